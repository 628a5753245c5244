"""Random cases, the same in every run. `python -m scripts.measure.properties` runs more cases."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from property_cases import TrainCase, from_json, simpler, to_json, train_cases
from property_runs import verdict_of
from property_verdicts import judge
from ranks import RankPools

from fp8_dist import Float8LinearConfig, cast_to_float8

IN_CI = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    # Don't simplify cases here: a hang would take too long. The script does it.
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.full
def test_a_result_is_right_or_a_documented_error(ranks: RankPools) -> None:
    @hypothesis.settings(IN_CI, max_examples=6)
    @hypothesis.given(train_cases(4))
    def holds(case: TrainCase) -> None:
        verdict = verdict_of(case, ranks)
        command = f"python -m scripts.measure.properties --case '{to_json(case)}'"
        assert verdict.kind != "FAILED", f"{command}\n{verdict.text}"

    holds()


def test_a_history_that_is_not_used_does_not_come_back(ranks: RankPools) -> None:
    there_and_back = ("invalidate", "sync", "dcp.load, another mesh", "dcp.load, another mesh")
    case = TrainCase("HSDP 2 x 2", "FSDP2 2 x TP 2", "delayed", actions=there_and_back)
    assert verdict_of(case, ranks).kind == "right"


def test_weights_that_became_nan_have_scales_of_nan(ranks: RankPools) -> None:
    """Also if statistics of rows are rounded to the bf16 of FSDP2's gather, and reduced as bits."""
    recipe, precision = "rowwise_with_gw_hp", "MixedPrecisionPolicy"
    case = TrainCase("FSDP2 2 x TP 2", recipe=recipe, precision=precision, values="nan")
    assert verdict_of(replace(case, actions=("step", "evaluate")), ranks).kind == "right"


@hypothesis.settings(IN_CI, max_examples=20)
@hypothesis.given(train_cases(4))
def test_a_report_shows_the_case(case: TrainCase) -> None:
    assert from_json(to_json(case)) == case


def test_simpler_cases() -> None:
    case = TrainCase(dim=3, actions=("freeze", "step"))
    assert simpler(case) == [
        TrainCase(actions=("freeze", "step")),
        TrainCase(dim=3),
        TrainCase(dim=3),
        TrainCase(dim=3, actions=("freeze",)),
    ]
    assert simpler(TrainCase(actions=())) == [TrainCase()]


def unnamed() -> None:
    raise ValueError("something is wrong")


def test_what_a_documented_error_is() -> None:
    refused = judge(lambda: Float8LinearConfig(amax_history_len=0) and None)
    assert (refused.kind, refused.name[:41]) == (
        "error",
        "ValueError: FloatNLinearConfig.amax_histo",
    )
    assert judge(lambda: cast_to_float8(None, None) and None).kind == "error"  # type: ignore[arg-type,func-returns-value]
    assert judge(lambda: torch.zeros(2).reshape(3) and None).kind == "FAILED"  # type: ignore[func-returns-value]
    assert judge(unnamed).kind == "FAILED"
    assert judge(lambda: None).kind == "right"
