"""python -m fp8_dist.doctor: what it says about the machine and about models."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8_dist
from fp8_dist import Float8LinearConfig, doctor, env, gemm_table
from fp8_dist.doctor import machine
from fp8_dist.gemm_table import TABLE
from fp8_dist.linear.checks import check_alignment

ROOT = Path(__file__).parents[2]
SIZES = (16, 24, 31, 48, 50, 64, 100)


def layers_of_shapes(*shapes: tuple[int, int]) -> nn.Module:
    return nn.ModuleDict({f"{out}x{in_}": nn.Linear(in_, out) for out, in_ in shapes})


def model() -> nn.Module:
    block = {"up": (4096, 8192), "down": (8192, 4096), "small": (4096, 64), "odd": (48, 4100)}
    blocks = [
        nn.ModuleDict({name: nn.Linear(*shape) for name, shape in block.items()}) for _ in range(2)
    ]
    head = nn.Linear(4096, 1000, bias=False)
    return nn.ModuleDict(
        {"embedding": nn.Embedding(1000, 4096), "layers": nn.ModuleList(blocks), "lm_head": head}
    )


def reads_values() -> nn.Module:
    return nn.Sequential(nn.Linear(16, int(torch.tensor(32).item())))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def tied() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Module(), "to_words": nn.Linear(32, 64)})
    model["words"].register_parameter("weight", model["to_words"].weight)
    return model


def layers_of_all_sizes() -> nn.Module:
    return layers_of_shapes(*product(SIZES, SIZES))


def needs_an_argument(size: int) -> nn.Module:
    return nn.Linear(size, size)


A_MODEL = nn.Linear(16, 16)


def no_model() -> int:
    return 1


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert doctor.main(arguments) == 0
    said = capsys.readouterr()
    progress = [f"building and converting {arguments[1]}"] if "--model" in arguments else []
    assert said.err.splitlines() == progress
    return said.out


def report_of(capsys: pytest.CaptureFixture[str], function: str, *arguments: str) -> str:
    """The part of the report about the model."""
    text = report(capsys, "--model", f"{__name__}:{function}", *arguments)
    return text[text.index("\nmodel ") + 1 :]


A100 = SimpleNamespace(name="A100", major=8, minor=0)
L40 = SimpleNamespace(name="L40", major=8, minor=9)
B200 = SimpleNamespace(name="B200", major=10, minor=0)
H100 = SimpleNamespace(name="H100", major=9, minor=0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Simulate a machine with an A100 and an H100, and torch's build for CUDA."""
    devices = [A100, H100]

    def capability(device: torch.device) -> tuple[int, int]:
        return devices[device.index].major, devices[device.index].minor

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    gemm_table._has_gemm.cache_clear()
    yield devices
    gemm_table._has_gemm.cache_clear()


@pytest.mark.usefixtures("gpus")
def test_gpus_multiply_natively_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    gemm_table._has_gemm.cache_clear()
    text = report(capsys)
    assert "cpu: emulated in a wider type, as on every CPU\n" in text
    assert "cuda:0: A100, compute capability 8.0: emulated in a wider type (native from" in text
    native = "cuda:1: H100, compute capability 9.0: native; of the recipes with scales of blocks: "
    assert f"{native}none; experts: in float8\n" in text  # GEMMs of blocks need CUDA 12.9
    gemm_table._has_gemm.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert f"{native}blockwise; experts: in float8\n" in report(capsys)


def test_every_gemm_of_a_gpu_is_listed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[SimpleNamespace],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpus[:] = L40, B200
    gemm_table._has_gemm.cache_clear()
    text = report(capsys)
    assert (
        "L40, compute capability 8.9: native; of the recipes with scales of blocks: none; " in text
    )
    assert "blocks: none; experts: one after the other\n" in text
    assert "blocks: mxfp8; experts: in bf16\n" in text
    _, _, table = text.partition("\nGEMMs that torch has, by compute capability or AMD's name\n")
    table, _, _ = table.partition("\n\n")
    rows = [row for row in table.splitlines() if row.startswith("    ")]
    assert len(rows) == len(TABLE)
    assert "    10.*: not yet (not up to torch 2.14.1; pytorch#187095, pytorch#188063)" in rows
    assert "    12.*: from torch 2.14 on, CUDA 13.0 (cuBLASLt; pytorch#198126)" in rows
    assert any(row.startswith("    9.*: from torch 2.11 on, not CUDA 12.9 (") for row in rows)


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    for cuda, told in ((None, "CPUs\n"), ("13.0", "CUDA 13.0, but finds no device\n")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert f"  no GPU: torch is built for {told}" in report(capsys)


def test_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"torch>={machine.OLDEST_TORCH}"]
    text = report(capsys)
    assert text.startswith(f"fp8_dist {fp8_dist.__version__}, Python 3.")
    assert f"torch {torch.__version__}: supported (2.11 or later)\n" in text
    assert "  gloo: available\n" in text
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "packages_distributions", lambda: {"triton": ["torch"]})
    assert f"  Triton: {version('torch')}, fused kernels\n" in report(capsys)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.1+cpu"))
    text = report(capsys)
    assert "torch 2.10.1+cpu: not supported: fp8_dist needs 2.11 or later\n" in text
    assert "  Triton: not installed; GPUs cast with torch's operators" in text


