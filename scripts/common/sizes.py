"""Sizes of the reference models, by name. (For parsers, so nothing here imports torch.)"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts."""

    experts: int
    top_k: int
    ffn_dim: int  # of each expert
    shared: int = 0  # experts that take every token
    first_dense: int = 0  # number of leading blocks with a dense feed-forward
    balance: float = 0.01  # weight of the balancing loss


@dataclass(frozen=True)
class Latent:
    """Sizes of an attention with low-rank queries, keys and values."""

    q_rank: int
    kv_rank: int
    content_dim: int  # channels of a query or key that are not rotated
    rope_dim: int  # channels that are rotated; all heads share the key's
    value_dim: int


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # each serves n_heads / n_kv_heads query heads
    ffn_dim: int
    vocab_size: int = 128256  # rows of the embedding and of the untied head
    max_seq_len: int = 8192  # length of the rotary tables
    rope_theta: float = 500000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5
    mixture: Mixture | None = None
    latent: Latent | None = None

    @property
    def head_dim(self) -> int:
        """Channels of one head (k)."""
        return self.dim // self.n_heads

    @property
    def rope_dim(self) -> int:
        """Channels of one head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim


# debug and small are for CPUs: every dim stays a multiple of 16 when sharded 4 ways.
# 124m has as many parameters as GPT-2, but bytes for tokens.
# 1b has the shapes of Llama-3.2-1B (whose head is tied; ours is not), deepseek_v3 the shapes of
# DeepSeek-V3 without multi-token prediction, and the others the shapes of Llama-3(.1).
MODELS: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(128, 4, 8, 4, 384, vocab_size=256, max_seq_len=512),
    "small": LlamaConfig(256, 6, 8, 4, 768, vocab_size=256, max_seq_len=1024),
    "moe": LlamaConfig(
        128, 2, 8, 4, 384, vocab_size=256, max_seq_len=512, mixture=Mixture(8, 2, 128)
    ),
    "124m": LlamaConfig(768, 12, 12, 12, 3456, vocab_size=256, max_seq_len=1024),
    "1b": LlamaConfig(2048, 16, 32, 8, 8192),
    "8b": LlamaConfig(4096, 32, 32, 8, 14336),
    "70b": LlamaConfig(8192, 80, 64, 8, 28672),
    "405b": LlamaConfig(16384, 126, 128, 8, 53248),
    "deepseek_v3": LlamaConfig(
        7168,
        61,
        128,
        128,
        18432,
        vocab_size=129280,
        max_seq_len=4096,
        rope_theta=10000.0,
        norm_eps=1e-6,
        mixture=Mixture(256, 8, 2048, shared=1, first_dense=3),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
}
