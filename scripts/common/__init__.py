"""Code that commands of several folders share; nothing here imports from another folder."""
