"""After the step of any optimizer: weights forget their scales, then precompute runs."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class WatchesSteps(Protocol):
    """An object that is told of optimizer steps."""

    def optimizer_stepped(self, updated: set[int]) -> None:
        """An optimizer took a step, which updated the parameters of these ids."""


_watchers: "weakref.WeakSet[WatchesSteps]" = weakref.WeakSet()
_watchers_lock = threading.Lock()  # models may be trained in several threads
_calls: "weakref.WeakKeyDictionary[Optimizer, OrderedDict[int, Callable[[], None]]]" = (
    weakref.WeakKeyDictionary()
)


def watch_steps(watcher: WatchesSteps) -> None:
    """Tell an object of all optimizer steps from now on, as long as it lives."""
    _install_hook()
    with _watchers_lock:
        _watchers.add(watcher)


def after_step(optimizer: Optimizer, call: Callable[[], None]) -> RemovableHandle:
    """Run ``call`` after each step of ``optimizer``, once the watchers have been told.

    (torch runs an optimizer's own post-step hooks before the global one.)
    """
    _install_hook()
    calls = _calls.setdefault(optimizer, OrderedDict())
    handle = RemovableHandle(calls)
    calls[handle.id] = call
    return handle


@cache
def _install_hook() -> RemovableHandle:
    return register_optimizer_step_post_hook(_on_optimizer_step)


@torch.compiler.disable
def _on_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    with _watchers_lock:
        watchers = list(_watchers)
    for watcher in watchers:
        watcher.optimizer_stepped(updated)
    for call in list(_calls.get(optimizer, {}).values()):
        call()
