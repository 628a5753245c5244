"""Comparison of recipes: the error of each recipe in each layer, for one batch."""
