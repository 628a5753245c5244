"""The stages of `scripts.prove` that measure and train, on CPUs and on the faked device."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from scripts.common.candidates import TORCHAO
from scripts.common.corpus import Corpus, load_packages
from scripts.prove import checks, speed, training
from scripts.prove.results import Case, Result, append, read
from scripts.prove.runner import Place
from scripts.prove.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]

needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)


def run(words: Iterable[str], folder: Path, program: str, *stages: str) -> dict[str, list[Result]]:
    """Run stages after a program has changed their modules; return the results by stage."""
    path = folder / "prove.py"
    ends = f"sys.exit(main(['--only', *{stages!r}, '--out', {str(folder / 'out')!r}]))"
    begins = "import sys\nfrom scripts.prove import speed, training"
    path.write_text(f"{begins}\nfrom scripts.prove.__main__ import main\n{program}\n{ends}\n")
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    command = [sys.executable, "-m", *(word.format(path=path) for word in words)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    results: dict[str, list[Result]] = {}
    for result in read(folder / "out" / "results.jsonl"):
        results.setdefault(result.stage, []).append(result)
    assert {*results} == {*stages}, done.stdout + done.stderr
    return results


def errors(results: list[Result]) -> dict[str, str]:
    return {result.name: result.error for result in results if result.error}


RANKS = "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "{path}"
REHEARSAL = "fake_cuda.rehearsal", "-c", "exec(open('{path}').read())"
QUICK = "speed.WARM_UP = speed.READINGS = speed.STEPS = 1"


def test_steps_and_collectives_of_two_ranks(tmp_path: Path) -> None:
    eager = "build = speed.build\nspeed.build = lambda *of, compiled, **how: build(*of, **how)"
    results = run(RANKS, tmp_path, f"{QUICK}\n{eager}", "time")["time"]
    assert errors(results) == {}
    first = [result for result in results if result.rank == 0]
    shapes = [f"debug, 2 blocks, {mesh}, 64 tokens" for mesh in ("FSDP2 2", "FSDP2 1 x TP 2")]
    wires = ["tensorwise, float8 gradients"], ["tensorwise, float8 sums"]
    names = []
    for shape, coded in zip(shapes, wires, strict=True):
        compiled = ["bf16", "tensorwise", "rowwise_folded", *coded]
        names += [f"{shape}, {name}, compiled" for name in compiled]
        names += [f"{shape}, {name}, eager" for name in ("bf16", "tensorwise")]
        names += [f"{shape}, bf16, compiled, again"]
    found = [result.name for result in first if result.flops]
    assert found == names
    assert first[3].recipe == "tensorwise, float8 gradients"
    assert {result.tokens for result in first if result.shape == shapes[1]} == {32}
    moved = [result for result in first if not result.flops]
    assert first.index(moved[0]) == 7
    assert [result.name.split(", ", 2)[2] for result in moved] == [
        "all-gather, bfloat16",
        "all-gather, uint8",
        "reduce-scatter, float32",
        "reduce-scatter, bfloat16",
        "all-to-all, uint8",
    ]
    weights = speed.block_weights("debug")
    assert [result.bytes / weights for result in moved] == [1, 0.5, 2, 1, 0.5]
    assert all(len(result.readings) == 1 for result in results)


IMPORTS = "from scripts.prove import checks, run, speed, training"


def test_optional_packages_are_not_needed() -> None:
    """Stages other than `tests` need torch, numpy, psutil and tqdm alone."""
    absent = ["accelerate", "jinja2", "matplotlib", "peft", "pytest", "torchao", "transformers"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); {IMPORTS}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_imports_use_no_gpu() -> None:
    """The ranks of the launcher import the stages, and could not fork after they used a GPU."""
    program = "import torch; torch.cuda.is_available, torch.cuda._lazy_init = (lambda: True), exit"
    program += f"; torch.cuda.device_count = lambda: 1; {IMPORTS}; print('imported')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "imported\n"


def test_losses_of_two_ranks(tmp_path: Path) -> None:
    """Both curves see the same tokens; the second one takes the steps of the first."""
    program = "training.MOST_TEXT['cpu'], training.CALIBRATED = 2**12, 1"
    results = run(RANKS, tmp_path, program, "loss", "curve")
    assert errors(results["loss"]) == errors(results["curve"]) == {}
    by_name = {result.name: result for result in results["loss"] if result.rank == 0}
    assert [*by_name] == [*training.RUNS]
    losses = {name: result.values["loss"] for name, result in by_name.items()}
    assert all(3 < loss < 4 for loss in losses.values())
    assert len({*losses.values()}) == 5
    coded = by_name["tensorwise, float8 gradients"]
    assert coded.values["difference"] == losses[coded.name] / losses["bf16"] - 1
    assert (coded.recipe, coded.shape) == (coded.name, "debug, 8 steps of 8 x 64 tokens")
    assert by_name["bf16, seed 1"].recipe == "bf16"
    bf16, float8 = (result for result in results["curve"] if result.rank == 0)
    assert (bf16.recipe, float8.recipe) == ("bf16", "tensorwise")
    assert bf16.values["steps"] == float8.values["steps"] == 2**12 // (4 * 64)
    assert len(bf16.readings) == len(bf16.values["losses"]) == 16
    assert abs(bf16.values["losses"][0] / float8.values["losses"][0] - 1) < 1e-3
    assert abs(float8.values["difference"]) < 0.1
    assert re.match(r"4,096 bytes of \d+ files of .*, SHA-256 [0-9a-f]{16}$", bf16.note)


def test_curves_fit_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If steps become slower, the curve is cut off, and not compared at its end."""
    clock, path, slower = 0.0, tmp_path / "results.jsonl", 1.0
    rates = {"bf16": 1.0, "tensorwise": 2.0}

    def trainer(recipe: str, words: str, *_: Any) -> Any:
        args = {"steps": int(words.split()[1]), "batch_size": 4, "seq_len": 64, "model": "debug"}
        return SimpleNamespace(recipe=recipe, args=SimpleNamespace(**args))

    def trained(run: Any, steps: range) -> tuple[float, float]:
        nonlocal clock
        factor = slower if run.args.steps > 100 and run.recipe != "bf16" else 1.0
        clock += len(steps) * rates[run.recipe] * factor
        return 1 / steps[-1], rates[run.recipe] * factor

    def run_cases(cases: Iterable[Case]) -> None:
        for case in cases:
            about = {"stage": "curve", "name": case.name}
            append(path, replace(case.known, **about, **case.measure()))

    worker: Any = SimpleNamespace(results=path, stage="curve", run=run_cases)
    monkeypatch.setattr(training, "trainer", trainer)
    monkeypatch.setattr(training, "trained", trained)
    monkeypatch.setattr(training, "everyone", lambda value: [value])
    monkeypatch.setattr(training, "monotonic", lambda: clock)
    monkeypatch.setattr(training, "load_packages", lambda most: Corpus(bytearray(10**6), "text"))
    place = Place(torch.device("cpu"), 1, 1, 1000.0)
    training.curve(worker, place)
    bf16, float8 = read(path)
    # 60 s for the calibration, and as much for starting again; 3 s per step of both.
    assert bf16.values["steps"] == float8.values["steps"] == (900 - 2 * 60) // 3
    assert (float8.values["points"], float8.values["difference"]) == (130, 0)
    path.unlink()
    clock, slower = 0.0, 2.0
    training.curve(worker, place)
    bf16, float8 = read(path)
    assert 950 < clock < 1000
    assert (bf16.values["points"], float8.values["points"]) == (130, 82)
    assert "difference" not in float8.values


