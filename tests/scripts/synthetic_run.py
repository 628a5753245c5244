"""The folder of a run that never was, with faults planted: what scripts.train.train would write."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

# Layer, step (counted in recorded steps) and operand of what goes wrong.
SPIKE, SPIKE_AT = "layers.1.feed_forward.w2", 0.4
BROKEN, BROKEN_AT = "layers.2.attention.wo", 0.85

PROJECTIONS = (*(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),)
PROJECTIONS += tuple(f"feed_forward.{name}" for name in ("w1", "w2", "w3"))
OPERANDS = {
    "input": ("float8_e4m3fn", ["output", "grad_weight"], 3.0),
    "weight": ("float8_e4m3fn", ["output", "grad_input"], 0.3),
    "grad_output": ("float8_e5m2", ["grad_input", "grad_weight"], 2e-4),
}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def json_number(value: float) -> float | str:
    """A number as the files of a run have it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def layers_of(blocks: int) -> list[str]:
    """The names of the float8 layers of a Llama."""
    return [f"layers.{block}.{name}" for block in range(blocks) for name in PROJECTIONS]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    folder: Path, blocks: int = 4, steps: int = 120, every: int = 2, **config: Any
) -> Path:
    """Writes a run of 7 float8 layers per block, watched in every so many steps.

    The input of `SPIKE` is 1e4 times as large in one step, the output gradients of `BROKEN` have
    NaN from one on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers, random = layers_of(blocks), np.random.default_rng(0)
    write_config(folder, layers, steps, config)
    write_metrics(folder, steps, random)
    rows, anomalies = watched(layers, range(every, steps + 1, every), random)
    write_lines(folder / "float8_stats.jsonl", rows)
    write_lines(folder / "anomalies.jsonl", anomalies)
    (folder / "comm.json").write_text(json.dumps(comm_rows(layers)))
    return folder


def write_config(folder: Path, layers: list[str], steps: int, config: dict[str, Any]) -> None:
    """Writes config.json."""
    shown: dict[str, Any] = {
        "model": "small",
        "recipe": "tensorwise",
        "dp": 2,
        "tp": 2,
        "compile": False,
        "steps": steps,
        "batch_size": 16,
        "seq_len": 128,
        "lr": 1e-3,
        "warmup": steps // 4,
        "seed": 0,
        "out": str(folder),
        "checkpoint_every": None,
        "data": "Python's standard library",
        "data_bytes": 4194304,
        "device": "cpu",
        "parameters": 853120,
        "float8_layers": layers,
        "high_precision_gather": {"norm.weight": 64},
        "memory": "rank 0: resident memory of the process at the end of the step",
        "torch": "2.13.0",
        "fp8_dist": "0.1.0",
        "python": "3.11.7",
    }
    (folder / "config.json").write_text(json.dumps(shown | config))


def write_metrics(folder: Path, steps: int, random: np.random.Generator) -> None:
    """Writes metrics.jsonl: a loss that falls, with a spike, and a norm that becomes NaN."""
    rows = []
    for step in range(1, steps + 1):
        part = step / steps
        loss = 2.1 + 3.4 * math.exp(-4 * part) + 0.05 * random.standard_normal()
        spike = SPIKE_AT <= part < SPIKE_AT + 0.03
        broken = part >= BROKEN_AT
        rows.append(
            {
                "step": step,
                "loss": loss + 1.5 * spike,
                "tokens_per_second": 5500 + 200 * random.standard_normal(),
                "grad_norm": math.nan if broken else (1.2 - part) * (9.0 if spike else 1.0),
                "learning_rate": 1e-3 * min(4 * part, (1 - part) / 0.75),
                "memory_bytes": int(7.1e8 + 1e6 * random.random()),
            }
        )
    write_lines(folder / "metrics.jsonl", rows)


def watched(
    layers: list[str], steps: range, random: np.random.Generator
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of float8_stats.jsonl and of anomalies.jsonl."""
    rows, anomalies = [], []
    level = {name: random.normal(0, 0.7, len(layers)) for name in OPERANDS}
    spike = steps[int(SPIKE_AT * len(steps))]
    broken = steps[int(BROKEN_AT * len(steps))]
    for step in steps:
        for index, fqn in enumerate(layers):
            for operand in OPERANDS:
                row = cast_row(operand, step, fqn, level[operand][index], index / len(layers))
                row["sqnr"] += 0.3 * random.standard_normal()
                if (fqn, operand, step) == (SPIKE, "input", spike):
                    row |= {"amax": row["amax"] * 1e4, "underflow": 61.0, "sqnr": 9.5}
                    anomalies.append(anomaly(row, "underflow", 61.0, 5.0, [0, 1]))
                if (fqn, operand) == (BROKEN, "grad_output") and step >= broken:
                    row |= {"amax": "NaN", "scale": "NaN", "nonfinite": 0.01, "sqnr": "NaN"}
                    if step == broken:
                        anomalies.append(anomaly(row, "non-finite values", 0.01, 0.0, [1]))
                rows.append(row)
            sqnr = 27 + 2 * random.standard_normal()
            rows.append({"kind": "gemm", "step": step, "fqn": fqn, "gemm": "output", "sqnr": sqnr})
    return rows, anomalies


