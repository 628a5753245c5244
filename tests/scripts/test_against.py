"""Comparing a benchmark of two commits."""

from scripts.bench.against import readings

PRINTED = """\
`python -m scripts.bench.linear` on a CPU

linear 16 x 16 x 16

| candidate  |    ms | x bf16 |
| ---------- | ----: | -----: |
| bf16       | 0.040 |  1.00x |
| tensorwise | 1,200 | 30000x |
"""


def test_readings() -> None:
    title = "linear 16 x 16 x 16"
    expected = {f"{title}: bf16": 0.04, f"{title}: tensorwise": 1200.0}
    assert dict(readings(PRINTED)) == expected
