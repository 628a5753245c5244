"""Plan a training run: what a step communicates and keeps in memory on thousands of ranks."""
