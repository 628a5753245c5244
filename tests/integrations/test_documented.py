"""Every Python block of a page runs in a test. Here run those that no other test covers."""

import re
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documented import ROOT, own_warnings_raise, python_blocks, run_shown
from ranks import RankPools, device_mesh
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import llama

import fp8_dist
from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    skip_head,
)
from scripts.common.llama import Llama, LlamaConfig

HERE = "tests/integrations/test_documented.py"
DISTRIBUTED, INTEGRATIONS = "tests/distributed/", "tests/integrations/"
# By page: for each block the test that runs it, or why no test can.
RUN_BY = {
    "README.md": ["tests/scripts/test_examples.py"] * 2,
    "docs/communication.md": ["tests/unit/test_docs.py"],
    "docs/debugging.md": ["tests/unit/test_docs.py"] * 5,
    "docs/experts.md": [f"{INTEGRATIONS}transformers/test_experts_on_ranks.py"] * 4,
    "docs/export.md": [
        HERE,
        HERE,
        f"{INTEGRATIONS}transformers/test_fp8_export.py",
        HERE,
        f"{INTEGRATIONS}transformers/test_fp8_export.py",
    ],
    "docs/four_bits.md": [
        f"{DISTRIBUTED}test_four_bits.py",
        f"{INTEGRATIONS}transformers/test_released_four_bits.py",
    ],
    "docs/from_torchao.md": [HERE],
    "docs/frozen.md": [f"{INTEGRATIONS}transformers/test_stored_models.py"] * 2,
    "docs/fsdp2.md": [HERE, HERE, f"{DISTRIBUTED}test_micro_batches.py", HERE],
    "docs/lightning.md": [f"{INTEGRATIONS}test_lightning.py"] * 2,
    "docs/lora.md": [f"{INTEGRATIONS}test_lora.py"] * 2,
    "docs/numerics.md": ["tests/unit/test_docs.py"],
    "docs/recipes.md": ["tests/unit/test_docs.py"],
    "docs/report.md": [f"{INTEGRATIONS}test_reported_loops.py"] * 4,
    "docs/serving.md": [
        f"{DISTRIBUTED}test_export_on_meshes.py",
        f"{INTEGRATIONS}transformers/test_stored_models.py",
        f"{DISTRIBUTED}test_export_on_meshes.py",
    ],
    "docs/state.md": [HERE, HERE],
    "docs/tensor_parallel.md": [
        HERE,
        f"{DISTRIBUTED}test_plans.py",
        "tests/unit/test_docs.py",
        "tests/unit/test_docs.py",
        HERE,
        "GPUs alone: symmetric memory",
        "tests/scripts/test_local_tensors.py",
    ],
    "docs/torchtitan.md": [f"{INTEGRATIONS}torchtitan/test_torchtitan.py"] * 2,
    "docs/training.md": [
        HERE,
        HERE,
        HERE,
        "tests/compile/test_compile.py",
        "tests/fake_cuda/test_capture.py",
    ],
    "docs/transformers.md": [f"{INTEGRATIONS}transformers/test_transformers_page.py"] * 7,
}


def test_every_block_has_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    shown = {name: len(blocks) for name in names if (blocks := python_blocks(name))}
    assert shown == {page: len(tests) for page, tests in RUN_BY.items()}
    for page, tests in RUN_BY.items():
        for test in {test for test in tests if not test.startswith("GPUs alone")}:
            text = (ROOT / test).read_text()
            assert "run_shown(" in text or test == "tests/scripts/test_examples.py", test
            assert Path(page).name in text, (page, test)


def net() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(64, 2, 4, 2, 96, vocab_size=64, max_seq_len=32))


def scope_of(model: Any, **others: Any) -> dict[str, Any]:
    """A scope with the names that pages leave to the reader, or import in earlier blocks."""
    scope = {"torch": torch, "model": model, "DistributedDataParallel": DistributedDataParallel}
    for module in (fp8_dist, fp8_dist.fsdp, fp8_dist.tensor_parallel, torch.distributed.fsdp):
        scope |= {name: getattr(module, name) for name in module.__all__}
    return scope | others


FSDP2 = """
for block in model.layers:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
"""


def steps(scope: dict[str, Any], count: int = 2) -> None:
    tokens = torch.arange(2 * 16).view(2, 16)
    with own_warnings_raise():
        for _ in range(count):
            output = scope["model"](tokens)
            getattr(output, "logits", output).float().square().mean().backward()
            scope["optimizer"].step()
            scope["optimizer"].zero_grad()


def sharded() -> dict[str, Any]:
    """The scope, with a model, after the first block of docs/fsdp2.md."""
    code = python_blocks("docs/fsdp2.md")[0].replace("...", f"{FSDP2}\n#")
    run_shown(code, scope := scope_of(net()))
    return scope


