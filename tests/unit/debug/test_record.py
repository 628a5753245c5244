"""record and replay on one device: when a recording is written, what it keeps, what is refused."""

import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net
from torch import nn

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import AnomalyLimits, Recorder, float8_stats, record
from fp8_dist.debug.replay import main
from fp8_dist.debug.replay.findings import Replay
from fp8_dist.debug.replay.printing import page
from fp8_dist.report.__main__ import main as report

pytestmark = pytest.mark.filterwarnings("ignore:record")
NAN = float("nan")


def net(recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(Net(layers=2), config=config)


def step(model: nn.Module, scale: float = 1.0, at: float | None = None) -> None:
    x = scale * torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    if at is not None:
        x[1, 2, 3] = at
    model(x).square().mean().backward()


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_of(recorder: Recorder, folder: Path) -> list[tuple[int, str]]:
    """The steps and the kinds of the records that are written now."""
    found = torch.load(recorder.write() / "rank00000.pt", weights_only=True)["records"]
    return sorted({(r["step"], "cast" if "high" in r else "gemm") for r in found})


def test_a_step_ends_with_an_optimizers_or_with_the_block(tmp_path: Path) -> None:
    model = net()
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in model.layers]  # type: ignore[union-attr,arg-type]
    recorder = record(model, tmp_path, 2, ["layers.0.w[12]", "layers.0.w3"]).at(5)
    with recorder:
        for _ in range(3):
            step(model)
            step(model)  # a micro-batch
            for optimizer in optimizers:
                optimizer.step()
    assert recorder.step == 7
    for _ in range(2):
        with recorder:
            step(model)
    assert recorder.step == 9
    assert {row.step for row in recorder.rows} == {8, 9}
    assert steps_of(recorder, tmp_path) == [(n, kind) for n in (8, 9) for kind in ("cast", "gemm")]
    assert (recorder.write().name, written(tmp_path)) == (
        "step000009-2",
        ["step000009", "step000009-2"],
    )
    replay = Replay(tmp_path / "step000009")
    assert not replay.findings
    assert {cast.parts[0]["fqn"] for cast in replay.casts} == {f"layers.0.w{i}" for i in (1, 2, 3)}
    assert not optimizers[0]._optimizer_step_pre_hooks
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_anomaly_writes_its_step_and_the_next_one(tmp_path: Path) -> None:
    """Without named layers: the casts of the step, and all of the layer in the next one."""
    model = net()
    with record(model, tmp_path) as recorder:
        for each in (None, None, NAN, None, None, None):
            step(model, at=each)
            recorder._before_optimizer()
    assert written(tmp_path) == ["step000002", "step000003"]
    (first, *_), (next_finding, *_) = (
        Replay(tmp_path / name).findings for name in written(tmp_path)
    )
    assert (first.step, first.fqn, first.operand) == (2, "layers.0.w1", "input")
    assert (first.element, first.ranks, first.is_wrong) == ((10, 3), (0,), True)
    assert next_finding.element is None  # the casts of step 2 are in its own recording
    assert "layers='layers.0.w1') keeps those" in page(Replay(tmp_path / "step000003"))
    assert first.text == "NaN or infinite"
    file = torch.load(tmp_path / "step000002" / "rank00000.pt", weights_only=True)
    assert file["reason"] == "step 2: layers.0.w1: a scale that is not finite"
    file = torch.load(tmp_path / "step000003" / "rank00000.pt", weights_only=True)
    assert "layers.0.w1" in {r["fqn"] for r in file["records"] if "result" in r}


