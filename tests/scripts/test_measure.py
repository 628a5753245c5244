"""The measurements: their figures on small cases, and the problems that they must detect."""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import RankPool, RankPools, device_mesh
from safetensors.torch import save_file

from scripts.common.models import build
from scripts.common.recipes import BF16, OURS
from scripts.common.saved_bytes import OTHER
from scripts.measure import (
    communication_run,
    hf_plans,
    hf_plans_run,
    memory_run,
    soak_run,
    sqnr,
    sqnr_run,
)
from scripts.measure.communication_run import FOLDED, FSDP, MESHES, OURS_PRECOMPUTED, TP, Row
from scripts.measure.memory_run import WEIGHT, Held

# Communication


SHALLOW = {"LAYERS": 2, "SIZES": dataclasses.replace(communication_run.SIZES, n_layers=2)}


# The variants that checks compare.
COMPARED = (
    *(
        communication_run.OURS,
        communication_run.OURS_PRECOMPUTED,
        communication_run.FLOAT8_GRADIENTS,
    ),
    *(
        communication_run.FOLDED,
        communication_run.DELAYED,
        communication_run.BLOCKWISE,
        communication_run.MXFP8,
    ),
    communication_run.MXFP4,
)


def our_rows(name: str) -> list[Row]:
    dp, tp = MESHES[name]
    chosen = [v for v in communication_run.variants(name) if v in COMPARED]
    with patch.multiple(communication_run, **SHALLOW):
        return communication_run.rows_of(name, chosen, device_mesh(dp=dp, tp=tp))


@patch.multiple(communication_run, **SHALLOW, MESHES={name: MESHES[name] for name in (FSDP, TP)})
def test_collectives_of_a_step(ranks: RankPools) -> None:
    rows = [row for name in (FSDP, TP) for row in ranks(2).run_same(our_rows, name)]
    assert all(check.holds for check in communication_run.checks(rows))
    known = {(row.mesh, row.variant): row for row in rows}
    for key, change in (
        ((FSDP, OURS_PRECOMPUTED.name), {"counts": known[FSDP, FOLDED.name].counts}),
        ((FSDP, FOLDED.name), {"counts": known[FSDP, FOLDED.name].counts | {"all_reduce": 1}}),
    ):
        changed = known | {key: known[key]._replace(**change)}  # type: ignore[arg-type]
        assert not all(c.holds for c in communication_run.checks([*changed.values()])), key


# Accuracy


def test_accuracy_of_a_training_run() -> None:
    recorded = sqnr_run.record([1, 2], 0)
    linears = sqnr_run.recorded_linears()
    assert [*recorded] == [sqnr_run.Place(name, step) for step in (1, 2) for name in linears]
    place = sqnr_run.Place(linears[0], 2)
    row = sqnr_run.measure(recorded[place])
    for name, by_gemm in row.items():
        least = 15 if "mxfp4" in name else 20
        assert all(by_gemm[gemm] > least for gemm in sqnr_run.GEMMS), name
    assert all(check.holds for check in sqnr_run.checks({place: row}))
    for behind in (0.11, float("nan")):
        worse = row["rowwise_folded"] | {"output": row["rowwise"]["output"] - behind}
        doctored = {place: row | {"rowwise_folded": worse}}
        assert not all(check.holds for check in sqnr_run.checks(doctored))


def test_one_copy_loses_where_the_documents_say_so() -> None:
    cases = sqnr_run.stress_cases(0)
    row = sqnr_run.measure(cases["output channels of lognormal(2.5) size"])
    rows = "rows of grad_weight"
    assert row["rowwise"][rows] > 25
    assert all(row[recipe][rows] < 15 for recipe in sqnr_run.ONE_COPY)
    zeros = sqnr_run.measure(cases["10 % of weight rows zero"])
    assert all(zeros[recipe][rows] > 25 for recipe in sqnr_run.ONE_COPY)


def test_weights_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w, small = torch.randn(200, 10, 30), torch.randn(64, 512)
    w[128:] = w[:, 9:] = float("nan")  # cropped, or left out
    content = {
        "w": w,
        "small": small,
        "embed": w.clone(),
        "ids": torch.ones(256, 256).int(),
    }
    save_file(content, tmp_path / "a.safetensors")
    nested = {"model_state": content, "optimizer_state": [w], "step": 3}
    torch.save(nested, tmp_path / "b.pt")
    torch.save({"small": small}, tmp_path / "c.pt")
    a, b, c = (str(path) for path in sorted(tmp_path.iterdir()))
    assert sqnr.main(["--weights", a, b]) == 0
    _, _, one, _, other, *_ = capsys.readouterr().out.split("\n\n")
    assert one == other
    e4m3, *mxfp4 = (line.split("|")[2].split() for line in one.splitlines()[2:])
    assert 31 < float(e4m3[0]) < 32
    assert 15 < float(mxfp4[0][0]) < float(mxfp4[1][0]) < float(mxfp4[2][0]) < 20
    assert e4m3[1] == f"({e4m3[0]})"  # a single matrix
    with pytest.raises(SystemExit, match=r"c\.pt has no matrix of 128 x 128"):
        sqnr.main(["--weights", c])