def test_switches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(re.findall(r"\bFP8_DIST_[A-Z_]+", env.__doc__ or "")) == set(env.SWITCHES)
    for name in env.set_switches():
        monkeypatch.delenv(name)
    assert "FP8_DIST_* switches\n  none is set\n\nthis machine: " in report(capsys)
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "maybe")
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNEMENT", "1")
    text = report(capsys)
    assert "  FP8_DIST_STRICT_ALIGNMENT=maybe\n" in text
    assert "  FP8_DIST_STRICT_ALIGNEMENT=1: not a switch of the library\n" in text
    assert "  FP8_DIST_STRICT_ALIGNMENT='maybe': expected one of" in text


def test_the_report_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = report_of(capsys, "model", "--tp", "2")
    head, _, rest = text.partition("\nfloat8 layers that ")
    assert head.splitlines()[:3] == [
        "model test_doctor:model, built on the meta device",
        'recipe tensorwise, enable_fsdp_float8_all_gather="auto"',
        "module_filter_fn=skip_head(model)",
    ]
    assert "conversion_summary: 6 of 9 weights in float8, 94.0% of 143,360,520 parameters" in head
    assert_expected_inline(
        rest,
        """\
auto_filter("tensorwise", tp_size=2) would leave out (a GPU refuses dims that are not multiples of 16, unless pad_inner_dim=True)
  layers.*.small (2), 64 x 4096: out <= 1024 and in <= 4096

large enough to gain: 4 of 6 float8 layers (93.6% of the parameters)
the 6 linear layers: at the rates of an H100 they gain from about 9,900 tokens per rank and micro-batch on if compiled, 17,300 in eager code (more under FSDP2)

this machine: float8 runs on this CPU, but emulated: for tests, not for speed.
the model: On an H100 it gains from about 9,900 tokens per micro-batch on, if compiled (FSDP2 needs more). Next: add --tokens N with yours.
""",
    )


def verdicts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The last two lines of a report: on the machine, and on the model."""
    *_, empty, machine, model = report(capsys, *arguments).splitlines()
    assert empty == ""
    return machine.partition(": ")[2], model.partition(": ")[2]


ON_A_CPU = "float8 runs on this CPU, but emulated: for tests, not for speed."


def test_verdicts_on_machines(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[SimpleNamespace],
) -> None:
    step = "Next: --model package.module:function says what it would gain on an H100."

    def on(*devices: SimpleNamespace) -> str:
        gemm_table._has_gemm.cache_clear()
        gpus[:] = devices
        machine, model = verdicts(capsys)
        assert model == f"none is given. {step}"
        return machine

    assert on() == ON_A_CPU
    assert on(A100) == "float8 is only emulated on this GPU, slower than bf16: train in bf16 here."
    assert on(A100, H100) == "float8 runs natively on 1 of 2 GPUs."
    assert on(H100) == "float8 runs natively on 1 of 1 GPUs."
    tried = "float8 was never tried, but should run natively on 1 of 1 GPUs."
    assert on(L40) == tried
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert on(H100) == "float8 runs natively on 1 of 1 GPUs: install Triton for fused casts."
    assert on(A100).startswith("float8 is only emulated")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.1+cpu"))
    assert on(H100) == "float8 does not run here: install torch 2.11 or later."


def test_verdicts_on_models(capsys: pytest.CaptureFixture[str]) -> None:
    def of(function: str, *arguments: str) -> str:
        machine, model = verdicts(capsys, "--model", f"{__name__}:{function}", *arguments)
        assert machine == ON_A_CPU
        return model

    assert_expected_inline(
        "\n".join(
            [
                of("tied"),
                of("small", "--tokens", "8192"),
                of("model"),
                *(of("model", "--tokens", tokens) for tokens in ("4900", "5000")),
            ]
        ),
        """\
