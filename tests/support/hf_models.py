"""Small transformers models, converted, and the text that they are trained on."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fp8_dist import Float8LinearConfig, convert_to_float8_training, skip_head
from scripts.measure.hf_plans_run import SIZES

SMALL = SIZES
HEADS = {"head_dim": 16}
GEMMA = HEADS | {"query_pre_attn_scalar": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


# By name: the model class, the config class, and fields of the config besides SMALL.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama_base": ("LlamaModel", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", HEADS | EXPERTS | {"num_experts": 4}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        HEADS | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 32}
        | {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", HEADS | EXPERTS | {"num_local_experts": 4}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        HEADS | EXPERTS | {"num_local_experts": 4},
    ),
}


def build(kind: str, **config: Any) -> nn.Module:
    """The model of a kind, always with the same weights. 1-D parameters are random, too."""
    name, config_name, extra = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = getattr(transformers, config_name)(**SMALL | extra | config)
        model: nn.Module = getattr(transformers, name)(settings)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def converted(kind: str, fsdp: bool = False, **config: Any) -> nn.Module:
    """The model with all layers but the head converted; ``fsdp``: use float8 gathers in FSDP2."""
    model = build(kind, **config)
    float8 = replace(Float8LinearConfig(), enable_fsdp_float8_all_gather=fsdp)
    return convert_to_float8_training(model, module_filter_fn=skip_head(model), config=float8)


def batch(step: int, rows: int = 4, length: int = 16) -> torch.Tensor:
    """Pieces of a Python source file as bytes, ``[rows, length]``."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    return torch.stack([text[start : start + length].long() for start in starts])
