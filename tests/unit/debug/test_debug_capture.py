"""capture: what the files hold, which casts make one, limits and errors."""

import dataclasses
import errno
import os
import warnings
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from nets import Net
from reference import raised, reference_cast, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_level import E4M3, TwoLevel

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import Capture, CapturedCast, CastStats, capture, float8_stats, load_capture
from fp8_dist.debug import capturing as files


def net(recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(Net(layers=2), config=config)


def step(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    return x


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loaded(recorded: Capture) -> list[CapturedCast]:
    return [load_capture(path) for path in recorded.files]


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_file_holds_the_tensor_its_copy_and_scale(tmp_path: Path, format: str) -> None:
    model = net()
    where = {"fqn": "layers.0.w1", "operand": "input", "gemm": "output"}
    with capture(model, tmp_path / "new" / "folder", **where, format=format) as recorded:  # type: ignore[arg-type]
        x = step(model)
    (path,) = recorded.files
    suffix = {"torch": "pt", "safetensors": "safetensors"}[format]
    assert path.name == f"step000000-rank000-layers.0.w1-input-output+grad_weight-0.{suffix}"
    assert names(tmp_path / "new" / "folder") == [path.name]
    assert recorded.bytes == path.stat().st_size
    found = load_capture(path)
    expected, scale = reference_cast(x.reshape(16, 64), torch.float8_e4m3fn)
    assert same_bits(found.high, x.reshape(16, 64))
    assert torch.equal(found.qdata.double(), expected)
    assert found.scale.item() == scale
    others = (found.step, found.rank, found.fqn, found.operand, found.gemms, found.call)
    assert others == (0, 0, "layers.0.w1", "input", ("output", "grad_weight"), 0)
    assert (found.delayed, found.granularity) == (False, "tensor")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_folded", "mxfp8", "delayed"])
def test_a_file_has_the_statistics_of_its_cast(tmp_path: Path, recipe: str) -> None:
    model = net(recipe)
    with float8_stats(model) as stats, capture(model, tmp_path) as recorded:
        step(model)
    found = {(c.fqn, c.operand, c.gemms): c.stats() for c in loaded(recorded)}
    assert len(recorded.files) == len(found) >= 6 * 3
    rows = (row for row in stats.rows if isinstance(row, CastStats))
    assert found == {(row.fqn, row.operand, row.gemms): row for row in rows}


def test_patterns_choose_layers_operands_and_gemms(tmp_path: Path) -> None:
    model = net("rowwise")

    def chosen(**where: object) -> set[str]:
        with capture(model, tmp_path, **where) as recorded:  # type: ignore[arg-type]
            step(model)
        return {f"{c.fqn} {c.operand} {'+'.join(c.gemms)}" for c in loaded(recorded)}

    layers = {f"layers.{i}.w{j}" for i in (0, 1) for j in (1, 2, 3)}
    assert {each.split()[0] for each in chosen()} == layers
    # No gradient flows to the model's input: its two layers neither cast for it nor get one.
    assert len(chosen()) == 6 * 6 - 2 * 2
    assert chosen(fqn="layers.*.w[12]", operand="weight", gemm="output") == {
        f"layers.{i}.w{j} weight output" for i in (0, 1) for j in (1, 2)
    }
    assert chosen(fqn=["layers.0.w1", "*.1.w2"], gemm="grad_weight") == {
        f"{layer} {operand} grad_weight"
        for layer in ("layers.0.w1", "layers.1.w2")
        for operand in ("input", "grad_output")
    }
    assert len(chosen(operand="grad_*")) == 6 * 2 - 2


def test_steps_and_calls(tmp_path: Path) -> None:
    model = net()
    where = {"fqn": "layers.1.w2", "operand": "grad_output"}
    recorded = capture(model, tmp_path, **where, steps=[1, 7])  # type: ignore[arg-type]
    for _ in range(3):
        with recorded:
            step(model, 0)
            step(model, 1)
    with recorded.at(7):
        step(model)
        with pytest.raises(RuntimeError, match="this capture is already recording"):
            recorded.__enter__()
    step(model)
    assert [(c.step, c.call) for c in loaded(recorded)] == [(1, 0), (1, 1), (7, 0)]
    assert recorded.step == 7
    with capture(model, tmp_path, **where, steps=range(1, 10**12, 2)).at(3) as recorded:  # type: ignore[arg-type]
        step(model)
    assert [c.step for c in loaded(recorded)] == [3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_no_call(tmp_path: Path, reentrant: bool) -> None:
    model = net()
    y = torch.randn(2, 8, 64, requires_grad=True)
    with capture(model, tmp_path, fqn="layers.0.w2") as recorded:
        for layer in model.layers:  # type: ignore[union-attr]
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.sum().backward()
    calls = [(c.operand, c.call) for c in loaded(recorded)]
    assert calls == [("weight", 0), ("input", 0), ("grad_output", 0)]


def test_a_rank_that_is_not_chosen_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    with capture(model, tmp_path, ranks=[0, 3]) as recorded:
        step(model)
    assert recorded.files == []
    with capture(model, tmp_path, operand="weight", ranks=2) as recorded:
        step(model)
    assert {c.rank for c in loaded(recorded)} == {2}
    message = raised(ValueError, lambda: capture(model, tmp_path, ranks=[1, 4]))
    assert message == "capture: ranks=[1, 4]: there are ranks 0 to 3 only"


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    model = net()
    everything = capture(model, tmp_path / "all", operand="weight")
    with warnings.catch_warnings(), everything:
        warnings.simplefilter("error")
        step(model)
    sizes = [path.stat().st_size for path in everything.files]
    limit = sum(sizes[:3])
    recorded = capture(model, tmp_path / "some", operand="weight", max_bytes=limit)
    message = (
        r"capture: casts of step 0 were left out on rank 0, from layers.1.w1 weight on \(3 in all\): .* "
        rf"max_bytes={limit:,}\. Raise it"
    )
    with pytest.warns(UserWarning, match=message), recorded:
        step(model)
    assert [p.name for p in recorded.files] == [p.name for p in everything.files[:3]]
    assert recorded.bytes == limit
    with pytest.warns(UserWarning, match=r"casts of step 1 were left out.*\(6 in all\)"), recorded:
        step(model)
    assert (len(recorded.files), recorded.left_out) == (3, 9)


def test_a_disk_that_is_full_ends_the_capture_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = net()
    monkeypatch.setattr(os, "replace", full)
    message = (
        r"casts of step 0 were left out.*\(6 in all\): a file could not be written.*No space left"
    )
    with pytest.warns(UserWarning, match=message), capture(model, tmp_path, operand="input"):
        step(model)
    assert names(tmp_path) == []  # nor an unfinished one


def test_a_killed_run_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def replace(unfinished: Path, path: Path) -> None:
        seen.append((unfinished.name, names(tmp_path)))
        raise KeyboardInterrupt

    model = net()
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt), capture(model, tmp_path, operand="input"):
        step(model)
    ((unfinished, there),) = seen
    assert there == [unfinished]
    assert unfinished.startswith(".")
    assert not unfinished.endswith(".pt")


def test_the_copies_outlive_writes_into_the_tensor(tmp_path: Path) -> None:
    layer = convert_to_float8_training(nn.Linear(16, 16, bias=False))
    x = torch.randn(32, 16)[::2]
    with capture(layer, tmp_path, operand="input") as recorded:
        layer(x)
        x.zero_()
    (found,) = loaded(recorded)
    assert found.high.count_nonzero() == found.high.numel()
    assert found.fqn == "Float8Linear"


def test_names_that_a_file_name_can_not_hold_or_that_are_long(tmp_path: Path) -> None:
    model = nn.Sequential()
    odd = ["a/b", *("/" * 100 + str(i) for i in range(2))]  # the long ones differ at the end alone
    for name in odd:
        model.add_module(name, nn.Linear(16, 16))
    convert_to_float8_training(model)
    with capture(model, tmp_path) as recorded:
        model(torch.randn(2, 16)).sum().backward()
    assert recorded.left_out == 0
    assert "step000000-rank000-a%2Fb-input-output+grad_weight-0.pt" in names(tmp_path)
    assert len(set(recorded.files)) == 3 * 3
    assert max(len(path.name) for path in recorded.files) < 200
    assert {captured.fqn for captured in loaded(recorded)} == set(odd)


WRONG: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"fqn": "layers.7.w2"}, ValueError, "fqn='layers.7.w2' matches no converted layer. Near names: layers.1.w2, layers.0.w2"),
    ({"fqn": ["*.w1", "*.wo"]}, ValueError, "fqn='*.wo' matches no converted layer"),
    ({"operand": "inputs"}, ValueError, "operand='inputs' matches no operand. Near names: input"),
    ({"gemm": "grad"}, ValueError, "gemm='grad' matches no GEMM. Near names: "),
    ({"fqn": 3}, TypeError, "capture: fqn=3 must be a string or a list of strings; leave it out to take all"),
    ({"operand": []}, TypeError, "operand=[] must be a string or a list of strings"),
    ({"operand": "input", "gemm": "grad_input"}, ValueError, "no chosen layer casts input for grad_input. Their casts are: input for output, grad_weight; weight for output, grad_input; grad_output for grad_input, grad_weight"),
    ({"steps": -1}, ValueError, "steps=-1 must hold at least one number, and none below 0"),
    ({"steps": range(0)}, ValueError, "steps=range(0, 0) must hold at least one number"),
    ({"steps": "3"}, TypeError, "steps='3' must be an integer or a collection of integers"),
    ({"steps": True}, TypeError, "steps=True must be an integer"),
    ({"ranks": [0.5]}, TypeError, "ranks=[0.5] must be an integer"),
    ({"ranks": 1}, ValueError, "ranks=1: there are ranks 0 to 0 only"),
    ({"max_bytes": 0}, ValueError, "max_bytes=0 must be a positive integer"),
    ({"format": "numpy"}, ValueError, "format='numpy' must be one of ['torch', 'safetensors']"),
]  # fmt: skip


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    for where, kind, message in WRONG:
        assert message in raised(kind, partial(capture, model, tmp_path / "x", **where))
    message = raised(ValueError, lambda: capture(Net(), tmp_path))
    assert message.startswith("capture: the module has no converted layer; call convert_to_float8")
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    message = raised(ImportError, lambda: capture(model, tmp_path, format="safetensors"))
    assert "format='safetensors' needs the package safetensors: pip install" in message
    assert names(tmp_path) == []