# Memory


def test_memory_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_run, "ROWS", 128)
    monkeypatch.setattr(memory_run, "FEATURES", 256)
    names = (BF16, "tensorwise", "mxfp8", memory_run.HIGH_PRECISION_INPUT)
    kept = {name: memory_run.held_by_layer(name) for name in names}
    x, w = memory_run.ROWS * memory_run.FEATURES, memory_run.FEATURES**2
    for name, held in kept.items():
        if name in OURS and name != memory_run.HIGH_PRECISION_INPUT:
            assert x <= held[OTHER] <= memory_run.LIMIT * 2 * x, name
        else:
            assert 2 * x <= held[OTHER] <= 2.02 * x, name
        assert held[WEIGHT] in ((w, 2 * w) if name in OURS else (0,)), name


def test_memory_of_checkpointed_blocks() -> None:
    plain, selective, full = (
        memory_run.held_by_block("tensorwise", mode)[OTHER] for mode in memory_run.MODES
    )
    assert plain > 1.5 * selective > 1.5 * full


def test_memory_of_models(ranks: RankPools) -> None:
    (models,) = ranks(2).run_same(memory_run.held_by_models, ["tensorwise"]).values()
    assert memory_run.per_block(models) > 0
    assert all(held[WEIGHT] == 0 for held in models)


def kept_unsharded() -> Held:
    """The bytes that a block keeps if FSDP2 does not reshard it after its forward."""
    model = build(BF16, memory_run.CONFIG, device_mesh(dp=2, tp=1))
    model.layers[0].set_reshard_after_forward(False)
    tokens = torch.randint(256, (1, memory_run.SEQUENCE))
    kinds = dict.fromkeys(memory_run.weight_sizes(memory_run.Block(memory_run.CONFIG)), WEIGHT)
    return memory_run.kept_by(lambda: model(tokens), model, kinds)


def test_an_unsharded_weight_is_noticed(ranks: RankPools) -> None:
    weights = sum(p.numel() for p in memory_run.Block(memory_run.CONFIG).parameters() if p.ndim > 1)
    assert [held[WEIGHT] for held in ranks(2).run(kept_unsharded)] == [2 * weights] * 2


# Soak


def test_nothing_grows() -> None:
    pool = RankPool(2)  # a new pool: other tests leave collectives without a wait
    try:
        results = pool.run(soak_run.soak, 36, ["delayed"])
    finally:
        pool.close()
    for found, kept in results:
        assert len(found) == 6
        broken = [c.sentence for c in soak_run.checks_of(found, kept) if not c.holds]
        # In so few steps, resident memory fluctuates.
        assert [sentence for sentence in broken if "resident memory" not in sentence] == []


def test_what_a_soak_notices() -> None:
    usage = soak_run.Usage(rss=400, tensors=100, entries=20, works=0)

    def broken(late: soak_run.Usage, kept: dict[str, tuple[int, int]]) -> int:
        checks = soak_run.checks_of([("tensorwise", "dp=2", usage, late)], kept)
        return sum(not check.holds for check in checks)

    assert broken(usage, {"table": (3, 3)}) == 0
    assert broken(usage, {"fp8_dist.text._warned": (3, 4)}) == 1
    for more in ({"rss": 500}, {"tensors": 101}, {"entries": 21}, {"works": 1}):
        assert broken(dataclasses.replace(usage, **more), {}) == 1


def test_tables_of_modules_classes_and_caches_are_found() -> None:
    found = soak_run.table_sizes()
    assert "fp8_dist.text._warned" in found
    assert "fp8_dist.gemm_table._has_gemm (cache)" in found


# Plans of transformers models


def test_plans_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["llama", "olmo", "qwen2_5_vl"]
    assert hf_plans.main(["--assert", "--only", *known, "qwen3_vl"]) == 0
    planned, without = (
        part.partition("\n\n")[2] for part in capsys.readouterr().out.split("models ")[1:3]
    )
    llama, olmo, qwen_vl = planned.splitlines()[2:5]
    assert llama.startswith("| LlamaForCausalLM ")
    assert llama.count(" dB ") == 2
    assert "refused: " in olmo
    # Vision-language models run only without sequence parallelism.
    assert qwen_vl.count(" dB ") == 1
    assert "refused: " in qwen_vl
    assert "Qwen3VLForConditionalGeneration" in without


def test_a_wrong_plan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [hf_plans_run.Found("wrong", "6 / 5 dB"), hf_plans_run.Found("right", "120 / 40 dB")]
    monkeypatch.setattr(hf_plans_run, "run_on_ranks", lambda *_, **__: [{"llama": found}] * 2)
    assert hf_plans.main(["--assert", "--only", "llama"]) == 1
    with pytest.raises(SystemExit):
        hf_plans.main(["--only", "llama", "no_such_model"])
