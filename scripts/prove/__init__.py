"""Proof of the library on somebody's GPUs: `python -m scripts.prove`."""
