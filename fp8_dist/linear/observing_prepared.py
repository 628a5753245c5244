"""Observation of inputs that ``PrepareFloat8ModuleInput`` casts for several layers.

A cast and its uses are in different places, perhaps with a gather in between, and a module may have
several such inputs. So each cast has a number, which the Float8Tensor carries to the layers.
"""

import itertools

import torch

from fp8_dist.linear.observing import Owner, who_has_not_seen
from fp8_dist.linear.observing_gemms import keep_prepared
from fp8_dist.linear.scale_query import owner_of, query
from fp8_dist.mesh import local_tensor, with_local
from fp8_dist.scaling import Quantized, Start, scheme_named
from fp8_dist.tensor import Float8Tensor
from fp8_dist.torch_internals import STAND_INS, without_dispatch_modes

_cast_numbers = itertools.count()


def observe_prepared_cast(owner: Owner, input: torch.Tensor, low: Quantized) -> torch.Tensor:
    """Show observers the cast of an input for several layers.

    Args:
        owner: the ``float8_weight`` of the layer whose config the cast follows.
        input: ``[..., K]``, a tensor or DTensor in high precision.
        low: its local part in float8.

    Returns:
        The Float8Tensor of ``low``, or a DTensor of it, with the number of this cast.
    """
    high = local_tensor(input).detach()
    if torch.compiler.is_compiling():
        qdata, (first, *others), scheme, start, _ = low
        first, number = observe_preparation.overload(
            first, owner.handle, high, qdata, others, scheme.key, start
        )
        low = low._replace(scales=(first, *others))
    else:
        number = _show_preparation(owner, high, low)
        keep_prepared(number, input)
    prepared = Float8Tensor.of(low, input.dtype).rewrap(cast_number=number)
    return with_local(input, prepared)


def observe_prepared_use(owner: Owner, prepared: Float8Tensor) -> Float8Tensor:
    """Tell observers that a layer takes a prepared input, and return the input to use."""
    number = prepared.cast_number
    if number is None:  # its cast was not observed
        return prepared
    if torch.compiler.is_compiling():
        scale = observe_use.overload(prepared.scale, owner.handle, number)
        return prepared.rewrap(scale=(scale, *prepared.scales[1:]))
    _show_use(owner, number)
    return prepared


def _show_preparation(owner: Owner, high: torch.Tensor, low: Quantized) -> torch.Tensor:
    """Show the cast of a prepared input, and return its number as a new tensor."""
    value = next(_cast_numbers)
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        number = torch.tensor(value, device="cpu")
        if not isinstance(high, STAND_INS):
            for observer in who_has_not_seen((owner, "prepared input"), True):
                observer.on_prepared_cast(owner, value, high, low)
    return number


def _show_use(owner: Owner, number: torch.Tensor) -> None:
    if isinstance(number, STAND_INS):
        return
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        for observer in who_has_not_seen((owner, "use"), True):
            observer.on_prepared_use(owner, int(number.item()))


@query(
    "observe_preparation(Tensor scale, Tensor handle, Tensor high, Tensor qdata, Tensor[] others, "
    "str scheme, int[] start) -> (Tensor, Tensor)"
)
def observe_preparation(
    scale: torch.Tensor,
    handle: torch.Tensor,
    high: torch.Tensor,
    qdata: torch.Tensor,
    others: list[torch.Tensor],
    scheme: str,
    start: Start,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`observe_prepared_cast` in a compiled graph.

    ``scale`` is that of the first level, ``others`` are those of others. Returns the scale to use,
    and the number of the cast.
    """
    scales = (scale, *others)
    low = Quantized(qdata, scales, scheme_named(scheme), (start[0], start[1]))
    return scale.clone(), _show_preparation(owner_of(handle), high, low)


@query("observe_use(Tensor scale, Tensor handle, Tensor number) -> Tensor")
def observe_use(scale: torch.Tensor, handle: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """:func:`observe_prepared_use` in a compiled graph."""
    _show_use(owner_of(handle), number)
    return scale.clone()


observe_preparation.register_fake(
    lambda scale, *_: (torch.empty_like(scale), torch.empty((), dtype=torch.int64, device="cpu"))
)
observe_use.register_fake(lambda scale, *_: torch.empty_like(scale))
