"""Unit tests start no process groups and compile nothing: ``scripts/test.sh --fast`` runs them."""

import pytest
import torch


@pytest.fixture
def ranks() -> None:
    pytest.fail("a test that needs ranks belongs in tests/distributed")


@pytest.fixture(autouse=True)
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        pytest.fail("a test that compiles belongs in tests/compile")

    monkeypatch.setattr(torch, "compile", refused)
