"""The training script and its text: options, devices, what a run writes."""

import html
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from processes import run
from ranks import RankPools, device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch_releases import uneven_sequence_in_torchs_linear

import fp8_dist
from fp8_dist.debug import Anomaly, GemmStats
from scripts.common.corpus import Corpus, load_corpus
from scripts.train import report, train
from scripts.train.processes import choose_device, process_group
from scripts.train.report_data import read_run
from scripts.train.run_writer import MEMORY, RunWriter, memory_bytes

ROOT = Path(train.__file__).parents[2]
QUICK = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "32"]


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    """A file of a kilobyte of text."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"All work and no play makes float8 a dull dtype.\n" * 21)
    return path


def options_error(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The last line that a refused command line prints."""
    with pytest.raises(SystemExit) as error:
        train.parse_args(list(options))
    assert error.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1].partition("error: ")[2]


def test_standard_library_is_text_that_repeats():
    first, again = (load_corpus(None, seq_len=128, max_bytes=2**16) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.dtype == torch.uint8
    assert first.tokens.numel() == 2**16
    assert b"import " in bytes(first.tokens.tolist())


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"c.txt": "3", "a.txt": "1", "b/x.md": "2", ".git/y": "0"}.items():
        (tmp_path / name).write_text(text)
    assert bytes(load_corpus(tmp_path, seq_len=2).tokens.tolist()) == b"123"


def test_ranks_share_the_rows_of_one_global_batch():
    corpus = Corpus(torch.arange(256, dtype=torch.uint8), "a test")
    whole = corpus.batch(seed=1, step=7, batch_size=6, seq_len=8)
    parts = [
        corpus.batch(seed=1, step=7, batch_size=6, seq_len=8, rank=rank, ranks=3)
        for rank in range(3)
    ]
    for index in range(2):
        assert whole[index].shape == (6, 8)
        assert whole[index].dtype == torch.int64
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))
    assert torch.equal(whole[0] + 1, whole[1])


def test_batches_depend_on_seed_and_step():
    corpus = Corpus(torch.arange(256, dtype=torch.uint8), "a test")
    draws = {
        tuple(corpus.batch(seed=seed, step=step, batch_size=4, seq_len=8)[0][:, 0].tolist())
        for seed in (0, 1)
        for step in (1, 2)
    }
    assert len(draws) == 4


def test_options_of_one_process(small_text):
    args = train.parse_args(["--data", str(small_text), "--recipe", "tensorwise"])
    assert (args.dp, args.tp) == (1, 1)
    assert args.out == Path("runs/tensorwise")


