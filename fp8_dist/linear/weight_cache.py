"""Whether a weight's scale still belongs to the weight's values.

A scale (and the float8 copy made with it) may be used only for the values it was computed from.
What can change a weight, and how it is noticed:

* any ``torch.optim`` step: a global post-step hook drops what is known of the optimizer's
  parameters. Version counters alone would not do: foreach and fused steps change a DTensor
  without bumping them. It also drops what was cast in passing of parameters that no optimizer
  was seen to update: they may be copies of such parameters (mixed-precision optimizers that own
  the masters copy them back through ``.data``);
* FSDP2 replaces sharded parameters by unsharded ones and back: the layer notices each exchange,
  since it can't know what an unsharded parameter holds the next time. (But in the backward: what
  the forward gathered, unless the versions of the two tell of a write since);
* in-place ops on the parameter or on its ``to_local()``: version counters;
* ``load_state_dict``, ``module.to()``, a replaced parameter: the layer drops it, or the identity
  differs.

Not noticed, because nothing that Python can read changes:

* writes through ``.data`` (``vector_to_parameters`` makes such), or through a numpy array;
* collectives into the weight: ``dist.broadcast(weight, 0)``, ``all_reduce``, ``recv``;
* on DTensors: in-place foreach ops outside an optimizer, and writes to what ``state_dict()`` gave
  out;
* a write to ``to_local()`` between precompute and the first use of the scale;
* ``swap_tensors`` of two tensors whose version counters coincide.

For these there is :func:`fp8_dist.invalidate_float8_scales`. Without it the next forward uses the
old scale, and the old float8 copy if there is one, in evaluation too. An evaluation then drops the
copy, and the scale unless it was precomputed. Every change, noticed or not, must be made on all
ranks: a rank that drops its scales alone waits alone for the all-reduce of new ones.

All of it depends on the sequence of calls alone, which is the same on all ranks, so ranks agree
about which of them need a collective. Nothing here runs inside a compiled graph.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fp8_dist.config import CastSpec
from fp8_dist.kernels import Scaling
from fp8_dist.tensor import Quantized
from fp8_dist.torch_internals import in_backward
from fp8_dist.warn import warn_once

# Who finds a scaling out: precompute, FSDP2's gather of the sharded parameter, a forward, which
# sees whatever is the layer's parameter at that time, or one without gradients in a compiled graph,
# after which there is no end_of_evaluation: nothing of it is kept.
Source = Literal["precompute", "gather", "forward", "evaluation"]


class Promise:
    """Scales of several weights that a collective under way will make known.

    Args:
        find: waits for the collective; for each cache: its scaling by cast, and ``all_rows``.
    """

    def __init__(
        self, find: Callable[[], list[tuple["WeightCache", dict[CastSpec, Scaling], Any]]]
    ) -> None:
        self._find: Callable[[], Any] | None = find

    def keep(self) -> None:
        """Hand the scales to the caches that still wait for them. The first call waits."""
        if self._find is not None:
            find, self._find = self._find, None
            # Whoever asks first, training may save what is found.
            with torch.inference_mode(False), torch.no_grad():
                found = find()
            for cache, scaling, all_rows in found:
                cache.fulfil(self, scaling, all_rows)


class Values(NamedTuple):
    """The values that a parameter has at one time, as far as its version tells."""

    param: torch.Tensor
    version: int | None

    @staticmethod
    def of(param: torch.Tensor) -> "Values":
        """Those that it has now."""
        return Values(param, _version(param))

    def are(self, others: "Values | None") -> bool:
        """True if they are the same, of the same parameter."""
        if others is None or self.param is not others.param:
            return False
        return self.version == others.version


class WeightCache:
    """What is known about the current values of one weight.

    Attributes:
        scaling: for each cast of the weight, the (quantization multiplier, scale) of its local
            shard: of the global weight, or of the global rows or columns.
        float8: the local shard as float8, one for each cast, where they are kept.
        all_rows: scales ``[rows, 1]`` of the global weight's rows, where FSDP2's gather can't carry
            them (0 for rows that it does not gather).
    """

    def __init__(self) -> None:
        self.float8: tuple[Quantized, ...] | None = None
        self.all_rows: torch.Tensor | None = None
        self._scaling: dict[CastSpec, Scaling] | None = None
        self._promise: Promise | None = None
        # A strong reference: tensors with weak ones can't be swapped, as module.to() does.
        self._param: torch.Tensor | None = None
        self._version: int | None = None
        self._shard_version: int | None = None
        self._source: Source = "forward"
        # What FSDP2 gathered, and into what.
        self._origin: Values | None = None
        self._gathered: Values | None = None
        self._optimized = False
        self._steps_since_sync = 0

    @property
    def scaling(self) -> dict[CastSpec, Scaling] | None:
        """See the class. Waits for a collective that will tell."""
        if self._promise is not None:
            self._promise.keep()
        return self._scaling

    @property
    def _is_known(self) -> bool:
        """Without waiting."""
        return self._scaling is not None or self._promise is not None

    def fulfil(
        self, promise: Promise, scaling: dict[CastSpec, Scaling], all_rows: torch.Tensor | None
    ) -> None:
        """Take what was promised, unless it was dropped in the meantime."""
        if self._promise is promise:
            self._promise = None
            self._scaling, self.all_rows = scaling, all_rows

    def store(
        self,
        param: torch.Tensor,
        scaling: dict[CastSpec, Scaling] | Promise,
        source: Source,
        shard: torch.Tensor | None = None,
    ) -> None:
        """Remember the scaling of the values that ``param`` has now.

        Args:
            param: the parameter.
            scaling: (multiplier, scale) for each cast, or what will tell them.
            source: who found it out.
            shard: its local tensor where it is being used; None: precomputed for later use.
        """
        origin = self._origin
        self.drop()
        self._origin = origin
        if isinstance(scaling, Promise):
            self._promise = scaling
        else:
            self._scaling = scaling
        self._version = _version(param)
        if shard is None:
            self._shard_version = None
        else:
            self._shard_version = self._version if shard is param else _version(shard)
        self._source = source
        if self._param is not param:
            _unwatch(self._param, self)
            self._param = param
            self._optimized = False
            _watch(param, self)

    def is_fresh(self, param: torch.Tensor, shard: torch.Tensor) -> bool:
        """True if what is known is known of ``param``, and of the values it has now.

        Args:
            param: the parameter.
            shard: its local tensor. Its version is compared from one use to the next, not with
                that at precompute: FSDP2 replaces the local tensor of a padded shard when it
                first runs, on some ranks only.
        """
        if self._param is not param or not self._is_known:
            return False
        shard_version = _version(shard)
        if self._shard_version is None:
            self._shard_version = shard_version
        if self._version != _version(param) or self._shard_version != shard_version:
            self.drop()
            return False
        return True

    def precomputed_for_another(self, param: torch.Tensor) -> bool:
        """True if a scale was precomputed for a parameter, and ``param`` is another."""
        return self._source == "precompute" and self._param is not param

    def end_of_evaluation(self) -> None:
        """Forget, after a pass without gradients, what such passes must not rely on.

        An evaluated model may be changed by means that go unnoticed (an EMA by foreach ops).
        """
        self.float8 = None
        if self._source != "precompute":
            self._scaling = self.all_rows = None

    def parameter_replaced(self, by: torch.Tensor | None, gathered: torch.Tensor | None) -> None:
        """The layer's parameter becomes another tensor, perhaps to come back with other values.

        (A sharded parameter that FSDP2 replaces doesn't change in the meantime.)

        Args:
            by: the other tensor.
            gathered: what FSDP2 gathers it from, if it does. What a forward found out about it
                holds in the backward again, where a checkpointed block asks once more; unless
                something was dropped in between, or one of the two was written to.
        """
        origin = None if gathered is None else Values.of(gathered)
        into = None if by is None else Values.of(by)
        if self._source == "forward":
            if self._origin is not None and self._origin.param is by:
                return  # sharded again
            again = origin is not None and origin.are(self._origin)
            if again and into is not None and into.are(self._gathered) and in_backward():
                return
            self.drop()
        self._origin, self._gathered = origin, into

    def optimizer_stepped(self, is_own: bool) -> None:
        """An optimizer took a step: one that updates this parameter, or another."""
        self._optimized |= is_own
        self._steps_since_sync += is_own
        if is_own or not (self._optimized or self._source == "precompute"):
            self.drop()

    def drop(self) -> None:
        """Forget everything but that there once was a precomputed scale."""
        if self._promise is not None:
            self._promise.keep()  # torch wants every collective waited for
        self._scaling = self.float8 = self.all_rows = self._origin = None

    def reset(self) -> None:
        """Forget everything: the parameter is about to become another."""
        self.drop()
        _unwatch(self._param, self)
        self._param = self._gathered = None
        self._source = "forward"

    def warn_if_stale(self, param: torch.Tensor, name: str) -> None:
        """Warn once if the precomputed scale of ``param`` was dropped and none followed."""
        if not self._is_known and self._source == "precompute" and self._param is param:
            self._source = "forward"
            warn_once(
                "stale scale",
                f"{name}: the weight changed after precompute_float8_dynamic_scale, so its scale "
                "is computed again in this step, with one all-reduce per weight. Call "
                "precompute_float8_dynamic_scale(model) after every optimizer.step(), or "
                "attach_precompute(optimizer, model) once",
            )

    def synced(self) -> None:
        """The amax histories of the layer have been updated."""
        self._steps_since_sync = 0

    def warn_if_not_synced(self, name: str) -> None:
        """Warn once if optimizer steps pass by without a sync of the delayed scale."""
        if self._steps_since_sync > 1:
            warn_once(
                "stale history",
                f"{name}: {self._steps_since_sync} optimizer steps were taken since the amax "
                "histories of DELAYED scales were last updated; call "
                "sync_float8_amax_and_scale_history(model) once per step",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCache":
        return WeightCache()  # a copied parameter is another parameter

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return WeightCache, ()


def after_step(optimizer: Optimizer, call: Callable[[], None]) -> RemovableHandle:
    """Run ``call`` after each step of ``optimizer``, once stale scales have been dropped.

    (torch runs an optimizer's own post-step hooks before the global one, which drops them.)
    """
    _install_hook()
    calls = _after_step.setdefault(optimizer, OrderedDict())
    handle = RemovableHandle(calls)
    calls[handle.id] = call
    return handle


# id of a parameter -> the caches that know it, each of which keeps it alive.
_caches: dict[int, "weakref.WeakSet[WeightCache]"] = {}
_after_step: "weakref.WeakKeyDictionary[Optimizer, OrderedDict[int, Callable[[], None]]]" = (
    weakref.WeakKeyDictionary()
)
_hook: RemovableHandle | None = None


def _watch(param: torch.Tensor, cache: WeightCache) -> None:
    _install_hook()
    _caches.setdefault(id(param), weakref.WeakSet()).add(cache)


def _unwatch(param: torch.Tensor | None, cache: WeightCache) -> None:
    known = _caches.get(id(param))
    if known is not None:
        known.discard(cache)
        if not known:
            del _caches[id(param)]


def _install_hook() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_on_optimizer_step)


@torch.compiler.disable
def _on_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for param, caches in _caches.items():
        for cache in caches:
            cache.optimizer_stepped(param in own)
    for call in list(_after_step.get(optimizer, {}).values()):
        call()


def _version(tensor: torch.Tensor) -> int | None:
    """The version counter of a tensor; None if it keeps none."""
    return None if tensor.is_inference() else tensor._version
