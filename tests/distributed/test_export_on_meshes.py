"""A sharded model's float8 state dict and stream of weights are those of one device."""

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from documented import NO_HEAD, run_shown
from expecttest import assert_expected_inline
from nets import Net, full, net_plan
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits, weights_used
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter, QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    float8_quantization_config,
    float8_state_dict,
    freeze_to_float8,
    iter_float8_weights,
)
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan, declare_placements

# (With the sizes CUT, FSDP2 and tensor parallelism cut blocks of 128 and of 32.)
E8M0 = torch.float8_e8m0fnu
CUT: dict[str, int] = {"dim": 192, "hidden": 320}
WHOLE = {"dim": 512, "hidden": 512, "layers": 1}
BOTH = {"dp": 2, "tp": 2}
UNEVEN = {"dim": 70, "hidden": 66, "layers": 1}
OFFLOADED = {"dim": 192, "hidden": 320, "layers": 1}


def converted(
    recipe: str, gather: Any = "auto", spread: float = 8, options: Any = None, **sizes: int
) -> Net:
    config = Float8LinearConfig.from_recipe_name(recipe, **(options or {}))
    config = replace(config, enable_fsdp_float8_all_gather=gather, pad_inner_dim=True)
    net = Net(**sizes)
    for weight in net.parameters():
        weight.data *= torch.linspace(-spread, spread, weight.shape[-1]).exp()
    convert_to_float8_training(net, config=config)
    return net


def sharded(net: Net, axes: dict[str, int], **options: Any) -> Net:
    """Tensor parallelism over tp, and FSDP2 over all other axes."""
    mesh = device_mesh(**axes)
    if "tp" in axes:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    if data := tuple(axis for axis in axes if axis != "tp"):
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh[data], **options)
    return net


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert list(found) == list(expected)
    return [name for name in expected if not same_bits(full(found[name]), full(expected[name]))]


@pytest.mark.parametrize(
    ("axes", "recipe", "gather", "sizes"),
    [
        ({"dp": 2}, "mxfp8", "auto", OFFLOADED),
        ({"tp": 2}, "blockwise", False, WHOLE),
        (BOTH, "blockwise", "auto", CUT),
        (BOTH, "mxfp8", False, CUT),
        ({"dp": 4}, "blockwise", "auto", UNEVEN),
    ],
)
@on_ranks("axes", returns=[])
def test_the_whole_is_that_of_one_device(
    axes: dict[str, int], recipe: str, gather: Any, sizes: dict[str, int]
) -> list[str]:
    """Runs on each rank: what is wrong with the export of a sharded model."""
    one_device = float8_state_dict(converted(recipe, **sizes))
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if sizes == OFFLOADED else {}
    net = sharded(converted(recipe, gather, **sizes), axes, **offload)
    plain = get_model_state_dict(net)
    with comm_audit() as audit:
        parts = float8_state_dict(net)
    assert audit.count() == audit.count("all_reduce")
    if (axes, recipe) == (BOTH, "blockwise"):
        # One for all 6 weights, each of which has a table of 3 x 2 or 2 x 3 blocks.
        rows = [(row.op, row.dtype, row.count, row.bytes) for row in audit.rows]
        assert rows == [("all_reduce", torch.uint8, 1, 36)]
    wrong = []
    for name in (f"{name}.weight" for name in float8_layers(net)):
        weight, scales = parts[name], parts[f"{name}_scale_inv"]
        assert isinstance(weight, DTensor)
        assert isinstance(scales, DTensor)
        same = weight.placements == plain[name].placements and weight.shape == plain[name].shape
        same &= weight.to_local().shape == plain[name].to_local().shape
        same &= weight.dtype is torch.float8_e4m3fn
        if not same or {*scales.placements} != {Replicate()}:
            wrong.append(f"{name}: {weight.placements} and {scales.placements}")
        if not same_bits(scales.to_local(), one_device[f"{name}_scale_inv"]):
            wrong.append(f"{name}: other scales")
    wrong += differences(float8_state_dict(net, full_state_dict=True), one_device)
    on_first = float8_state_dict(net, full_state_dict=True, cpu_offload=True)
    wrong += differences(on_first, one_device if dist.get_rank() == 0 else {})
    offloaded = float8_state_dict(net, cpu_offload=True)
    locals_ = ([local_tensor(state[k]) for k in parts] for state in (offloaded, parts))
    assert all(map(same_bits, *locals_))
    return wrong


def in_mxfp4(recipe: str, is_stored: bool, **sizes: int) -> Net:
    net = converted(recipe, options={"weight_format": "mxfp4"}, **sizes)
    if is_stored:
        net.requires_grad_(False)
        freeze_to_float8(net, format="mxfp4")
    return net


