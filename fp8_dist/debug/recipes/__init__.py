"""One batch through every recipe: what each would lose in each layer."""
