"""The weights of float8 layers: parameters, their casts, storage, and comparison between ranks."""
