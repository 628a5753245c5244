"""The table of GEMMs, for releases of torch and CUDA that are not here."""

import pytest
import torch
from torch.torch_version import TorchVersion

from fp8_dist import gemm_table
from fp8_dist.gemm_table import GEMMS, TABLE, GemmKind


def known(architecture: str) -> set[GemmKind]:
    return {row.gemm for row in TABLE if gemm_table._serves(row, architecture)}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> object:
    """Let torch be another release, built for another CUDA."""

    def build(release: str, cuda: str | None) -> None:
        monkeypatch.setattr(torch, "__version__", TorchVersion(release))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return build


HOPPER = {"scaled", "by rows", "blocks of 128", "groups", "groups in bf16"}


@pytest.mark.parametrize("release", ["2.11.0", "2.11.0a0+nv26.01", "2.14.0.dev20260801", "2.15.0"])
def test_releases_before_a_release_have_its_gemms(release: str, built: object) -> None:
    built(release, "13.0")  # type: ignore[operator]
    assert known("9.0") == HOPPER
    assert known("8.0") == known("7.5") == known("") == set()


def test_each_gemm_from_its_release_on(built: object) -> None:
    for release, has_mx in (("2.13.1", False), ("2.14.0rc1", True), ("2.14.0a0", True)):
        built(release, "13.0")  # type: ignore[operator]
        assert ("blocks of 32" in known("12.0")) == has_mx, release
    # The GEMM for Ada ran on another stream than its caller's.
    for release, has_rowwise in (("2.11.0", False), ("2.12.0", True)):
        built(release, "13.0")  # type: ignore[operator]
        assert ("by rows" in known("8.9")) == has_rowwise
        assert "scaled" in known("8.9")


def test_builds_for_older_releases_of_cuda(built: object) -> None:
    built("2.13.0", "12.8")  # type: ignore[operator]
    assert known("9.0") == HOPPER - {"blocks of 128"}
    assert known("10.0") == {"scaled", "by rows", "blocks of 32", "groups in bf16"}
    # torch's kernels for 10.0 would load on a 10.3, and trap.
    assert known("10.3") == {"scaled", "blocks of 32"}
    assert known("12.1") == {"scaled"}
    built("2.13.0", "12.9")  # type: ignore[operator]
    assert known("9.0") == HOPPER - {"by rows"}
    assert known("10.3") == known("10.0")
    built("2.13.0", None)  # type: ignore[operator]
    assert known("gfx942") == {"scaled", "by rows", "groups", "groups in bf16"}
    assert known("gfx1201") == {"scaled", "by rows"}


def test_rows_are_of_gemms_that_are_described() -> None:
    assert {row.gemm for row in TABLE} == {*GEMMS}
