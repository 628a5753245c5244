"""The scheme of MXFP4 weights: values of four bits, with one exponent for each square of values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fp8_dist.kernels.blocks import pack_blocks
from fp8_dist.kernels.e2m1 import E2M1_X2, pack_e2m1, unpack_e2m1
from fp8_dist.scaling.blocks import Blocks
from fp8_dist.scaling.level import Start
from fp8_dist.scaling.scheme import Scales, Statistics


@dataclass(frozen=True, eq=False)
class Mxfp4(Blocks):
    """Values of E2M1, with one exponent per block (:mod:`fp8_dist.kernels.e2m1`).

    The data is e4m3, which can represent all of these values, so GEMMs are as in :class:`Blocks`.

    Attributes:
        rule: the rule of the exponents, "ceil", "even" or "floor".
    """

    family: ClassVar[str] = "mxfp4"
    packed_dtype: ClassVar[torch.dtype | None] = E2M1_X2

    rows: int = 32
    columns: int = 32
    rule: str | None = "floor"

    @property
    def covers(self) -> str:
        return f"block of {self.rows} x {self.columns} (MXFP4, {self.rule})"

    @property
    def largest(self) -> float:
        return 6.0

    @property
    def saturates_above(self) -> float:
        return 7.0

    def unfit_for(self, operand: str, contracts_rows: bool) -> str | None:
        if operand != "weight":
            return f"{operand} can't be cast to MXFP4, which is for weights; cast it to e4m3"
        if (self.dtype, self.rows) == (torch.float8_e4m3fn, self.columns) and not self.rows % 32:
            return None
        return (
            f"weight has format='mxfp4', target_dtype={self.dtype} and blocks of {self.rows} x "
            f"{self.columns}, but MXFP4 is multiplied as float8_e4m3fn (which AMD's gfx94x do not "
            "have), in squares of a multiple of 32; use block_size=(32, 32) or (128, 128)"
        )

    def pack(self, qdata: Tensor) -> Tensor:
        return pack_e2m1(qdata).view(E2M1_X2)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        unpack_e2m1(packed, out)

    def cast_packed(self, x: Tensor, statistics: Statistics, start: Start) -> tuple[Scales, Tensor]:
        packed = pack_blocks(self._taken(x), statistics[0], self._blocks(start))
        return statistics, packed.view(E2M1_X2)
