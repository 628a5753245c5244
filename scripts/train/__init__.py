"""Commands that train the reference Llama and compare runs."""
