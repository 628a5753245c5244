"""How a Triton kernel is launched: which block sizes are measured, when, and for what."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import launch
from scripts.bench.gpu_operators import operator_calls, tuned_kernels
from scripts.bench.gpu_smoke_run import check_same, launched, portable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _fill(out, size, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + n, tl.full([BLOCK], BLOCK, tl.int32), mask=n < size)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The measured times, each of which is shorter than the one before."""
    times: list[float] = []

    def measure(call: Callable[[], None], quantiles: list[float], **_: int) -> list[float]:
        call()
        times.append(1 / (1 + len(times)))
        return [times[-1]] * len(quantiles)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(triton.testing, "do_bench", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return times


def run(kernel: launch.Tuned, size: int = 10, dtype: torch.dtype = torch.int32) -> int:
    """The block size of a launch."""
    out = torch.zeros(size, dtype=dtype, device=DEVICE)
    kernel(lambda chosen: (triton.cdiv(size, chosen["BLOCK"]),), out, size)
    assert (out == out[0]).all()
    return int(out[0])


def make() -> launch.Tuned:
    return launch.Tuned(_fill, (launch.blocks(4, BLOCK=4), launch.blocks(4, BLOCK=8)))


def test_the_fastest_is_found_once_for_each_kind_of_calls(measured: list[float]) -> None:
    kernel = make()
    assert [run(kernel), run(kernel, 11), len(measured)] == [8, 8, 2]
    assert [run(kernel, 90), len(measured)] == [8, 4]
    assert [run(kernel, 10, torch.int64), len(measured)] == [8, 6]


def test_a_captured_launch_takes_the_first_choice(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, new = make(), make()
    assert run(known) == 8
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [run(known), run(new), len(measured)] == [8, 4, 2]


def test_without_memory_to_measure_the_first_choice_is_taken(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no 256 MB")

    monkeypatch.setattr(triton.testing, "do_bench", measure)
    kernel = make()
    assert [run(kernel), run(kernel)] == [4, 4]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_measuring_the_choices_of_a_kernel_leaves_its_results_as_they_are(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton runs each choice on the arguments of a call, and then the fastest one once more."""
    launches = launch.Tuned.__call__
    several = {each for each in tuned_kernels() if len(each.configs) > 1}
    seen: set[launch.Tuned] = set()

    def note(tuned: launch.Tuned, *args: object, **constants: object) -> None:
        seen.add(tuned)
        launches(tuned, *args, **constants)  # type: ignore[arg-type]

    monkeypatch.setattr(launch.Tuned, "__call__", note)
    for each in several:
        monkeypatch.setattr(each, "_fastest", {})
        monkeypatch.setattr(each, "configs", each.configs[:2])
    calls = [*operator_calls(DEVICE, odd=True, shape=(34, 40)).values()]
    firsts = {id(call.op): call for call in reversed(calls)}  # these launch almost all kernels
    for call in [*firsts.values(), *calls]:
        before = len(seen)
        found = launched(call)
        if len(seen) > before:
            check_same(found, portable(call))
        if several <= seen:
            break
    assert several <= seen
    assert len(measured) >= 2 * len(several)


def test_the_instruction_is_used_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda = torch.device("cuda", 0)
    for capability, formats in (((8, 0), 0), ((8, 9), 0), ((9, 0), 3), ((10, 0), 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch.float8_constants.cache_clear()
        soft = [launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS]
        assert soft.count(False) == formats
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch.float8_constants.cache_clear()
    assert all(launch.float8_constants(dtype, cuda)["SOFT"] for dtype in launch.BIAS)
