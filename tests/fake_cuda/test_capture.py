"""What a CUDA graph would hold: what its own capture computed, and nothing else."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from documented import python_blocks, run_shown
from expecttest import assert_expected_inline
from fake_cuda.counter import KernelCounter
from fake_cuda.device import FakeCudaMode, fake_tensors
from fake_cuda.layer import LayerShape, layer_on_fake_cuda
from fake_cuda.process import FakeCudaProcess
from fake_cuda.world import meshes
from reference import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.device import current_capture
from fp8_dist.fsdp import clip_grad_norm_
from fp8_dist.kernels.cuda.triton import amaxes, blocks, casts, e2m1, encoding, folded, launch
from fp8_dist.text import aligned

SHAPE = LayerShape(256, 512, 1024)
LAYERS, DIM = 4, 64


def capturing(captured: bool = True) -> AbstractContextManager[object]:
    return torch.cuda.graph(torch.cuda.CUDAGraph()) if captured else nullcontext()


def numbers_of_captures() -> list[int]:
    """The number in each capture of one graph, of which the second fails, and after it."""
    graph, numbers = torch.cuda.CUDAGraph(), []
    for fails in (False, True, False):
        with pytest.raises(KeyError) if fails else nullcontext(), torch.cuda.graph(graph):
            numbers += [current_capture(), current_capture()]
            if fails:
                raise KeyError
        numbers.append(current_capture())
    return numbers


def numbers_without_graph() -> int:
    """How many numbers a capture gets that no torch.cuda.CUDAGraph has begun."""
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin.__wrapped__(graph)
        return len({current_capture() for _ in range(3)})


def launches(name: str) -> list[int]:
    """Kernels of a step with known weight statistics, of two captured steps, and of one after them.

    The weight changes before the second captured step.
    """
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, SHAPE, mode)
    with fake_tensors(mode):
        layer.run()
        counts = []
        for captured, changes in ((False, False), (True, False), (True, True), (False, False)):
            layer.clear()
            if changes:
                layer.change_weight()
            with capturing(captured), KernelCounter() as counter:
                layer.run()
            counts.append(counter.counts.launches)
    return counts


def forget_kernels() -> None:
    """Let each Triton kernel be loaded again, as in a new process."""
    for module in (amaxes, blocks, casts, e2m1, encoding, folded):
        for each in vars(module).values():
            if isinstance(each, launch.Kernel):
                each._compiled.clear()


def captured_without_update(recipe: str) -> list[str]:
    """What captures of a step without an update raise, after a step with one, and after another."""
    forget_kernels()
    texts = []
    with fake_tensors():
        model = sharded(recipe, meshes(dp=8)["dp"], [DIM] * (LAYERS + 1))
        x = torch.empty(32, DIM, device="cuda", dtype=torch.bfloat16)
        update_float8_scales(model)
        model(x).sum().backward()
        for _ in range(2):
            try:
                with capturing():
                    model(x).sum().backward()
            except ValueError as error:
                texts.append(str(error))
                for module in (*model, model):
                    module.reshard()
                invalidate_float8_scales(model)
                model(x).sum().backward()  # as the capture, which takes nothing for known
    return texts


def test_a_capture_loads_no_kernel(fake_cuda: FakeCudaProcess) -> None:
    (text,) = fake_cuda.run(captured_without_update, "tensorwise")
    assert re.fullmatch(
        r"a CUDA graph is being captured, and the kernel _\w+ has not run yet with such arguments; "
        r"CUDA can't load a kernel in a capture\. Run exactly this step once before it, .*",
        text,
    )


def sharded(recipe: str, mesh: DeviceMesh, sizes: list[int], offload: bool = False) -> Any:
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather="auto")
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in pairwise(sizes)))
    convert_to_float8_training(model, config=config)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    return model


def reductions_of_gathers(recipe: str) -> list[int]:
    """All-reduces of scales where FSDP2 gathers uneven parts; the third gather is captured."""
    mesh, counts = meshes(dp=8)["dp"], []
    with fake_tensors():
        model = sharded(recipe, mesh, [64, 36])
        for captured in (False, False, True, False, False):
            with capturing(captured), comm_audit(mesh) as audit:
                model[0].unshard()
                model[0].reshard()
            counts.append(audit.count("all_reduce"))
    return counts


def work_of_steps(recipe: str) -> str:
    """Launches and all-reduces of an eager step, of captured ones, and of an eager one after them.

    An all-reduce is that of the norm of gradients.
    """
    kinds = ("_many", "_cast_many", "_tiles", "_rows", "_cast")
    lines = [["", "launches", *kinds, "all_reduce"]]
    with fake_tensors():
        model = sharded(recipe, meshes(dp=8)["dp"], [DIM] * (LAYERS + 1))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True, capturable=True)
        x = torch.empty(32, DIM, device="cuda", dtype=torch.bfloat16)

        def step(update: Callable[[nn.Module], None] = update_float8_scales) -> None:
            update(model)
            model(x).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()
        graph = torch.cuda.CUDAGraph()
        for name, context, update in (
            ("eager", nullcontext(), update_float8_scales),
            ("captured", torch.cuda.graph(graph), update_float8_scales),
            ("captured, no update", capturing(), lambda model: None),
            ("eager, later", nullcontext(), update_float8_scales),
            ("eager, after a replay", nullcontext(), lambda model: graph.replay()),
        ):
            if name == "eager, after a replay":
                update_float8_scales(model)
            with context, KernelCounter() as counter:
                step(update)
            counts = counter.counts
            assert not counts.syncs
            found = Counter(kernel.name for kernel in counts.kernels)
            numbers = (
                counts.launches,
                *(found[kind] for kind in kinds),
                counts.collectives["all_reduce"],
            )
            lines.append([name, *map(str, numbers)])
    return aligned(lines)


def steps_of_the_page() -> Counter[str]:
    """The collectives of what docs/training.md shows: three eager steps and a captured one."""
    with fake_tensors(), torch.device("cuda"):
        model = sharded("tensorwise", meshes(dp=8)["dp"], [DIM] * (LAYERS + 1))
        x = torch.empty(32, DIM, dtype=torch.bfloat16)
        scope = {"torch": torch, "model": model, "inputs": x, "targets": x.clone()}
        scope |= {"update_float8_scales": update_float8_scales, "clip_grad_norm_": clip_grad_norm_}
        scope |= {"loss_of": nn.functional.mse_loss, "batches": [(x, x)] * 2}
        (code,) = (b for b in python_blocks("docs/training.md") if "torch.cuda.graph" in b)
        with KernelCounter() as counter:
            run_shown(code, scope)
    return counter.counts.collectives


def refusals() -> str:
    mesh, refused = meshes(dp=8)["dp"], []
    with fake_tensors():
        for model, update in (
            (sharded("delayed", mesh, [DIM, DIM]), update_float8_scales),
            (sharded("delayed", mesh, [DIM, DIM]), sync_float8_amax_and_scale_history),
            (sharded("tensorwise", mesh, [DIM, DIM], offload=True), update_float8_scales),
            (sharded("tensorwise", mesh, [DIM, DIM], True), precompute_float8_dynamic_scale),
        ):
            with capturing():
                refused.append(raised(NotImplementedError, lambda m=model, u=update: u(m)))
    return "\n".join(refused)


def refusal_of_delayed_scales() -> str:
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda("delayed", SHAPE, mode)
    with fake_tensors(mode), capturing():
        return raised(NotImplementedError, layer.run)


def test_each_capture_has_a_number(fake_cuda: FakeCudaProcess) -> None:
    first, again, after, *rest = fake_cuda.run(numbers_of_captures)
    assert first == again > after == 0
    second, _, ended, third, _, _ = rest
    assert ended == 0
    assert len({first, second, third}) == 3
    assert fake_cuda.run(numbers_without_graph) == 3


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_folded", "mxfp8"])
def test_a_captured_step_holds_the_cast_of_the_weight(
    fake_cuda: FakeCudaProcess, name: str
) -> None:
    known, captured, captured_new, after = fake_cuda.run(launches, name)
    assert known == captured == captured_new == after


def test_gathers_find_the_scales_of_uneven_rows(fake_cuda: FakeCudaProcess) -> None:
    """(A captured gather replaces what is known in eager code.)"""
    for recipe in ("rowwise_folded", "tensorwise"):
        assert fake_cuda.run(reductions_of_gathers, recipe) == [1, 0, 1, 1, 0]


def test_work_of_captured_steps(fake_cuda: FakeCudaProcess) -> None:
    """(Two launches copy tables of addresses. In eager code they are there from the step before.)"""
    assert_expected_inline(
        fake_cuda.run(work_of_steps, "tensorwise"),
        """\
                       launches  _many  _cast_many  _tiles  _rows  _cast  all_reduce
