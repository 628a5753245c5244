"""Single casts, kept in files to be looked at."""