@pytest.mark.parametrize(("recipe", "is_stored"), [("mxfp8", False), ("blockwise", True)])
@on_ranks(4, returns=[])
def test_mxfp4_is_that_of_one_device(recipe: str, is_stored: bool) -> list[str]:
    """Shards cut squares, of 128 along both dims, but no 32 values of a row."""
    one_device = float8_state_dict(in_mxfp4(recipe, is_stored, **CUT), format="mxfp4")
    net = sharded(in_mxfp4(recipe, is_stored, **CUT), BOTH)
    parts = float8_state_dict(net, format="mxfp4")
    for name in (f"{name}.weight" for name in float8_layers(net)):
        placements = get_model_state_dict(net)[name].placements
        assert parts[f"{name}_blocks"].placements == placements
        assert {*parts[f"{name}_scales"].placements} == {Replicate()}
    stream = {name: tensor for name, tensor, _ in iter_float8_weights(net, format="mxfp4")}
    whole = float8_state_dict(net, full_state_dict=True, format="mxfp4")
    return [name for each in (parts, whole, stream) for name in differences(each, one_device)]


def beside_mxfp4() -> Net:
    """The first layer is stored in blocks of 1 x 32, and the others in tensorwise float8."""
    net = converted("tensorwise", **CUT).requires_grad_(False)
    is_first = lambda _, fqn: fqn == "layers.0.w1"  # noqa: E731
    freeze_to_float8(net, module_filter_fn=is_first, format="mxfp4", block_size=(1, 32))
    freeze_to_float8(net, module_filter_fn=lambda *args: not is_first(*args))
    return net


@on_ranks(4, returns=[])
def test_stored_weights_beside_mxfp4_are_those_of_one_device() -> list[str]:
    one_device = float8_state_dict(beside_mxfp4(), format="mxfp4")
    names = {name for name, tensor in one_device.items() if tensor.dtype is torch.uint8}
    assert names == {"layers.0.w1.weight_blocks", "layers.0.w1.weight_scales"}
    net = sharded(beside_mxfp4(), BOTH)
    states = [float8_state_dict(net, full_state_dict=f, format="mxfp4") for f in (True, False)]
    return [name for state in states for name in differences(state, one_device)]


@on_ranks(4)
def test_what_mxfp4_lacks_is_refused_on_all_ranks() -> None:
    net = sharded(in_mxfp4("mxfp8", False, dim=64, hidden=96, layers=1), BOTH)
    with comm_audit() as audit:
        texts = [raised(ValueError, lambda: float8_state_dict(net, format="mxfp4"))]
    assert audit.count() == 0
    for value in (torch.nan, torch.inf):
        if dist.get_rank() == 3:  # which alone has it
            local_tensor(net.layers[0].w3.weight)[0, 0] = value  # type: ignore[union-attr]
        stream = iter_float8_weights(net, ranks=[0], bucket_bytes=1, format="mxfp4")
        texts.append(raised(ValueError, lambda: list(stream)).partition(" which")[0])  # noqa: B023
    assert_expected_inline(
        "\n".join(texts),
        """\
float8_state_dict: layers.0.w2.weight, [64, 96], is placed as [Shard(dim=0), Shard(dim=1)], and ranks have parts of blocks of 32 values, which MXFP4 packs together; pass full_state_dict=True
layers.0.w3.weight has a block with NaN or infinity,
layers.0.w3.weight has a block with NaN or infinity,""",
    )


