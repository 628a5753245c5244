"""Plans a training run: what a step communicates and holds on thousands of ranks."""
