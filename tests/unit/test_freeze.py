"""Frozen weights that are stored in float8, on one device."""

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpointed import SELECTIVE
from expecttest import assert_expected_inline
from recordings import casts, written
from reference import raised, reloaded, same_bits, same_values, saved_in
from stored_weights import CONFIGS, RELEASED, New, converted, freeze, frozen, released, run, same
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8State,
    ScalingType,
    conversion_summary,
    convert_to_float8_training,
    dequantized,
    freeze_to_float8,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
    unfreeze_from_float8,
    update_float8_scales,
)
from fp8_dist.debug import CastStats, GemmStats, float8_stats, record
from fp8_dist.device import is_float8
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training

every_config = pytest.mark.parametrize("name", CONFIGS)
PACKED = [name for name in CONFIGS if "mxfp4" in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_config
def test_bits_and_bytes_of_a_stored_weight(name: str, dtype: torch.dtype) -> None:
    net, twin = frozen(name, dtype), converted(name, dtype)
    expected = run(twin, dtype)
    assert same(run(net, dtype), expected)
    assert same(run(nn.Sequential(*net).eval(), dtype), expected)
    for layer in (net[0], net[2]):
        tensors = [p.plain for p in layer.parameters() if hasattr(p, "plain")]
        size = sum(t.numel() * t.itemsize for t in tensors)
        assert [t.untyped_storage().nbytes() for t in tensors] == [
            t.numel() * t.itemsize for t in tensors
        ]
        # One scale per tensor, per row of 320 or 512 values, or per block of 32 x 32 or 128 x 128.
        per_weight = {"rowwise_folded": 1 + 4 / 320, "mxfp8": 1.002}.get(name, 1.001)
        per_weight = 0.502 if name in PACKED else per_weight
        assert size <= per_weight * layer.weight.numel()
    assert f"stored in {'mxfp4' if name in PACKED else 'float8'}" in repr(net)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in PACKED])
def test_weights_are_not_cast(name: str) -> None:
    shapes = {}
    for net in (frozen(name), converted(name)):
        with New() as new:
            run(net)
        float8 = {shape for shape, dtype in new.made if is_float8(dtype)}
        shapes[net[0].float8_weight.is_stored] = float8
    weights = {(320, 512), (192, 320)}
    assert shapes[True] == shapes[False] - weights
    assert weights < shapes[False]


@pytest.mark.parametrize("name", PACKED)
def test_autograd_keeps_packed_weights(name: str) -> None:
    net, x = frozen(name), torch.randn(48, 512, dtype=torch.bfloat16, requires_grad=True)
    output, saved = saved_in(lambda: net(x))
    assert {tuple(each.shape) for each in saved if is_float8(each.dtype)} == set()
    assert any(each is net[2].weight for each in saved)
    output.sum().backward()


@pytest.mark.parametrize("name", RELEASED)
def test_weights_in_blocks_of_released_checkpoints(name: str) -> None:
    """Passes have the bits of layers with the dequantized weights, of which autograd keeps none."""
    net, twin = released(name), released(name)
    assert unfreeze_from_float8(twin) == ["0.weight", "2.weight"]
    assert same(run(net), run(twin))
    with float8_stats(net) as stats:
        run(net)
    operands = {row.operand for row in stats.rows if isinstance(row, CastStats)}
    assert operands == (set() if name.endswith("bf16") else {"input", "weight", "grad_output"})
    x = torch.randn(48, 512, dtype=torch.bfloat16, requires_grad=True)
    _, saved = saved_in(lambda: net(x))
    plain = {tuple(each.shape) for each in saved if type(each) is torch.Tensor}
    assert plain.isdisjoint({(320, 512), (192, 320), (512, 320), (320, 192)})
    state, loaded = net.state_dict(), converted(name)
    assert [*state["0.weight_scale_inv"].shape] == [320, 16]
    freeze_to_float8(loaded, format="mxfp4", block_size=(1, 32))
    with torch.no_grad():
        loaded[0].weight.plain.zero_()
    loaded.load_state_dict(state)
    assert same(run(loaded), run(twin))
    # E2M1 times powers of two are exact in bf16, and casting them again changes nothing.
    loaded.load_state_dict(twin.state_dict())
    assert all(same_bits(tensor, state[key]) for key, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["1 x 32 in bf16", "1 x 32 of tensorwise"])
