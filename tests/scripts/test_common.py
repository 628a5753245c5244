"""scripts/common: blocks of documents, tables, metrics, ranks, reports, models."""

import atexit
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh
from torch.multiprocessing import ProcessRaisedException

from fp8_dist.debug import comm_audit
from scripts.common import models, report
from scripts.common.blocks import read_block, replace_block
from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.llama import Block, LlamaConfig
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check

TINY = LlamaConfig(64, 2, 4, 4, 128, vocab_size=256, max_seq_len=16)


def test_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n\n<!-- begin a: python -m a --write -->\n<!-- end a -->\n\nBetween.\n\n"
        "<!-- begin a b -->\n\nstays\n\n<!-- end a b -->\n\nAfter.\n"
    )
    for text in ("old\n", "| new |\n| --- |"):
        replace_block(page, "a", text)
        assert read_block(page, "a") == text.strip()
    assert read_block(page, "a b") == "stays"
    assert_expected_inline(
        page.read_text(),
        """\
Before.

<!-- begin a: python -m a --write -->

| new |
| --- |

<!-- end a -->

Between.

<!-- begin a b -->

stays

<!-- end a b -->

After.
""",
    )


@pytest.mark.parametrize(
    ("document", "counts"),
    [
        ("", "0 begin and 0 end"),
        ("<!-- begin a: b -->\n", "1 begin and 0 end"),
        ("<!-- begin a -->\n<!-- begin a: b -->\n<!-- end a -->\n", "2 begin and 1 end"),
        ("<!-- end a -->\n<!-- begin a -->\n", "1 begin and 1 end"),
    ],
)
def test_blocks_need_one_pair_of_markers(document: str, counts: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(document)
    with pytest.raises(ValueError, match=rf"page\.md: block 'a' has {counts} markers"):
        replace_block(page, "a", "text")
    assert page.read_text() == document


def test_blocks_of_the_documents_are_complete() -> None:
    for page in report.DOCS.glob("*.md"):
        for name in re.findall(
            r"^<!-- (?:begin|end) ([^:]+?)(?:: .*)? -->$", page.read_text(), re.M
        ):
            assert read_block(page, name), (page, name)


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


def gloo_options() -> list[Any]:
    """Those of the default group, and of another one."""
    groups = [dist.group.WORLD, dist.new_group([0])]
    return [group._get_backend(torch.device("cpu")).options for group in groups]


def gloo_threads() -> set[int]:
    """How many threads run the collectives of a group."""
    return {options._threads for options in gloo_options()}


def test_gloo_runs_the_collectives_of_a_group_one_by_one(ranks: RankPools) -> None:
    assert run_on_ranks(1, gloo_threads) == ranks(1).run(gloo_threads) == [{1}]


def gloo_devices() -> int:
    """How many TCP devices two groups have together."""
    devices = [device for options in gloo_options() for device in options._devices]
    return len(set(map(id, devices)))


def test_the_gloo_groups_of_a_process_share_a_device(ranks: RankPools) -> None:
    assert run_on_ranks(1, gloo_devices) == ranks(1).run(gloo_devices) == [1]


def test_gloo_takes_the_interface_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(ProcessRaisedException, match="no_such_interface"):
        run_on_ranks(1, gloo_threads)


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
    asserted: bool,
    holds: bool,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    before = "<!-- begin a -->\n<!-- end a -->\n"
    page.write_text(before)
    checks = [Check("first", True), Check("second", holds)]
    for option in ("--threads=1", "--write"):
        parser = report.make_parser(
            "scripts.some", "A measurement.", "page.md", repeat=1, asserts="it fails"
        )
        args = report.start(parser, [option, *["--assert"] * asserted])
        assert report.finish(args, {"a": "| table |"}, checks) == status
        printed = capsys.readouterr().out
        assert "a\n\n| table |\n" in printed
        assert f"holds: first\n{'holds' if holds else 'BROKEN'}: second\n" in printed
        assert (page.read_text() == before) is (option != "--write")
    command = f"`python -m scripts.some --write{' --assert' * asserted}`"
    assert read_block(page, "a") == f"{command} on {report.machine('cpu', 1)}.\n\n| table |"


def gathered(name: str, dp: int, tp: int) -> dict[str, int]:
    """Bytes of the all-gathers of a candidate's forward, by dtype."""
    mesh = device_mesh(dp=dp, tp=tp)
    model = models.build(name, TINY, mesh)
    with comm_audit(mesh) as audit:
        models.after_step(name, dp > 1)(model)
        loss = model(torch.randint(256, (2, 16))).square().mean()
    loss.backward()
    found: dict[str, int] = {}
    for row in audit.rows:
        if row.op == "all_gather":
            dtype = "float8" if "float8" in str(row.dtype) else str(row.dtype).rpartition(".")[2]
            found[dtype] = found.get(dtype, 0) + row.bytes
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["tensorwise", *TORCHAO[:1]])
def test_models_gather_float8(ranks: RankPools, name: str, dp: int, tp: int) -> None:
    """torchao's too: by its own styles and hooks, over gloo."""
    bf16, found = (ranks(2).run(gathered, each, dp, tp)[0] for each in (BF16, name))
    assert set(bf16) == {"bfloat16"}
    assert found["float8"] > 0
    assert found["bfloat16"] == bf16["bfloat16"] - 2 * found["float8"]


def test_models_have_the_same_parameters() -> None:
    expected = dict(models.build(BF16, TINY, seed=3).named_parameters())
    for name in (*OURS, *TORCHAO):
        for path, parameter in models.build(name, TINY, seed=3).named_parameters():
            assert torch.equal(parameter, expected[path]), (name, path)


def test_models_on_the_meta_device() -> None:
    config = dataclasses.replace(TINY, dim=2**16, ffn_dim=2**18)
    model = models.build("tensorwise", config, device="meta", amax_scope="rank")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.layers[0].attention.wq.config.amax_scope == "rank"
    assert type(model.output) is torch.nn.Linear


def test_compiled_models_have_graphs_of_their_own() -> None:
    codes = [Block.forward.__code__]
    for name in (BF16, "tensorwise", "rowwise"):
        model = models.build(name, TINY, compiled=True)
        first, *others = (block.forward.__func__.__code__ for block in model.layers)
        assert all(code is first for code in others)
        assert all(first is not code for code in codes)
        assert all(block._compiled_call_impl is not None for block in model.layers)
        codes.append(first)
