"""Captures: single casts, saved to files for inspection."""
