"""Float8 communication of layers whose parameters and activations are plain local tensors."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8_dist.linear.agreement import check_placed
from fp8_dist.linear.local_placements import LocalPlacements
from fp8_dist.linear.module import Float8Linear
from fp8_dist.mesh import layout_over
from fp8_dist.tensor_parallel.reductions import check_transport, gathered
from fp8_dist.tensor_parallel.shared_casts import cast_input, shared_input_cast
from fp8_dist.transport import Encoding


def declare_placements(
    layer: Float8Linear,
    mesh: DeviceMesh,
    *,
    weight: Placement,
    input: Placement,
    output: Placement,
    reduce_transport: Encoding = None,
) -> Float8Linear:
    """Declare the placements of a layer's plain local tensors in their global tensors.

    This is for tensor parallelism without DTensors. The parameters, the input and the output of the
    layer are plain tensors, and stay so. The layer scales, casts and redistributes them like a
    layer with the style ``Float8ColwiseParallel`` or ``Float8RowwiseParallel``.

    Args:
        layer: a layer whose weight is this rank's part, ``[out_features, in_features]``, with one
            of them divided by the size of the mesh. Parts must be equal. FSDP2 may shard them over
            other axes of the same root mesh, before or after this call.
        mesh: the tensor-parallel axis, 1-D: ``mesh["tp"]`` of a larger mesh.
        weight: ``Shard(0)`` (column-parallel), ``Shard(1)`` (row-parallel) or ``Replicate()``. A
            bias is sharded with ``Shard(0)``, and replicated otherwise.
        input: placement of the input. ``Shard(0)`` or ``Shard(1)``, the batch or the sequence, is
            gathered as float8 where the GEMMs need the whole input.
        output: placement of the output. A row-parallel layer sums it. ``Partial()`` leaves the sum
            to the caller, for a layer without a bias.
        reduce_transport: as in the two styles. It applies to the output of a row-parallel layer and
            to grad_input of a column-parallel one, where these are sharded. ``share_input`` takes
            it from the layers. The result then depends on the number of ranks.

    A gradient has the placement of its tensor. The gradient of a replicated tensor is the full
    gradient on every rank: gradients of a replicated input, weight or bias are summed over the
    mesh, and the gradient of a replicated output must be full on every rank. The gradient of a
    Partial output is full too.

    Returns:
        ``layer``. A later call replaces the declaration.

    Collectives: in forward and backward those of the two styles. In this call one all-reduce of 16
    bytes, which ``comm_audit`` does not count, compares the layer and the arguments between ranks.

    Raises:
        TypeError: ``layer`` is not a Float8Linear, ``mesh`` is not a DeviceMesh, or a placement is
            not a Placement.
        ValueError: the mesh is not 1-D, a placement is not among those above,
            ``reduce_transport`` is given and nothing is reduce-scattered, the weight has been
            distributed over ``mesh`` already, its shape does not fit, or ranks differ.
    """
    if isinstance(mesh, DeviceMesh):
        # First of all, because only some ranks may fail the checks below.
        converted = {"": layer} if isinstance(layer, Float8Linear) else {}
        declared = f"{weight=}, {input=}, {output=}, {reduce_transport=}"
        check_placed(converted, mesh, "declare_placements", {"placements": declared})
    if not isinstance(layer, Float8Linear):
        raise TypeError(
            f"declare_placements needs a Float8Linear, got a {type(layer).__name__}; convert it "
            "first (convert_to_float8_training)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{layer.fqn}: declare_placements needs a DeviceMesh, got a {type(mesh).__name__}; "
            "DeviceMesh.from_group(group, device_type) makes one of a process group"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{layer.fqn}: declare_placements needs a 1-D mesh, got one with shape "
            f"{tuple(mesh.shape)} and axes {mesh.mesh_dim_names}: pass its tensor-parallel axis, "
            "such as mesh['tp']"
        )
    for name, placement in (("weight", weight), ("input", input), ("output", output)):
        if not isinstance(placement, Placement):
            raise TypeError(f"{layer.fqn}: {name}={placement!r} is no placement, such as Shard(0)")
    if weight == Shard(-1):
        weight = Shard(1)
    _check_placements(layer, weight, input, output)
    check_transport(reduce_transport, layer.fqn)
    scattered = {Shard(0): input, Shard(1): output}.get(weight)  # type: ignore[call-overload]
    if reduce_transport is not None and not isinstance(scattered, Shard):
        raise ValueError(
            f"{layer.fqn}: reduce_transport={reduce_transport!r} applies to a reduce-scatter: of "
            "the output of a row-parallel layer (weight=Shard(1), output a Shard), or of "
            "grad_input of a column-parallel one (weight=Shard(0), input a Shard). There is none "
            f"with weight={weight!r}, input={input!r}, output={output!r}"
        )
    _check_shapes(layer, mesh, weight)
    layer.local_placements = LocalPlacements(mesh, weight, input)
    layer.output_placements = (output,)
    layer.reduce_transport = reduce_transport
    layer.float8_weight.cache.reset()
    return layer


def share_input(
    input: torch.Tensor,
    layers: Sequence[Float8Linear],
    *,
    reduce_transport: Encoding = None,
) -> torch.Tensor:
    """Cast and gather an input once for several layers, such as wq, wk and wv.

    This is ``PrepareFloat8ModuleInput`` as a function.

    Args:
        input: a plain tensor at the placement that the layers declared for their input; or a
            DTensor on a 1-D mesh, for layers whose parameters are DTensors.
        layers: column-parallel layers with the same config, and with the same declared mesh and
            input placement, or none. The first layer has the amax history of a DELAYED scale.
        reduce_transport: as in ``PrepareFloat8ModuleInput``, for a DTensor. For a plain tensor the
            layers declare it.

    Returns:
        A DTensor that each of the layers takes as its input. It is float8 where one copy serves all
        GEMMs (``rowwise`` and ``rowwise_with_gw_hp`` gather in high precision). The gradients of
        the layers are summed, and then reduced once to the placement of ``input``.

    Collectives: those of ``PrepareFloat8ModuleInput``, or of torch's ``PrepareModuleInput``.

    Raises:
        ValueError: no layers, one that is not column-parallel by its declaration, layers that
            disagree, a DTensor on a mesh of several axes, or ``reduce_transport`` for an input that
            is not sharded, or whose layers declare it.
        TypeError: ``layers`` is not a sequence of Float8Linear; or ``input`` is a DTensor where a
            local tensor was declared, or the other way round.
    """
    if not torch.compiler.is_compiling():
        _check_shared(input, layers, reduce_transport)
    first = layers[0]
    declared, cast = first.local_placements, shared_input_cast(first)
    if isinstance(input, DTensor):
        placed = input
    else:
        assert declared is not None
        placed = DTensor.from_local(input, declared.mesh, (declared.input,), run_check=False)
    if cast is not None:
        at, mesh, history = placed.placements[0], placed.device_mesh, first.histories.get("input")
        placed = cast_input(placed, at, mesh, *cast, history, first.float8_weight)
    transport = reduce_transport if declared is None else first.reduce_transport
    return gathered(placed, transport, "share_input")


def _check_shared(
    input: torch.Tensor, layers: Sequence[Float8Linear], reduce_transport: Encoding
) -> None:
    single = isinstance(layers, nn.Linear)
    wrong = [layers] if single else [m for m in layers if not isinstance(m, Float8Linear)]
    if wrong:
        kinds = ", ".join(type(layer).__name__ for layer in wrong)
        raise TypeError(
            f"share_input takes a list of Float8Linear, got {kinds}"
            + (" alone" if single else "; convert it first (convert_to_float8_training)")
        )
    names = [layer.fqn for layer in layers]
    declared = layers[0].local_placements if layers else None
    if not layers or any(
        layer.local_placements != declared
        or (declared is not None and declared.weight != Shard(0))
        or shared_input_cast(layer) != shared_input_cast(layers[0])
        or layer.reduce_transport != layers[0].reduce_transport
        for layer in layers
    ):
        found = "".join(f"\n  - {m.fqn}: {m.local_placements}, {m.extra_repr()}" for m in layers)
        raise ValueError(
            f"share_input: {names} must be column-parallel layers (declare_placements with "
            f"weight=Shard(0)), with one mesh, input placement and cast of the input; found{found}"
        )
    check_transport(reduce_transport, "share_input")
    if reduce_transport is not None and declared is not None:
        raise ValueError(
            f"share_input: reduce_transport={reduce_transport!r}, but {names} declared how their "
            "input stands; give it to declare_placements"
        )
    if isinstance(input, DTensor) and declared is not None:
        raise TypeError(
            f"share_input: {names} declared a local input, but got a DTensor, {input.placements} "
            f"on {input.device_mesh}; pass its to_local()"
        )
    if isinstance(input, DTensor) and input.device_mesh.ndim != 1:
        raise ValueError(
            f"share_input: the input of {names} is on {input.device_mesh}; it must be on a 1-D mesh"
        )
    if not isinstance(input, DTensor) and declared is None:
        raise TypeError(
            f"share_input: the input of {names} is a plain tensor; declare where it stands "
            "(declare_placements), or pass a DTensor"
        )


def _check_placements(
    layer: Float8Linear, weight: Placement, input: Placement, output: Placement
) -> None:
    fits = {
        "weight": weight in (Shard(0), Shard(1), Replicate()),
        "input": isinstance(input, Shard | Replicate),
        "output": isinstance(output, Shard | Replicate)
        or (output == Partial() and weight == Shard(1) and layer.bias is None),
    }
    allowed = {
        "weight": "Shard(0), Shard(1) or Replicate()",
        "input": "a Shard or Replicate()",
        "output": "a Shard, Replicate(), or, of a row-parallel layer without a bias, Partial()",
    }
    given = {"weight": weight, "input": input, "output": output}
    for name, fit in fits.items():
        if not fit:
            raise ValueError(f"{layer.fqn}: {name}={given[name]!r}, but it must be {allowed[name]}")


def _check_shapes(layer: Float8Linear, mesh: DeviceMesh, weight: Placement) -> None:
    """Raise for a weight that can't be this rank's part, by facts that all ranks share."""
    parameter = layer.weight
    if parameter.ndim != 2:
        raise ValueError(
            f"{layer.fqn}: the weight has shape {tuple(parameter.shape)}, not [out_features, "
            "in_features] (flattened by FSDP1?); use fully_shard (FSDP2)"
        )
    layout = layout_over(parameter, mesh, weight, layer.fqn)
    for dim, name in enumerate(("out_features", "in_features")):
        features, whole = getattr(layer, name), layout.shape[dim]
        part = whole // mesh.size() if weight == Shard(dim) else whole
        if features not in (part, whole):
            raise ValueError(
                f"{layer.fqn}: {name}={features} fits neither the weight's local size, {part}, "
                f"nor the global one, {whole}, of a weight declared as {weight!r} on {mesh.size()} "
                "ranks. Parts must be equal: pad the layer, or use the parallel styles, which "
                "take uneven ones"
            )
