"""The stream of a sharded model's float8 weights: its bytes, its messages, its memory."""

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import run_shown
from expecttest import assert_expected_inline
from nets import Net, net_plan
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_state_dict,
    iter_float8_weights,
)
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import apply_tp_plan

CUT = {"dim": 192, "hidden": 320}  # FSDP2 and tensor parallelism cut blocks
UNEVEN = {"dim": 70, "hidden": 66, "layers": 1}
WHOLE = {"dim": 512, "hidden": 512, "layers": 1}
FP32 = {"scale_format": "fp32", "weight_source": "bf16"}


def converted(recipe: str = "blockwise", options: Any = None, **sizes: int) -> Net:
    config = Float8LinearConfig.from_recipe_name(recipe, **(options or {}))
    net = Net(**sizes)
    for weight in net.parameters():
        weight.data *= torch.linspace(-3, 3, weight.shape[-1]).exp()
    config = replace(config, enable_fsdp_float8_all_gather="auto", pad_inner_dim=True)
    convert_to_float8_training(net, config=config)
    return net


def sharded(net: Net, axes: dict[str, int], **options: Any) -> Net:
    """FSDP2 over all axes but tp, which has tensor parallelism."""
    mesh = device_mesh(**axes)
    if "tp" in axes:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    if data := tuple(axis for axis in axes if axis != "tp"):
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh[data], **options)
    return net


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not same_bits(found[name], expected[name])]


def collected(stream: Iterator[Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor, scale_inv in stream:
        found[name] = tensor
        if scale_inv is not None:
            found[f"{name}_scale_inv"] = scale_inv
    return found


@pytest.mark.parametrize(
    ("axes", "recipe", "options", "sizes"),
    [
        ({"dp": 2}, "mxfp8", None, CUT),
        ({"dp": 2, "tp": 2}, "blockwise", None, CUT),
        ({"dp": 2, "tp": 2}, "blockwise", FP32, UNEVEN),
        ({"replicate": 2, "shard": 2}, "blockwise", None, UNEVEN),
    ],
)
@on_ranks("axes", returns=[])
def test_the_stream_is_the_state_dict_of_one_device(
    axes: dict[str, int], recipe: str, options: Any, sizes: dict[str, int]
) -> list[str]:
    """What is not, byte for byte, one device's."""
    expected = float8_state_dict(converted(recipe, options, **sizes))
    offload: Any = {}
    if recipe == "mxfp8":
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    net = sharded(converted(recipe, options, **sizes), axes, **offload)
    small = sum(tensor.nbytes for tensor in expected.values()) // 5
    wrong = differences(collected(iter_float8_weights(net, bucket_bytes=small)), expected)
    wrong += differences(collected(iter_float8_weights(net)), expected)
    last = collected(iter_float8_weights(net, bucket_bytes=1, ranks=[dist.get_world_size() - 1]))
    assert bool(last) is (dist.get_rank() == dist.get_world_size() - 1)
    return wrong + (differences(last, expected) if last else [])


def messages(axes: dict[str, int], sizes: dict[str, int]) -> tuple[str, float]:
    """What a stream of two buckets sends, and the bytes of its weights relative to bf16's."""
    net = sharded(converted(**sizes), axes)
    elements = sum(weight.numel() for weight in net.parameters() if weight.ndim == 2)
    with comm_audit(device_mesh(**axes)) as audit:
        stream = iter_float8_weights(net, bucket_bytes=600_000)
        assert audit.count() == 0
        next(stream)
        first = audit.count()
        assert len(list(stream)) == 4
    lines = [f"{row.op:10} {row.axis:5} {row.count} {row.bytes}" for row in audit.rows]
    biases = sum(bias.numel() * bias.itemsize for bias in net.parameters() if bias.ndim == 1)
    sent = sum(row.bytes for row in audit.rows) - biases
    return "\n".join([f"first bucket: {first}", *lines]), sent / (2 * elements)


def test_what_is_sent(ranks: RankPools) -> None:
    """Per bucket one all-reduce of exponents and one all-gather, which has the biases too."""
    text, relative = ranks(4).run_same(messages, {"dp": 2, "tp": 2}, WHOLE)
    assert 0.5 < relative < 0.5001
    assert_expected_inline(
        text,
        """\
first bucket: 2
all_reduce world 2 48
all_gather world 2 788480
all_gather dp    1 2048""",
    )
    text, relative = ranks(4).run_same(messages, {"replicate": 2, "shard": 2}, WHOLE)
    assert relative <= 0.502
    assert_expected_inline(
        text,
        """\
first bucket: 2
all_reduce shard 2 48
all_gather shard 2 790528""",
    )


@on_ranks(2)
def test_ranks_stop_after_the_same_item() -> None:
    """Nothing is sent ahead, nothing is kept, and nothing is left behind."""
    net = sharded(converted(**WHOLE), {"dp": 2})
    expected = float8_state_dict(net, full_state_dict=True)
    with comm_audit() as audit:
        stream = iter_float8_weights(net, bucket_bytes=1)
        first = next(stream)
        assert (first.name, audit.count()) == ("layers.0.w1.weight", 2)
        held = weakref.ref(first.tensor)
        del first
        assert (next(stream).name, audit.count()) == ("layers.0.w3.weight", 4)
        assert held() is None
        stream.close()  # type: ignore[attr-defined]
    assert audit.count() == 4
    assert differences(collected(iter_float8_weights(net)), expected) == []


PAGE = Path(__file__).parents[2] / "docs/serving.md"
LOOP, _, SHARDS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@on_ranks(2)
def test_the_loop_of_the_page() -> None:
    sent: list[Any] = []
    net = Net(dim=128, hidden=256, layers=1)
    scope: dict[str, Any] = {
        "torch": torch,
        "model": net,
        "batches": [(torch.randn(2, 4, 128), 0)] * 4,
        "loss_of": lambda output, target: (output - target).square().mean(),
        "send": lambda *entry: sent.append(entry),
        "put": lambda name, part, placements: sent.append((name, part)),
    }
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run_shown(LOOP, scope)
    expected = float8_state_dict(net, full_state_dict=True)
    assert not any(same_bits(expected[name], tensor) for name, tensor in before.items())
    assert differences(collected(iter(sent)), expected if dist.get_rank() == 0 else {}) == []
    sent.clear()
    run_shown(SHARDS, scope)
    assert [*dict(sent)] == [*expected]
    for name, part in sent:
        whole = expected[name]
        is_scale = name.endswith("_scale_inv")
        own = whole if is_scale else whole.chunk(2)[dist.get_rank()]
        assert same_bits(part, own.contiguous()), name


@on_ranks(2)
def test_errors_come_before_the_first_message() -> None:
    net = sharded(converted(dim=64, hidden=192, layers=1), {"dp": 2})
    with comm_audit() as audit:
        texts = [raised(ValueError, lambda: iter_float8_weights(net, bucket_bytes=0))]
        texts.append(raised(ValueError, lambda: iter_float8_weights(Net())))
    assert audit.count() == 0
    assert_expected_inline(
        "\n".join(texts),
        """\
iter_float8_weights: bucket_bytes is 0; pass 1 or more
iter_float8_weights: the module has no converted layer; call convert_to_float8_training of fp8_dist first (for experts, fp8_dist.moe.convert_experts_to_float8_training)""",
    )
