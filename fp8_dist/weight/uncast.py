"""Weights that the backward casts."""

from typing import NamedTuple

import torch

from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.operand.observers import Owner, Use, is_observed
from fp8_dist.operand.prepare import cast_local
from fp8_dist.scaling import CastPlan, Quantized, Scheme, Statistics, transposed
from fp8_dist.scaling.operators import dequantize
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored import StoredFloat8


class Uncast(NamedTuple):
    """The weight of grad_input's GEMM, which the backward casts with statistics of the forward.

    It is FSDP2's unsharded high-precision parameter, which FSDP2 frees between forward and
    backward: a float8 copy would outlive it. Or it is stored in packed form, and the backward
    unpacks it, or dequantizes it and casts it again.

    Attributes:
        parameter: the parameter, unsharded.
        statistics: its global statistics. Those of a stored weight are, or follow, its scales.
        scheme: the scheme of the cast.
        layout: its layout.
        owner: the owner of the cast, for observers; None if they are not notified.
        measures: see :func:`fp8_dist.operand.prepare.cast_local`.
        transposed_to: the scheme of the transposed view that the GEMM takes; None: the GEMM takes
            the cast itself.
        stored_as: the scheme of a stored weight whose values are cast; None: its data is taken.
    """

    parameter: torch.Tensor
    statistics: Statistics
    scheme: Scheme
    layout: Layout | None
    owner: Owner | None = None
    measures: bool = False
    transposed_to: Scheme | None = None
    stored_as: Scheme | None = None

    def cast(self, depends_on: torch.Tensor | None = None) -> Quantized:
        """Cast the parameter, which FSDP2 has gathered again, or unpack it.

        Args:
            depends_on: the gradient. Without it, a graph would cast in the forward and keep the
                float8 copy.
        """
        local, scheme = KnownWeight.unwrap(local_tensor(self.parameter)), self.scheme
        statistics = self.statistics
        if isinstance(local, StoredFloat8):
            held = self.stored_as or scheme
            position = held.start(self.layout), held.splits_blocks(self.layout)
            data = local.unpacked(held, depends_on)
            quantized = Quantized(data, statistics[:1], held, *position)
            if self.stored_as is None:
                return self._transposed(quantized)
            local, statistics = dequantize(quantized, local.dtype), statistics[1:]
        use = None
        if self.owner is not None and is_observed():
            use = Use((self.owner,), "weight", self.owner.forward_layout(self.parameter))
        (quantized,), _ = cast_local(
            local,
            CastPlan((scheme,)).on(self.layout),
            [statistics],
            use,
            measures=self.measures,
            depends_on=depends_on,
        )
        return self._transposed(quantized)

    def _transposed(self, quantized: Quantized) -> Quantized:
        to = self.transposed_to
        return quantized if to is None else transposed(quantized, to)
