"""Figures of a GPU on pages are those of docs/gpu_h100.jsonl, as `scripts.prove --show` prints them.

Tables are made again from the results: a line's label names the candidate, and the header says what
its cells are. Sentences with figures are written here with the numbers left open. What then still
looks like a figure of a GPU has no result, and must leave the page.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from fp8_dist.model import break_even
from scripts.plan.__main__ import parse_args
from scripts.prove.page import candidates, latest
from scripts.prove.results import Result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/gpu_h100.jsonl"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/*.md")]
LAYER, FEW, ODD = (f"{rows} x 4096 x 14336" for rows in (8192, 2048, 8191))
BLOCKS, SMALL = "Llama 8B, 8 blocks x 8192 tokens", "training of 1b, 4,096 tokens"
EXPERTS = "128 x 512 rows x 2048 x 1536"
BF16, COMPILED = "bf16", "bf16, compiled"
OURS = "delayed", "tensorwise", "rowwise", "rowwise_folded", "rowwise_with_gw_hp"
OURS += "blockwise", "mxfp8"
COMPILED_ONES = "tensorwise, compiled", "rowwise_folded, compiled", "torchao tensorwise, compiled"

# What makes a paragraph, a bullet or a table one of a GPU, and what looks like a figure in it.
CARD = re.compile(r"\b[ABHL]\d+0+\b")
ABOUT_GPUS = {"README.md": re.compile(r"\bGPU"), "docs/gpu.md": re.compile("")}
UNIT = r"\s?(?:ms|us|s|dB|%|times|[GTM]B(?:/s)?|TFLOP/s|tokens/s)(?!\w)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)(?!\w|\.\d)|(?<![\w.])\d[\d,]*{UNIT}")
SOFTWARE = (
    "torch|torchao|Triton|CUDA|Python|transformers|accelerate|or|,|capability|to|the newest is"
)
VERSION = re.compile(rf"(?:\b(?:{SOFTWARE})|,) `?\d+\.\d+[\w.+]*|\bv?\d+\.\d+\.\w+[\w.+]*")


@cache
def rows() -> dict[tuple[str, str], Result]:
    """The results by shape and name, with all readings of a candidate."""
    found = candidates(latest([RESULTS]))
    return {(shape, who.text): r for shape, of in found.items() for who, r in of.items()}


@cache
def others() -> dict[tuple[str, str], Result]:
    """The results by stage and name."""
    return {(r.stage, r.name): r for r in latest([RESULTS])}


def milliseconds(shape: str, name: str) -> float:
    return 1e3 * rows()[shape, name].median


def ms(shape: str, name: str, digits: int = 2) -> str:
    return f"{milliseconds(shape, name):.{digits}f}"


def speed(shape: str, name: str, base: str = BF16) -> str:
    return f"{milliseconds(shape, base) / milliseconds(shape, name):.2f}"


def rate(name: str) -> str:
    """The TFLOP/s of a GEMM of the layer."""
    result = others()["rates", f"{LAYER}, {name}"]
    return f"{result.flops / result.median / 1e12:.0f}"


def bandwidths(kernel: str) -> str:
    """The least and the largest TB/s of a kernel of a step in tensorwise."""
    note = others()["kernels", "tensorwise"].note
    found = [float(n.replace(",", "")) for n in re.findall(rf"{kernel} .*? us ([\d,]+) GB/s", note)]
    assert found
    return f"{min(found) / 1e3:.1f} to {max(found) / 1e3:.1f}"


def copied() -> str:
    """The TB/s of a copy."""
    result = others()["kernels", "copy, first"]
    return f"{result.bytes / result.median / 1e12:.1f}"


def farthest() -> tuple[str, str]:
    """By how many percent measured layers differ from their estimates: most of them; blockwise."""
    (lines,) = (table for table in tables("docs/gpu.md") if table[0][2] == "GB besides GEMMs")
    estimated = {line[0].strip("`"): float(line[3]) for line in lines[2:]}
    off = {name: milliseconds(LAYER, name) / estimated[name] - 1 for name in (BF16, *OURS)}
    blockwise = off.pop("blockwise")
    most = max(map(abs, off.values()))
    assert blockwise > most
    return f"{math.ceil(100 * most)}", f"{100 * blockwise:.0f}"


# The cells of a table's line, from its label, by the table's header.
Cells = Callable[[str], list[str]]


def cells_of_layer(name: str) -> list[str]:
    walls = [f"{each}, wall" for each in (name, f"{name}, compiled")]
    if name.startswith("torchao"):  # was compiled alone
        return ["", "", *with_speed(f"{name}, compiled", COMPILED), "", ms(LAYER, walls[1])]
    eager, compiled = with_speed(name, BF16), with_speed(f"{name}, compiled", COMPILED)
    return [*eager, *compiled, *(ms(LAYER, wall) for wall in walls)]


def with_speed(name: str, base: str) -> list[str]:
    return [ms(LAYER, name), speed(LAYER, name, base)]


def cells_of_blocks(name: str) -> list[str]:
    optimizer = ms(f"optimizer of {BLOCKS}", name, 1)
    both = rows()[BLOCKS, name].median + rows()[f"optimizer of {BLOCKS}", name].median
    row = rows()[BLOCKS, name]
    tokens, peak = f"{row.tokens / both:,.0f}", f"{row.peak / 1e9:.1f}"
    return [ms(BLOCKS, name, 1), speed(BLOCKS, name), optimizer, tokens, peak]


def cells_of_training(name: str) -> list[str]:
    (loss,) = re.findall(r"([\d.]+) after 50 steps", rows()[SMALL, name].note)
    return [ms(SMALL, name, 1), speed(SMALL, name, COMPILED), f"{float(loss):.3f}"]


def cells_of_readme(label: str) -> list[str]:
    names = {
        f"8 blocks of Llama 8B, {rows()[BLOCKS, COMPILED].tokens:,} tokens": (BLOCKS, 1),
        f"one layer (4096 x 14336), {rows()[LAYER, COMPILED].tokens:,} tokens": (LAYER, 2),
    }
    shape, digits = names[label]
    shown = [ms(shape, COMPILED, digits)]
    for name in COMPILED_ONES:
        shown.append(f"{ms(shape, name, digits)} ({speed(shape, name, COMPILED)})")
    return shown


TABLES: dict[tuple[str, str], Cells] = {
    ("docs/gpu.md", "layer; eager; x bf16's speed; compiled"): cells_of_layer,
    ("docs/gpu.md", "blocks; forward and backward, ms"): cells_of_blocks,
    (
        "docs/gpu.md",
        "training; ms; x compiled bf16's speed; loss after 50 steps",
    ): cells_of_training,
    ("README.md", "**Speed**: ms of forward and backward on one H100"): cells_of_readme,
}
# Tables of other figures, and the test that compares them.
ELSEWHERE = {
    ("docs/gpu.md", "layer; kernels; GB besides GEMMs"): "tests/fake_cuda/test_tables.py",
    ("docs/gpu.md", "blocks; eager, ms; x bf16; us per linear layer"): __file__,
    ("README.md", "GB that a GPU sends per step"): "tests/scripts/test_readme.py",
}
# Times of the README that tests/scripts/test_readme.py computes.
COMPUTED = re.compile(r"64 GPUs spend \d+ ms per step on sending with [\w ]+, and \d+ ms with both")


def sentences() -> Iterator[tuple[str, str]]:
    """Yield pages and their sentences with figures, between words that stay as they are."""
    (card,) = {result.card for result in others().values()}
    yield "docs/gpu.md", f"The figures are of one {card} ("
    tokens, features, more = LAYER.split(" x ")
    layer = f"forward and backward, {tokens} rows, {features} to {more} features (Llama 8B),"
    yield "docs/gpu.md", f"One linear layer in bf16, {layer}"
    yield "docs/gpu.md", f"one sequence of {rows()[BLOCKS, BF16].tokens} tokens, without FSDP2"
    yield "docs/gpu.md", f"A step of a Llama of 1b, {rows()[SMALL, BF16].tokens} tokens, FSDP2"
    yield (
        "docs/gpu.md",
        f"With 8191 rows `tensorwise` has {speed(ODD, 'tensorwise')} times bf16's speed, "
        f"{speed(ODD, 'tensorwise, compiled', COMPILED)} compiled;",
    )
    yield (
        "docs/gpu.md",
        f"With 2048 rows the device needs {ms(FEW, BF16)} ms in bf16, {ms(FEW, 'tensorwise')} in "
        f"`tensorwise` (torchao, compiled: {ms(FEW, 'torchao tensorwise, compiled')}). On the "
        f"host's clock a step of `tensorwise` takes {ms(FEW, 'tensorwise, wall')} ms in eager code "
        f"and {ms(FEW, 'tensorwise, compiled, wall')} compiled (torchao "
        f"{ms(FEW, 'torchao tensorwise, compiled, wall')}), but one in bf16 takes "
        f"{ms(FEW, 'bf16, wall')}.",
    )
    compiled = [speed(BLOCKS, name, COMPILED) for name in COMPILED_ONES]
    yield (
        "docs/gpu.md",
        f"Compiled, `tensorwise` is {compiled[0]} times as fast as bf16, `rowwise_folded` "
        f"{compiled[1]}, torchao's {compiled[2]}.",
    )
    number, tokens, features, more = re.findall(r"\d+", EXPERTS)
    yield (
        "docs/gpu.md",
        f"{number} experts with {tokens} tokens each, {features} to {more} features, took "
        f"{ms(EXPERTS, BF16)} ms in bf16, {ms(EXPERTS, 'rowwise_folded')} in "
        f"`rowwise_folded`, {ms(EXPERTS, 'tensorwise')} in `tensorwise`, "
        f"{ms(EXPERTS, 'blockwise')} in `blockwise` and {ms(EXPERTS, 'mxfp8')} in `mxfp8`.",
    )
    yield (
        "docs/gpu.md",
        f"The casts of `tensorwise` move {bandwidths('_cast')} TB/s, and its amaxes "
        f"{bandwidths('_tiles')}, where a copy moves {copied()}.",
    )
    by_rows = "float8 by rows"
    yield (
        "docs/gpu.md",
        f"GEMMs of this shape run at {rate('bf16')} TFLOP/s in bf16, "
        f"{rate('float8, fast accumulation')} in float8 with fast accumulation and "
        f"{rate('float8')} without, by rows {rate(f'{by_rows}, fast accumulation')} and "
        f"{rate(by_rows)}, in blocks of 128 {rate('float8 in blocks of 128')}.",
    )
    yield (
        "docs/gpu.md",
        f"They assume {ms(FEW, 'tensorwise, wall')} ms of the host per layer in eager code and "
        f"{ms(FEW, 'tensorwise, compiled, wall')} compiled (",
    )
    yield "docs/gpu.md", f"blocks of Llama 8B in bf16 ({ms(BLOCKS, COMPILED, 1)} ms)"
    yield (
        "docs/gpu.md",
        "Times measured on the H100 in eager code are within {} % of these, except for "
        "`blockwise` ({} % more).".format(*farthest()),
    )
    yield (
        "README.md",
        f"Llama 1B with {rows()[SMALL, COMPILED_ONES[0]].tokens:,} tokens ran at "
        f"{speed(SMALL, COMPILED_ONES[0], COMPILED)} of bf16's speed (`tensorwise`)",
    )
    # Four times the eight blocks, without embedding and head.
    computed = 4 * milliseconds(BLOCKS, "tensorwise, compiled")
    yield "README.md", f"(about {round(computed, -1):.0f} ms)"
    plan = parse_args(["--model", "8b", "--mesh", "dp=8"])
    within, between = plan.gbps_within, plan.gbps_between
    yield "README.md", f"At {within:.0f} GB/s within and {between:.0f} between nodes,"
    yield (
        "docs/communication.md",
        f"assumes {within:.0f} GB/s within a node (NVLink of an H100) and {between:.0f} GB/s "
        f"between nodes ({8 * between:.0f} Gb/s for each GPU)",
    )
    yield "docs/communication.md", f"how long this takes at {within:.0f} and {between:.0f} GB/s"


def tables(page: str) -> Iterator[list[list[str]]]:
    """The cells of the tables of a page."""
    for text in re.findall(r"(?:^\|.*\|\n)+", (ROOT / page).read_text(), re.MULTILINE):
        yield [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def of_header(known: dict[tuple[str, str], object], page: str, header: list[str]) -> list[str]:
    return [start for path, start in known if path == page and "; ".join(header).startswith(start)]


def blocks(page: str) -> Iterator[str]:
    """The paragraphs and bullets of a page, each on one line, without commands and tables."""
    text = re.sub(r"^```[^`]*^```$|^ {4}.*$|^\|.*$", "", (ROOT / page).read_text(), flags=re.M)
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        yield " ".join(block.split())


def left_over(page: str) -> list[str]:
    """The figures of a GPU on a page that are in no sentence and no table of this test."""
    known = [sentence for path, sentence in sentences() if path == page]
    names, found = ABOUT_GPUS.get(page, CARD), []
    for block in blocks(page):
        for sentence in known:
            block = block.replace(sentence, " ")
        block = COMPUTED.sub(" ", block)
        if names.search(block):
            found += FIGURE.findall(VERSION.sub(" ", block))
    for header, _, *lines in tables(page):
        text = " ".join(cell for line in [header, *lines] for cell in line)
        is_known = of_header({**TABLES, **ELSEWHERE}, page, header)
        if not is_known and names.search(text):
            found += FIGURE.findall(VERSION.sub(" ", text))
    return found


def test_sentences() -> None:
    for page, sentence in sentences():
        text = "\n".join(blocks(page))
        assert text.count(sentence) == 1, f"{page} should say, once: {sentence}"


@pytest.mark.parametrize(("page", "start"), TABLES)
def test_tables(page: str, start: str) -> None:
    (lines,) = (t for t in tables(page) if "; ".join(t[0]).startswith(start))
    for label, *shown in lines[2:]:
        assert shown == TABLES[page, start](label.replace("`", "")), label


def test_no_figure_is_without_a_result() -> None:
    found = {path: left_over(path) for path in (p.relative_to(ROOT).as_posix() for p in PAGES)}
    assert {path: figures for path, figures in found.items() if figures} == {}


def test_constants() -> None:
    assert f"{break_even.HOST_EAGER:.3f}" == ms(FEW, "tensorwise, wall", 3)
    assert f"{break_even.HOST_COMPILED:.3f}" == ms(FEW, "tensorwise, compiled, wall", 3)
    assert f"{8192 * 1.75e9 / break_even.BF16_PACE:.1f}" == ms(BLOCKS, COMPILED, 1)


def numbers_of(start: str) -> list[list[float]]:
    """The numbers of a table of docs/gpu.md, by line."""
    (lines,) = (t for t in tables("docs/gpu.md") if "; ".join(t[0]).startswith(start))
    return [[float(cell.replace(",", "")) for cell in line[1:]] for line in lines[2:]]


def test_ratios_of_estimates() -> None:
    """Compiled layers are about as fast as eager ones, but for torchao's."""
    lines = numbers_of("layer; kernels; GB besides GEMMs")
    for _, _, time, ratio, compiled in lines:
        assert ratio == pytest.approx(lines[0][2] / time, abs=0.01)
        assert abs(compiled - ratio) < 0.02 or (ratio < 0.5 and 1.3 < compiled < 1.4)


def test_times_of_the_host() -> None:
    """Ratios and times per layer follow from the times of steps, as far as these are rounded."""
    lines = numbers_of("blocks; eager, ms; x bf16; us per linear layer")
    for line in lines:
        for at in (0, 3):
            time, ratio, per_layer = line[at : at + 3]
            assert ratio == pytest.approx(time / lines[0][at], rel=0.06)
            assert per_layer == pytest.approx(1e3 * time / 21, rel=0.06)
