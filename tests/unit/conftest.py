"""Unit tests start no process groups and compile nothing: ``scripts/test.sh --fast`` runs them."""

import importlib.util
import logging

import pytest
import torch

# Tests that compare with torchao (which imports Triton), or use it to quantize weights.
OF_TORCHAO = (
    "kernels/test_torchao_blocks",
    "linear/test_torchao",
    "test_torchao_objects",
)
installed = all(importlib.util.find_spec(name) for name in ("torchao", "triton"))
collect_ignore = [] if installed else [f"{name}.py" for name in OF_TORCHAO]
logging.getLogger("torchao").setLevel(logging.ERROR)


@pytest.fixture
def ranks() -> None:
    pytest.fail("a test that needs ranks belongs in tests/distributed")


@pytest.fixture(autouse=True)
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        pytest.fail("a test that compiles belongs in tests/compile")

    monkeypatch.setattr(torch, "compile", refused)
