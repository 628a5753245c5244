"""The page of kernel counts. (What is counted is tested in tests/fake_cuda.)"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from scripts.bench import gpu_counts
from scripts.common.blocks import read_block
from scripts.common.fake_cuda.counter import Counts, Kernel
from scripts.common.fake_cuda.dispatch import Dispatched
from scripts.common.fake_cuda.process import FakeCudaProcess
from scripts.common.fake_cuda.roofline import Rates, milliseconds

GEMM = Kernel("_scaled_mm", "gemm", 1, 10**9, 10**9, 12 * 10**11, "float8")
FEW = Counts([GEMM, Kernel("add", "tiny", 4, 100, 100)])
MANY = Counts(
    [
        GEMM._replace(precision="bf16", flops=79 * 10**10),
        Kernel("mul", "elementwise", 1, 3 * 10**9, 10**9),
        Kernel("amax", "reduction", 1, 35 * 10**8, 4),
        Kernel("clone", "transposing copy", 1, 10**8, 35 * 10**6 * 2),
    ],
    Counter(all_reduce=2),
)


def _answer(self: Any, function: Any, *args: Any) -> Any:
    if function is gpu_counts.seconds_to_dispatch:
        assert args[2] == 3
        return {"bf16": Dispatched(40e-6, 130e-6), "alone": Dispatched(90e-6, None)}
    return FEW if args[0] == "bf16" or function is gpu_counts.count_update else MANY


def test_times() -> None:
    assert milliseconds(FEW, Rates()) == pytest.approx({"gemm": 1.0, "tiny": 0.01})
    faster = Rates(float8=2400.0, launch=5.0)
    assert milliseconds(FEW, faster) == pytest.approx({"gemm": 0.5, "tiny": 0.02})
    assert milliseconds(MANY, Rates()) == pytest.approx(
        {"gemm": 1.0, "elementwise": 1.0, "reduction": 1.0, "transposing copy": 17 / 27}
    )


def test_the_page(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudaProcess, "run", _answer)
    monkeypatch.setattr(gpu_counts, "OURS", ("tensorwise",))
    monkeypatch.setattr(gpu_counts, "TORCHAO", ())
    assert gpu_counts.main(["--write", "--transpose", "0.17", "--turns", "3"]) == 0
    page = documents / "gpu.md"
    names = ("gpu layer", "gpu roofline", "gpu blocks", "gpu dispatch")
    texts = [read_block(page, name).partition("\n\n")[2] for name in names]
    assert_expected_inline(
        "\n\n".join(texts),
        """\
| layer      | kernels | weight cached | compiled | GB besides GEMMs | weight cached | compiled | transposing copies | compiled |
| ---------- | ------: | ------------: | -------: | ---------------: | ------------: | -------: | -----------------: | -------: |
| bf16       |       5 |               |        5 |             0.00 |               |     0.00 |                  0 |        0 |
| tensorwise |       4 |             4 |        4 |             7.67 |          7.67 |     7.67 |                  1 |        1 |

Assumed: 790 TFLOP/s in bf16, 1400 in float8 with fast accumulation and 1200 without; 4 TB/s of elementwise kernels, 3.5 of reductions, 0.17 of copies that transpose 1-byte elements; at least 2.5 us for each kernel.

| layer, ms  | GEMMs | elementwise | reductions | transposing copies | tiny | eager | x bf16's speed | compiled | x bf16's speed |
| ---------- | ----: | ----------: | ---------: | -----------------: | ---: | ----: | -------------: | -------: | -------------: |
| bf16       |  1.00 |        0.00 |       0.00 |               0.00 | 0.01 |  1.01 |           1.00 |     1.01 |           1.00 |
| tensorwise |  1.00 |        1.00 |       1.00 |               1.00 | 0.00 |  4.00 |           0.25 |     4.00 |           0.25 |

| blocks     | kernels | x bf16 | GB besides GEMMs | collectives | update: kernels |   GB | collectives |
| ---------- | ------: | -----: | ---------------: | ----------: | --------------: | ---: | ----------: |
| bf16       |       5 |   1.00 |             0.00 |           0 |               5 | 0.00 |           0 |
| tensorwise |       4 |   0.80 |             7.67 |           2 |               5 | 0.00 |           0 |

| layer, us of CPU time | eager | x bf16 | compiled alone | x eager bf16 |
| --------------------- | ----: | -----: | -------------: | -----------: |
| bf16                  |    40 |    1.0 |            130 |          3.2 |
| alone                 |    90 |    2.2 |                |              |""",
    )