def test_the_most_wanted_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have as many blocks as fit; where none fits, they are left out."""
    gigabytes, cases = 80, list[Case]()
    properties = lambda device: SimpleNamespace(total_memory=1e9 * gigabytes)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(speed, "everyone", lambda value: [value])
    worker: Any = SimpleNamespace(run=lambda some: cases.extend(some))
    place = Place(torch.device("cuda"), 8, 8, 300.0)
    speed.time(worker, place)
    names = [case.name for case in cases]
    assert len({*names}) == len(names)
    shape = "8b, 8 blocks, FSDP2 8, 8,192 tokens"
    compiled = ["bf16", *TORCHAO[:1], "tensorwise", "rowwise_folded"]
    compiled += ["tensorwise, float8 gradients"]
    steps = [f"{shape}, {name}, compiled" for name in compiled]
    assert names[: len(steps) + 1] == [*steps, f"{shape}, bf16, compiled, again"]
    tensor_parallel = "70b, 4 blocks, FSDP2 4 x TP 2, 8,192 tokens"
    assert f"{tensor_parallel}, tensorwise, float8 gradients and sums, compiled" in names
    graph = [case for case in cases if case.name.endswith(", graph")]
    assert len(graph) == 2 * 12
    assert graph[0].known.compiled
    assert graph[0].known.shape == "8b, 8 blocks, FSDP2 8, 2,048 tokens"
    assert names[-1] == "1b, 16 blocks, FSDP2 4 x TP 2, 8,192 tokens, tensorwise, eager"
    gigabytes = 24
    found = {(s.model, s.tokens): s.blocks for s in speed.settings(place._replace(ranks=1))}
    assert found == {("8b", 8192): 2, ("8b", 2048): 4, ("1b", 2048): 15, ("1b", 8192): 8}


def test_cases_of_bits_on_nodes_of_eight_gpus() -> None:
    """Sums and compiled cases come first; the time follows from the number of cases."""
    counts, seconds = {}, {}
    for ranks in (1, 2, 8, 16):
        place = Place(torch.device("cuda"), ranks, min(ranks, 8), 0.0)
        cases = checks.cases_of_bits(place)
        assert [*cases] == ["sum", "compiled", "eager"]
        assert len({case.name for of in cases.values() for case in of}) == sum(
            map(len, cases.values())
        )
        counts[ranks] = [len(of) for of in cases.values()]
        seconds[ranks] = checks.seconds_of_bits(place)
    assert counts == {1: [0, 7, 7], 2: [3, 7, 20], 8: [3, 7, 34], 16: [3, 7, 27]}
    assert seconds[8] - seconds[16] == 7 * checks.SECONDS["eager"]
    assert STAGES["bits"].patience == STAGES["bytes"].patience == 150  # with cold caches
    assert STAGES["facts"].seconds == 60
    assert "one sum on 1, 2, 4, 8 ranks, tensorwise, float8" in [c.name for c in cases["sum"]]


@pytest.mark.full
def test_the_time_of_bits_is_rehearsed() -> None:
    """(That it suffices is no test, because other load would slow the parts down.)"""
    command = [sys.executable, "-m", "tests.support.rehearse_proof", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    place = Place(torch.device("cuda"), 2, 2, 0.0)
    for kind, cases in checks.cases_of_bits(place).items():
        names = "".join(f"\n  {case.name}" for case in cases)
        assert f"2 GPUs, {kind}:{names}\n" in done.stdout
    *_, line = done.stdout.splitlines()
    allowed = STAGES["bits"].seconds + checks.seconds_of_bits(place)
    assert re.fullmatch(rf"\|\s+2 \|(.* s \|){{3}}( +\d+ \|){{2}} +{allowed:.0f} \|", line), line


def test_exposed_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.covered([]) == 0
    assert speed.covered([(4, 5), (0, 3), (1, 2), (2, 4)]) == 5
    kernels = [("gemm", 0, 4), ("ncclDevKernel_AllGather", 2, 6), ("gemm", 8, 10)]
    kernels += [("ncclDevKernel_ReduceScatter", 8, 9)]
    events = [
        SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=1e3 * start, end=1e3 * end),
            device_type=device,
            is_user_annotation=annotates,
        )
        for name, start, end, device, annotates in [
            *((*kernel, DeviceType.CUDA, False) for kernel in kernels),
            ("nccl:all_gather", 0, 99, DeviceType.CUDA, True),
            ("aten::mm", 0, 99, DeviceType.CPU, False),
        ]
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profile = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profile))
    assert speed.profiled(list) == {"busy ms": 4, "communication ms": 2.5, "exposed ms": 1}
    events.clear()
    assert speed.profiled(list) == {}


PLANTED = f"""{QUICK}
import contextlib, types
from scripts.prove import checks
checks.OURS, checks.PACKED, checks.SUMS = ("tensorwise",), (), {{"tensorwise": "float8"}}
# Values mean nothing.
recorder = types.SimpleNamespace(write=lambda: None)
checks.record = lambda *_, layers: contextlib.nullcontext(recorder)
checks.replayed, checks.digest = lambda folder: (1, ""), lambda model: "none"
build = speed.build

