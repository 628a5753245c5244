"""The reference model: shapes, attention, rotary positions, sizes, initialization."""

import torch
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scripts.common.llama import MODELS, Llama, LlamaConfig, apply_rope, rope_tables

TINY = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, max_seq_len=16
)


def tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length))


def test_a_position_sees_only_itself_and_the_past():
    model = Llama(TINY)
    text = tokens(1)
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % TINY.vocab_size
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert all(not torch.equal(before[0, i], after[0, i]) for i in range(7, 16))


def test_a_rotation_is_a_complex_product():
    cos, sin = rope_tables(TINY)
    half = TINY.head_dim // 2
    x = torch.randn(2, TINY.max_seq_len, 3, TINY.head_dim, dtype=torch.float32)
    positions = torch.arange(TINY.max_seq_len, dtype=torch.float64)[:, None, None]
    frequencies = TINY.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.exp(1j * positions * frequencies)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(apply_rope(x, cos, sin), expected)


def test_sizes():
    counts = {}
    with torch.device("meta"):
        for name, config in MODELS.items():
            counts[name] = sum(p.numel() for p in Llama(config).parameters())
    assert_expected_inline(
        "\n".join(f"{name:<12}{count:>16,}" for name, count in counts.items()),
        """\
debug                853,120
small              4,852,992
moe                  952,960
124m             124,275,456
1b             1,498,482,688
8b             8,030,261,248
70b           70,553,706,496
405b         405,853,388,800
deepseek_v3  671,026,404,352""",
    )


def initial_weights(mesh_shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The full weights of a model initialized as FSDP2 x TP shards; called on every rank."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Llama(TINY)
    style = {"layers.*.attention.wq": ColwiseParallel(), "layers.*.attention.wo": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], style)
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.init_weights(seed=5)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_shards_are_initialized_alike_on_any_mesh(ranks):
    expected = Llama(TINY, seed=5).state_dict()
    for weights in ranks(4).run(initial_weights, (2, 2)):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