def test_options_of_four_ranks(small_text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = train.parse_args(["--data", str(small_text), "--tp", "2"])
    assert (args.dp, args.tp) == (2, 2)


def test_refused_options(capsys, monkeypatch, small_text):
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused = [
        "--dp 3 --tp 2",
        "--tp 8",
        "--batch-size 6",
        "--steps 0",
        "--seed -1",
        "--warmup -1",
        "--dp 0",
        "--lr 0",
        "--lr -1e-3",
        "--lr nan",
        "--lr inf",
        "--timeout 0",
        "--timeout inf",
        "--checkpoint-every 0",
        "--keep 0",
        "--step 3",
        "--recipe float4",
    ]
    errors = [
        options_error(capsys, *f"{options} --data {small_text}".split()) for options in refused
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
--dp 3 times --tp 2 is 6, but there are 4 ranks: start that many (torchrun --nproc-per-node 6)
--dp 1 times --tp 8 is 8, but there are 4 ranks: start that many (torchrun --nproc-per-node 8)
--batch-size 6 is not a multiple of --dp 4
argument --steps: 0 is not positive
--seed must lie in [0, 2**31), got -1
--warmup must not be negative, got -1
argument --dp: 0 is not positive
--lr must be positive and finite, got 0.0
argument --lr: expected one argument
--lr must be positive and finite, got nan
--lr must be positive and finite, got inf
--timeout must be positive and finite, got 0.0
--timeout must be positive and finite, got inf
argument --checkpoint-every: 0 is not positive
argument --keep: 0 is not positive
unrecognized arguments: --step 3
argument --recipe: invalid choice: 'float4' (choose from 'bf16', 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'rowwise_folded', 'blockwise', 'mxfp8', 'delayed')""",
    )


def test_refused_texts(capsys, monkeypatch, tmp_path, small_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    refused = ["--data nowhere", "--data empty", "--data text.txt --seq-len 1008"]
    errors = [options_error(capsys, *options.split()) for options in refused]
    assert_expected_inline(
        "\n".join(errors),
        """\
--data: nowhere: no such file or folder
--data: empty has 0 bytes of text (0 files), but rows of 128 tokens need more: give a longer text or use shorter rows
--data: text.txt has 1008 bytes of text (1 files), but rows of 1008 tokens need more: give a longer text or use shorter rows""",
    )
    train.parse_args(["--data", "text.txt", "--seq-len", "1007"])


def test_heads_that_the_ranks_cannot_share(capsys, monkeypatch, small_text):
    monkeypatch.setenv("WORLD_SIZE", "8")
    message = options_error(capsys, "--tp", "8", "--data", str(small_text))
    assert message == "--tp 8 does not divide the 4 key/value heads of --model debug"


@pytest.mark.parametrize(
    ("gpus", "device", "reason"),
    [
        (0, "cpu", ""),
        (1, "cpu", "2 ranks need as many GPUs, this machine has 1"),
        (2, "cuda:1", ""),
    ],
)
def test_ranks_train_on_gpus_when_each_has_one(monkeypatch, gpus, device, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(local_rank=1, local_ranks=2) == (torch.device(device), reason)


def test_learning_rate_rises_and_falls():
    factors = [train.learning_rate_factor(step, 4, 12) for step in range(12)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[5:] == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert [train.learning_rate_factor(step, 5, 2) for step in range(2)] == [0.2, 0.4]
    assert train.learning_rate_factor(0, 0, 1) == 1.0


def run_script(out: Path, *options: str) -> list[dict[str, float]]:
    """Trains in a process of its own, without torchrun; returns its metrics."""
    finished = run(
        [sys.executable, "-m", "scripts.train.train", *QUICK, *options, "--out", str(out)],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT)),
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Collectives of one training step" in finished.stdout
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_one_process_trains_and_writes_everything(tmp_path, small_text):
    metrics = run_script(tmp_path, "--data", str(small_text), "--recipe", "tensorwise")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[0]["loss"] == pytest.approx(5.55, abs=0.1)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    for line in metrics:
        assert list(line) == [
            "step",
            "loss",
            "tokens_per_second",
            "grad_norm",
            "learning_rate",
            "memory_bytes",
        ]
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert 2**26 < line["memory_bytes"] < 2**36  # torch alone needs more than 64 MiB
    assert [line["learning_rate"] for line in metrics] == [1e-3, 1e-3, 5e-4]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["memory"] == MEMORY["cpu"]
    assert (config["torch"], config["fp8_dist"]) == (torch.__version__, fp8_dist.__version__)
    assert (config["recipe"], config["parameters"]) == ("tensorwise", 853120)
    assert (tmp_path / "comm.txt").read_text().strip()
    assert isinstance(json.loads((tmp_path / "comm.json").read_text()), list)


def rates_of_the_optimizer(options: list[str]) -> list[float]:
    """Runs on a rank: trains, and returns the learning rate that each step found."""
    rates: list[float] = []
    step = train.Trainer.step

    def recorded(self: train.Trainer, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rates.extend(group["lr"] for group in self.optimizer.param_groups)
        return step(self, number)

    with mock.patch.object(train.Trainer, "step", recorded):
        train.train(train.parse_args(options), torch.device("cpu"))
    return rates


def test_the_rate_that_is_written_is_the_optimizers(ranks: RankPools, small_text, tmp_path):
    options = [*QUICK, "--warmup", "2", "--data", str(small_text), "--out", str(tmp_path)]
    (used,) = ranks(1).run(rates_of_the_optimizer, options)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == used == [5e-4, 1e-3, 1e-3]


def test_memory_on_a_gpu_is_the_peak_since_the_line_before(monkeypatch):
    calls = []
    for name, result in (("max_memory_allocated", 7), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(
            torch.cuda,
            name,
            lambda device, name=name, result=result: calls.append((name, device)) or result,
        )
    device = torch.device("cuda", 1)
    assert memory_bytes(device) == 7
    assert calls == [("max_memory_allocated", device), ("reset_peak_memory_stats", device)]


def steps(options: list[str], tp: int) -> list[tuple[float, float]]:
    """Runs on every rank: loss and gradient norm of each step, with sequence parallelism."""
    os.environ["WORLD_SIZE"] = str(tp)
    args = train.parse_args([*QUICK, *options, "--tp", str(tp)])
    trainer = train.Trainer(args, device_mesh(dp=1, tp=tp), torch.device("cpu"))
    steps = (trainer.step(step) for step in range(1, args.steps + 1))
    return [(trainer.mean_over_ranks(loss), norm.item()) for loss, norm in steps]


# As far from one process as rows of a length that tp divides are.
@pytest.mark.parametrize(("recipe", "tolerance"), [("bf16", 5e-4), ("tensorwise", 5e-3)])
def test_rows_of_a_length_that_tp_does_not_divide(
    ranks: RankPools, small_text: Path, recipe: str, tolerance: float
):
    options = ["--data", str(small_text), "--recipe", recipe, "--seq-len", "31"]
    (expected,) = ranks(1).run(steps, options, 1)
    with uneven_sequence_in_torchs_linear():
        first, second = ranks(2).run(steps, options, 2)
        assert first == second
        for found, (loss, norm) in zip(first, expected, strict=True):
            assert found[0] == pytest.approx(loss, rel=tolerance)
            # (In bf16 the norm of the gradients depends on the processor, too.)
            assert found[1] == pytest.approx(norm, rel=20 * tolerance)


def test_an_old_run_is_gone_before_a_new_one_starts(tmp_path, small_text):
    names = ("config.json", "metrics.jsonl", "comm.json", "comm.txt")
    for name in names:
        (tmp_path / name).write_text("old")
    writer = RunWriter(train.parse_args(["--data", str(small_text), "--out", str(tmp_path)]))
    writer.metrics.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name in names} == {
        "metrics.jsonl": ""
    }


def test_what_a_resumed_run_knows_and_syncs(tmp_path: Path, small_text: Path) -> None:
    args = train.parse_args(["--data", str(small_text), "--out", str(tmp_path)])

    def tell(writer: RunWriter, step: int, fqn: str) -> None:
        row = GemmStats(step=step, fqn=fqn, gemm="output", sqnr=3.0)
        writer.write_anomaly(Anomaly("SQNR", 3.0, 15.0, row))

    def told() -> list[tuple[int, str]]:
        lines = (tmp_path / "anomalies.jsonl").read_text().splitlines()
        return [(line["step"], line["fqn"]) for line in map(json.loads, lines)]

    writer = RunWriter(args)
    tell(writer, 1, "w1")
    tell(writer, 5, "w2")  # in a step that will be run again
    synced = set()
    with mock.patch("os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)):
        writer.sync()
    writer.metrics.close()
    assert synced == {path.stat().st_ino for path in tmp_path.glob("*.jsonl")}
    assert len(synced) == 2
    resumed = RunWriter(args, first=4)
    tell(resumed, 4, "w1")
    tell(resumed, 5, "w2")
    resumed.metrics.close()
    assert told() == [(1, "w1"), (5, "w2")]


def test_shortest_text_that_serves():
    corpus = Corpus(torch.arange(9, dtype=torch.uint8), "a test")
    inputs, targets = corpus.batch(seed=0, step=1, batch_size=1, seq_len=8)
    assert (inputs.tolist(), targets.tolist()) == ([list(range(8))], [list(range(1, 9))])


def test_statistics_of_some_steps(small_text: Path, tmp_path: Path) -> None:
    """A run that is continued keeps the lines of the steps before it, and has the others once."""
    out = tmp_path / "run"
    options = [*QUICK, "--data", str(small_text), "--recipe", "tensorwise", "--out", str(out)]
    options += ["--stats-every", "1", "--stats-gemms", "--checkpoint-every", "2"]
    assert train.main(options) == 0
    lines = (out / "float8_stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    layers = json.loads((out / "config.json").read_text())["float8_layers"]
    for step in (1, 2, 3):
        of_step = [row for row in rows if row["step"] == step]
        assert {row["fqn"] for row in of_step} == set(layers)
        assert [row["kind"] for row in of_step].count("cast") == 3 * len(layers)
        assert [row["kind"] for row in of_step].count("gemm") == 3 * len(layers)
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    assert train.main([*options, "--resume", "auto"]) == 0
    assert (out / "float8_stats.jsonl").read_text().splitlines() == lines
    shutil.rmtree(out / "checkpoints")
    assert train.main([*options[:-5], "--steps", "1"]) == 0  # a fresh run: they go
    assert not (out / "float8_stats.jsonl").exists()


def test_options_of_transports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    errors = [
        options_error(capsys, "--error-feedback"),
        options_error(capsys, "--stochastic-rounding"),
        options_error(capsys, "--gradient-transport", "fp16"),
        options_error(capsys, "--gradient-transport", "bf16", "--stochastic-rounding", "-1"),
        options_error(capsys, "--gradient-transport", "bf16", "--tp", "4"),
        options_error(capsys, "--reduce-transport", "float8", "--tp", "2"),
        options_error(capsys, "--reduce-transport", "float8", "--recipe", "tensorwise"),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
--error-feedback needs --gradient-transport: fp32 gradients are not rounded
--stochastic-rounding needs --gradient-transport: fp32 gradients are not rounded
argument --gradient-transport: invalid choice: 'fp16' (choose from 'float8', 'bf16')
--stochastic-rounding must not be negative, got -1
--gradient-transport needs --dp 2 or more: a single data-parallel rank sends no gradients
--reduce-transport needs --tp 2 or more and a float8 --recipe: it is for the reduce-scatters of float8 layers
--reduce-transport needs --tp 2 or more and a float8 --recipe: it is for the reduce-scatters of float8 layers""",
    )
    args = train.parse_args(["--gradient-transport", "float8", "--stochastic-rounding"])
    assert (args.error_feedback, args.stochastic_rounding) == (False, 0)
    assert train.parse_args([]).stochastic_rounding is None


def test_options_of_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [
        options_error(capsys, "--stats-every", "2"),
        options_error(capsys, "--recipe", "tensorwise", "--stats-gemms"),
        options_error(capsys, "--recipe", "tensorwise", "--stats-every", "0"),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
--stats-every is for float8 recipes: in bf16 nothing is cast
--stats-gemms needs --stats-every
argument --stats-every: 0 is not positive""",
    )


def test_a_planted_fault_is_named_by_every_output(tmp_path: Path, capsys: Any) -> None:
    """The input of one layer times 1e4 where scales are delayed, and a NaN in a gradient."""
    args = train.parse_args(
        [*QUICK, "--recipe", "delayed", "--stats-every", "1", "--out", str(tmp_path)]
    )
    with process_group(60.0):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        trainer = train.Trainer(args, mesh, torch.device("cpu"))
        writer = RunWriter(args)
        stats = train.stats_of(trainer, writer)
        assert stats is not None
        layers = trainer.model.layers
        for step in range(1, 10):
            handles = []
            if step == 7:
                faulty = layers[1].feed_forward.w2
                handles.append(faulty.register_forward_pre_hook(lambda _, x: (x[0] * 1e4,)))
            if step == 9:
                faulty = layers[2].attention.wo
                handles.append(
                    faulty.register_full_backward_pre_hook(lambda _, g: (g[0] * math.nan,))
                )
            with stats.at(step):
                trainer.step(step)
            for handle in handles:
                handle.remove()
            writer.write_stats(stats)
    printed = capsys.readouterr().out
    anomalies = (tmp_path / "anomalies.jsonl").read_text()
    page = report.render(read_run(tmp_path))
    for text in (printed, anomalies, html.unescape(page)):
        assert (
            "step 7: layers.1.feed_forward.w2: input (for output, grad_weight): the amax is" in text
        )
        assert "step 9: layers.2.attention.wo: grad_output" in text
    first = min(json.loads(line)["step"] for line in anomalies.splitlines())
    assert first == 7
    rows = [json.loads(line) for line in (tmp_path / "float8_stats.jsonl").read_text().splitlines()]
    bad = [r for r in rows if r["kind"] == "cast" and r["nonfinite"]]
    assert (bad[0]["step"], bad[0]["nonfinite_rank"]) == (9, 0)
    assert "layers.2.attention.wo" in {row["fqn"] for row in bad}