def cast_row(operand: str, step: int, fqn: str, level: float, depth: float) -> dict[str, Any]:
    """A row of one cast; deeper layers have larger inputs and smaller gradients."""
    dtype, gemms, usual = OPERANDS[operand]
    drift = 1 + 0.4 * math.log1p(step) * (1 - depth)
    amax = usual * math.exp(level + depth) * drift
    underflow = max(0.0, 2.5 * depth + level) ** 2 if operand == "grad_output" else 0.02 * depth
    return {
        "kind": "cast",
        "step": step,
        "fqn": fqn,
        "operand": operand,
        "gemms": gemms,
        "granularity": "tensor",
        "dtype": dtype,
        "amax": amax,
        "scale": amax / LARGEST[dtype],
        "scale_min": amax / LARGEST[dtype],
        "underflow": underflow,
        "saturation": 0.0,
        "nonfinite": 0.0,
        "sqnr": (31.5 if dtype == "float8_e4m3fn" else 25.5) - underflow / 4,
    }


def anomaly(
    row: dict[str, Any], what: str, value: float, threshold: float, ranks: list[int]
) -> dict[str, Any]:
    """A row of anomalies.jsonl about a row of float8_stats.jsonl."""
    where = {name: row[name] for name in ("step", "fqn", "operand")}
    message = f"{row['fqn']}: {what} in the {row['operand']} at step {row['step']}"
    numbers = {"value": json_number(value), "threshold": threshold}
    return where | {"what": what, "ranks": ranks, "message": message} | numbers


def comm_rows(layers: list[str]) -> list[dict[str, Any]]:
    """The rows of comm.json."""
    rows = []
    for op, axis, dtype, size, modules in (
        ("all_gather", "dp", "torch.float8_e4m3fn", 1, layers),
        ("all_gather", "tp", "torch.float8_e5m2", 1, layers[::7]),
        ("reduce_scatter", "tp", "torch.bfloat16", 2, layers[3::7]),
        ("all_gather", "dp", "torch.bfloat16", 2, [""]),
        ("all_reduce", "tp", "torch.int32", 4, [""]),
        ("reduce_scatter", "dp", "torch.float32", 4, [""]),
    ):
        elements = 64 if dtype == "torch.int32" else 98304
        for module in modules:
            mixed = (op, axis, dtype) == ("all_gather", "dp", "torch.bfloat16")
            rows.append(
                {
                    "op": op,
                    "axis": axis,
                    "dtype": dtype,
                    "module": module,
                    "in_mixed_gather": mixed,
                    "count": 0 if mixed else 1,
                    "elements": elements,
                    "bytes": size * elements,
                    "float8_bytes": elements if "float8" in dtype else 0,
                }
            )
    return rows