def test_values_of_released_checkpoints_are_made_once(name: str) -> None:
    """Each pass makes the float8 data and the values in bf16, and no other copy but the cast."""
    net, x = released(name)[:1], torch.randn(48, 512, dtype=torch.bfloat16, requires_grad=True)
    with New() as forward:
        output = net(x)
    with New() as backward:
        output.sum().backward()
    dtypes = [torch.float8_e4m3fn, torch.bfloat16]
    dtypes += [] if name.endswith("bf16") else [torch.float8_e4m3fn]
    for new in (forward, backward):
        assert [dtype for shape, dtype in new.made if math.prod(shape) >= 320 * 512] == dtypes


@pytest.mark.parametrize("rule", ["ceil", "even", "floor"])
def test_blocks_of_released_checkpoints_keep_the_rule_of_the_recipe(rule: Any) -> None:
    config = Float8LinearConfig.from_recipe_name(
        "mxfp8", weight_format="mxfp4", weight_block_size=(1, 32)
    )
    cast = replace(config.cast_config_weight, scale_rule=rule)
    net = nn.Sequential(nn.Linear(512, 320)).bfloat16().requires_grad_(False)
    net[0].weight.data *= torch.linspace(-4, 4, 512).exp()  # amaxes that rules round differently
    convert_to_float8_training(net, config=replace(config, cast_config_weight=cast))
    expected = run(net)
    freeze_to_float8(net, format="mxfp4", block_size=(1, 32))
    assert same(run(net), expected)


def test_blocks_that_are_refused() -> None:
    freezes = partial(freeze_to_float8, format="mxfp4", block_size=(1, 32))
    narrow = convert_to_float8_training(nn.Sequential(nn.Linear(48, 32))).requires_grad_(False)
    odd = convert_to_float8_training(nn.Sequential(nn.Linear(33, 32))).requires_grad_(False)
    squares = frozen("mxfp4")
    calls = [
        partial(freezes, narrow),
        partial(freezes, odd),
        partial(freezes, squares),
        partial(freezes, converted("mxfp4")),
        partial(freeze_to_float8, released("1 x 32 of mxfp8"), format="mxfp4"),
        partial(freeze_to_float8, narrow, block_size=(1, 32)),
        partial(freezes, narrow, block_size=(1, 16)),
    ]
    assert_expected_inline(
        "\n".join(raised(ValueError, call) for call in calls),
        """\
freeze_to_float8: 0.weight is [32, 48], whose input features 32 does not divide; leave the layer out (module_filter_fn)
freeze_to_float8: 0.weight is [32, 33], and an odd number of columns can't be packed in pairs; leave the layer out (module_filter_fn)
freeze_to_float8: 0.weight is not cast to four bits, or stored in float8 already; convert the model with weight_format="mxfp4", or pass block_size=(1, 32), and call unfreeze_from_float8 before format="mxfp4"; or leave the layer out (module_filter_fn)
freeze_to_float8: 0.weight is cast to four bits in squares, and block_size=(1, 32) would cast it twice; leave block_size out, or pass weight_block_size to the recipe
freeze_to_float8: 0.weight is not cast to four bits, or stored in float8 already; convert the model with weight_format="mxfp4", or pass block_size=(1, 32), and call unfreeze_from_float8 before format="mxfp4"; or leave the layer out (module_filter_fn)
freeze_to_float8: format='float8' with block_size=(1, 32); pass format="mxfp4", block_size=(1, 32), or "float8" or "mxfp4" without block_size to store weights as the recipe casts them
freeze_to_float8: format='mxfp4' with block_size=(1, 16); pass format="mxfp4", block_size=(1, 32), or "float8" or "mxfp4" without block_size to store weights as the recipe casts them""",
    )


def test_delayed() -> None:
    """The scale of a frozen weight is by its own amax; the other operands keep their histories."""
    net, twin = converted("delayed"), converted("delayed")
    freeze_to_float8(net)
    for _ in range(3):
        assert same(run(net), run(twin))
        for each in (net, twin):
            sync_float8_amax_and_scale_history(each)


@every_config
def test_dequantized(name: str) -> None:
    """By the layout's definition: data times the scale of the tensor, row or block."""
    net = frozen(name)
    for layer in (net[0], net[2]):
        state, weight = layer.state_dict(), dequantized(layer)
        data, scale = state["weight"], state["weight_scale_inv"].double()
        if name not in ("tensorwise", "rowwise_folded"):
            block = 32 if name in ("mxfp8", "mxfp4") else 128
            scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            scale = scale[: data.shape[0], : data.shape[1]]
        expected = (data.double() * scale).float().to(torch.bfloat16)
        assert same_bits(weight, expected)
        assert same_bits(layer.to_linear().weight, expected)
    plain = converted(name)[0]
    assert same_bits(dequantized(plain), plain.weight.detach())


