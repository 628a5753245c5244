"""The script counts cases, and prints a failing case so that it can be run again."""

import random
import re
from unittest import mock

import pytest
import torch

import fp8_dist.kernels.quantization
from scripts.measure import properties


def test_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert properties.main(["--cases", "20", "--ranks", "1", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    right, refused, failed = map(int, re.findall(r"\d+", said)[:3])
    assert (right + refused, failed) == (20, 0)
    assert "| ValueError: " in said


def wrong(x: torch.Tensor, multiplier: torch.Tensor, *_: object) -> torch.Tensor:
    """A faulty product, which differs from call to call."""
    return x.float() * multiplier * random.uniform(0.5, 1)


def test_a_failure_is_made_simpler_and_can_be_run_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.object(fp8_dist.kernels.quantization, "multiplied", wrong):
        assert properties.main(["--cases", "5", "--ranks", "1", "--jobs", "1"]) == 1
        said = capsys.readouterr().out
        case = re.findall(r"^--case '(.*)'$", said, re.MULTILINE)[0]
        assert properties.main(["--case", case]) == 1
        assert capsys.readouterr().out.startswith("FAILED: wrong: ")
    assert properties.main(["--case", case]) == 0
    assert capsys.readouterr().out == "right\n"
