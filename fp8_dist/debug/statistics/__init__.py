"""What casts and GEMMs do to the numbers of a model, measured while it runs."""
