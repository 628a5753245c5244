"""Training steps of the script on four ranks: how sums travel, and what multiplies in fp32."""

import os
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from ranks import RankPools, device_mesh
from reference import Watching, same_bits

from fp8_dist.debug import CommAudit, comm_audit
from scripts.common import models
from scripts.common.llama import MODELS, LlamaConfig
from scripts.train import train, train_run

QUICK = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "32"]


def trainer(*options: str) -> train_run.Trainer:
    """Runs on every rank: a small model on dp 2 x tp 2, its text and optimizer."""
    os.environ["WORLD_SIZE"] = "4"
    tiny = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    with mock.patch.dict(MODELS, tiny=tiny):
        fixed = ["--model", "tiny", "--tp", "2", *QUICK, "--data", train_run.__file__]
        args = train.parse_args([*fixed, *options])
        return train_run.Trainer(args, device_mesh(dp=2, tp=2), torch.device("cpu"))


def two_steps(ours: train_run.Trainer) -> tuple[list[float], CommAudit]:
    """Losses and gradient norms of two steps, and the collectives of the second: audited like the
    last one of a run."""
    numbers, audit = [], comm_audit(device_mesh(dp=2, tp=2))
    for step in (1, 2):
        with audit if step == 2 else nullcontext():
            losses, norm = ours.step(step)
        numbers += [ours.whole_loss(losses), norm.item()]
    return numbers, audit


def sent_over(axis: str, *options: str) -> tuple[list[float], dict[str, int]]:
    """Runs on every rank: the numbers of two steps, and the second's bytes over an axis, by op."""
    numbers, audit = two_steps(trainer(*options))
    sent: dict[str, int] = {}
    for row in audit.rows:
        if row.axis == axis:
            sent[row.op] = sent.get(row.op, 0) + row.bytes
    return numbers, sent


def test_gradients_travel_as_the_options_say(ranks: RankPools) -> None:
    def run(*options: str) -> tuple[list[float], dict[str, int]]:
        return ranks(4).run(sent_over, "dp", *options)[0]

    numbers, sent = run()
    assert "all_to_all" not in sent
    elements = sent["reduce_scatter"] // 4
    # FSDP2 reduces gradients of bf16 compute: they are bf16 numbers, which travel as they are.
    exact, sent = run("--gradient-transport", "bf16")
    assert exact == numbers
    assert 2 < sent["all_to_all"] / elements < 2.02  # norms travel in fp32
    fp32 = ["--compute", "fp32"]
    assert run(*fp32)[0] != run(*fp32, "--gradient-transport", "bf16")[0]
    found, sent = run("--gradient-transport", "float8")
    assert "reduce_scatter" not in sent
    assert 1 < sent["all_to_all"] / elements < 1.04
    # The loss of the first step is that before all gradients.
    assert found[0] == numbers[0]
    assert found[2] != numbers[2]
    assert found[2] == pytest.approx(numbers[2], rel=1e-3)


def test_sums_of_tensor_parallelism_travel_as_the_option_says(ranks: RankPools) -> None:
    def run(*options: str) -> tuple[list[float], dict[str, int]]:
        options = ("--recipe", "tensorwise", *options)
        return ranks(4).run(sent_over, "tp", *options)[0]

    expected, sent = run()
    assert "all_to_all" not in sent
    plain = sent["reduce_scatter"]
    for transport, elements in (("bf16", 2), ("float8", 1 + 1 / 64)):
        numbers, sent = run("--reduce-transport", transport)
        # Those of the embedding's output and of the head's input stay as they are.
        layers = plain - sent["reduce_scatter"]
        assert 0 < sent["reduce_scatter"] < plain / 4
        assert sent["all_to_all"] == layers // 2 * elements  # (blocks have 64 features here)
        # Two bf16 summands have one rounded sum, in whichever dtype they are added.
        assert (numbers == expected) == (transport == "bf16")
        assert numbers == pytest.approx(expected, rel=1e-2)


def bf16_steps(is_slow: bool) -> tuple[list[float], str]:
    """Runs on every rank. is_slow: as on a CPU without instructions for bf16."""
    with mock.patch.object(models, "has_bf16_instructions", return_value=not is_slow):
        numbers, audit = two_steps(trainer("--recipe", "bf16"))
    return numbers, audit.table()


def test_gemms_in_fp32_change_no_message(ranks: RankPools) -> None:
    expected, messages = ranks(4).run(bf16_steps, False)[0]
    numbers, same = ranks(4).run(bf16_steps, True)[0]
    assert numbers == pytest.approx(expected, rel=1e-2)
    assert messages == same


def test_a_layer_in_bf16_multiplies_in_fp32_where_bf16_is_slow() -> None:
    layer = torch.nn.Linear(64, 48, bias=False).bfloat16()
    with mock.patch.object(models, "has_bf16_instructions", return_value=False):
        models.multiply_in_fp32(layer)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with Watching() as operators:
        output = layer(x)
    assert operators.seen.count("aten._to_copy.default") == 3  # two operands, and the result
    assert same_bits(output, (x.float() @ layer.weight.float().t()).bfloat16())
    output.backward(gradient := torch.randn_like(output))
    assert same_bits(x.grad, (gradient.float() @ layer.weight.float()).bfloat16())
