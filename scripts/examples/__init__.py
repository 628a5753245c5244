"""Programs to copy from, one for each way to train."""
