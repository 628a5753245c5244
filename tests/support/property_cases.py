"""The cases of the property tests, which are plain data for JSON, and how they are drawn.

A `TrainCase` trains a model on a mesh through a sequence of actions. `property_training` defines
correct results; `property_actions` has the actions.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from property_values import VALUES
from recipe_algebra import RECIPES

# Mesh sizes: ranks that replicate, that shard (FSDP2), that are tensor-parallel; and if with SP.
MESHES: dict[str, tuple[int, int, int, bool]] = {
    "one process": (1, 1, 1, False),
    "FSDP2 x2": (1, 2, 1, False),
    "TP x2": (1, 1, 2, False),
    "TP + SP x2": (1, 1, 2, True),
    "FSDP2 x3": (1, 3, 1, False),
    "TP + SP x3": (1, 1, 3, True),
    "FSDP2 x4": (1, 4, 1, False),
    "HSDP 2 x 2": (2, 2, 1, False),
    "FSDP2 2 x TP 2": (1, 2, 2, False),
    "FSDP2 2 x TP + SP 2": (1, 2, 2, True),
    "HSDP 2 x 1 x TP 2": (2, 1, 2, False),
    "HSDP 2 x 2 x TP + SP 2": (2, 2, 2, True),
}
# The MixedPrecisionPolicy gathers and computes in bf16, and reduces in fp32. Autocast is to bf16.
PRECISIONS = ("of the parameters", "MixedPrecisionPolicy", "autocast")
# What `fully_shard` is called on: the layers and the model, or the model alone, which then stays
# unsharded after a forward. "layers, kept": the layers stay unsharded, too.
SHARDINGS = ("layers", "layers, kept", "model")
IN_FOUR_BITS = ("blockwise", "mxfp8")  # recipes that allow weight_format="mxfp4"
EVALUATIONS = ("no_grad", "inference_mode", "eval()", "eval(), no_grad")
ACTIONS = (
    "step",
    "step without update",
    "step, evaluate, update",
    "micro-batches",
    "micro-batches, evaluate",
    "evaluate",
    "load_state_dict",
    "edit in place",
    "write .data, invalidate",
    "freeze",
    "unfreeze",
    "deepcopy",
    "checkpointing",
    "precompute",
    "precompute, write",
    "dcp.load",
    "dcp.load, another mesh",
    "GradScaler",
    "GradScaler, overflow",
    "sync",
    "invalidate",
)


@dataclass(frozen=True)
class TrainCase:
    """Actions on a model on a mesh; each pass is compared with a twin in one process.

    Attributes:
        sharding: one of `SHARDINGS`, on meshes with FSDP2.
        evaluation: one of `EVALUATIONS`.
        in_four_bits: whether weights are cast to MXFP4, in recipes that allow it.
        other: the mesh to which "dcp.load, another mesh" changes, and from which it changes back.
        differs: whether the last rank has another config, which all ranks must refuse. (Not on
            meshes with both TP and FSDP2, where replicas would wait for those whose plan fails.)
    """

    mesh: str = "one process"
    other: str = ""
    recipe: str = "tensorwise"
    in_four_bits: bool = False
    precision: str = PRECISIONS[0]
    sharding: str = SHARDINGS[0]
    evaluation: str = EVALUATIONS[0]
    gather: bool | str = "auto"
    flags: tuple[tuple[str, Any], ...] = ()
    dim: int = 16
    hidden: int = 32
    batch: int = 2
    sequence: int = 4
    dtype: str = "fp32"
    values: str = "normal"
    optimizer: str = "SGD"
    actions: tuple[str, ...] = ("step",)
    differs: bool = False
    seed: int = 0


def processes(mesh: str) -> int:
    """The number of ranks of one of `MESHES`."""
    replicate, shard, tp, _ = MESHES[mesh]
    return replicate * shard * tp


def to_json(case: TrainCase) -> str:
    """Serialize a case for `from_json`, without fields that have their default."""
    default = dataclasses.asdict(TrainCase())
    fields = dataclasses.asdict(case).items()
    return json.dumps({name: value for name, value in fields if value != default[name]})


def from_json(text: str) -> TrainCase:
    """The case from the text in a report."""
    return TrainCase(**{name: _tuples(value) for name, value in json.loads(text).items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def simpler(case: TrainCase) -> list[TrainCase]:
    """Variants of a case in which one field has its default, or fewer entries."""
    found: list[TrainCase] = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if value != field.default:
            found.append(dataclasses.replace(case, **{field.name: field.default}))
        if field.name in ("flags", "actions") and value:
            shorter = (value[:i] + value[i + 1 :] for i in range(len(value)))
            found += [dataclasses.replace(case, **{field.name: rest}) for rest in shorter]
    return [each for each in found if each != case]


def _flags() -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    names = ("pad_inner_dim", "round_scales_to_power_of_2")
    flag = st.tuples(st.sampled_from(names), st.booleans())
    return st.lists(flag, unique_by=lambda flag: flag[0], max_size=2).map(tuple)


@st.composite
def train_cases(draw: st.DrawFn, max_ranks: int) -> TrainCase:
    mesh = draw(st.sampled_from([name for name in MESHES if processes(name) <= max_ranks]))
    others = [name for name in MESHES if processes(name) == processes(mesh) and name != mesh]
    other = draw(st.sampled_from(others)) if others else mesh
    sharded = [MESHES[name][:3] for name in (mesh, other)]
    # Weights that are empty on a tensor-parallel rank are refused at FSDP2's first gather, or FSDP2
    # hangs waiting for their gradients. Before that, torch can't compute full tensors of them.
    on_two_axes = any(tp > 1 and replicate * shard > 1 for replicate, shard, tp in sharded)
    on_one_axis = all((replicate * shard > 1) is not (tp > 1) for replicate, shard, tp in sharded)
    has_policy = all(replicate * shard > 1 for replicate, shard, _ in sharded)
    recipe = draw(st.sampled_from([*RECIPES, "delayed"]))
    return TrainCase(
        mesh=mesh,
        other=other,
        recipe=recipe,
        in_four_bits=recipe in IN_FOUR_BITS and draw(st.booleans()),
        precision=draw(st.sampled_from(PRECISIONS if has_policy else PRECISIONS[::2])),
        sharding=draw(st.sampled_from(SHARDINGS)),
        evaluation=draw(st.sampled_from(EVALUATIONS)),
        gather=draw(st.sampled_from(["auto", "auto", False, True])),
        flags=draw(_flags()),
        dim=draw(st.sampled_from([16, 32, 64, 24, 33, 1, 3])),
        hidden=draw(
            st.sampled_from([32, 64, 48, 33, 3] if on_two_axes else [32, 64, 48, 33, 3, 1])
        ),
        batch=draw(st.sampled_from([1, 2, 3, 0])),
        sequence=draw(st.sampled_from([4, 6, 1, 3, 5])),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        values=draw(st.sampled_from(["normal", *VALUES])),
        optimizer=draw(st.sampled_from(["SGD", "AdamW", "AdamW foreach"])),
        actions=tuple(draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=5))),
        differs=on_one_axis and draw(st.sampled_from([*[False] * 11, True])),
        seed=draw(st.integers(0, 99)),
    )
