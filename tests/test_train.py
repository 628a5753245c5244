"""The training script, its text, and the comparison of two runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import torch
import train
from corpus import Corpus, load_corpus
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh

SCRIPTS = Path(train.__file__).parent
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


def test_shortest_text_that_serves():
    corpus = Corpus(torch.arange(9, dtype=torch.uint8), "a test")
    inputs, targets = corpus.batch(seed=0, step=1, batch_size=1, seq_len=8)
    assert (inputs.tolist(), targets.tolist()) == ([list(range(8))], [list(range(1, 9))])


def test_options_of_one_process(small_text):
    args = train.parse_args(["--data", str(small_text), "--recipe", "tensorwise"])
    assert (args.dp, args.tp, args.sequence_parallel) == (1, 1, False)
    assert args.out == Path("runs/tensorwise")


def test_options_of_four_ranks(small_text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = train.parse_args(["--data", str(small_text), "--tp", "2"])
    assert (args.dp, args.tp, args.sequence_parallel) == (2, 2, True)


def test_refused_options(capsys, monkeypatch, small_text):
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused = [
        "--dp 3 --tp 2",
        "--tp 8",
        "--batch-size 6",
        "--sequence-parallel",
        "--tp 4 --seq-len 130",
        "--steps 0",
        "--seed -1",
        "--warmup -1",
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
--sequence-parallel needs --tp above 1
--seq-len 130 is not a multiple of --tp 4
--steps must be at least 1
--seed must lie in [0, 2**31), got -1
--warmup must not be negative, got -1""",
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


def test_unknown_recipe(capsys):
    message = options_error(capsys, "--recipe", "float4")
    assert "invalid choice: 'float4'" in message
    assert "bf16" in message
    assert "tensorwise" in message


def test_learning_rate_rises_and_falls():
    factors = [train.learning_rate_factor(step, 4, 12) for step in range(12)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[5:] == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert [train.learning_rate_factor(step, 5, 2) for step in range(2)] == [0.2, 0.4]
    assert train.learning_rate_factor(0, 0, 1) == 1.0


def run_script(out: Path, *options: str) -> list[dict[str, float]]:
    """Trains in a process of its own, without torchrun; returns its metrics."""
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "train.py"), *QUICK, *options, "--out", str(out)],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(SCRIPTS.parent)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Collectives of one training step" in finished.stdout
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_one_process_trains_and_writes_everything(tmp_path, small_text, recipe):
    metrics = run_script(tmp_path, "--data", str(small_text), "--recipe", recipe)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[0]["loss"] == pytest.approx(5.55, abs=0.1)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    for line in metrics:
        assert list(line) == ["step", "loss", "tokens_per_second", "grad_norm"]
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["recipe"], config["parameters"]) == (recipe, 853120)
    assert (tmp_path / "comm.txt").read_text().strip()
    assert isinstance(json.loads((tmp_path / "comm.json").read_text()), list)


def gradient_norms(sequence_parallel: bool) -> tuple[float, float]:
    """Runs on every rank: the norm that training clips by, and that of the full gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options = ["--dp", "2", "--tp", "2", "--seq-len", "16"]
    if not sequence_parallel:
        options.append("--no-sequence-parallel")
    os.environ["WORLD_SIZE"] = "4"
    model = train.build_model(train.parse_args(options), mesh, torch.device("cpu"))
    text = torch.arange(32).view(2, 16) + mesh.get_local_rank("dp")
    model(text).logsumexp(-1).mean().backward()
    full = [p.grad.full_tensor().flatten() for p in model.parameters()]
    return train.global_grad_norm(model).item(), torch.cat(full).double().norm().item()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradient_norm_counts_every_element_once(ranks, sequence_parallel):
    results = ranks(4).run(gradient_norms, sequence_parallel)
    for ours, expected in results:
        assert ours == pytest.approx(expected, rel=1e-5)
        assert ours == results[0][0]


def write_run(folder: Path, recipe: str, losses: list[float], sizes: dict[str, int]) -> Path:
    """Writes the files of a run; sizes: bytes by "op dtype"."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": recipe}))
    lines = [
        {"step": step, "loss": loss, "tokens_per_second": 1000.0, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"op": op, "bytes": size, "float8_bytes": size if "float8" in dtype else 0}
        for (op, _, dtype), size in ((k.partition(" "), v) for k, v in sizes.items())
    ]
    (folder / "comm.json").write_text(json.dumps(rows))
    return folder


def test_comparison_of_good_runs(tmp_path, capsys):
    losses = [5.5 - 0.1 * step for step in range(40)]
    bf16 = write_run(
        tmp_path / "a", "bf16", losses, {"all_gather bfloat16": 3000, "all_reduce bfloat16": 1000}
    )
    float8 = write_run(
        tmp_path / "b",
        "tensorwise",
        [5.5, *(x * 1.004 for x in losses[1:])],
        {"all_gather float8_e4m3fn": 1500, "all_reduce bfloat16": 700},
    )
    assert compare.main([str(bf16), str(float8), "--out", str(tmp_path), "--assert"]) == 0
    shown = capsys.readouterr().out.partition("written:")[0].strip("\n")
    assert_expected_inline(
        shown,
        """\
              first loss  mean of last 20   bytes per step   of it float8   tokens/s
bf16              5.5000           2.5500            4,000              0      1,000
tensorwise        5.5000           2.5602            2,200          1,500      1,000
loss of tensorwise against bf16: +0.40%
bytes on the wire, tensorwise / bf16: 0.550; of all-gathers alone, unconverted layers included: 0.500
verdict: within 1% of bf16, and both below 70% of their first loss""",
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "summary.json").read_text())["bytes_ratio"] == 0.55


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (3.06, "the losses differ by more than 1%"),
        (float("nan"), "the losses differ by more than 1%"),
        (4.5, "tensorwise did not get below 70% of its first loss"),
    ],
)
def test_comparison_of_a_bad_run(tmp_path, capsys, last, problem):
    bf16 = write_run(tmp_path / "a", "bf16", [5.5] + [3.0] * 20, {"all_gather bfloat16": 4000})
    float8 = write_run(
        tmp_path / "b", "tensorwise", [5.5] + [last] * 20, {"all_gather uint8": 2200}
    )
    arguments = [str(bf16), str(float8), "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--assert"]) == 1
    assert problem in capsys.readouterr().out


def test_comparison_of_an_unfinished_run(tmp_path):
    with pytest.raises(SystemExit, match="is not a finished run of"):
        compare.read_run(tmp_path)