def saved(tmp_path: Path, **changes: object) -> Path:
    """A file of a layer's input, with these things changed."""
    layer = convert_to_float8_training(nn.Linear(16, 16, bias=False))
    with capture(layer, tmp_path, operand="input") as recorded:
        layer(torch.randn(2, 16))
    changed = dataclasses.replace(load_capture(recorded.files[0]), **changes)  # type: ignore[arg-type]
    return files.save_capture(changed, tmp_path, "torch")


OTHERS: list[tuple[dict[str, object], str]] = [
    ({"operand": "bias"}, "operand='bias' is not what a capture holds"),
    ({"gemms": ()}, "gemms=[] is not what a capture holds"),
    ({"step": True}, "step=True is not what a capture holds"),
    ({"scheme": 3}, "scheme=3 is not what a capture holds"),
    ({"scheme": "quad()"}, "the scaling scheme quad() is not defined here"),
    ({"start": (0, -1)}, "start=[0, -1] is not what a capture holds"),
    ({"scales": ()}, "KeyError: 'scale0'"),
    ({"scales": (torch.ones(2),)}, "the scales are torch.float32 [2], not torch.float32 []"),
    ({"scales": (-torch.ones(()),)}, "a scale is -1; all of them must be positive"),
    (
        {"scheme": TwoLevel().key, "scales": (torch.ones(()), torch.zeros(2, 1).to(E4M3))},
        "a scale is 0; all of them must be positive",
    ),
    ({"qdata": torch.zeros(2, 16)}, "qdata, torch.float32 [2, 16], is no float8 copy of high"),
    ({"high": torch.zeros(3, 16)}, "is no float8 copy of high, torch.float32 [3, 16]"),
    ({"high": torch.eye(2, 16).to_sparse()}, "high is not a plain, contiguous tensor"),
    ({"high": nn.Parameter(torch.zeros(2, 16))}, "high is not a plain, contiguous tensor"),
]


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    refused = "holds no cast that fp8_dist.debug.capture saved, or is damaged: "
    for changes, reason in OTHERS:
        path = saved(tmp_path, **changes)
        message = raised(ValueError, partial(load_capture, path))
        assert message.startswith(f"{path} {refused}")
        assert reason in message, changes
    torch.save({"weight": torch.ones(2)}, path)
    assert refused in raised(ValueError, lambda: load_capture(path))
    torch.save(nn.ReLU(), path)  # would run code
    assert refused in raised(ValueError, lambda: load_capture(path))
    foreign = tmp_path / "x.safetensors"
    foreign.write_bytes(b"nothing")
    assert refused in raised(ValueError, lambda: load_capture(foreign))
    for missing in (tmp_path / "none.pt", tmp_path / "none.safetensors"):
        raised(FileNotFoundError, partial(load_capture, missing))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_damage_is_a_value_error(tmp_path: Path, format: files.FileFormat) -> None:
    """Lost ends, flipped bits; a safetensors file has no checksums of its values."""
    captured, random = load_capture(saved(tmp_path)), Random(0)
    path = files.save_capture(captured, tmp_path, format)
    content, refused, texts = path.read_bytes(), 0, ""
    for _ in range(100):
        place = random.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << random.randrange(8)])
        rest = random.choice([b"", flipped + content[place + 1 :]])
        path.write_bytes(content[:place] + rest)
        try:
            found = load_capture(path)
        except ValueError as error:
            refused, texts = refused + 1, texts + str(error)
            continue
        if format == "torch":  # what was hit is padding
            for name in ("high", "qdata", "scale"):
                assert same_bits(getattr(found, name), getattr(captured, name))
    assert refused > 50
    assert ("the checksum of a part is wrong" in texts) == (format == "torch")
