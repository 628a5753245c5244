"""The collectives of a step: kinds, bytes, times."""