def fsdp2_and_state(folder: str) -> bool:
    """Whether a resumed run ends with the same results as an uninterrupted one."""
    _, transport, _, replicated = python_blocks("docs/fsdp2.md")
    checkpoints, back = python_blocks("docs/state.md")
    old, new = sharded(), sharded()
    for scope in (old, new):
        run_shown(transport, scope)
        run_shown(checkpoints, scope)
    steps(old)
    with own_warnings_raise():
        old["save"](old["model"], old["optimizer"], folder)
        new["load"](new["model"], new["optimizer"], folder)
    for scope in (old, new):
        steps(scope)
    pairs = zip(old["model"].parameters(), new["model"].parameters(), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    run_shown(back, new)
    assert not float8_layers(new["model"])
    steps(new)
    run_shown(replicated, scope := scope_of(net()))
    steps(scope)
    return same


def test_fsdp2_and_state(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run_same(fsdp2_and_state, str(tmp_path)) is True


def clipped_and_logged() -> tuple[float, list[tuple[int, list[str]]]]:
    """The norm of gradients, and the names that rank 0 logs, by step."""
    clipping, _, logging, _, _ = python_blocks("docs/training.md")
    scope, logs, tokens = sharded(), [], torch.arange(2 * 16).view(2, 16)
    run = SimpleNamespace(log=lambda values, step: logs.append((step, sorted(values))))
    scope |= {"wandb": SimpleNamespace(init=lambda: run), "batches": [(tokens, tokens)] * 2}
    scope["loss_of"] = lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.view(-1)
    )
    scope["loss_of"](scope["model"](tokens), tokens).backward()
    run_shown(clipping, scope)
    scope["optimizer"].zero_grad()
    run_shown(logging, scope)
    return scope["norm"].item(), logs


def test_training(ranks: RankPools) -> None:
    (norm, logged), (same_norm, nothing) = ranks(2).run(clipped_and_logged)
    assert norm == same_norm > 0
    assert nothing == []
    metrics, casts, *later = logged
    assert metrics == (0, ["grad_norm", "loss"])
    assert later == [(1, ["grad_norm", "loss"])]
    assert all(re.fullmatch(r"float8/\w+/layers\.0\.[\w.]+/\w+", name) for name in casts[1])
    assert "float8/weight_for_output_grad_input/layers.0.attention.wq/amax" in casts[1]


def collectives_and_weights(code: str) -> tuple[str, list[torch.Tensor]]:
    """The collectives of a step, and the weights after it, if code follows the TP plan."""
    mesh, tokens = device_mesh(dp=2, tp=2), torch.arange(2 * 16).view(2, 16)
    model = convert_to_float8_training(net(), module_filter_fn=skip_head(net()))
    plan = fp8_dist.tensor_parallel.llama_tp_plan(model)
    fp8_dist.tensor_parallel.apply_tp_plan(model, mesh["tp"], plan)
    run_shown(code, {"model": model})
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8_dist.attach_update(optimizer, model)
    for _ in range(2):
        with fp8_dist.debug.comm_audit(mesh) as audit:
            model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return audit.table(), [parameter.full_tensor() for parameter in model.parameters()]


def checkpointed() -> tuple[list[bool], list[bool]]:
    """Whether collectives, and bits, are those without checkpointing: with the policy; without."""
    _, selective, *_ = python_blocks("docs/training.md")
    whole = selective.replace(", context_fn=contexts", "")
    assert whole != selective
    plain, *others = (collectives_and_weights(code) for code in ("", selective, whole))
    bits = [all(map(torch.equal, plain[1], weights)) for _, weights in others]
    return [table == plain[0] for table, _ in others], bits


def test_activation_checkpointing(ranks: RankPools) -> None:
    assert ranks(4).run_same(checkpointed) == ([True, False], [True, True])


def tensor_parallel() -> None:
    blocks = python_blocks("docs/tensor_parallel.md")
    scope = scope_of(net(), mesh=device_mesh(tp=2))
    attach = "attach_update(optimizer, model)"
    optimizer = "optimizer = torch.optim.AdamW(model.parameters())\n"
    code = blocks[0].replace(attach, optimizer + attach)
    assert code != blocks[0]
    run_shown(code, scope)
    steps(scope)
    plan = "llama_tp_plan(model)"
    encoded = code.replace(f'apply_tp_plan(model, mesh["tp"], {plan})', f"{blocks[4]}APPLIED")
    encoded = encoded.replace("APPLIED", 'apply_tp_plan(model, mesh["tp"], plan)')
    assert encoded.count("plan)") == 1
    run_shown(encoded, scope := scope_of(net(), mesh=device_mesh(tp=2)))
    steps(scope)


def test_tensor_parallel(ranks: RankPools) -> None:
    ranks(2).run(tensor_parallel)


def export(folder: str) -> None:
    save, in_bf16, _, consolidated, _ = python_blocks("docs/export.md")
    gathered, written = save.split("\n", maxsplit=1)
    config = Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32")
    model = convert_to_float8_training(llama(), config=config, module_filter_fn=skip_head(llama()))
    for module in (*model.model.layers, model):
        fully_shard(module)
    scope = scope_of(model, folder="consolidated")
    with chdir(folder):
        run_shown("\n".join((gathered, in_bf16, written, consolidated)), scope)
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
def test_export(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(export, str(tmp_path))
    plain, sharded = (
        {
            tensor.dtype
            for file in (tmp_path / name).glob("model*.safetensors")
            for tensor in load_file(file).values()
        }
        for name in ("checkpoint", "consolidated")
    )
    assert plain == {torch.float8_e4m3fn, torch.float32, torch.bfloat16}
    assert sharded == {torch.float8_e4m3fn, torch.float32}


def test_configs() -> None:
    """docs/from_torchao.md."""
    run_shown(python_blocks("docs/from_torchao.md")[0], names := {})
    model = names["convert_to_float8_training"](torch.nn.Sequential(torch.nn.Linear(32, 32)))
    assert isinstance(model[0], Float8Linear)