def test_statistics_name_the_layers_of_the_next_step(tmp_path: Path) -> None:
    model = net()
    recorder = record(model, tmp_path)
    stats = float8_stats(model, on_anomaly=recorder.follow, limits=AnomalyLimits(sqnr=100))
    with recorder:
        for observed in (False, True, False, False):
            with stats if observed else record(model, tmp_path / "other"):
                step(model)
            recorder._before_optimizer()
    assert written(tmp_path) == ["other", "step000002"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_exception_writes(tmp_path: Path, error: BaseException) -> None:
    model = net()
    recorder = record(model, tmp_path)

    def fail() -> None:
        with recorder:
            step(model)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert recorder.bytes == 0
    (folder,) = tmp_path.iterdir()
    file = torch.load(folder / "rank00000.pt", weights_only=True)
    assert (file["step"], file["reason"]) == (0, f"{type(error).__name__}: {error}")
    assert Replay(folder).checked["casts equal those of one device, bit for bit"] == 6 * 3


# Forks a process for each folder and end, and prints how it ends.
PROGRAM = """
import os, signal, sys, torch
import torch._dynamo  # which a recorder imports
from fp8_dist import convert_to_float8_training
from fp8_dist.debug import record
model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)))
for folder, end in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        recorder = record(model, folder)
        exec(end)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
ENDS = {
    "recorder.start(); model(torch.ones(4, 32)); os.kill(os.getpid(), signal.SIGTERM)": 143,
    "with recorder: model(torch.ones(4, 32)); os.kill(os.getpid(), signal.SIGTERM)": 143,
    "recorder.start(); model(torch.ones(4, 32)); model(torch.ones(4, 31))": 1,
    "recorder.start(); model(torch.ones(4, 32)); recorder.stop()": 0,
}


def test_the_end_of_a_program_writes(tmp_path: Path) -> None:
    """SIGTERM, within a block or not, and an error; but not after ``stop``."""
    arguments = [text for i, end in enumerate(ENDS) for text in (str(tmp_path / str(i)), end)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    found = subprocess.run(command, capture_output=True, check=True, text=True)
    assert [*map(int, found.stdout.split())] == [*ENDS.values()], found.stderr
    for i, status in enumerate(ENDS.values()):
        assert written(tmp_path / str(i)) == (["step000000"] if status else [])


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    model = net()
    one = record(model, tmp_path / "a", layers="*")
    with one:
        step(model)
    assert one.bytes > 0 == one.dropped
    less = record(model, tmp_path / "b", layers="*", max_bytes=one.bytes // 2)
    with less:
        step(model)
    assert one.bytes // 4 < less.bytes <= one.bytes // 2 < one.bytes
    assert less.dropped > 0
    with record(model, tmp_path / "c", max_bytes=2**22) as passing:
        step(model)
        assert 0 < passing.bytes <= 2**15
    assert (passing.bytes, passing.dropped) == (0, 0)
    with record(model, tmp_path / "e", max_bytes=2**22) as recorder:
        for rows in (100, 4):
            x = torch.randn(rows, 64)
            model.layers[0].w1(x)  # type: ignore[index,union-attr]
            if rows > 4:  # FSDP2 frees what it has gathered: the room is there again
                x.untyped_storage().resize_(0)
        records = torch.load(recorder.write() / "rank00000.pt", weights_only=True)["records"]
        assert [r["operand"] for r in records] == ["weight", "input"]
    # A tensor that is modified in place after its cast is not written.
    x = torch.randn(4, 64)
    with record(model, tmp_path / "d") as recorder:
        model.layers[0].w1(x)  # type: ignore[index,union-attr]
        x.mul_(2)
        assert steps_of(recorder, tmp_path) == [(0, "cast")]  # of the weight
        records = torch.load(recorder.write() / "rank00000.pt", weights_only=True)["records"]
        assert [r["operand"] for r in records] == ["weight"]


def test_what_differs_in_a_file_is_named(tmp_path: Path) -> None:
    """A float8 byte, a scale, an operand and a result; errors of a GPU's GEMM are none."""
    model = net("rowwise_folded")
    with record(model, tmp_path, layers="*") as recorder:
        step(model)
    path = recorder.write() / "rank00000.pt"
    file = torch.load(path, weights_only=True)
    casts = [record for record in file["records"] if "high" in record]

    def first(change: Any) -> tuple[str, str, Any]:
        kept = torch.load(path, weights_only=True)
        records = kept["records"]
        change([r for r in records if "high" in r][2], [r for r in records if "result" in r][1])
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        torch.save(kept, folder / "rank00000.pt")
        found = Replay(folder).findings
        return (found[0].operand, found[0].text.split(":")[0], found[0].element) if found else ()  # type: ignore[return-value]

    operand, name = casts[2]["operand"], "not the cast of one device"
    byte = lambda low: low["qdata"].view(torch.uint8)[3:4, 5].bitwise_xor_(8)  # noqa: E731
    assert first(lambda cast, gemm: byte(cast["low"])) == (operand, name, (3, 5))
    assert first(lambda cast, gemm: cast["low"]["scales"][0][7].mul_(2)) == (operand, name, (7, 0))
    name = "what arrived for the GEMM is not what was cast"
    assert first(lambda cast, gemm: byte(gemm["left"])) == ("input", name, (3, 5))
    found = first(lambda cast, gemm: gemm["result"][2, 4].add_(1))
    assert (found[0], found[2]) == ("result", (2, 4))
    assert not first(lambda cast, gemm: gemm["result"].mul_(1 + 1e-5))


def test_processes_share_the_work_of_a_replay(tmp_path: Path) -> None:
    """Each takes some of the layers, with folded scales and statistics; an error is found once."""
    model = net("rowwise_folded")
    with record(model, tmp_path, layers="*") as recorder:
        step(model)
    path = recorder.write() / "rank00000.pt"
    file = torch.load(path, weights_only=True)
    wrong = next(r for r in file["records"] if "result" in r and r["fqn"] == "layers.1.w1")
    wrong["result"].add_(1)
    torch.save(file, path)
    whole = Replay(path.parent)
    for count in (2, 3, 40):
        parts = [Replay(path.parent, (i, count)) for i in range(count)]
        assert sum((part.checked for part in parts), Counter[str]()) == whole.checked
        assert sum(len(part.casts) for part in parts) == len(whole.casts)
        (finding,) = [finding for part in parts for finding in part.findings]
        assert finding.fqn == whole.findings[0].fqn == "layers.1.w1"


def test_rows_that_ranks_share_count_once(tmp_path: Path) -> None:
    """A jump is relative to earlier steps, however many ranks have written their rows."""
    model = net()
    with record(model, tmp_path, steps=12) as recorder:
        for i in range(12):
            step(model, scale=1.0 if i % 11 else 1e4)
            recorder._before_optimizer()
    path = recorder.write() / "rank00000.pt"
    file = torch.load(path, weights_only=True) | {"world": 2}
    for rank in range(2):
        torch.save(file | {"rank": rank}, path.with_name(f"rank0000{rank}.pt"))
    assert len({row["step"] for row in file["rows"]}) == 12
    assert not Replay(path.parent).findings


def test_damaged_and_foreign_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    with record(model, tmp_path / "own", layers="layers.1.w2") as recorder:
        step(model)
    good = (recorder.write() / "rank00000.pt").read_bytes()
    file = torch.load(recorder.write() / "rank00000.pt", weights_only=True)
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(ValueError, match="holds no rank"):
        Replay(bad)
    contents = [b"", b"text", good[:-900], good.replace(b"input", b"inpit", 1)]
    contents += [good[:2000] + bytes([good[2000] ^ 1]) + good[2001:]]
    for content in contents:
        (bad / "rank00000.pt").write_bytes(content)
        with pytest.raises(ValueError, match="of no recording, or damaged"):
            Replay(bad)
    for change in ({"version": 0}, {"records": [{"high": 1}]}, {"records": 3}, {"threads": "x"}):
        torch.save(file | change, bad / "rank00000.pt")
        with pytest.raises(ValueError, match=r"versions|do not fit together|damaged"):
            Replay(bad)
    with pytest.raises(SystemExit) as status:
        main([str(tmp_path / "missing")])
    assert status.value.code == 2
    # If some ranks did not write a recording, the command shows what the others wrote.
    torch.save(file | {"world": 3}, bad / "rank00000.pt")
    assert main([str(bad)]) == 0
    assert "ranks that did not write: [1, 2]" in capsys.readouterr().out


def test_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = net(), tmp_path / "run"
    with record(model, run / "recordings", layers="*") as recorder:
        step(model)
        recorder._before_optimizer()
        with torch.no_grad():
            model.layers[1].w3.weight[7, 9] = 1e30  # type: ignore[index,union-attr]
        step(model)
        recorder._before_optimizer()
    assert main([str(run / "recordings")]) == 1
    out = capsys.readouterr().out
    assert (
        "step 1: layers.1.w3: weight for output, grad_input, element [7, 9] on rank 0: 99.98 % "
        in out
    )
    assert "amax 1e+30 at [7, 9]" in out
    assert out.count("2^8 ") == 1
    assert main([str(run)]) == 1  # the folder of the run
    assert capsys.readouterr().out == out
    (first,) = (run / "recordings").iterdir()
    shutil.copytree(first, run / "recordings" / "step000010")
    shutil.copytree(first, run / "recordings" / "step000000.incomplete")
    assert main([str(run)]) == 1
    several = f"{first}\nnot shown: {run / 'recordings' / 'step000010'}\n"
    assert capsys.readouterr().out == out.replace(f"{first}\n", several)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert report([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert 'href="recordings/step000001"' in page
    assert "the amax is" in page.partition("Recordings")[2]


def test_errors(tmp_path: Path) -> None:
    model = net()
    for fields in ({"steps": 0}, {"steps": True}, {"max_bytes": 1.5}, {"layers": "layers.9"}):
        with pytest.raises(
            ValueError, match=r"record: \w+=.*(positive integer|Near names: layers)"
        ):
            record(model, tmp_path, **fields)  # type: ignore[arg-type]
    for fields in ({"layers": 3}, {"layers": [3]}, {"mesh": "dp"}):
        with pytest.raises(TypeError, match="record: "):
            record(model, tmp_path, **fields)  # type: ignore[arg-type]
    with (
        record(model, tmp_path) as recorder,
        pytest.raises(RuntimeError, match="already recording"),
    ):
        recorder.start()
    plain = record(nn.Linear(4, 4), tmp_path)
    with plain:
        plain._before_optimizer()
    assert plain.step == 0
    (tmp_path / "step000000.incomplete").mkdir()
    (tmp_path / "step000000.incomplete" / "rank00000.pt").write_text("of a killed run")
    record(model, tmp_path)
    assert not list((tmp_path / "step000000.incomplete").iterdir())
    with pytest.raises(RuntimeError, match="not recording; start it first"):
        recorder.stop()
    with record(model, tmp_path / "a") as one:  # blocks that overlap
        two = record(model, tmp_path / "b")
        two.start()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    two.stop()
    assert (torch._dynamo.eval_frame._stance.stance, one.step) == ("default", -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        record(model, tmp_path / "file")
