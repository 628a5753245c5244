"""Hugging Face transformers: tensor-parallel plans, its Trainer, and its loading (extra ``hf``)."""
