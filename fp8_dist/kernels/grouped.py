"""GEMMs of groups of rows: ``[R, ...]``, with rows sorted by group.

``torch._scaled_grouped_mm`` multiplies all groups in one kernel. It takes e4m3 data with one fp32
scale per row or column, and writes bf16. A sum over rows requires that the dim of rows is
contiguous in memory, and that groups begin at multiples of 16 bytes. So both operands are
transposed, and groups are padded in the same pass.

Some devices have such a kernel for bf16 alone (:mod:`fp8_dist.gemm_table`). They multiply the
values of the same float8 data. Scales are powers of two, so these values are exact in bf16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_dist.device import e4m3
from fp8_dist.gemm_table import has_gemm
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.gemm import row_major
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import native_scaled_grouped_mm

_grouped_mm = partial(native_scaled_grouped_mm, out_dtype=torch.bfloat16)


class Padded(NamedTuple):
    """Groups, each padded to a multiple of some number of rows.

    Attributes:
        source: the row at each place, int64 ``[P]``; -1 for padding.
        ends: the end of each group's places, int32 ``[E]``.
    """

    source: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Groups:
    """The rows of each group, among rows that are sorted by group.

    Attributes:
        on_host: the number of rows of each group, int64 ``[E]``, on the host.
        sizes: the same, on the device.
        group_of_row: the group of each row, int64 ``[R]``.
        ends: the end of each group's rows, int32 ``[E]``.
    """

    on_host: Tensor
    sizes: Tensor
    group_of_row: Tensor
    ends: Tensor
    _padded: dict[int, Padded] = field(default_factory=dict)

    @staticmethod
    def of(sizes: Tensor, on_host: Tensor, rows: int) -> "Groups":
        """The groups of given sizes, whose sum is ``rows``."""
        group_of_row, _, ends = places_of_groups(sizes, rows, 1)
        return Groups(on_host, sizes, group_of_row, ends)

    @cached_property
    def counts(self) -> list[int]:
        """The sizes as Python numbers. Only operators read them, since graphs do not know them."""
        return self.on_host.tolist()

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(group, begin, count)`` for each group that has rows."""
        begins = accumulate(self.counts, initial=0)
        for group, (begin, count) in enumerate(zip(begins, self.counts, strict=False)):
            if count:
                yield group, begin, count

    def padded(self, multiple: int) -> Padded:
        """Pad each group to a multiple of ``multiple`` rows, without a wait of the host."""
        if multiple not in self._padded:
            count = sum([size + -size % multiple for size in self.counts])
            _, *padded = places_of_groups(self.sizes, count, multiple)
            self._padded[multiple] = Padded(*padded)
        return self._padded[multiple]


