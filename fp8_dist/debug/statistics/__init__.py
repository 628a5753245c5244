"""Statistics of a model's casts and GEMMs, measured while it runs."""
