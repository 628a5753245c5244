"""Tensor-parallel plans for the module names of particular models, one file per family."""

from fp8_dist.tensor_parallel.models.llama import llama_tp_plan

__all__ = ["llama_tp_plan"]
