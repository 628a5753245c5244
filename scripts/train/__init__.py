"""Trains the reference Llama, and compares runs."""