@pytest.mark.parametrize("gather", [False, "auto"])
@on_ranks(4, returns=[])
def test_bits_are_those_that_a_forward_multiplies(gather: Any) -> list[str]:
    """FSDP2's mixed precision rounds a weight before its cast, if it is not gathered in float8."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = sharded(converted("blockwise", gather, spread=1, **CUT), BOTH, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 4, CUT["dim"])
    for _ in range(2):
        net(x).square().mean().backward()
        optimizer.step()
    with weights_used(net) as used, torch.no_grad():
        net(x)
    state, wrong = float8_state_dict(net, full_state_dict=True), []
    for name, weight in used.items():
        dim = 1 if name.endswith("w2") else 0
        part = state[f"{name}.weight"].chunk(2, dim)[device_mesh(dp=2, tp=2).get_local_rank("tp")]
        assert part.to(torch.float32).isfinite().all()
        if not same_bits(part.contiguous(), weight.qdata.contiguous()):
            wrong.append(name)
    assert len(used) == 6
    return wrong


@on_ranks(2, returns=[])
def test_ddp_is_left_out_of_the_names() -> list[str]:
    net = converted("blockwise", **CUT)
    wrapped = DistributedDataParallel(net)
    assert float8_quantization_config(wrapped)["modules_to_not_convert"] == []
    return differences(float8_state_dict(wrapped), float8_state_dict(net))


def saved(folder: str, by_hugging_face: bool, is_e8m0: bool = False) -> None:
    net = converted("blockwise", **CUT)
    if is_e8m0:
        net.requires_grad_(False)
        freeze_to_float8(net)
        e8m0 = {k: v.to(E8M0) if "scale" in k else v for k, v in net.state_dict().items()}
        net.load_state_dict(e8m0)
    state = float8_state_dict(sharded(net, BOTH))
    if by_hugging_face:
        assert is_e8m0 == any(local_tensor(each).dtype is E8M0 for each in state.values())
        state = {k: v.float() if k.endswith("_scale_inv") else v for k, v in state.items()}
        writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save(state, checkpoint_id=folder)


def saved_in_mxfp4(folder: str) -> None:
    state = float8_state_dict(sharded(in_mxfp4("mxfp8", False, **CUT), BOTH), format="mxfp4")
    dcp.save(state, checkpoint_id=folder)


def test_distributed_checkpoints_in_mxfp4(ranks: RankPools, tmp_path: Path) -> None:
    """(The writer of safetensors can't consolidate integers.)"""
    ranks(4).run(saved_in_mxfp4, str(tmp_path))
    expected = float8_state_dict(in_mxfp4("mxfp8", False, **CUT), format="mxfp4")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert differences(loaded, expected) == []


@pytest.mark.parametrize("is_e8m0", [False, True])
def test_distributed_checkpoints(ranks: RankPools, tmp_path: Path, is_e8m0: bool) -> None:
    """Saved by four ranks, none of which has the whole; loaded by one process."""
    net = converted("blockwise", **CUT)
    expected = float8_state_dict(net)
    ranks(4).run(saved, f"{tmp_path}/dcp", False)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert differences(loaded, expected) == []
    ranks(4).run(saved, f"{tmp_path}/hf", True, is_e8m0)
    loaded = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    loaded = {name: loaded.pop(name) for name in expected} | loaded
    assert differences(loaded, expected) == []
    # torch's reader dequantizes it, also where 128 does not divide sizes.
    with weights_used(net) as used, torch.no_grad():
        net(torch.randn(2, CUT["dim"]))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "hf"))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    multiplied = net.state_dict() | {f"{k}.weight": w.dequantize() for k, w in used.items()}
    assert differences(loaded, multiplied) == []


@on_ranks(2)
def test_plain_local_tensors_are_refused() -> None:
    mesh = device_mesh(tp=2)
    net = nn.Sequential(nn.Linear(128, 128))
    convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name("blockwise"))
    declare_placements(net[0], mesh, weight=Shard(0), input=Replicate(), output=Shard(-1))
    message = raised(NotImplementedError, lambda: float8_state_dict(net))
    assert "0.weight is a plain local tensor (declare_placements), and where" in message


# The stream of float8 weights: its bytes, its messages, its memory.

FP32 = {"scale_format": "fp32", "weight_source": "bf16"}


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
    """Names of tensors that are not, byte for byte, those of one device."""
    expected = float8_state_dict(converted(recipe, spread=3, options=options, **sizes))
    offload: Any = {}
    if recipe == "mxfp8":
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    net = sharded(converted(recipe, spread=3, options=options, **sizes), axes, **offload)
    small = sum(tensor.nbytes for tensor in expected.values()) // 5
    wrong = differences(collected(iter_float8_weights(net, bucket_bytes=small)), expected)
    wrong += differences(collected(iter_float8_weights(net)), expected)
    last = collected(iter_float8_weights(net, bucket_bytes=1, ranks=[dist.get_world_size() - 1]))
    assert bool(last) is (dist.get_rank() == dist.get_world_size() - 1)
    return wrong + (differences(last, expected) if last else [])


def messages(axes: dict[str, int], sizes: dict[str, int]) -> tuple[str, float]:
    """What a stream of two buckets sends, and the bytes of its weights relative to bf16's."""
    net = sharded(converted("blockwise", **sizes), axes)
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
    net = sharded(converted("blockwise", **WHOLE), {"dp": 2})
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
    run_shown(LOOP, scope, expected=NO_HEAD)
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
    net = sharded(converted("blockwise", dim=64, hidden=192, layers=1), {"dp": 2})
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
