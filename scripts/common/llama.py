"""The reference model: a plain Llama. (scripts/common/sizes.py has its sizes.)

Vocabulary (used in shapes below): b = batch, s = sequence, d = model dim, h = query heads,
g = key/value heads, k = head dim, v = vocabulary.

The model knows nothing about float8 or meshes. Two things make it easy to parallelize:
- the number of local heads is derived from the projections' outputs, so with tensor-parallel
  shards of `wq`, `wk`, `wv` a rank computes its own heads, and no attribute has to change;
- `init_weights` derives every parameter from (seed, parameter name) alone, so all meshes, recipes
  and initialization orders (CPU, or meta device and `to_empty`) give the same model.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from scripts.common.mixture import MixtureOfExperts
from scripts.common.sizes import MODELS as MODELS
from scripts.common.sizes import Latent, LlamaConfig

INIT_STD = 0.02


def rope_tables(config: LlamaConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The tables for `apply_rope`: cos and sin, fp32, both (max_seq_len, rope_dim).

    They hold cos and sin of position times frequency, repeated for both halves of the channels. The
    sign of sin in a rotation is included.
    """
    half = config.rope_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=device) / half
    positions = torch.arange(config.max_seq_len, dtype=torch.float64, device=device)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).float(), torch.cat((-sin, sin), dim=-1).float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + k/2 of every head by the angle of the position, in fp32.

    x: (b, s, heads, k), any floating dtype; the result has the same dtype. cos, sin: (s, k), rows
    of `rope_tables`.
    """
    wide = x.float()
    partner = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * cos[:, None] + partner * sin[:, None]).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions: (b, s, d) -> (b, s, d).

    Attributes:
        dtype: the dtype of queries, keys and values in the attention; None: that of projections.
    """

    dtype: torch.dtype | None = None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        # Take shapes from the projections, not from x: under tensor parallelism projections hold
        # the local heads, and under sequence parallelism x is a shard along s.
        q, k, v = (
            projected.view(*projected.shape[:2], -1, self.head_dim)
            for projected in (self.wq(x), self.wk(x), self.wv(x))
        )
        given, dtype = v.dtype, self.dtype or v.dtype
        q, k, v = apply_rope(q.to(dtype), cos, sin), apply_rope(k.to(dtype), cos, sin), v.to(dtype)
        heads = [projected.transpose(1, 2) for projected in (q, k, v)]
        grouped = self.n_kv_heads != self.n_heads
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped)
        return self.wo(out.transpose(1, 2).flatten(2).to(given))


class LatentAttention(nn.Module):
    """Causal self-attention of DeepSeek-V3: (b, s, d) -> (b, s, d).

    `shared_key` is an identity on the keys' shared part, so that a parallel style can apply to it.
    """

    def __init__(self, config: LlamaConfig, latent: Latent) -> None:
        super().__init__()
        self.n_heads, self.latent = config.n_heads, latent
        query_dim = latent.content_dim + latent.rope_dim
        kv_dim = latent.content_dim + latent.value_dim
        self.wq_a = nn.Linear(config.dim, latent.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(latent.q_rank, eps=config.norm_eps)
        self.wq_b = nn.Linear(latent.q_rank, config.n_heads * query_dim, bias=False)
        self.wkv_a = nn.Linear(config.dim, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=config.norm_eps)
        self.wkv_b = nn.Linear(latent.kv_rank, config.n_heads * kv_dim, bias=False)
        self.shared_key = nn.Identity()
        self.wo = nn.Linear(config.n_heads * latent.value_dim, config.dim, bias=False)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        content, rope, value = self.latent.content_dim, self.latent.rope_dim, self.latent.value_dim
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (-1, content + rope))
        low_rank, shared = self.wkv_a(x).split([self.latent.kv_rank, rope], dim=-1)
        kv = self.wkv_b(self.kv_norm(low_rank)).unflatten(-1, (-1, content + value))
        shared = apply_rope(self.shared_key(shared).unsqueeze(2), cos, sin)
        k, v = kv.split([content, value], dim=-1)
        k = torch.cat((k, shared.expand(*k.shape[:3], -1)), dim=-1)
        q = torch.cat((q[..., :content], apply_rope(q[..., content:], cos, sin)), dim=-1)
        heads = [projected.transpose(1, 2) for projected in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: (b, s, d) -> (b, s, d)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def feed_forward(config: LlamaConfig, index: int) -> nn.Module:
    """The feed-forward of a block: dense, or a mixture of experts."""
    mixture = config.mixture
    if mixture is None or index < mixture.first_dense:
        return FeedForward(config.dim, config.ffn_dim)
    width = mixture.shared * mixture.ffn_dim
    shared = FeedForward(config.dim, width) if width else None
    return MixtureOfExperts(config.dim, mixture, shared)


class Block(nn.Module):
    """One transformer block, pre-norm: (b, s, d) -> (b, s, d)."""

    def __init__(self, config: LlamaConfig, index: int = 0) -> None:
        super().__init__()
        latent = config.latent
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config) if latent is None else LatentAttention(config, latent)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = feed_forward(config, index)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos=cos, sin=sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (b, s), int64 -> logits (b, s, v), fp32.

    The constructor initializes the parameters, except on the meta device: there call
    `to_empty(device=...)`, then `init_weights()`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            self.register_buffer(name, table, persistent=False)
        if not self.cos.is_meta:
            self.init_weights(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(
                f"the sequence has {length} tokens, more than max_seq_len="
                f"{self.config.max_seq_len}: shorten it or build the model with a larger one"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.output(self.norm(x)).float()

    @torch.no_grad()
    def init_weights(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Initialize every parameter and the rotary tables, in place.

        Norm weights become 1. All others are normal with standard deviation `INIT_STD`, divided by
        sqrt(2 * n_layers) for layers that write to the residual stream (`wo`, `w2`). A DTensor
        parameter gets its shard of the same full tensor, without communication. Values depend on
        `seed`, not on the global generator, and on the kind of `device`, where they are drawn,
        because GPUs have another generator.
        """
        for name, parameter in self.named_parameters():
            # Full-size tensors are drawn, one parameter at a time.
            size = parameter.shape
            if parameter.ndim < 2:
                full = torch.ones(size, device=device)
            else:
                generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
                residual = name.endswith(("wo.weight", "w2.weight", "experts.w2"))
                scale = (2 * self.config.n_layers) ** -0.5 if residual else 1.0
                full = torch.randn(size, generator=generator, device=device).mul_(INIT_STD * scale)
            full = full.to(parameter.device)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(full)
        for buffer, table in zip(
            (self.cos, self.sin), rope_tables(self.config, self.cos.device), strict=True
        ):
            buffer.copy_(table)
