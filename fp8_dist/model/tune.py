"""Block sizes of Triton kernels, measured before a training run."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8_dist.cast import cast_by, cast_copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.fsdp.precompute import local_statistics, precompute_float8_dynamic_scale
from fp8_dist.fsdp.update import weights_to_precompute
from fp8_dist.kernels.quantization import rounded_up
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.linear.parameter import LocalPlacements
from fp8_dist.linear.weight import CONVERT_FIRST
from fp8_dist.mesh import Layout, Placements, local_tensor, reduced, sharded_dim, with_local
from fp8_dist.model.freeze import freeze_to_float8
from fp8_dist.scaling import CastPlan, measure
from fp8_dist.tensor import Float8Tensor
from fp8_dist.torch_internals import fsdp_groups, fsdp_parameters
from fp8_dist.transport import Encoding


class _Parallel(NamedTuple):
    """How tensor parallelism distributes a kind of layers."""

    mesh: DeviceMesh  # without the axes of FSDP2
    weight: Placements
    output: Placements | None
    transport: Encoding
    declared: LocalPlacements | None
    whole: Layout  # with these axes, so that all ranks of the mesh see the same kinds

    def wrap(self, local: torch.Tensor, placements: Placements) -> torch.Tensor:
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


class _Kind(NamedTuple):
    """A kind of layers, which launch the same kernels."""

    shape: tuple[int, int]  # of the weight that GEMMs take: gathered, or a tensor-parallel part
    parallel: _Parallel | None
    shard: tuple[torch.Size, torch.dtype] | None  # this rank's; None without FSDP2
    gathers: bool  # whether FSDP2 gathers the weight in float8
    trains: bool  # whether the weight gets a gradient
    is_stored: bool  # in float8
    config: Float8LinearConfig


def tune(
    model: nn.Module, tokens: int, *, dtype: torch.dtype = torch.bfloat16, progress: bool = True
) -> None:
    """Measure block sizes for the Triton kernels that a step of a model's float8 layers launches.

    Without this function a kernel measures its few choices when a step first launches it for
    tensors of about some size, so that the first steps are slow, and need 256 MB of memory for it.
    The choice does not change results.

    Call it on each rank, once the model is converted and distributed. It runs forward and backward
    of layers of its own that are like the model's, one at a time, and needs as much memory as they
    do. The model, its gradients, its amax histories and random numbers stay as they are. The
    choices belong to the process. Kernels of experts still measure theirs in the first steps.

    Args:
        tokens: the rows of a GEMM on a rank, batch times sequence; with sequence parallelism, of
            the whole sequence. For several numbers whose bit lengths differ, call it for each.
        dtype: the dtype in which layers compute: that of inputs, or of autocast, or the
            ``param_dtype`` of FSDP2.
        progress: print a line to stderr for each kind of layer, on rank 0.

    Collectives: under tensor parallelism those of a step of each kind of layers; otherwise none.

    Raises:
        TypeError: ``model`` is not an nn.Module.
        ValueError: ``tokens`` is not positive; the model has no float8 layers, or they are not on
            a GPU.
        NotImplementedError: Triton is not installed.
    """
    layers = float8_layers(model)
    _check(layers, tokens)
    kinds = _kinds(layers)
    talks = progress and not (torch.distributed.is_initialized() and torch.distributed.get_rank())
    device = next(iter(layers.values())).float8_weight.device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for n, (kind, name) in enumerate(kinds.items(), 1):
            if talks:
                size = f"{kind.shape[1]} -> {kind.shape[0]}"
                text = f"fp8_dist.tune: {n} of {len(kinds)}, layers like {name} ({size})"
                print(text, file=sys.stderr, flush=True)
            _run(kind, tokens, dtype, device, name)
    weights = {name: layer.float8_weight for name, layer in layers.items()}
    dynamic = {name: weight for name, weight in weights.items() if weight.is_dynamic}
    with torch.no_grad():
        # Block sizes follow the number of tensors: precompute has all, an update may have fewer.
        for chosen in (dynamic, weights_to_precompute(model, weights)):
            local_statistics({each: each.parameter() for each in chosen.values()})


def _check(layers: dict[str, Float8Linear], tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"tune: tokens must be positive, got {tokens}")
    if not layers:
        raise ValueError(f"tune: the model has no float8 layers; {CONVERT_FIRST}")
    for name, layer in layers.items():
        device = layer.float8_weight.device
        if device.type != "cuda":
            raise ValueError(
                f"tune: {name or 'the layer'} is on {device}, but block sizes are those of a GPU's "
                "kernels; move the model to a GPU first, or leave out the call"
            )
    if find_spec("triton") is None:
        raise NotImplementedError(
            "tune: there is no Triton in this environment, so that there are no kernels with block "
            "sizes; pip install triton (the release that torch's own metadata names)"
        )


def _kinds(layers: dict[str, Float8Linear]) -> dict[_Kind, str]:
    """The kinds of layers, each with the name of the first such layer."""
    groups = {
        id(each.parameter): (each, group.mesh_info.mesh.ndim)
        for group in fsdp_groups()
        for each in fsdp_parameters([group])
    }
    kinds: dict[_Kind, str] = {}
    for name, layer in layers.items():
        weight = layer.float8_weight
        parameter = weight.parameter()
        known, axes = groups.get(id(parameter), (None, 0))
        shard = None
        if known is not None and not weight.is_stored:
            shard = weight.shard().shape, parameter.dtype
        kind = _Kind(
            *_without_fsdp(layer, weight.layout(), axes),
            shard,
            known is not None and known.has_hooks and not weight.is_stored,
            parameter.requires_grad,
            weight.is_stored,
            layer.config,
        )
        kinds.setdefault(kind, name or "the model")
    return kinds


def _without_fsdp(
    layer: Float8Linear, layout: Layout | None, axes: int
) -> tuple[tuple[int, int], _Parallel | None]:
    """The local shape of a weight, of which FSDP2 shards over the first axes of the mesh."""
    if layout is None or layout.mesh.ndim == axes:
        return (layer.out_features, layer.in_features), None
    mesh, placements, shape = layout.mesh, layout.placements[axes:], [*layout.shape]
    if axes:
        assert mesh.mesh_dim_names is not None
        mesh = mesh[mesh.mesh_dim_names[axes:]]
    for axis, placement in enumerate(placements):
        dim = sharded_dim(placement, 2)
        if dim is not None:
            shape[dim] = -(-shape[dim] // mesh.size(axis))
    own = layer.output_placements, layer.reduce_transport, layer.local_placements
    return (shape[0], shape[1]), _Parallel(mesh, placements, *own, layout)


def _run(kind: _Kind, tokens: int, dtype: torch.dtype, device: torch.device, fqn: str) -> None:
    """Launch the kernels of two steps of a layer, where they differ: the second knows scales."""
    parallel, (rows, columns) = kind.parallel, kind.shape
    if parallel is not None and kind.is_stored:  # the parts of the twin cut no blocks
        levels = [each for scheme in kind.config.recipe.schemes["weight"] for each in scheme.levels]
        rows = rounded_up(rows, max(level.rows or 1 for level in levels))
        columns = rounded_up(columns, max(level.columns or 1 for level in levels))
    with torch.device("meta"):
        layer = nn.Linear(columns, rows, bias=False)
    ones = partial(torch.ones, dtype=dtype, device=device)
    layer.weight = nn.Parameter(ones(rows, columns))
    twin = Float8Linear.from_float(layer, config=kind.config, fqn=fqn)
    weight = twin.float8_weight
    weight.is_compared = True
    if kind.is_stored:
        twin.requires_grad_(False)
        freeze_to_float8(twin)
    if parallel is not None:
        twin.output_placements, twin.reduce_transport = parallel.output, parallel.transport
        twin.local_placements = parallel.declared
        if parallel.declared is None:
            wrapped = parallel.wrap(twin.weight.detach(), parallel.weight)
            twin.weight = nn.Parameter(wrapped, requires_grad=not kind.is_stored)
    if kind.gathers:
        _gather(twin, kind)
    elif not kind.is_stored:
        twin.requires_grad_(kind.trains)
        weight.is_exchanged = kind.shard is not None
    # On several axes, an update may make process groups, which all ranks of the world must.
    is_updated = (
        parallel is not None
        and parallel.mesh.ndim == 1
        and weight.is_dynamic
        and kind.shard is None
    )
    for x in _inputs(parallel, tokens, columns, ones):
        x.requires_grad_()
        for _ in range(2 if twin.histories or is_updated else 1):
            output = reduced(twin(x))
            output.backward(torch.ones_like(output))
            assert x.grad is not None
            local_tensor(x.grad)  # waits for what reduces it
            for history in twin.histories.values():
                history.load(torch.ones(1, device=device))
            if is_updated:
                precompute_float8_dynamic_scale(twin)


def _inputs(
    parallel: _Parallel | None, tokens: int, columns: int, ones: Callable[..., torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield inputs of a layer in each placement that they may have.

    ``columns``: those of the local weight.
    """
    if parallel is None:
        yield ones(tokens, columns)
        return
    declared = () if parallel.declared is None else (parallel.declared.input,)
    output = parallel.output or ()
    cut = [sharded_dim(placement, 2) == 1 for placement in parallel.weight]
    # The features of activations are dim 1 only if these have two dims.
    is_matrix = Shard(1) in (declared if any(cut) else output)
    last = 1 if is_matrix else 2
    of_rows = 0 if is_matrix or Shard(0) in (*output, *declared) else 1
    options = {
        tuple([Shard(last) if features else rows for features in cut]): None
        for rows in (Shard(of_rows), Replicate())
    }
    for placements in [declared] if declared else options:
        shape = [1, 1, 1][: last + 1]
        shape[of_rows], shape[last] = tokens, columns
        for axis, placement in enumerate(placements):
            size = parallel.mesh.size(axis)
            if cut[axis]:
                shape[last] *= size
            dim = sharded_dim(placement, last + 1)
            if dim is not None:
                shape[dim] = -(-shape[dim] // size)
        local = ones(shape)
        yield local if declared else parallel.wrap(local, placements)


def _gather(twin: Float8Linear, kind: _Kind) -> None:
    """Cast a shard, and give the layer a weight as FSDP2 gathers it."""
    weight = twin.float8_weight
    assert kind.shard is not None
    (shape, shard_dtype), device = kind.shard, twin.weight.device
    plan = CastPlan(weight.schemes)
    shard = torch.ones(shape, dtype=shard_dtype, device=device)
    whole = weight.plain(local_tensor(twin.weight))
    with torch.no_grad():
        if weight.history is not None:
            for _ in range(2):
                weight.history.copies_of(shard, plan, False)
                weight.history.load(torch.ones(1, device=device))
        else:
            cast_copies(shard, plan)
            cast_by(shard, plan, measure(shard, plan.schemes))
        (quantized,) = cast_copies(whole, plan)[1]
    gathered = with_local(twin.weight, Float8Tensor.of(quantized, twin.weight.dtype))
    twin.weight = nn.Parameter(gathered, requires_grad=kind.trains)