def builds(name, *of, compiled, **how):
    assert name != "rowwise_folded", "planted"
    return build(name, *of, compiled=compiled and name.endswith("tensorwise"), **how)

speed.build = builds
speed.ORDER, speed.TORCHAO = (("debug", 64),), speed.TORCHAO[:1]
for options in (training.LOSS, training.CURVE, training.SIZES):
    options["cuda"] = options["cpu"]
training.MOST_TEXT["cuda"], training.CALIBRATED = 2**11, 1
training.RUNS = {{"bf16": "", "bf16, seed 1": "--seed nothing", "tensorwise": ""}}
"""


@needs_cpu_build
def test_a_rehearsal(tmp_path: Path) -> None:
    """Run each stage with one rank. A case that fails costs no other case its result."""
    stages = "facts", "bits", "bytes", "time", "loss", "curve", "experts"
    results = run(REHEARSAL, tmp_path, PLANTED, *stages)
    names = {stage: [result.name for result in results[stage]] for stage in stages}
    assert errors(results["facts"]) == errors(results["bytes"]) == errors(results["bits"]) == {}
    assert names["bits"][:2] == [f"FSDP2 1, tensorwise{end}" for end in (", compiled", "")]
    assert len(names["bytes"]) == 4
    shape = "debug, 2 blocks, FSDP2 1, 64 tokens"
    compiled = ["bf16", *TORCHAO[:1], "tensorwise", "rowwise_folded"]
    modes = [f"{name}, {mode}" for mode in ("graph", "eager") for name in ("bf16", "tensorwise")]
    steps = [*(f"{name}, compiled" for name in compiled), *modes, "bf16, compiled, again"]
    assert names["time"] == [f"{shape}, {step}" for step in steps]
    planted = {f"{shape}, rowwise_folded, compiled": "AssertionError: planted"}
    assert errors(results["time"]) == planted
    assert {*errors(results["loss"])} == {"bf16, seed 1"}
    assert names["loss"] == ["bf16", "bf16, seed 1", "tensorwise"]
    assert [result.values["steps"] for result in results["curve"]] == [8, 8]
    assert {result.recipe for result in results["experts"]} >= {"bf16", "tensorwise"}
    assert errors(results["experts"]) == {}
    assert results["experts"][0].values["host ms"] > 0


TESTS = """
import os, pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2

