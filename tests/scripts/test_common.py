"""scripts/common: tables, metrics, ranks, reports, models."""

import atexit
import dataclasses
import os
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from ranks import RankPools
from reference import Watching, same_bits
from torch.multiprocessing import ProcessRaisedException

from scripts.common import models, report
from scripts.common.candidates import TORCHAO
from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.ranks import run_on_ranks
from scripts.common.recipes import BF16, OURS, PACKED
from scripts.common.report import Check

TINY = LlamaConfig(64, 2, 4, 4, 128, vocab_size=256, max_seq_len=16)


def test_tables() -> None:
    lines = [["ours", "", "1.25"], ["bf16, longer", "", "3"]]
    assert_expected_inline(
        table(["name", "torchao", "ms"], lines, "lr"),
        """\
| name         |   ms |
| ------------ | ---: |
| ours         | 1.25 |
| bf16, longer |    3 |""",
    )


def test_sqnr() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert sqnr(exact, exact) == float("inf")
    assert sqnr(exact, torch.tensor([3.0, 4.5])) == pytest.approx(20.0)


def gloo_threads_and_devices() -> tuple[set[int], int]:
    """The numbers of threads of two groups, and the number of devices that they have."""
    groups = [dist.group.WORLD, dist.new_group([0])]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    devices = {id(device) for each in options for device in each._devices}
    return {each._threads for each in options}, len(devices)


def test_gloo_groups_run_collectives_one_by_one_and_share_a_device(ranks: RankPools) -> None:
    ours, theirs = (
        run(gloo_threads_and_devices) for run in (ranks(1).run, partial(run_on_ranks, 1))
    )
    assert ours == theirs == [({1}, 1)]


def test_gloo_takes_the_interface_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(ProcessRaisedException, match="no_such_interface"):
        run_on_ranks(1, gloo_threads_and_devices)


def rank_that_aborts_at_its_end() -> tuple[int, int]:
    atexit.register(os.abort)
    return dist.get_rank(), torch.get_num_threads()


def test_ranks_answer_and_end_at_once() -> None:
    assert run_on_ranks(2, rank_that_aborts_at_its_end, threads=2) == [(0, 2), (1, 2)]


def fails() -> None:
    raise ZeroDivisionError("on a rank")


def test_the_error_of_a_rank_is_told() -> None:
    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: on a rank"):
        run_on_ranks(1, fails)


@pytest.mark.parametrize(
    ("asserted", "holds", "status"), [(False, False, 0), (True, True, 0), (True, False, 1)]
)
def test_reports(
    asserted: bool, holds: bool, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = report.make_parser("scripts.some", None, repeat=1, asserts="it fails")
    args = report.parse(parser, ["--threads=1", *["--assert"] * asserted])
    checks = [Check("first", True), Check("second", holds)]
    assert report.finish(args, {"title": "| table |"}, checks) == status
    printed = capsys.readouterr().out
    command = f"`python -m scripts.some --threads=1{' --assert' * asserted}`"
    assert printed.startswith(f"{command} on {report.machine('cpu', 1)}\n")
    assert "title\n\n| table |\n" in printed
    assert f"{'holds' if holds else 'BROKEN'}: second\n" in printed


def test_models_have_the_same_parameters() -> None:
    expected = dict(models.build(BF16, TINY, seed=3).named_parameters())
    for name in (*OURS, *PACKED, *TORCHAO):
        for path, parameter in models.build(name, TINY, seed=3).named_parameters():
            assert torch.equal(parameter, expected[path]), (name, path)


def test_models_on_the_meta_device() -> None:
    config = dataclasses.replace(TINY, dim=2**16, ffn_dim=2**18)
    model = models.build("tensorwise", config, device="meta", emulate=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.layers[0].attention.wq.config.emulate
    assert type(model.output) is torch.nn.Linear


def test_a_layer_in_bf16_multiplies_in_fp32_where_bf16_is_slow() -> None:
    layer = torch.nn.Linear(64, 48, bias=False).bfloat16()
    with mock.patch.object(models, "has_bf16_instructions", return_value=False):
        models.multiply_in_fp32(layer)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with Watching() as operators:
        output = layer(x)
    assert operators.seen.count("aten._to_copy.default") == 3  # both operands, and the result
    assert same_bits(output, (x.float() @ layer.weight.float().t()).bfloat16())
    output.backward(gradient := torch.randn_like(output))
    assert same_bits(x.grad, (gradient.float() @ layer.weight.float()).bfloat16())