eager                  99        1      1           8       0      8      2
captured               101       1      1           8       0      8      2
captured, no update    110       0      0           12      0      16     5
eager, later           99        1      1           8       0      8      2
eager, after a replay  110       0      0           12      0      16     5""",
    )
    assert_expected_inline(
        fake_cuda.run(work_of_steps, "rowwise_folded"),
        """\
                       launches  _many  _cast_many  _tiles  _rows  _cast  all_reduce
eager                  113       1      1           0       4      4      1
captured               115       1      1           0       4      4      1
captured, no update    122       0      0           0       8      12     1
eager, later           113       1      1           0       4      4      1
eager, after a replay  122       0      0           0       8      12     1""",
    )


def test_the_page(fake_cuda: FakeCudaProcess) -> None:
    """In each step one all-reduce of amaxes, and one of the norm of gradients."""
    assert fake_cuda.run(steps_of_the_page)["all_reduce"] == 4 * 2


def test_what_a_graph_can_not_train(fake_cuda: FakeCudaProcess) -> None:
    assert_expected_inline(
        fake_cuda.run(refusals),
        """\
update_float8_scales: a CUDA graph is being captured, and can't replay a step of 0.weight, which has amax histories in Python; use a recipe without DELAYED scales, or run steps without a graph
sync_float8_amax_and_scale_history: a CUDA graph is being captured, and can't replay a step of 0.weight, which has amax histories in Python; use a recipe without DELAYED scales, or run steps without a graph
update_float8_scales: a CUDA graph is being captured, and can't replay a step of 0.weight, which is on the CPU; leave out CPUOffloadPolicy, or run steps without a graph
precompute_float8_dynamic_scale: a CUDA graph is being captured, and can't replay a step of 0.weight, which is on the CPU; leave out CPUOffloadPolicy, or run steps without a graph""",
    )
    assert "would replay one step of a DELAYED scale" in fake_cuda.run(refusal_of_delayed_scales)
