"""Short programs to copy: one for each way to train."""
