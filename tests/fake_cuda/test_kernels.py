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
tensorwise                    48 kernels 3 GEMMs 3 transposing copies   4.82 GB
tensorwise, weight cached     34 kernels 3 GEMMs 3 transposing copies   3.59 GB
rowwise                      102 kernels 3 GEMMs 3 transposing copies  10.91 GB
rowwise, weight cached        70 kernels 3 GEMMs 3 transposing copies   7.97 GB
rowwise_with_gw_hp            70 kernels 3 GEMMs 1 transposing copies   6.60 GB
rowwise_with_gw_hp, weight cached  37 kernels 3 GEMMs 1 transposing copies   3.89 GB
rowwise_folded                92 kernels 3 GEMMs 3 transposing copies  17.53 GB
rowwise_folded, weight cached  76 kernels 3 GEMMs 3 transposing copies  16.06 GB
delayed                       45 kernels 3 GEMMs 3 transposing copies   6.50 GB
delayed, weight cached        32 kernels 3 GEMMs 3 transposing copies   4.80 GB""",
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
tensorwise                    51 kernels 3 GEMMs 3 transposing copies   5.29 GB
rowwise                      108 kernels 3 GEMMs 3 transposing copies  11.85 GB
rowwise_with_gw_hp            76 kernels 3 GEMMs 1 transposing copies   7.54 GB
rowwise_folded                87 kernels 3 GEMMs 3 transposing copies  14.71 GB
delayed                       52 kernels 3 GEMMs 3 transposing copies   6.50 GB
torchao tensorwise            13 kernels 3 GEMMs 0 transposing copies   1.38 GB
torchao rowwise               15 kernels 3 GEMMs 0 transposing copies   1.75 GB
torchao rowwise_with_gw_hp    11 kernels 3 GEMMs 0 transposing copies   1.06 GB""",
    )


def test_blocks_under_fsdp(fake_cuda: FakeCudaProcess) -> None:
    rows = []
    for name in (BF16, "tensorwise", "delayed"):
        counts = fake_cuda.run(count_blocks, name, 2, 8192)
        rows.append(f"{name:28} {counts.launches:4} kernels")
        assert counts.syncs == counts.problems == []
    for name in ("tensorwise", "delayed"):
        counts = fake_cuda.run(count_update, name, 2)
        rows.append(f"{name + ', update of 14 weights':28} {counts.launches:4} kernels")
        assert counts.syncs == []
    assert_expected_inline(
        "\n".join(rows),
        """\
bf16                          149 kernels
tensorwise                    537 kernels
delayed                       705 kernels
tensorwise, update of 14 weights   64 kernels
delayed, update of 14 weights   38 kernels""",
    )
