"""Some recorded cases, for each kind of fault and each mesh."""

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import RankPools
from recorded_cases import DOWN, UP, RecordedCase, drawn, verdict

CLEAN = {
    "freed scales": RecordedCase("FSDP2 x2", "rowwise_folded", named=False),
    "TP of 90": RecordedCase("TP x4", "rowwise_folded", dim=50, hidden=90, accumulation=2),
    "SP of 50": RecordedCase("TP + SP x3", "blockwise", dim=90, hidden=50, checkpointing=True),
    "FSDP2 of 3": RecordedCase("FSDP2 x3", "mxfp8", dim=50, hidden=50, named=False, compiled=True),
    "experts": RecordedCase("FSDP2 2 x EP 2", "rowwise_folded", gather=False),
    "idle experts": RecordedCase("EP x3", "tensorwise", experts=2, accumulation=2),
    "freed weights": RecordedCase(
        "FSDP2 2 x TP 2", "rowwise_with_gw_hp", gather=False, hidden=50, named=False
    ),
}
TP = RecordedCase("TP x4", "delayed", hidden=90, faulty=3)
EP = RecordedCase("FSDP2 2 x EP 2", "mxfp8", faulty=2)
FAULTS = [
    replace(TP, fault="input", target=("layers.0.w1", "input")),
    replace(TP, fault="gradient", target=("layers.1.w2", "grad_output"), named=False),
    replace(TP, fault="operand scale", target=("layers.0.w2", "grad_input weight")),
    replace(TP, fault="scale", target=("layers.0.w2", "input")),
    RecordedCase("HSDP 2 x 2", fault="replica", faulty=3, target=("layers.0.w3", "weight")),
    replace(EP, fault="byte", target=(DOWN, "weight"), recipe="rowwise_folded"),
    replace(EP, fault="rows swapped", target=(UP, "input")),
    replace(EP, fault="row twice", target=(DOWN, "grad_output"), checkpointing=True),
    replace(EP, fault="routing", target=(UP, "input")),
    RecordedCase("parted experts x4", fault="nan", faulty=1, target=(UP, "input")),
]
CASES = CLEAN | {case.fault: case for case in FAULTS}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_names_the_fault_alone(ranks: RankPools, tmp_path: Path, name: str) -> None:
    assert verdict(CASES[name], ranks, tmp_path) == "right"


def test_cases_are_drawn_from_their_numbers() -> None:
    cases = [drawn(number, 0, number % 2 > 0) for number in range(40)]
    assert cases == [drawn(number, 0, number % 2 > 0) for number in range(40)]
    assert [bool(case.fault) for case in cases] == [False, True] * 20