Nothing of it is converted. Next: change what is refused, or stay in bf16.
Its float8 layers are all too small to gain speed: stay in bf16, unless sending costs more (python -m scripts.plan counts what a step sends).
On an H100 it gains from about 5,000 tokens per micro-batch on, if compiled (FSDP2 needs more). Next: add --tokens N with yours.
On an H100 it is slower than in bf16 with 4,900 tokens. Next: use 5,000 or more per micro-batch, or CUDA graphs, or stay in bf16.
On an H100 it gains with 5,000 tokens, if compiled (FSDP2 needs more). Next: torch.compile each block, and time it beside bf16.""",
    )


@pytest.mark.usefixtures("gpus")
def test_verdicts_on_a_machine_and_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = verdicts(capsys, "--model", f"{__name__}:model", "--tokens", "16384")
    assert found == (
        "float8 runs natively on 1 of 2 GPUs.",
        "On an H100 it gains with 16,384 tokens, if compiled (FSDP2 needs more). "
        "Next: torch.compile each block, and time it beside bf16.",
    )


def test_the_help_says_what_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        doctor.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a function without arguments that returns the model: an nn.Module, not conv" in said


def test_a_model_that_cannot_be_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    text = report_of(capsys, "reads_values")
    assert "built on the CPU; on the meta device: RuntimeError: Tensor.item()" in text
    assert "1 of 1 weights in float8" in text


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_alignment_is_that_of_the_layers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """The report lists the layers that a rank refuses, if rows or if columns are divided."""
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "1")

    def refused(weight: torch.Tensor) -> bool:
        try:
            check_alignment(Float8LinearConfig(), weight, torch.device("cpu"), "layer")
        except ValueError:
            return True
        return False

    expected = {
        f"{out}x{in_}"
        for out, in_ in product(SIZES, SIZES)
        for dim in (0, 1)
        if any(map(refused, torch.empty(out, in_, device="meta").chunk(tp, dim)))
    }
    text = report_of(capsys, "layers_of_all_sizes", "--tp", str(tp))
    assert expected
    assert set(re.findall(r"^  (\d+x\d+)\b.* is not a multiple", text, re.MULTILINE)) == expected


def test_a_refusal_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    text = report_of(capsys, "tied")
    assert "refused: convert_to_float8_training: enable_fsdp_float8_all_gather gathers" in text
    assert "to_words.weight is also words.weight" in text


def test_layers_that_stay_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, "--model", f"{__name__}:model", "--skip", "up", "1.down")
    assert "\nmodule_filter_fn=skip_head(model, 'up', '1.down')\n" in text
    assert "large enough to gain: 1 of " in text
    text = report(capsys, "--model", f"{__name__}:model", "--skip", "upp")
    assert "refused: skip_head" in text
    assert "did you mean 'up'" in text


WRONG = {
    "--model test_doctor:nothing": "it can't be imported: AttributeError: module 'test_doctor'",
    "--model no_such_module:f": "it can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
    "--model 9b": "error: --model 9b: it is not MODULE:FUNCTION",
    "--model test_doctor:A_MODEL": "--model test_doctor:A_MODEL: it is a Linear, not a function",
    "--model test_doctor:no_model": "it returned an int, not an nn.Module",
    "--model test_doctor:needs_an_argument": "the function raised TypeError: needs_an_argument() mi",
    "--tp 2": "--recipe, --tp, --tokens and --skip describe the use of a model: give --model",
    "--model test_doctor:model --tp 0": "argument --tp: '0' is not a positive number",
    "--tokens 8192": "--recipe, --tp, --tokens and --skip describe the use of a model: give --model",
    "--skip up": "--recipe, --tp, --tokens and --skip describe the use of a model: give --model",
    "--model test_doctor:model --recipe int4": "argument --recipe: invalid choice: 'int4'",
    "--verbose": "unrecognized arguments: --verbose",
}


def test_wrong_calls(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in WRONG.items():
        with pytest.raises(SystemExit) as stopped:
            doctor.main(arguments.split())
        said = capsys.readouterr()
        assert (stopped.value.code, said.out) == (2, "")
        assert "python -m fp8_dist.doctor: error: " in said.err
        assert message in said.err