@pytest.mark.skip
def test_skips():
    pass

def test_crashes():
    os._exit(9)
"""


def test_tests_are_results(tmp_path: Path) -> None:
    """A test that crashes its process is an error. Tests that have begun are not run again."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_some.py").write_text(TESTS)
    results, begun = tmp_path / "results.jsonl", tmp_path / "begun"
    program = f"""
from pathlib import Path
from scripts.prove import tests
from scripts.prove.results import Worker

tests.ROOT = Path({str(tmp_path)!r})
names = ["tests/gpu/test_some.py::test_" + n for n in ("passes", "fails", "skips", "crashes")]
for some in (names[:1], names):
    files = Path({str(results)!r}), Path({str(begun)!r})
    tests.run(Worker("tests", 0, *files, frozenset(some), print), None)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {r.name.rpartition("_")[2]: (r.error, r.note) for r in read(results)}
    assert "crashed while running" in found.pop("crashes")[0]
    assert found == {"fails": ("assert 1 == 2", ""), "skips": ("", "skipped")}
    assert {*begun.read_text().split()} == {r.name for r in read(results)}


def test_packages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    texts = {"stdlib/b": "two", "stdlib/a": "one", "stdlib/tests/c": "no", "purelib/a": "two"}
    for name, text in (texts | {"purelib/b": "three"}).items():
        (tmp_path / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    corpus = load_packages(100)
    assert corpus.text == b"onetwothree"
    assert corpus.source.startswith("3 files")
    assert load_packages(5).text == b"onetw"
