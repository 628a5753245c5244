"""How a Triton kernel is launched: which block sizes are measured, when, and for what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import launch
from scripts.bench.gpu_operators import Call, operator_calls, tuned_kernels
from scripts.bench.gpu_smoke import check_same, launched, portable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _fill(out, size, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + n, tl.full([BLOCK], BLOCK, tl.int32), mask=n < size)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The results of measurements, of which each makes the next one shorter."""
    times: list[float] = []

    def measure(call: Callable[[], None], quantiles: list[float]) -> list[float]:
        call()
        times.append(1 / (1 + len(times)))
        return [times[-1]] * len(quantiles)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return times


def run(kernel: launch.Tuned, key: Any) -> int:
    """The block size of a launch."""
    out = torch.zeros(10, dtype=torch.int32, device=DEVICE)
    kernel(lambda chosen: (triton.cdiv(10, chosen["BLOCK"]),), key, DEVICE, out, 10)
    assert (out == out[0]).all()
    return int(out[0])


def make() -> launch.Tuned:
    return launch.Tuned(_fill, (launch.blocks(4, BLOCK=4), launch.blocks(4, BLOCK=8)))


def test_the_fastest_is_found_once_for_each_key_but_not_while_a_graph_is_captured(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make()
    assert [run(kernel, 0), run(kernel, 0), len(measured)] == [8, 8, 2]
    assert [run(kernel, 1), len(measured)] == [8, 4]
    kernel = make()
    measured.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(kernel, 0) == 4
    assert not measured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert run(kernel, 0) == 8  # what served meanwhile is not remembered
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(kernel, 0) == 8
    assert len(measured) == 2


def calls_of_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Call]:
    """A call of an operator for each kernel that has several choices."""
    found: dict[str, Call] = {}
    now: list[Call] = []

    def note(tuned: launch.Tuned, *args: Any, **constants: Any) -> None:
        if len(tuned.configs) > 1:
            found.setdefault(tuned.kernel.__name__, now[0])

    with monkeypatch.context() as patched:
        patched.setattr(launch.Tuned, "__call__", note)
        for each in operator_calls(DEVICE, odd=True, shape=(34, 40)).values():
            now[:] = [each]
            launched(each)
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_measuring_the_choices_of_a_kernel_leaves_its_results_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton measures them on the arguments of a call. Each is called once, then ten times more."""
    calls = calls_of_kernels(monkeypatch)
    several = [each for each in tuned_kernels() if len(each.configs) > 1]
    assert calls.keys() == {each.kernel.__name__ for each in several}
    launches = 0

    def measure(call: Callable[[], None], quantiles: list[float]) -> list[float]:
        nonlocal launches
        launches += 1
        call()
        return [1.0] * len(quantiles)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for each in several:
        monkeypatch.setattr(each, "_fastest", {})
    for each in calls.values():
        expected = portable(each)
        for _ in range(11):
            check_same(launched(each), expected)
    assert launches >= sum(len(each.configs) for each in several)


def test_without_memory_to_measure_the_first_choice_is_kept(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(call: Callable[[], None], quantiles: list[float]) -> list[float]:
        measured.append(0.0)
        raise torch.OutOfMemoryError("no 256 MB")

    monkeypatch.setattr(launch, "measure", measure)
    kernel = make()
    assert [run(kernel, 0), run(kernel, 0)] == [4, 4]
    assert measured == [0.0]


class Found:
    """A Triton kernel whose launches say who found the compiled kernel: Triton, or nobody."""

    arg_names = ("x", "numbers", "optional", "FLAG", "BLOCK")

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> "Found":
        given = args, *(constants[name] for name in ("FLAG", "BLOCK")), grid(constants)
        self.launched.append(("Triton", *given))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launched.append(("kept", args[:3], *args[3:], grid))


@pytest.fixture
def found() -> launch.Tuned:
    """A tuned kernel whose block size is chosen."""
    kernel = launch.Tuned(Found(), (launch.blocks(4, BLOCK=8),))
    kernel._fastest["key"] = {"BLOCK": 8, "num_warps": 4}
    return kernel


def who(
    kernel: launch.Tuned, x: torch.Tensor, size: int = 10, flag: object = 1, count: int = 3
) -> str:
    """Who found the kernel of a launch, whose arguments are checked."""
    arguments = x, (size, x.t()), None
    kernel(lambda chosen: (count, chosen["BLOCK"]), "key", x.device, *arguments, FLAG=flag)
    name, (first, numbers, optional), *constants, grid = kernel.kernel.launched[-1]
    assert first is x
    assert numbers[0] == size
    assert [optional, *constants] == [None, flag, 8]
    assert grid == ((count, 8) if name == "Triton" else (count, 8, 1))
    return str(name)


def test_a_compiled_kernel_is_launched_again_for_arguments_of_the_same_kind(
    found: launch.Tuned,
) -> None:
    x, another = torch.zeros(2, 64, 16, dtype=torch.bfloat16)
    others = [
        {"x": x.half()},
        {"x": x.view(-1)[1:14].view(1, 13)},  # not aligned
        {"x": x, "size": 11},
        {"x": x, "size": 16},
        {"x": x, "flag": 2},
    ]
    for arguments in ({"x": x}, *others):
        assert [who(found, **arguments) for _ in range(3)] == ["Triton", "kept", "kept"]  # type: ignore[arg-type]
    assert who(found, another, count=4) == "kept"  # in a grid of its own
    # It is found again after so many others that not all are kept.
    for size in range(100, 100 + launch._KEPT):
        who(found, x, size)
    assert len(found._compiled) < launch._KEPT
    assert [who(found, x) for _ in range(2)] == ["Triton", "kept"]


def test_a_kernel_is_not_kept_before_its_block_size_is_chosen(
    found: launch.Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    chosen = found._fastest.pop("key")
    x = torch.zeros(3, 4)
    assert [who(found, x) for _ in range(3)] == ["Triton"] * 3
    found._fastest["key"] = chosen
    assert [who(found, x) for _ in range(2)] == ["Triton", "kept"]


def test_the_instruction_is_used_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    cuda = torch.device("cuda", 0)
    for capability, formats in (((8, 0), 0), ((8, 9), 0), ((9, 0), 2), ((10, 0), 2)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch.float8_constants.cache_clear()
        soft = [launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS]
        assert soft.count(False) == formats
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch.float8_constants.cache_clear()
    assert all(launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS)
