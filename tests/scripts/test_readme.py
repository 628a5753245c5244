"""The README's example runs as it stands, on CPU ranks; public names are what they claim to be."""

import inspect
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import RankPools
from torch.distributed.tensor import parallel

import fp8_dist
from fp8_dist import tensor_parallel
from fp8_dist.debug import comm_audit
from scripts.common.llama import Llama, LlamaConfig

README = (Path(__file__).parents[2] / "README.md").read_text()
TINY = LlamaConfig(64, 2, 4, 2, 96, vocab_size=64, max_seq_len=32)


def example() -> str:
    return next(re.finditer(r"```python\n(.*?)```", README, re.DOTALL)).group(1)


def run_example() -> tuple[float, float, int]:
    """(first loss, last loss, float8 gathers of a further step)."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (4, 33))
    losses: list[float] = []

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        losses.append(loss.item())
        return loss

    code = example().replace('"cuda", (32, 8)', '"cpu", (2, 2)')
    code = re.sub(r"^.*init_process_group.*\n", "", code, flags=re.MULTILINE)
    scope = {
        "model": Llama(TINY),
        "loss_of": loss_of,
        "batches": [(tokens[:, :-1], tokens[:, 1:])] * 20,
    }
    exec(code, scope)
    with comm_audit(scope["mesh"]) as audit:
        scope["model"](tokens[:, :-1])
    return losses[0], losses[-1], audit.count("all_gather", dtype=torch.float8_e4m3fn)


def test_the_example_trains(ranks: RankPools) -> None:
    for first, last, gathers in ranks(4).run(run_example, timeout=120):
        assert last < first
        assert gathers == 6  # two blocks: a weight gather each, and two input gathers each


def test_the_example_is_short() -> None:
    lines = [
        line for line in example().splitlines() if line and not line.startswith(("from", "import"))
    ]
    assert len(lines) <= 20


def test_the_readme_is_a_page() -> None:
    assert len(README.splitlines()) <= 100


def test_the_alias_of_torchao() -> None:
    ours = fp8_dist.precompute_float8_dynamic_scale
    assert fp8_dist.precompute_float8_dynamic_scale_for_fsdp is ours
    for name in fp8_dist.__all__:
        assert hasattr(fp8_dist, name)


def test_constructor_arguments_of_torch_are_taken() -> None:
    for ours, theirs in (
        (tensor_parallel.Float8ColwiseParallel, parallel.ColwiseParallel),
        (tensor_parallel.Float8RowwiseParallel, parallel.RowwiseParallel),
        (tensor_parallel.PrepareFloat8ModuleInput, parallel.PrepareModuleInput),
    ):
        known = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(theirs).parameters.items():
            assert known[name].default == parameter.default
