"""Ways to save and load a model, its optimizer and its Float8State with DCP, each in one call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
import torch.nn as nn
from documented import run_shown
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from fp8_dist import Float8State

# The state_dict for dcp.save or dcp.load, and a function to call after the load.
Pattern = tuple[dict[str, Any], Callable[[], object]]
DOCS = Path(__file__).parents[2] / "docs" / "state.md"


class OptimizerState:
    """An optimizer as a Stateful of its own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class AppState:
    """Model, optimizer and Float8State in one Stateful, as in torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.float8 = Float8State(model)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "float8": self.float8.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.float8.load_state_dict(state["float8"])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def stateful(model: nn.Module, optimizer: Optimizer, key: str = "float8") -> dict[str, Any]:
    state = {"model": model, "optimizer": OptimizerState(model, optimizer)}
    return state | {key: Float8State(model)}


def model_state_dict(model: nn.Module, optimizer: Optimizer) -> Pattern:
    own = get_model_state_dict(model)
    return stateful(model, optimizer) | {"model": own}, lambda: set_model_state_dict(model, own)


def nested(model: nn.Module, optimizer: Optimizer) -> Pattern:
    state = stateful(model, optimizer)
    float8 = state.pop("float8")
    inner = {"float8": float8.state_dict()}
    return state | {"run": inner}, lambda: float8.load_state_dict(inner["float8"])


def nothing() -> None:
    pass


PATTERNS: dict[str, Callable[[nn.Module, Optimizer], Pattern]] = {
    "aaa": lambda model, optimizer: (stateful(model, optimizer, "aaa"), nothing),
    "zzz": lambda model, optimizer: (stateful(model, optimizer, "zzz"), nothing),
    "model_state_dict": model_state_dict,
    "nested": nested,
    "app_state": lambda *both: ({"app": AppState(*both)}, nothing),
}
NAMES = ("docs", *PATTERNS)


def save(name: str, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """Save by the named pattern, in its own folder."""
    if name == "docs":
        _documented()["save"](model, optimizer, f"{folder}/docs")
        return
    state, _ = PATTERNS[name](model, optimizer)
    dcp.save(state, checkpoint_id=f"{folder}/{name}")


def load(
    name: str, model: nn.Module, optimizer: Optimizer, folder: str, planner: Any = None
) -> None:
    """Load what :func:`save` wrote, in one dcp.load."""
    if name == "docs":
        _documented()["load"](model, optimizer, f"{folder}/docs")
        return
    state, after = PATTERNS[name](model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/{name}", planner=planner)
    after()


def _documented() -> dict[str, Any]:
    """The functions that docs/state.md shows."""
    programs = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    (shown,) = [program for program in programs if "def save(" in program]
    names: dict[str, Any] = {}
    run_shown(shown, names)
    return names
