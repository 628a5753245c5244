"""Which module is running now, in forward and in backward; ``debug`` names collectives by it."""

from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fp8_dist.torch_internals import tree_leaves, when_backward_ends

# Path segments that wrappers add and ``state_dict`` keys leave out.
WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


class ModulePath:
    """A context manager: ``current`` is the FQN of the innermost module that is running.

    FQNs count from the outermost module that was called, as in its ``named_modules()``: that module
    itself is ``""``, and so is code outside of any module. ``current`` covers what torch runs
    around a module's own forward and backward too: hooks of FSDP2 and of tensor parallel styles.
    (``torch.utils.module_tracker`` takes a module for left before its own forward hooks run, which
    is where a row-parallel layer reduces its output.) Modules inside of compiled code are passed
    over: it runs as part of the module that called it.
    """

    def __init__(self) -> None:
        self.current = ""
        self._fqns: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        # (module, FQN, FQN of its caller, _after_own_hooks) of every forward that is under way.
        self._calls: list[tuple[nn.Module, str, str, RemovableHandle]] = []
        self._handles: list[RemovableHandle] = []
        self._backward_end_queued = False

    def __enter__(self) -> Self:
        self._handles.append(register_module_forward_pre_hook(self._before))
        self._handles.append(register_module_forward_hook(self._before_own_hooks))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in (*self._handles, *(leaving for *_, leaving in self._calls)):
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self.current = ""

    def _fqn(self, module: nn.Module) -> str:
        if module not in self._fqns:
            # A module called by one that doesn't own it is a root of its own.
            for name, child in module.named_modules():
                self._fqns[child] = without_wrappers(name)
        return self._fqns[module]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Runs before every other forward pre-hook of the module."""
        if torch.compiler.is_compiling():
            return
        fqn, caller = self._fqn(module), self.current
        self.current = fqn
        # Appended after the hooks that the module already has, so it runs after them.
        leaving = module.register_forward_hook(self._after_own_hooks, always_call=True)
        self._calls.append((module, fqn, caller, leaving))
        # Backward leaves the module once the gradients of its inputs are there.
        if tensors := _differentiable(args):
            leave = partial(self._leave_in_backward, fqn, caller)
            self._handles.append(register_multi_grad_hook(tensors, leave))

    def _before_own_hooks(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # First of the hooks on these tensors, before FSDP2's, which gathers the weights.
        self._on_backward_of(self._fqn(module), output)

    def _after_own_hooks(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._calls:
            # More than one only where a call raised and left its entry behind.
            called, fqn, self.current, leaving = self._calls.pop()
            leaving.remove()
            if called is module:
                # The module's own hooks may have replaced the output.
                self._on_backward_of(fqn, output)
                return

    def _on_backward_of(self, fqn: str, output: Any) -> None:
        if tensors := _differentiable(output):
            enter = partial(self._enter_in_backward, fqn)
            self._handles.append(register_multi_grad_hook(tensors, enter, mode="any"))

    # One tensor may be the output of nested modules and the input of others, and its hooks run
    # in the order of their registration, inner outputs before outer ones and outer inputs before
    # inner ones. So a module is entered only from outside of it, and left only from inside.

    def _enter_in_backward(self, fqn: str, _: Any) -> None:
        if not self._backward_end_queued:
            self._backward_end_queued = True
            when_backward_ends(self._end_backward)
        if not _is_inside(self.current, fqn):
            self.current = fqn

    def _leave_in_backward(self, fqn: str, caller: str, _: Any) -> None:
        if _is_inside(self.current, fqn):
            self.current = caller

    def _end_backward(self) -> None:
        self._backward_end_queued = False
        self.current = ""


def without_wrappers(fqn: str) -> str:
    """A module's name, less the segments that wrappers add."""
    return ".".join(s for s in fqn.split(".") if s not in WRAPPER_SEGMENTS)


def _is_inside(fqn: str, module: str) -> bool:
    return not module or f"{fqn}.".startswith(f"{module}.")


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]
