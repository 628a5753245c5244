"""Code that commands in several folders share. It imports nothing from those folders."""
