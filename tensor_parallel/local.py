"""Float8 communication for layers whose parameters and activations are plain local tensors."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fp8_dist.linear import Float8Linear
from fp8_dist.mesh import check_axis, layout_over
from fp8_dist.tensor_parallel.inputs import check_transport
from fp8_dist.text import kind_of
from fp8_dist.transport import Encoding
from fp8_dist.weight import agreement
from fp8_dist.weight.local_placements import LocalPlacements
from fp8_dist.weight.weights import attach_statistics


def declare_placements(
    layer: Float8Linear,
    mesh: DeviceMesh,
    *,
    weight: Placement,
    input: Placement,
    output: Placement,
    reduce_transport: Encoding = None,
) -> Float8Linear:
    """Declare the placements of a layer's plain local tensors, as parts of global tensors.

    This is for tensor parallelism without DTensors. The parameters, the input and the output of the
    layer are plain tensors, and stay so. The layer scales, casts and redistributes them like a
    layer with the style ``Float8ColwiseParallel`` or ``Float8RowwiseParallel``.

    Args:
        layer: a layer whose weight is this rank's part of the global weight: ``[out_features,
            in_features]``, one of them divided by the size of the mesh if the weight is sharded.
            Parts must be equal. FSDP2 may shard them over other axes of the same root mesh, before
            or after this call.
            If scales cover the values of several ranks, another parameter on the same storage
            replaces a plain weight, so make the optimizer after this call.
        mesh: the tensor-parallel axis, 1-D: ``mesh["tp"]`` of a larger mesh.
        weight: ``Shard(0)`` (column-parallel), ``Shard(1)`` (row-parallel) or ``Replicate()``. A
            bias is sharded with ``Shard(0)``, and replicated otherwise.
        input: placement of the input. An input that is sharded along the batch or the sequence,
            ``Shard(0)`` or ``Shard(1)``, is gathered as float8 if the GEMMs need all of it.
        output: placement of the output, which a row-parallel layer sums over the mesh.
            ``Partial()`` leaves the sum to the caller, for a layer without a bias.
        reduce_transport: as in the two styles. It applies to the output of a row-parallel layer and
            to grad_input of a column-parallel one. ``share_input`` takes it from the layers. The
            result then depends on the number of ranks.

    A gradient has the placement of its tensor. The gradient of a replicated tensor is the full
    gradient on every rank. So the gradients of a replicated input, weight or bias are summed over
    the mesh, and the gradient of a replicated output must be full on every rank. The gradient of a
    Partial output must be full on every rank too.

    Returns:
        ``layer``. A later call replaces the declaration.

    Collectives: in the forward and the backward, those of the two styles. In this call, one
    all-reduce of 16 bytes, which ``comm_audit`` does not count, to compare the layer and the
    arguments between ranks.

    Raises:
        TypeError: ``layer`` is not a Float8Linear, ``mesh`` is not a DeviceMesh, or a placement is
            not a Placement.
        ValueError: the mesh is not 1-D; a placement is not among those above; ``reduce_transport``
            is given and nothing is summed; the weight has been distributed over ``mesh``
            already; its shape does not fit; or ranks differ in the layer or the arguments.
    """
    if isinstance(mesh, DeviceMesh):
        # First of all, because only some ranks may fail the checks below.
        converted = {"": layer} if isinstance(layer, Float8Linear) else {}
        declared = f"{weight=}, {input=}, {output=}, {reduce_transport=}"
        agreement.check_placed(converted, mesh, "declare_placements", {"placements": declared})
    if not isinstance(layer, Float8Linear):
        raise TypeError(
            f"declare_placements needs a Float8Linear, got {kind_of(layer)}; convert it "
            "first (convert_to_float8_training)"
        )
    check_axis(mesh, f"{layer.fqn}: declare_placements")
    if weight == Shard(-1):
        weight = Shard(1)
    can_sum = output == Partial() and weight == Shard(1) and layer.bias is None
    writes = "a Shard, Replicate(), or, of a row-parallel layer without a bias, Partial()"
    has_weight = weight in (Shard(0), Shard(1), Replicate())
    for name, given, fits, allowed in (
        ("weight", weight, has_weight, "Shard(0), Shard(1) or Replicate()"),
        ("input", input, isinstance(input, Shard | Replicate), "a Shard or Replicate()"),
        ("output", output, isinstance(output, Shard | Replicate) or can_sum, writes),
    ):
        if not isinstance(given, Placement):
            raise TypeError(f"{layer.fqn}: {name}={given!r} is not a placement, such as Shard(0)")
        if not fits:
            raise ValueError(f"{layer.fqn}: {name}={given!r}, but it must be {allowed}")
    check_transport(reduce_transport, layer.fqn)
    if reduce_transport is not None and (weight == Replicate() or output == Partial()):
        raise ValueError(
            f"{layer.fqn}: reduce_transport={reduce_transport!r} applies to the sum of the output "
            "of a row-parallel layer (weight=Shard(1)), or of grad_input of a column-parallel one, "
            f"not to {weight=}, {input=}, {output=}"
        )
    # The sizes of the weight must be those of a rank's part, and are the same on all ranks.
    if layer.weight.ndim != 2:
        raise ValueError(
            f"{layer.fqn}: the weight has shape {tuple(layer.weight.shape)}, not [out_features, "
            "in_features] (flattened by FSDP1?); use fully_shard (FSDP2)"
        )
    layout = layout_over(layer.weight, mesh, weight, layer.fqn)
    for dim, name in enumerate(("out_features", "in_features")):
        features, whole = getattr(layer, name), layout.shape[dim]
        part = whole // mesh.size() if weight == Shard(dim) else whole
        if features not in (part, whole):
            raise ValueError(
                f"{layer.fqn}: {name}={features} fits neither the weight's local size, {part}, "
                f"nor the global one, {whole}, of a weight declared as {weight!r} on {mesh.size()} "
                "ranks. Pad the layer to equal parts, or use the parallel styles"
            )
    layer.local_placements = LocalPlacements(mesh, weight, input)
    layer.output_placements = (output,)
    layer.reduce_transport = reduce_transport
    attach_statistics([layer.float8_weight])
    return layer
