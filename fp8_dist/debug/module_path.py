"""The name of the module that is running, in forward and backward, for ``comm_audit``."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import tree_leaves, when_backward_ends

Call = Callable[..., Any]

# The paths that are entered now, and the ``nn.Module.__call__`` that they replaced. Global module
# hooks are no alternative, and neither is a function for each path: compiled graphs have guards on
# them, and would be recompiled.
_entered: list["ModulePath"] = []
_original_call: list[Call] = []


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module inside the entered paths; replaces ``nn.Module.__call__`` meanwhile."""
    call = _original_call[0]
    if not torch.compiler.is_compiling():
        for path in _entered:
            call = partial(path._run, call)
    return call(module, *args, **kwargs)


class ModulePath:
    """A context manager whose ``current`` is the FQN of the innermost module that is running.

    A path serves one block.

    FQNs are relative to the outermost module that was called, as in its ``named_modules()``.
    ``current`` is ``""`` in that module itself, and outside of any module. A module also counts as
    running during the hooks around its forward and backward, such as the hooks of FSDP2 and of
    tensor-parallel styles. ``torch.utils.module_tracker``, in contrast, leaves a module before its
    forward hooks run, although a row-parallel layer reduces its output in one.

    The submodules of a compiled module are not tracked, because Python does not call them.
    """

    def __init__(self) -> None:
        self.current = ""
        self._fqns: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._backward_end_queued = False
        self._depth = 0  # the number of nested calls

    def __enter__(self) -> Self:
        if not _entered:
            _original_call[:] = [nn.Module.__call__]
            nn.Module.__call__ = _call  # type: ignore[method-assign]
        _entered.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.remove(self)
        if not _entered:
            nn.Module.__call__ = _original_call[0]  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

    def _fqn(self, module: nn.Module) -> str:
        if module not in self._fqns:
            if isinstance(module, GraphModule) and (self._depth or self._backward_end_queued):
                return self.current  # a graph that torch.compile made of the running module
            # A module whose caller does not contain it is a root.
            for name, child in module.named_modules():
                self._fqns[child] = without_wrappers(name)
        return self._fqns[module]

    def _run(self, call: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, and track the call, including its hooks."""
        fqn, caller = self._fqn(module), self.current
        self.current = fqn
        self._depth += 1
        # The backward leaves the module when the gradients of its inputs have been computed. Leaves
        # are not counted: no module made them, and torch.autograd.grad can't run such hooks.
        if tensors := [t for t in _differentiable((args, kwargs)) if not t.is_leaf]:
            leave = partial(self._leave_in_backward, fqn, caller)
            self._handles.append(register_multi_grad_hook(tensors, leave))
        try:
            output = call(module, *args, **kwargs)
        finally:
            self.current = caller
            self._depth -= 1
        enter = partial(self._enter_in_backward, fqn)
        self._handles += [_register_first_hook(t, enter) for t in _differentiable(output)]
        return output

    # A tensor may be the output of nested modules and the input of others. So the backward enters a
    # module only from outside of it, and leaves it only from inside.

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


def _register_first_hook(tensor: torch.Tensor, hook: Callable[..., None]) -> RemovableHandle:
    """Register a gradient hook that runs before existing ones, such as FSDP2's gathering hook."""
    handle = tensor.register_hook(hook)
    hooks = handle.hooks_dict_ref()
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def _is_inside(fqn: str, module: str) -> bool:
    return not module or f"{fqn}.".startswith(f"{module}.")


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]
