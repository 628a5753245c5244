"""Kernels and bytes of one layer's step in eager code."""

from expecttest import assert_expected_inline

from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.fake_cuda.blocks import count_blocks, count_update
from scripts.common.fake_cuda.counter import Counts
from scripts.common.fake_cuda.layer import LayerShape, count_compiled_layer, count_layer
from scripts.common.fake_cuda.process import FakeCudaProcess

SHAPE = LayerShape()


def _row(name: str, counts: Counts) -> str:
    gemms, copies = counts.of_kind("gemm"), counts.of_kind("transposing copy")
    return (
        f"{name:28} {counts.launches:3} kernels {len(gemms)} GEMMs {len(copies)} transposing copies "
        f"{counts.bytes_besides_gemms / 1e9:6.2f} GB"
    )


def test_a_step_of_one_layer(fake_cuda: FakeCudaProcess) -> None:
    rows = []
    for name in (BF16, *OURS):
        for changed in (True, False):
            counts = fake_cuda.run(count_layer, name, SHAPE, changed)
            rows.append(_row(name + ("" if changed else ", weight cached"), counts))
            assert counts.syncs == counts.problems == []
    assert_expected_inline(
        "\n".join(rows),
        """\
bf16                           3 kernels 3 GEMMs 0 transposing copies   0.00 GB
bf16, weight cached            3 kernels 3 GEMMs 0 transposing copies   0.00 GB
tensorwise                     9 kernels 3 GEMMs 0 transposing copies   1.26 GB
tensorwise, weight cached      7 kernels 3 GEMMs 0 transposing copies   0.91 GB
rowwise                       12 kernels 3 GEMMs 0 transposing copies   1.26 GB
rowwise, weight cached         9 kernels 3 GEMMs 0 transposing copies   0.91 GB
rowwise_with_gw_hp            10 kernels 3 GEMMs 0 transposing copies   0.92 GB
rowwise_with_gw_hp, weight cached   6 kernels 3 GEMMs 0 transposing copies   0.45 GB
rowwise_folded                 9 kernels 3 GEMMs 0 transposing copies   1.07 GB
rowwise_folded, weight cached   8 kernels 3 GEMMs 0 transposing copies   0.84 GB
blockwise                     11 kernels 3 GEMMs 0 transposing copies   1.01 GB
blockwise, weight cached      10 kernels 3 GEMMs 0 transposing copies   0.77 GB
mxfp8                         14 kernels 3 GEMMs 0 transposing copies   2.27 GB
mxfp8, weight cached          13 kernels 3 GEMMs 0 transposing copies   2.04 GB
delayed                        9 kernels 3 GEMMs 0 transposing copies   0.84 GB
delayed, weight cached         7 kernels 3 GEMMs 0 transposing copies   0.60 GB""",
    )


def test_a_step_of_blocks_on_blackwell(fake_cuda: FakeCudaProcess) -> None:
    """It multiplies blocks of 32 alone; Hopper, as above, those of 128."""
    rows = []
    for name in ("blockwise", "mxfp8"):
        for changed in (True, False):
            counts = fake_cuda.run(count_layer, name, SHAPE, changed, "blackwell")
            rows.append(_row(name + ("" if changed else ", weight cached"), counts))
            assert counts.syncs == counts.problems == []
    assert_expected_inline(
        "\n".join(rows),
        """\
blockwise                     14 kernels 3 GEMMs 0 transposing copies   2.25 GB
blockwise, weight cached      13 kernels 3 GEMMs 0 transposing copies   2.02 GB
mxfp8                         11 kernels 3 GEMMs 0 transposing copies   1.03 GB
mxfp8, weight cached          10 kernels 3 GEMMs 0 transposing copies   0.79 GB""",
    )


def test_a_compiled_step_of_one_layer(fake_cuda: FakeCudaProcess) -> None:
    rows = []
    for name in (BF16, *OURS, *TORCHAO):
        counts = fake_cuda.run(count_compiled_layer, name, SHAPE)
        rows.append(_row(name, counts))
        assert counts.syncs == counts.problems == []
    assert_expected_inline(
        "\n".join(rows),
        """\
bf16                           3 kernels 3 GEMMs 0 transposing copies   0.00 GB
tensorwise                     9 kernels 3 GEMMs 0 transposing copies   1.26 GB
rowwise                       12 kernels 3 GEMMs 0 transposing copies   1.26 GB
rowwise_with_gw_hp            10 kernels 3 GEMMs 0 transposing copies   0.92 GB
rowwise_folded                 9 kernels 3 GEMMs 0 transposing copies   1.07 GB
blockwise                     12 kernels 3 GEMMs 0 transposing copies   1.01 GB
mxfp8                         15 kernels 3 GEMMs 0 transposing copies   2.27 GB
delayed                        9 kernels 3 GEMMs 0 transposing copies   0.84 GB
torchao tensorwise            13 kernels 3 GEMMs 0 transposing copies   1.38 GB
torchao rowwise               15 kernels 3 GEMMs 0 transposing copies   1.75 GB
torchao rowwise_with_gw_hp    11 kernels 3 GEMMs 0 transposing copies   1.06 GB""",
    )


def test_blocks_under_fsdp(fake_cuda: FakeCudaProcess) -> None:
    rows, launches = [], {}
    for name in (BF16, "tensorwise", "rowwise_folded", "blockwise", "mxfp8", "delayed"):
        counts = fake_cuda.run(count_blocks, name, 2, 8192)
        launches[name] = counts.launches
        rows.append(f"{name:28} {counts.launches:4} kernels")
        assert counts.syncs == counts.problems == []
    assert launches["tensorwise"] <= 1.3 * launches[BF16]
    assert_expected_inline(
        "\n".join(rows),
        """\
bf16                          153 kernels
tensorwise                    196 kernels
rowwise_folded                216 kernels
blockwise                     244 kernels
mxfp8                         284 kernels
delayed                       249 kernels""",
    )


def test_updates_of_many_weights(fake_cuda: FakeCudaProcess) -> None:
    rows = []
    for name in ("tensorwise", "rowwise_folded", "blockwise", "mxfp8", "delayed"):
        for blocks in (2, 32):
            counts, weights = fake_cuda.run(count_update, name, blocks), 7 * blocks
            rows.append(f"{name:15} {weights:3} weights {counts.launches:2} kernels")
            assert counts.syncs == []
        assert counts.launches <= weights / 10
    assert_expected_inline(
        "\n".join(rows),
        """\
tensorwise       14 weights  4 kernels
tensorwise      224 weights  4 kernels
rowwise_folded   14 weights  3 kernels
rowwise_folded  224 weights  3 kernels
blockwise        14 weights  2 kernels
blockwise       224 weights  2 kernels
mxfp8            14 weights  2 kernels
mxfp8           224 weights  2 kernels
delayed          14 weights 11 kernels
delayed         224 weights 21 kernels""",
    )