def moved_to_half(net: nn.Module) -> nn.Module:
    net.half()
    assert net[0].weight.dtype is torch.float16  # type: ignore[index]
    assert net[0].weight_scale_inv.dtype is torch.float32  # type: ignore[index]
    return net.double().bfloat16()


saved = partial(reloaded, weights_only=False)


def swapped(net: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net = moved_to_half(net)
        net.load_state_dict(frozen().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return net


def unfrozen_and_frozen(net: nn.Module) -> nn.Module:
    assert unfreeze_from_float8(net) == ["0.weight", "2.weight"]
    assert unfreeze_from_float8(net) == []
    freeze_to_float8(net)
    return net


def with_functional_call(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters = dict(net.named_parameters())
    return lambda x: torch.func.functional_call(net, parameters, x)


def updated(net: nn.Module) -> nn.Module:
    """Call what must have no effect on stored weights."""
    precompute_float8_dynamic_scale(net)
    update_float8_scales(net)
    invalidate_float8_scales(net)
    Float8State(net).load_state_dict(Float8State(net).state_dict())
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    torch.optim.AdamW(net.parameters(), weight_decay=0.1).step()
    torch.optim.SGD(net.parameters()).step()
    return net


CHANGES: list[Callable[[nn.Module], Any]] = [
    moved_to_half,
    saved,
    swapped,
    unfrozen_and_frozen,
    with_functional_call,
    updated,
    copy.deepcopy,
    lambda net: pickle.loads(pickle.dumps(net)),
    nn.Module.cpu,
    nn.Module.share_memory,
    convert_to_float8_training,
    lambda net: copy.deepcopy(saved(copy.deepcopy(net))),
    lambda net: partial(checkpoint, net, use_reentrant=False),
    lambda net: partial(checkpoint, net, use_reentrant=False, **SELECTIVE),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_model_keep_the_bits(change: Callable[[nn.Module], Any]) -> None:
    expected = run(converted())
    net = frozen()
    assert same(run(change(net)), expected)
    assert same(run(net), expected)  # the original, where the change made a copy


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], Any]) -> None:
    net, twin, x = frozen(), converted(), torch.randn(48, 512, dtype=torch.bfloat16)
    with mode():
        assert same_bits(net(x), twin(x))
    assert same(run(net), run(twin))
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(net(x.float()), twin(x.float()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, 1e-38])
@every_config
def test_special_values(name: str, value: float) -> None:
    net = converted(name)
    net[0].weight[3] = value
    net[2].weight[:] *= min(value, 1.0)
    twin = copy.deepcopy(net)
    freeze_to_float8(net)
    loaded = frozen(name)
    loaded.load_state_dict(net.state_dict())
    expected = run(twin)
    assert all(map(same_values, run(net), expected))
    assert all(map(same_values, run(loaded), expected))


# State dicts


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(net.state_dict())


def in_e8m0(net: nn.Module) -> dict[str, torch.Tensor]:
    e8m0 = torch.float8_e8m0fnu
    return {k: v.to(e8m0) if "scale" in k else v for k, v in net.state_dict().items()}


def by_dcp(net: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(net)


def test_entries_of_a_state_dict() -> None:
    net = frozen()
    state = state_of(net)
    found = {name: (t.dtype, list(t.shape)) for name, t in state.items()}
    fp8, fp32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    assert found == {
        "0.weight": (fp8, [320, 512]),
        "0.bias": (bf16, [320]),
        "0.weight_scale_inv": (fp32, [3, 4]),
        "2.weight": (fp8, [192, 320]),
        "2.bias": (bf16, [192]),
        "2.weight_scale_inv": (fp32, [2, 3]),
    }
    assert state["0.weight"].data_ptr() == net[0].weight.data_ptr()  # not a copy
    assert net.state_dict(keep_vars=True)["0.weight"] is net[0].weight
    # The dtype is the layer's, as of PEFT's adapters and of gradients.
    assert net[0].weight.dtype is bf16
    assert not net[0].weight.requires_grad
    assert [name for name, _ in net.named_parameters()] == list(state)


def copied_in_parts(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for each, values in zip(to, source, strict=True):
        for part, source_part in zip(each.chunk(3), values.chunk(3), strict=True):
            part.copy_(source_part)


def copied_as_bytes(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for each, values in zip(to, source, strict=True):
        each.view(-1).view(torch.uint8).copy_(values.view(-1).view(torch.uint8))


def copied_to_data(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for each, values in zip(to, source, strict=True):
        each.data.detach()[:] = values


def copied_in_inference_mode(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        for each, values in zip(to, source, strict=True):
            each.reshape(-1).copy_(values.reshape(-1))


def loaded_in_place(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    with TemporaryDirectory() as folder:
        dcp.save({str(i): each for i, each in enumerate(source)}, checkpoint_id=folder)
        dcp.load({str(i): each for i, each in enumerate(to)}, checkpoint_id=folder)


def scaled_experts() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Module()
    net.float8_weight_names = ("up",)  # type: ignore[assignment]
    net.up = nn.Parameter(torch.randn(3, 64, 96), requires_grad=False)
    config = Float8ExpertsConfig(recipe="mxfp8", weight_format="mxfp4")
    convert_experts_to_float8_training(net, config=config)
    return net


WRITES = (
    torch._foreach_copy_,
    copied_in_parts,
    copied_as_bytes,
    copied_to_data,
    copied_in_inference_mode,
    loaded_in_place,
)


# Two ways to write for each config, so that each way runs on a config with packed data.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "write"),
    [
        (name, WRITES[(i + j) % len(WRITES)])
        for i, name in enumerate([*CONFIGS, "experts"])
        for j in (0, 3)
    ],
)
def test_writes_to_entries_reach_the_weights(name: str, write: Any) -> None:
    """Also where an entry is a copy, as of packed data and of exponents."""
    nets = [scaled_experts() if name == "experts" else converted(name) for _ in range(2)]
    for each in nets[0].parameters():
        each.copy_(each.flip(0) * 8)
    for net in nets:
        _ = freeze_to_float8(net, format="mxfp4") if name == "experts" else freeze(net)
    source, earlier, state = (dict(net.state_dict()) for net in (nets[0], nets[1], nets[1]))
    write(list(state.values()), list(source.values()))
    for states in (nets[1].state_dict(), state, earlier):
        assert all(same_bits(states[key], each) for key, each in source.items())
    if name == "experts":
        assert same_bits(*(dequantized(net, "up") for net in nets))
    else:
        assert same(run(nets[1]), run(nets[0]))


@every_config
def test_operations_in_place_on_entries(name: str) -> None:
    net, twin = frozen(name), frozen(name)
    earlier, state, others = net.state_dict(), net.state_dict(), twin.state_dict()
    scales = [state["0.weight_scale_inv"], state["2.weight_scale_inv"]]
    torch._foreach_mul_(scales, 2.0)
    assert scales[0].mul_(0.5).add_(scales[0]) is scales[0]
    if scales[0].dtype is torch.float32:  # apply_ does not know others
        assert scales[1].apply_(lambda scale: 2 * scale).map_(scales[1], min) is scales[1]
        assert same_bits(dequantized(net[2]), dequantized(twin[2]) * 4)
        scales[1].mul_(0.5)
    assert same_bits(dequantized(net[0]), dequantized(twin[0]) * 2)
    state["0.weight"].zero_()
    assert not dequantized(net[0]).any()
    reads = [earlier["2.weight_scale_inv"], others["2.weight_scale_inv"] * 2]
    by_safetensors = lambda x: safetensors.torch.load(safetensors.torch.save({"x": x}))["x"]  # noqa: E731
    readers = [methodcaller("numpy"), methodcaller("tolist"), copy.deepcopy, reloaded]
    for form in (*readers, copy.copy, by_safetensors):
        found, expected = (torch.as_tensor(form(each)) for each in reads)
        assert form is copy.copy or type(found) is torch.Tensor
        assert found.equal(expected)


def test_values_that_no_stored_weight_has() -> None:
    net, expected = frozen("mxfp4"), run(frozen("mxfp4"))
    state = net.state_dict()
    with pytest.raises(ValueError, match=r"2: weight_scale_inv are not powers of two"):
        state["2.weight_scale_inv"].mul_(3.0)
    with pytest.raises(ValueError, match=r"0: weight has float8 values that MXFP4 does not have"):
        state["0.weight"][1].copy_(torch.full((512,), 0.75).to(torch.float8_e4m3fn))
    assert all(same_bits(state[key], each) for key, each in frozen("mxfp4").state_dict().items())
    assert same(run(net), expected)


def test_nothing_is_written_beside_values_that_no_stored_weight_has() -> None:
    """Also not to entries that come before the wrong one."""

    def load(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
        torch._foreach_copy_(list(net.state_dict().values()), list(state.values()))

    net, other = frozen("mxfp4"), converted("mxfp4")
    for layer in (other[0], other[2]):
        layer.weight.data *= 3  # type: ignore[operator]
    assert len(freeze(other)) == 2
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(other.state_dict())
    data = state["2.weight"].view(torch.uint8)
    data[3, 5] = 0x39  # 1.125
    text = raised(ValueError, lambda: load(net, state))
    assert "weight has float8 values that MXFP4 does not have" in text
    assert all(same_bits(x, before[key]) for key, x in net.state_dict().items())
    data[3, 5] = 0x38
    load(net, state)
    assert all(same_bits(x, state[key]) for key, x in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*is cast to float8 again")
@pytest.mark.parametrize("form", [state_of, in_e8m0, by_dcp])
@pytest.mark.parametrize("assign", [False, True])
@every_config
def test_states_load_as_they_were_saved(name: str, assign: bool, form: Any) -> None:
    if form is in_e8m0 and name not in ("blockwise", "mxfp8"):
        return  # scales that are not powers of two
    state, expected = form(frozen(name)), run(converted(name))
    net = frozen(name)
    with torch.no_grad():
        net[0].weight.data += 1.0  # type: ignore[operator]
        assert not same(run(net), expected)
    net.load_state_dict(state, assign=assign)
    assert same(run(net), expected)
    again = form(net) if form is by_dcp else net.state_dict()
    assert again.keys() == state.keys()
    assert all(same_bits(again[key], tensor) for key, tensor in state.items())


def test_scales_in_e8m0_are_loaded_by_layers_with_fp32_scales() -> None:
    state, net = in_e8m0(frozen("blockwise")), frozen("vllm")
    net.load_state_dict(state)
    again = state_of(net)
    assert again.keys() == state.keys()
    for key, tensor in state.items():
        assert same_bits(again[key], tensor.to(torch.float32) if "scale" in key else tensor)
    other = frozen("vllm")
    other.load_state_dict(again)
    assert same(run(other), run(net))


@every_config
def test_a_state_in_high_precision_is_cast(name: str) -> None:
    twin = converted(name)
    for scale in (1.0, 3.0):
        twin[0].weight *= scale
        net = frozen(name)
        missing = net.load_state_dict(twin.state_dict(), strict=scale == 1.0)
        assert missing == ([], [])
        assert same(run(net), run(twin))
    set_model_state_dict(frozen(name), get_model_state_dict(twin))


def test_a_state_lacks_a_layer() -> None:
    state = state_of(frozen())
    del state["0.weight"], state["0.weight_scale_inv"]
    net = frozen()
    assert net.load_state_dict(state, strict=False).missing_keys == [
        "0.weight",
        "0.weight_scale_inv",
    ]
    assert same(run(net), run(converted()))


@pytest.mark.parametrize("assign", [False, True])
@every_config
def test_a_model_on_the_meta_device_is_frozen_and_loaded(name: str, assign: bool) -> None:
    with torch.device("meta"):
        net = frozen(name)
    assert {p.device.type for p in net.parameters()} == {"meta"}
    if not assign:
        net.to_empty(device="cpu")
    net.load_state_dict(frozen(name).state_dict(), assign=assign)
    assert same(run(net.requires_grad_(False)), run(converted(name)))


# Layers that share a weight, and parts of a model


@pytest.mark.parametrize("gathers", [False, True])
def test_layers_that_share_a_weight(gathers: bool) -> None:
    config = replace(CONFIGS["blockwise"], enable_fsdp_float8_all_gather=gathers)

    def sharing() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).bfloat16()
        net[1].weight = net[0].weight
        convert_to_float8_training(net, config=config)
        return net.requires_grad_(False)

    net, expected = sharing(), run(sharing())
    assert freeze_to_float8(net) == ["0.weight", "1.weight"]
    for each in (net, copy.deepcopy(net), saved(net), moved_to_half(net)):
        assert each[0].weight is each[1].weight  # type: ignore[index]
        assert each[0].weight_scale_inv is each[1].weight_scale_inv  # type: ignore[index]
        assert same(run(each), expected)
    unfreeze_from_float8(net)
    assert net[0].weight is net[1].weight


def test_some_layers_of_a_model() -> None:
    net, twin = converted(), converted()
    for each in (net, twin):
        each[2].weight.requires_grad_(True)
    assert freeze_to_float8(net) == ["0.weight"]
    assert same(run(net), run(twin))
    assert same_bits(net[2].weight.grad, twin[2].weight.grad)
    net = converted()
    assert freeze_to_float8(net, module_filter_fn=lambda _, fqn: fqn == "2") == ["2.weight"]
    assert freeze_to_float8(net) == ["0.weight", "2.weight"]
    layer = converted()[0]
    assert freeze_to_float8(layer) == ["weight"]
    assert freeze_to_float8(layer) == ["weight"]


@pytest.mark.parametrize("name", ["blockwise", "mxfp4"])
def test_a_sum_is_cast_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8_dist.text._warned", set())
    net, twin = frozen(name), converted(name)
    update = torch.randn(320, 512).bfloat16()
    with pytest.warns(UserWarning, match="does not restore the weight's bits"):
        net[0].weight.data += update  # type: ignore[operator]
    unfreeze_from_float8(net)
    freeze(net)
    values = dequantized(frozen(name)[0]) + update
    twin[0].weight.copy_(values)
    assert same(run(net), run(twin))
    with torch.no_grad():
        net = frozen(name)
        net[0].weight.add_(update, alpha=-1)
        twin[0].weight.copy_(dequantized(frozen(name)[0]) - update)
    assert same(run(net), run(twin))


def test_sums_are_of_the_whole_weight_of_a_layer() -> None:
    """Parts, copies and the transposed view of a square have other scales, or none."""
    net = nn.Sequential(nn.Linear(256, 256, bias=False)).to(torch.bfloat16).requires_grad_(False)
    convert_to_float8_training(net, config=CONFIGS["mxfp4"])
    freeze(net)
    update = torch.randn(256, 256).bfloat16()
    copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net)), moved_to_half(copy.deepcopy(net))
    for each in (net, *copies):
        for weight in (each[0].weight, each[0].weight.data, each[0].weight.view(256, 256)):
            assert same_bits(weight + update.to(weight.dtype), dequantized(each[0]) + update)
    weight, state = net[0].weight.data, copy.deepcopy(net.state_dict())
    operations: list[Callable[[], object]] = [
        lambda: weight.mT + update,
        lambda: weight[:128] + update[:128],
        lambda: weight.clone() + update,
        lambda: weight.clone().add_(update),
        lambda: weight.mT.add_(update),
        lambda: update + weight,
        lambda: net[0].weight_scale_inv + 1,
    ]
    for operation in operations:
        assert "stored in float8; read it with" in raised(NotImplementedError, operation)
    assert all(same_bits(state[key], each) for key, each in net.state_dict().items())


# Errors


def refused(of: nn.Module, text: str, **arguments: Any) -> None:
    assert text in raised(ValueError, lambda: freeze_to_float8(of, **arguments))


def test_what_can_not_be_frozen() -> None:
    refused(nn.ReLU(), "freeze_to_float8: the module has no converted layer; call")
    refused(converted().requires_grad_(True), "no float8 weight of the module is frozen, or")
    refused(converted(), "admits none; call", module_filter_fn=lambda *_: False)
    refused(converted("rowwise"), "0.weight is multiplied in high precision in a GEMM, or cast")
    refused(converted(), "format='fp4' with block_size=None; pass format", format="fp4")
    refused(converted("mxfp8"), "0.weight is not cast to four bits, or stored", format="mxfp4")
    net = converted("mxfp4")
    freeze_to_float8(net, module_filter_fn=lambda _, fqn: fqn == "0")
    refused(net, "0.weight is not cast to four bits, or stored", format="mxfp4")
    odd = nn.Sequential(nn.Linear(33, 16)).requires_grad_(False)
    convert_to_float8_training(odd, config=CONFIGS["mxfp4"])
    refused(odd, "0.weight is [16, 33], and an odd number of columns can't be", format="mxfp4")
    off = CastConfig(ScalingType.DISABLED)
    without_grad_input = Float8LinearConfig(
        cast_config_weight_for_grad_input=off,
        cast_config_grad_output=off,
        cast_config_grad_output_for_grad_weight=CastConfig(),
    )
    layer = Float8Linear(16, 16, config=without_grad_input).requires_grad_(False)
    parametrized = converted()
    nn.utils.parametrize.register_parametrization(parametrized[0], "weight", nn.Identity())
    refused(parametrized, "distributed already, or is not a plain parameter; freeze")
    refused(layer, "weight is multiplied in high precision in a GEMM, or cast with several")
    assert "no converted layer" in raised(ValueError, lambda: unfreeze_from_float8(nn.ReLU()))
    text = "dequantized: a Float8Linear has no float8 weight 'bias'; pass a"
    assert text in raised(ValueError, lambda: dequantized(frozen()[0], "bias"))
    assert "pass the model, an nn.Module" in raised(TypeError, lambda: freeze_to_float8("model"))  # type: ignore[arg-type]


def test_a_weight_that_an_embedding_shares() -> None:
    net = nn.Sequential(nn.Embedding(320, 512), nn.Linear(512, 320, bias=False))
    net[1].weight = net[0].weight
    convert_to_float8_training(net, config=CONFIGS["blockwise"])
    net.requires_grad_(False)
    refused(net, "1.weight is also 0.weight, which stays in high precision, and both together")
    assert net[0].weight is net[1].weight


def test_a_stored_weight_is_not_trained() -> None:
    net = frozen().requires_grad_(True)
    text = "0: weight requires gradients, but is stored in float8, where no optimizer can"
    assert text in raised(ValueError, lambda: net(torch.zeros(16, 512).bfloat16()))
    net.requires_grad_(False)
    assert same(run(net), run(converted()))


def test_a_config_is_not_changed_afterwards() -> None:
    net = frozen()
    net[0].config = CONFIGS["tensorwise"]
    text = "and the layer's config has dense(dtype='torch.float8_e4m3fn', per='tensor'"
    assert text in raised(ValueError, lambda: run(net))
    assert "; choose the config before freeze_to_float8" in raised(ValueError, lambda: run(net))


def operations(weight: torch.Tensor) -> Iterable[Callable[[], object]]:
    values = torch.zeros(320, 512, dtype=torch.bfloat16)
    yield lambda: weight.copy_(values)
    yield lambda: values.copy_(weight)
    yield lambda: weight.mul_(2)
    yield lambda: weight.apply_(lambda value: 2 * value)
    yield lambda: values @ weight.t()
    yield lambda: nn.init.kaiming_uniform_(weight)
    yield lambda: torch.nn.utils.parameters_to_vector([weight, values])


@pytest.mark.parametrize("name", ["blockwise", "mxfp4"])
def test_operations_on_a_stored_weight(name: str) -> None:
    net = frozen(name)
    expected = run(net)
    with torch.no_grad():
        for operation in operations(net[0].weight):
            text = raised(NotImplementedError, operation)
            assert "stored in float8" in text
            assert re.search("read it with fp8_dist.dequantized|as DistributedDataParallel", text)

    def assign() -> None:
        net[0].weight.data = torch.zeros(320, 512)

    assert ".data of a weight that is stored in float8 can't become a Tensor of" in raised(
        TypeError, assign
    )
    assert same(run(net), expected)


PARTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.mT,
    lambda x: x[3:9, 64:96],
    lambda x: x.mT[2:6, 5:9],
    lambda x: x.view(-1)[512:1024],
    lambda x: x.chunk(3)[1],
]


@pytest.mark.parametrize(
    ("mode", "name"),
    [(nullcontext, "blockwise"), (nullcontext, "mxfp4"), (torch.inference_mode, "mxfp4")],
)
def test_views_and_moves_of_a_weight(mode: Callable[[], Any], name: str) -> None:
    """Under inference_mode, composite operators reach the tensor as they are."""
    layer = frozen(name)[0]
    weight, data = layer.weight, layer.state_dict()["weight"]
    moved = [lambda x: x.mT.contiguous(), lambda x: x.to("cpu"), lambda x: x.reshape(160, 1024)]
    with mode():
        for part in (*PARTS, *moved):
            found = part(weight).unpacked(layer.float8_weight.schemes[0])
            assert same_bits(found.contiguous(), part(data).contiguous())
        assert weight.to(torch.float32).shape == weight.shape


def test_views_that_divide_pairs() -> None:
    weight = frozen("mxfp4")[0].weight
    text = raised(NotImplementedError, lambda: weight[:, 1:4])
    assert "divides its pairs of values; use even sizes, or" in text


def refused_state(name: str, text: str, **changes: Any) -> None:
    state = state_of(frozen(name))
    for key, change in changes.items():
        key = f"0.{key}"
        state[key] = change(state[key])
        if state[key] is None:
            del state[key]
    net = frozen(name)
    assert text in raised(ValueError, lambda: net.load_state_dict(state))
    assert same(run(net), run(converted(name)))  # nothing was loaded


def test_states_that_are_refused() -> None:
    missing = "0: the state dict has 0.weight in torch.float8_e4m3fn, and a weight that is stored"
    refused_state("blockwise", missing, weight_scale_inv=lambda _: None)
    other = "needs torch.float8_e4m3fn and the scales 0.weight_scale_inv; load a checkpoint"
    refused_state("blockwise", other, weight=lambda t: t.float().to(torch.float8_e5m2))
    powers = "are not powers of two, and the layer's scheme has exponents; convert the"
    refused_state("blockwise", powers, weight_scale_inv=lambda t: t * 1.5)
    refused_state("blockwise", "has negative scales", weight_scale_inv=lambda t: -t)
    byte_scales_error = (
        "0.weight_scale_inv has the dtype torch.uint8; scales are float32, bfloat16,"
    )
    exponents = {"weight_scale_inv": lambda t: t.to(torch.float8_e8m0fnu).view(torch.uint8)}
    refused_state("blockwise", byte_scales_error, **exponents)
    other_blocks = r"0.weight_scale_inv is [4, 3], and the layer's recipe has one scale per"
    refused_state("blockwise", other_blocks, weight_scale_inv=lambda t: t.t())
    refused_state("blockwise", "is [12], and the", weight_scale_inv=lambda t: t.flatten())
    others = "0: 0.weight has float8 values that MXFP4 does not have; load a checkpoint in high"
    refused_state("mxfp4", others, weight=lambda t: (t.float() * 1.125).to(t.dtype))
    net = frozen()
    text = "is data of torch.float8_e4m3fn without its scales, from a state dict that was"
    x, state = torch.zeros(16, 512).bfloat16(), net.state_dict()
    assert text in raised(TypeError, lambda: torch.func.functional_call(net, state, x))


def test_the_scales_of_a_checkpoint_may_have_other_shapes() -> None:
    """One value for a tensor is a 0-dim tensor in many checkpoints; rows lack the last dim."""
    for name, shape in (("tensorwise", ()), ("tensorwise", (1, 1)), ("rowwise_folded", (-1,))):
        state, net = state_of(frozen(name)), frozen(name)
        net.load_state_dict(state | {"0.weight_scale_inv": state["0.weight_scale_inv"].view(shape)})
        assert same(run(net), run(converted(name)))


@pytest.mark.parametrize("assign", [False, True])
def test_codes_are_no_values_of_a_weight_in_high_precision(assign: bool) -> None:
    state, net = state_of(frozen()), converted()
    before = {name: value.clone() for name, value in state_of(net).items()}
    text = r"in torch\.float8_e4m3fn, which load_state_dict would convert to the layer's high prec"
    with pytest.raises(ValueError, match=rf"0: the state dict has 0\.weight {text}"):
        net.load_state_dict(state, strict=False, assign=assign)
    assert all(map(same_bits, state_of(net).values(), before.values()))


# Tools


def test_statistics_and_recordings(tmp_path: Path) -> None:
    net, twin = frozen(), converted()
    with float8_stats(net, gemms=True) as stats, record(net, tmp_path, layers="*") as recorder:
        run(net)
    with float8_stats(twin) as twin_stats:
        run(twin)
    # Weights are not cast: only inputs and gradients have rows.
    gemms = [row for row in stats.rows if isinstance(row, GemmStats)]
    rows = [row for row in stats.rows if row not in gemms]
    assert rows == [
        r for r in twin_stats.rows if isinstance(r, CastStats) and r.operand != "weight"
    ]
    assert [(row.fqn, row.gemm) for row in gemms] == [
        (fqn, gemm) for fqn in "02" for gemm in ("output", "grad_input")
    ]
    assert all(25 < row.sqnr < 60 for row in gemms)
    assert {c.parts[0]["operand"] for c in casts(written(recorder))} == {"input", "grad_output"}
    assert "2 of 2 weights in float8" in str(conversion_summary(net))
