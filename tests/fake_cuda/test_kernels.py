"""Kernels and bytes of a layer's step, of blocks under FSDP2, and of updates."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
from fake_cuda.blocks import count_blocks, count_compiled_block, count_update
from fake_cuda.counter import Counts
from fake_cuda.layer import (
    LayerShape,
    count_compiled_layer,
    count_frozen_layer,
    count_layer,
    count_packed_weight,
)
from fake_cuda.process import FakeCudaProcess
from torch_releases import RELEASE

from fp8_dist.kernels import blocks, folding, gemm, quantization, scale
from fp8_dist.kernels.cuda import triton
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.kernels.custom_op import CustomOp
from scripts.common.recipes import BF16, OURS

SHAPE = LayerShape()

# Inductor fuses, and the counts are those of CI's release. (2.11 moves up to 7 % more bytes.)
OF_INDUCTOR = pytest.mark.skipif(RELEASE < (2, 13), reason="Inductor's kernels of torch 2.13")


def check(counts: Counts, kernels: int, gigabytes: float) -> None:
    """Check for three GEMMs, no transposing copies, and these kernels and bytes besides GEMMs.

    (Copies of exponents into tiles, a few MB, count as transposing ones.)
    """
    large = [k for k in counts.by_kind("transposing copy") if k.bytes > 2**24]
    assert (len(counts.by_kind("gemm")), large) == (3, [])
    assert counts.launches == kernels
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(gigabytes, abs=0.0051)
    assert counts.syncs == counts.problems == []


# Of a step with a new weight: kernels and GB.
EAGER = {
    BF16: (3, 0.00),
    "tensorwise": (12, 1.26),
    "rowwise": (12, 1.26),
    "rowwise_with_gw_hp": (10, 0.92),
    "rowwise_folded": (12, 1.49),
    "blockwise": (14, 1.01),
    "mxfp8": (17, 2.28),
    "delayed": (12, 0.84),
}
# Blackwell only multiplies blocks of 32, and Hopper (in EAGER) only blocks of 128.
BLACKWELL = {"blockwise": (17, 2.26), "mxfp8": (17, 1.04)}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_any_number_of_tokens_costs_the_same(compiled: bool, fake_cuda: FakeCudaProcess) -> None:
    """Packed sequences have any number of tokens. The casts write the zeros that GEMMs read."""
    count = count_compiled_layer if compiled else count_layer
    for name in ("tensorwise", "mxfp8") if compiled else OURS:
        even, odd = (fake_cuda.run(count, name, SHAPE._replace(rows=rows)) for rows in (8192, 8191))
        # In graphs Inductor casts a multiple of 16 rows, and the library any other number.
        assert odd.launches == even.launches
        assert compiled or [k.name for k in odd.kernels] == [k.name for k in even.kernels]
        assert odd.bytes_besides_gemms == pytest.approx(even.bytes_besides_gemms, rel=1e-3)
        assert odd.problems == odd.syncs == []


def test_a_step_of_one_layer(fake_cuda: FakeCudaProcess) -> None:
    assert EAGER.keys() == {BF16, *OURS}
    for device, table in (((9, 0), EAGER), ((10, 0), BLACKWELL)):
        for name, expected in table.items():
            check(fake_cuda.run(count_layer, name, SHAPE, device), *expected)


@pytest.mark.parametrize(("name", "device"), [("blockwise", (9, 0)), ("mxfp8", (10, 0))])
def test_a_step_with_a_weight_in_mxfp4(
    name: str, device: tuple[int, int], fake_cuda: FakeCudaProcess
) -> None:
    expected = (EAGER if device == (9, 0) else BLACKWELL)[name]
    counts = fake_cuda.run(count_layer, f"{name}+mxfp4", SHAPE, device)
    check(counts, *expected)


def test_a_packed_weight(fake_cuda: FakeCudaProcess) -> None:
    """The cast packs in the same pass: 2.5 bytes of each value are moved, and then 1.5."""
    counts, values = fake_cuda.run(count_packed_weight, SHAPE), 14336 * 4096
    assert [(k.name, k.launches, k.bytes) for k in counts.kernels] == [
        ("_cast_blocks", 1, values * 5 // 2 + values // 1024),  # and exponents
        ("_unpack_e2m1", 1, values * 3 // 2),
    ]
    assert counts.syncs == []


# Kernels and GB besides the two GEMMs of a step with a frozen weight, in high precision and stored
# in float8. Stored weights are only transposed for grad_input, like weights that FSDP2 gathers.
FROZEN = {
    "tensorwise": ((11, 1.11), (9, 0.87)),
    "rowwise_folded": ((8, 1.04), (8, 0.81)),
    "blockwise": ((9, 0.69), (9, 0.58)),
    "mxfp8": ((11, 0.71), (11, 0.60)),
    "delayed": ((14, 0.81), (11, 0.57)),
}


def test_a_step_of_one_frozen_layer(fake_cuda: FakeCudaProcess) -> None:
    found = {}
    for name in FROZEN:
        device = (10, 0) if name == "mxfp8" else (9, 0)
        each = [fake_cuda.run(count_frozen_layer, name, SHAPE, st, device) for st in (False, True)]
        assert [len(counts.by_kind("gemm")) for counts in each] == [2, 2]
        assert all(counts.syncs == counts.problems == [] for counts in each)
        found[name] = tuple(
            (counts.launches, round(counts.bytes_besides_gemms / 1e9, 2)) for counts in each
        )
    assert found == FROZEN


@OF_INDUCTOR
@pytest.mark.parametrize(
    ("name", "kernels", "gigabytes"),
    [
        ("tensorwise", 12, 1.26),
        ("rowwise_folded", 12, 1.49),
        ("mxfp8", 17, 2.28),
        ("delayed", 16, 0.84),
    ],
)
def test_a_compiled_step_of_one_layer(
    name: str, kernels: int, gigabytes: float, fake_cuda: FakeCudaProcess
) -> None:
    check(fake_cuda.run(count_compiled_layer, name, SHAPE), kernels, gigabytes)


@OF_INDUCTOR
def test_a_compiled_block(fake_cuda: FakeCudaProcess) -> None:
    """Of Llama 8B: kernels that write operands find their amaxes, and cast them."""
    counts = fake_cuda.run(count_compiled_block, "tensorwise", 8192)
    assert counts.launches == 87
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(8.24, abs=0.0051)
    assert counts.syncs == counts.problems == []


@pytest.mark.parametrize(("name", "kernels"), [("tensorwise", 247), ("rowwise_folded", 261)])
def test_blocks_under_fsdp(name: str, kernels: int, fake_cuda: FakeCudaProcess) -> None:
    counts = fake_cuda.run(count_blocks, name, 2, 8192)
    assert counts.launches == kernels
    assert counts.syncs == counts.problems == []


def test_blocks_whose_weights_are_gathered_packed(fake_cuda: FakeCudaProcess) -> None:
    """Each of 14 weights is unpacked after each of two gathers; and no other kernel is launched."""
    counts = fake_cuda.run(count_blocks, "mxfp8+mxfp4", 2, 8192)
    assert [kernel.name for kernel in counts.kernels].count("_unpack_e2m1") == 28
    assert counts.launches == 317 + 28  # those of mxfp8, and these
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(42.66, abs=0.0051)
    assert counts.syncs == counts.problems == []


@pytest.mark.parametrize(
    ("blocks", "kernels"),
    [
        (2, (5, 3, 3, 3, 3, 18)),
        (3, (5, 3, 3, 3, 3, 18)),
    ],
)
def test_updates_of_many_weights(
    blocks: int, kernels: tuple[int, ...], fake_cuda: FakeCudaProcess
) -> None:
    """As many kernels for 14 weights as for 21."""
    names = ("tensorwise", "rowwise_folded", "blockwise", "mxfp8", "mxfp8+mxfp4", "delayed")
    for name, launches in zip(names, kernels, strict=True):
        counts = fake_cuda.run(count_update, name, blocks)
        assert (name, counts.launches) == (name, launches)
        assert counts.syncs == []


def count_portable_layer(name: str) -> Counts:
    """A step with a new weight where there is no Triton."""
    with ExitStack() as stack:
        for room in (scale, quantization, blocks, folding, gemm):
            for op in vars(room).values():
                if isinstance(op, CustomOp) and is_fused(op):
                    stack.enter_context(patch.dict(op.implementations, clear=True))
        stack.enter_context(patch.object(launch.Kernel, "__call__", None))  # none is launched
        return count_layer(name, SHAPE)


def is_fused(op: CustomOp[..., object]) -> bool:
    run = op.implementations.get("cuda")
    return run is not None and run.__module__.startswith(triton.__name__)


# A step with a new weight: kernels and GB.
PORTABLE = {
    "tensorwise": (48, 4.82),
    "rowwise": (102, 10.91),
    "rowwise_with_gw_hp": (70, 6.60),
    "rowwise_folded": (88, 17.53),
    "blockwise": (119, 14.66),
    "mxfp8": (127, 18.49),
    "delayed": (54, 6.50),
}


@pytest.mark.parametrize("name", OURS)
def test_portable_code_does_not_wait_for_the_device(name: str, fake_cuda: FakeCudaProcess) -> None:
    counts = fake_cuda.run(count_portable_layer, name)
    assert counts.syncs == counts.problems == []
    kernels, gigabytes = PORTABLE[name]
    assert counts.launches == kernels
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(gigabytes, abs=0.0051)