def empty_places(sizes: Tensor, count: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of :func:`places_of_groups`, uninitialized."""
    group = sizes.new_empty(count)
    return group, torch.empty_like(group), torch.empty_like(sizes, dtype=torch.int32)


@custom_op(
    "places_of_groups(Tensor sizes, SymInt count, int multiple) -> (Tensor, Tensor, Tensor)",
    fake=empty_places,
)
def places_of_groups(sizes: Tensor, count: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out groups of rows, each padded to a multiple of some number of places.

    Args:
        sizes: the number of rows of each group, int64 ``[E]``.
        count: the number of places.

    Returns:
        The group of each place, and its row or -1, int64 ``[count]``; the end of each group's
        places, int32 ``[E]``.
    """
    more = sizes.neg() % multiple
    taken = sizes + more
    groups = torch.arange(len(sizes), device=sizes.device)
    group = torch.repeat_interleave(groups, taken, output_size=count)
    row = torch.arange(count, device=sizes.device) - (more.cumsum(0) - more)[group]
    row.masked_fill_(row >= sizes.cumsum(0)[group], -1)
    return group, row, taken.cumsum(0, dtype=torch.int32)


@custom_op()
def rows_of_groups(x: Tensor, source: Tensor, transposed: bool) -> Tensor:
    """Copy rows of 1-byte elements ``[R, K]`` to ``[P, K]``, or to the columns of ``[K, P]``.

    ``source``: the row at each place, int64 ``[P]``; a place of -1 becomes 0.
    """
    rows = x.view(torch.uint8).index_select(0, source.clamp(min=0))
    rows.masked_fill_((source < 0).unsqueeze(1), 0)
    return (rows.t().contiguous() if transposed else rows).view(x.dtype)


def grouped_gemm(
    x: Tensor, sizes: Sequence[int], out_dtype: torch.dtype, emulate: bool, has_blocks: bool
) -> Literal["float8", "bf16"] | None:
    """Return the dtype in which a device multiplies groups of float8 data in one kernel.

    Args:
        x: an operand.
        sizes: the dims of the GEMM of a group, other than its number of rows.
        has_blocks: whether scales are those of blocks, which no kernel in float8 takes.

    Returns:
        ``None`` if groups must be multiplied one after the other, because the device has no such
        kernel, or because it does not take these operands.
    """
    fits = (
        not emulate
        and x.dtype == e4m3()
        and out_dtype is torch.bfloat16
        and not any(size % ALIGNMENT for size in sizes)
        and len(x) > 0
    )
    if not (fits and x.is_cuda):
        return None
    if has_gemm("groups", x.device) and not has_blocks:
        return "float8"
    if has_gemm("groups in bf16", x.device):
        _warn_of_bf16(has_blocks)
        return "bf16"
    warn_once(
        "no grouped GEMM",
        "this device has no grouped GEMM in this release of torch (python -m fp8_dist.doctor lists "
        "them), so experts are multiplied one after the other, which takes the host longer",
    )
    return None


def _warn_of_bf16(has_blocks: bool) -> None:
    reason = "this device has no grouped GEMM in float8 in this release of torch"
    if has_blocks:
        reason = "scales of blocks have no grouped GEMM in float8"
    warn_once(
        f"grouped GEMM in bf16, {has_blocks}",
        f"{reason} (python -m fp8_dist.doctor lists them), so experts are multiplied in bf16: "
        "slower than without float8, and each product makes a bf16 copy of its weights; what is "
        "sent and kept stays in float8",
    )


def grouped_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: Groups
) -> Tensor:
    """Multiply the rows of each group by its matrix; requires a :func:`grouped_gemm` in float8.

    Args:
        a: float8 ``[R, K]``.
        b: float8 ``[E, K, N]``. Unless its columns are contiguous, it is copied.
        scale_a: fp32 ``[R, 1]``.
        scale_b: fp32, expandable to ``[E, 1, N]``.

    Returns:
        bf16 ``[R, N]``.
    """
    experts, _, columns = b.shape
    column_scales = scale_b.expand(experts, 1, columns).reshape(experts, columns).contiguous()
    return _grouped_mm(a, row_major(b.mT).mT, scale_a.reshape(-1), column_scales, groups.ends)


def grouped_scaled_sums(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    groups: Groups,
    dtype: Literal["float8", "bf16"],
) -> Tensor:
    """Sum ``a[r] b[r]^T`` over the rows of each group.

    Args:
        a, b: float8 ``[N, P]`` and ``[K, P]``, :func:`rows_of_groups` of groups padded to 16.
        scale_a, scale_b: fp32, expandable to ``[E, 1, N]`` and ``[E, 1, K]``.
        dtype: what :func:`grouped_gemm` returns.

    Returns:
        bf16 ``[E, N, K]``.
    """
    experts, ends = len(groups.counts), groups.padded(ALIGNMENT).ends
    if dtype == "bf16":
        # All summands of an element have the same scales.
        sums = F.grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16).t(), offs=ends)
        sums.mul_(scale_a.mT.to(torch.bfloat16)).mul_(scale_b.to(torch.bfloat16))
    else:
        operands = ((scale_a, a), (scale_b, b))
        scales = [scale.expand(experts, 1, len(x)).reshape(-1) for scale, x in operands]
        sums = _grouped_mm(a, b.t(), *scales, ends)
    return without_empty(sums, groups)


def without_empty(sums: Tensor, groups: Groups) -> Tensor:
    """Set the sums ``[E, N, K]`` of groups without rows to 0, in place."""
    for group, count in enumerate(groups.counts):
        if not count:
            sums[group].zero_()
    return sums
