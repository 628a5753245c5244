"""The number of tokens from which the layers of a model are faster in float8 than in bf16.

The host queues kernels while the GPU runs earlier ones, so the slower of the two bounds a step.
Float8 shortens the GPU's time, and lengthens the host's. It is slower than bf16 where the host
needs longer for the float8 layers, by their number, than the GPU needs for a step in bf16, by their
sizes and the number of tokens (those of a rank in one micro-batch).
"""

from collections.abc import Iterable, Sequence

import torch

from fp8_dist.device import is_as_measured

# Measured on an H100 (docs/gpu.md): milliseconds of the host for a step of one `tensorwise` layer,
# by its clock, with 2048 rows. Under FSDP2 it needs longer.
HOST_EAGER, HOST_COMPILED = 2.25, 1.294
# Tokens times weights that a step in bf16 does per millisecond, with attention, norms and the loss:
# 8192 tokens and the 1.75e9 weights of eight compiled blocks of Llama 8B (docs/gpu.md).
BF16_PACE = 8192 * 1.75e9 / 166.2
MANY_TOKENS = 16384  # the conversion warns if layers need more
_HELPS = "What helps: more tokens per micro-batch, CUDA graphs"


def tokens_to_gain(sizes: Sequence[int], host: float = HOST_COMPILED) -> int:
    """Return the number of tokens with which the GPU is as slow in bf16 as the host in float8.

    Sizes are the numbers of elements of the layers' weights on a rank.
    """
    tokens = len(sizes) * host * BF16_PACE / max(sum(sizes), 1)
    return max(round(tokens / 100), 1) * 100  # the rates are not known better


def expectation(sizes: Sequence[int], tokens: int | None = None) -> str:
    """Say with how many tokens layers gain, and whether they do with ``tokens``."""
    compiled, eager = (tokens_to_gain(sizes, host) for host in (HOST_COMPILED, HOST_EAGER))
    text = (
        f"at the rates of an H100 they gain from about {compiled:,} tokens per rank and "
        f"micro-batch on if compiled, {eager:,} in eager code (more under FSDP2)"
    )
    if tokens is None:
        return text
    if tokens >= eager:
        return f"{text}. With {tokens:,} the GPU bounds the step, at least without FSDP2"
    bound = f"{text}. With {tokens:,} the host bounds the step"
    if tokens >= compiled:
        return f"{bound} in eager code: slower than bf16. {_HELPS}, torch.compile of each block"
    return f"{bound}, also if compiled: slower than bf16. {_HELPS}"


def why_slower(weights: Iterable[torch.Tensor]) -> str:
    """Return why float8 layers on known GPUs gain with no usual number of tokens, or ``""``."""
    sizes = [weight.numel() for weight in weights if is_as_measured(weight.device)]
    if not sizes or tokens_to_gain(sizes) <= MANY_TOKENS:
        return ""
    return (
        f"expect float8 to be slower than bf16. The layers (of {sum(sizes) // len(sizes):,} "
        "weights on average) are so small that the GPU waits for the host, which queues casts "
        f"besides GEMMs; {expectation(sizes)}. {_HELPS}, "
        "fewer small layers in float8 (module_filter_fn=auto_filter(recipe))"
    )
