"""Hugging Face transformers: tensor-parallel plans, its Trainer, and its loading (extra ``hf``)."""

from fp8_dist.integrations.transformers.tp_plan import hf_tp_plan

__all__ = ["hf_tp_plan"]
