"""The cases of the property tests: plain data that JSON can hold, and how they are drawn.

Three kinds. A `CastCase` casts one tensor. A `LayerCase` runs one layer with a config of any fields.
A `TrainCase` trains a model on a mesh through a sequence of actions. What is right is said in
`property_casts`, `property_layers` and `property_training`; `property_actions` has the actions.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from property_values import DTYPES, LAYOUTS, VALUES
from recipe_algebra import RECIPES

SIZES = (0, 1, 2, 3, 16, 17, 32, 33)
TYPES = ("dynamic", "delayed", "disabled")
GRANULARITIES = ("tensorwise", "axiswise")
TARGETS = (None, "e4m3", "e5m2")
OPERANDS = ("input", "weight", "grad_output")
SECOND = ("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")

# Of each mesh: ranks that replicate, that shard (FSDP2), that are tensor-parallel; sequence parallel?
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
# FSDP2's policy gathers and computes in bf16, and reduces in fp32; autocast is to bf16.
PRECISIONS = ("of the parameters", "MixedPrecisionPolicy", "autocast")
ACTIONS = (
    "step",
    "step without update",
    "micro-batches",
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
    "freeze to float8, unfreeze",
    "convert_to_linear and back",
)


@dataclass(frozen=True)
class CastCase:
    """A cast of one tensor, whole or distributed over `ranks` of a 1-D mesh."""

    shape: tuple[int, ...] = (4, 8)
    dtype: str = "fp32"
    values: str = "normal"
    layout: str = "contiguous"
    dim: int | None = None  # the reduced dim of an axiswise cast; None: tensorwise
    power_of_2: bool = False
    target: str | None = None
    ranks: int = 1
    placement: str | int = "replicate"  # or the dim that is sharded
    seed: int = 0


@dataclass(frozen=True)
class LayerCase:
    """A forward and a backward of one layer."""

    recipe: str = "tensorwise"  # its config is changed by what follows
    # (field after "cast_config_", type, granularity, target) of each cast that differs
    casts: tuple[tuple[str, str, str, str | None], ...] = ()
    flags: tuple[tuple[str, Any], ...] = ()  # (field, value) of other fields
    rows: tuple[int, ...] = (4,)  # the leading dims of the input
    in_features: int = 16
    out_features: int = 16
    dtype: str = "fp32"
    bias: bool = False
    input: str = "normal"
    weight: str = "normal"
    grad_output: str = "normal"
    input_layout: str = "contiguous"
    grad_layout: str = "contiguous"
    seed: int = 0


@dataclass(frozen=True)
class TrainCase:
    """Actions on a model on a mesh; each pass is compared with a twin in one process.

    Attributes:
        other: the mesh to which the action "dcp.load, another mesh" goes, and from there back.
        differs: the last of several ranks has another config, which all of them must refuse. (With
            tensor parallelism beside FSDP2, the other replicas wait for those that the plan refuses.)
    """

    mesh: str = "one process"
    other: str = ""
    recipe: str = "tensorwise"
    precision: str = PRECISIONS[0]
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


Case = CastCase | LayerCase | TrainCase
KINDS: dict[str, type[Case]] = {"cast": CastCase, "layer": LayerCase, "train": TrainCase}


def processes(mesh: str) -> int:
    """The number of ranks of one of `MESHES`."""
    replicate, shard, tp, _ = MESHES[mesh]
    return replicate * shard * tp


def ranks_of(case: Case) -> int:
    """How many processes a case needs."""
    if isinstance(case, TrainCase):
        return processes(case.mesh)
    return case.ranks if isinstance(case, CastCase) else 1


def to_json(case: Case) -> str:
    """What `from_json` makes the case of again; fields that have their default are left out."""
    kind = next(name for name, cls in KINDS.items() if type(case) is cls)
    own = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    defaults = dataclasses.asdict(type(case)())
    return json.dumps([kind, {n: value for n, value in own.items() if value != defaults[n]}])


def from_json(text: str) -> Case:
    """The case that a report shows."""
    kind, given = json.loads(text)
    return KINDS[kind](**{name: _tuples(value) for name, value in given.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def simpler(case: Case) -> list[Case]:
    """Cases that differ in one field, which has its default or fewer entries."""
    found: list[Case] = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if value != field.default:
            found.append(dataclasses.replace(case, **{field.name: field.default}))
        if field.name in ("casts", "flags", "actions") and value:
            shorter = (value[:i] + value[i + 1 :] for i in range(len(value)))
            found += [dataclasses.replace(case, **{field.name: rest}) for rest in shorter]
    return [each for each in found if each != case]


@st.composite
def cast_cases(draw: st.DrawFn, max_ranks: int) -> CastCase:
    ranks = draw(st.integers(1, max_ranks))
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    dims = range(len(shape))
    return CastCase(
        shape=shape,
        dtype=draw(st.sampled_from([*DTYPES])),
        values=draw(st.sampled_from(VALUES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        dim=draw(st.sampled_from([None, -1, *dims, len(shape)])),
        power_of_2=draw(st.booleans()),
        target=draw(st.sampled_from(TARGETS)),
        ranks=ranks,
        placement=draw(st.sampled_from(["replicate", *dims])) if ranks > 1 else "replicate",
        seed=draw(st.integers(0, 99)),
    )


_FLAGS = {
    "round_scales_to_power_of_2": st.booleans(),
    "pad_inner_dim": st.booleans(),
    "emulate": st.booleans(),
    "amax_history_len": st.sampled_from([1, 2, 16, 0]),
    "enable_fsdp_float8_all_gather": st.sampled_from([True, False, "auto", "yes"]),
    "fold_row_scales": st.booleans(),
}


def _flags(*names: str) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    chosen = st.lists(st.sampled_from(names), unique=True, max_size=2)
    return chosen.flatmap(lambda ns: st.tuples(*(st.tuples(st.just(n), _FLAGS[n]) for n in ns)))


def layer_cases() -> st.SearchStrategy[LayerCase]:
    cast = st.tuples(
        st.sampled_from([*OPERANDS, *SECOND]),
        st.sampled_from(TYPES),
        st.sampled_from(GRANULARITIES),
        st.sampled_from(TARGETS),
    )
    values = st.sampled_from(["normal", *VALUES])
    layout = st.sampled_from(LAYOUTS)
    size = st.sampled_from(SIZES)
    return st.builds(
        LayerCase,
        recipe=st.sampled_from(RECIPES),
        casts=st.just(()) | st.lists(cast, max_size=3, unique_by=lambda c: c[0]).map(tuple),
        flags=_flags(*_FLAGS),
        rows=st.lists(size, max_size=2).map(tuple),
        in_features=size,
        out_features=size,
        dtype=st.sampled_from([*DTYPES]),
        bias=st.booleans(),
        input=values,
        weight=values,
        grad_output=values,
        input_layout=layout,
        grad_layout=layout,
        seed=st.integers(0, 99),
    )


@st.composite
def train_cases(draw: st.DrawFn, max_ranks: int) -> TrainCase:
    mesh = draw(st.sampled_from([name for name in MESHES if processes(name) <= max_ranks]))
    others = [name for name in MESHES if processes(name) == processes(mesh) and name != mesh]
    other = draw(st.sampled_from(others)) if others else mesh
    sharded = [MESHES[name][:3] for name in (mesh, other)]
    # Weights of which a tensor-parallel rank has nothing are refused at FSDP2's first gather, or
    # FSDP2 waits for ever for their gradients; torch can't make full tensors of them before.
    on_two_axes = any(tp > 1 and replicate * shard > 1 for replicate, shard, tp in sharded)
    on_one_axis = all((replicate * shard > 1) is not (tp > 1) for replicate, shard, tp in sharded)
    has_policy = all(replicate * shard > 1 for replicate, shard, _ in sharded)
    return TrainCase(
        mesh=mesh,
        other=other,
        recipe=draw(st.sampled_from([*RECIPES, "delayed"])),
        precision=draw(st.sampled_from(PRECISIONS if has_policy else PRECISIONS[::2])),
        gather=draw(st.sampled_from(["auto", "auto", False, True])),
        flags=draw(_flags("pad_inner_dim", "round_scales_to_power_of_2")),
        dim=draw(st.sampled_from([16, 32, 24, 33, 1, 3])),
        hidden=draw(st.sampled_from([32, 48, 33, 3] if on_two_axes else [32, 48, 33, 3, 1])),
        batch=draw(st.sampled_from([1, 2, 3, 0])),
        sequence=draw(st.sampled_from([4, 6, 1, 3, 5])),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        values=draw(st.sampled_from(["normal", *VALUES])),
        optimizer=draw(st.sampled_from(["SGD", "AdamW", "AdamW foreach"])),
        actions=tuple(draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=5))),
        differs=on_one_axis and draw(st.sampled_from([*[False] * 11, True])),
        seed=draw(st.integers(0, 99)),
    )


def cases(kind: str, max_ranks: int = 4) -> st.SearchStrategy[Case]:
    """Cases of a kind that need at most so many ranks."""
    if kind == "layer":
        return layer_cases()
    return cast_cases(max_ranks) if kind == "cast" else train_cases(max_ranks)
