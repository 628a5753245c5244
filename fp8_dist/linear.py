"""``Float8Linear``: nn.Linear whose three GEMMs multiply float8 operands."""

import dataclasses
from typing import Any, ClassVar, Protocol, get_args

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.cast import cast_local, scaling_of
from fp8_dist.casts import Cast, Operand
from fp8_dist.checks import check_alignment, check_gathered, check_mesh, check_prepared
from fp8_dist.config import Float8LinearConfig
from fp8_dist.delayed import AmaxHistory, load_histories
from fp8_dist.freshness import Source, WeightCache, warn_once
from fp8_dist.function import float8_linear
from fp8_dist.operands import LinearSpec, WeightCasts
from fp8_dist.runtime import known_scaling, name_of
from fp8_dist.scaling import Scaling, quantize, reduced_dims
from fp8_dist.sharding import (
    Layout,
    Placements,
    local_tensor,
    reduced,
)
from fp8_dist.tensor import Float8Tensor

_HISTORIES = "float8_amax_histories"


class FSDPWeightType(Protocol):
    """A tensor type whose all-gather FSDP2 runs in float8 (``fp8_dist.fsdp`` has the one)."""

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A local tensor of this type on the same storage."""

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain local tensor; any other tensor is returned as it is."""


class Float8Linear(nn.Linear):
    """A linear layer that computes in float8; a drop-in for nn.Linear.

    Shapes: input ``[..., in_features]``, output ``[..., out_features]`` in the input's dtype (the
    autocast dtype under autocast). Parameters stay in high precision, so a ``state_dict`` is
    interchangeable with nn.Linear's. Made by :func:`fp8_dist.convert_to_float8_training`,
    :meth:`from_float`, or the constructor, which takes nn.Linear's arguments and ``config``.

    Collectives: none on one device. On DTensors those of the table in
    :mod:`fp8_dist.sharding`, plus an all-reduce of 4 bytes per scale for each operand of which
    what a scale covers is sharded, if the scale is not known yet.

    Attributes:
        config: what is cast, and how.
        fqn: the layer's name in the model that was converted, for messages.
        output_placements: where a DTensor output goes; ``None`` leaves it where the GEMM left it.
            The tensor-parallel styles set it.
        weight_cache: scales and float8 shard of the weight, while they are known to be fresh.
        histories: the amax history of each operand whose scaling is DELAYED (and of the input that
            ``PrepareFloat8ModuleInput`` casts in the layer's way).
    """

    config: Float8LinearConfig
    fqn: str
    output_placements: Placements | None
    weight_cache: WeightCache
    histories: dict[str, AmaxHistory]

    # Set by fp8_dist.fsdp: this package knows that there is such a type, not what it does.
    fsdp_weight_type: ClassVar[FSDPWeightType]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: Float8LinearConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config, "")

    @classmethod
    def from_float(
        cls, mod: nn.Linear, config: Float8LinearConfig | None = None, *, fqn: str = ""
    ) -> "Float8Linear":
        """A float8 layer with the parameters, hooks and attributes of ``mod`` (shared, not copied).

        With ``enable_fsdp_float8_all_gather`` the weight is a new parameter on the same storage, of
        the type that FSDP2 gathers in float8: make the optimizer afterwards.

        Args:
            mod: the layer to convert; it is left as it was.
            config: defaults to ``Float8LinearConfig()``.
            fqn: the layer's name, for messages.

        Raises:
            TypeError: ``mod`` is no nn.Linear, or ``config`` no Float8LinearConfig.
        """
        if not isinstance(mod, nn.Linear):
            raise TypeError(f"Float8Linear.from_float: expected an nn.Linear, got {type(mod)}")
        new = cls.__new__(cls)
        for name, value in mod.__dict__.items():
            # Containers (parameters, hooks) are the module's own, what they hold is shared.
            new.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
        new._set_up(config, fqn)
        return new

    def _set_up(self, config: Float8LinearConfig | None, fqn: str) -> None:
        if config is not None and not isinstance(config, Float8LinearConfig):
            raise TypeError(f"config must be a Float8LinearConfig, got {config!r}")
        self.config = Float8LinearConfig() if config is None else config
        self.fqn = fqn or type(self).__name__
        self.output_placements = None
        self._weight_is_fsdps = False  # sharded between its uses: nothing made of it may stay
        self._name = name_of(self)
        self.weight_cache = WeightCache()
        self.histories = {
            str(operand): AmaxHistory(
                cast, self.config.amax_history_len, self.config.round_scales_to_power_of_2
            )
            for operand in get_args(Operand)
            for cast in self.config.casts(operand)
            if cast.delayed
        }
        if self.config.enable_fsdp_float8_all_gather:
            self.weight = self._wrapped(self.weight)

    def to_linear(self) -> nn.Linear:
        """A new nn.Linear with this layer's parameters (shared, plain tensors) and mode alone."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(
            self._plain(self.weight), requires_grad=self.weight.requires_grad
        )
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See the class.

        Raises:
            TypeError: the input is not floating point.
            ValueError: its last dim is not ``in_features``; the input and the weight are not
                DTensors on one mesh, or both plain; or features are misaligned
                (``pad_inner_dim``).
        """
        if not input.dtype.is_floating_point:
            raise TypeError(f"{self.fqn}: the input must be floating point, got {input.dtype}")
        # (The shape of a DTensor made of uneven local tensors is only torch's guess.)
        plain = not isinstance(input, DTensor)
        if plain and (input.ndim == 0 or input.shape[-1] != self.in_features):
            raise ValueError(
                f"{self.fqn}: the last dim of the input must be in_features={self.in_features}, "
                f"got an input of shape {tuple(input.shape)}"
            )
        check_mesh(self.fqn, self.weight, input)
        if not torch.compiler.is_compiling():
            check_alignment(self.fqn, self.config, self.weight, input.device)
            if self.histories:
                self.weight_cache.warn_if_not_synced(self.fqn)
        weight = self._weight_casts()
        local = local_tensor(input)
        if isinstance(local, Float8Tensor):
            check_prepared(self.fqn, self.config, local)
        else:
            device = input.device.type
            if torch.is_autocast_enabled(device):
                input = input.to(torch.get_autocast_dtype(device))
            input = reduced(input)
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            self.weight_cache.end_of_evaluation()
        spec = LinearSpec(
            self.config, self.output_placements, self.fqn, self.histories, torch.is_grad_enabled()
        )
        return float8_linear(input, self.weight, self.bias, weight, spec)

    def local_shard(self) -> torch.Tensor:
        """The plain local tensor of the weight, as it is now (no copy, no collectives)."""
        return self.fsdp_weight_type.unwrap(local_tensor(self.weight))

    def meshes(self) -> list[DeviceMesh]:
        """The meshes that the layer's operands are distributed over."""
        layout = Layout.of(self.weight)
        own = [] if layout is None else [layout.mesh]
        return own + [h.mesh for h in self.histories.values() if h.mesh is not None]

    def cast_weight(
        self, source: Source, shard: torch.Tensor | None = None
    ) -> tuple[Float8Tensor, ...]:
        """The local shard of the weight in each of its casts, with the scales of the global weight.

        What ``precompute_float8_dynamic_scale`` or an earlier call left in ``weight_cache`` is
        used if it is fresh.

        Args:
            source: who asks. (What is computed here is remembered for a parameter only: a tensor
                in its place, such as FSDP1's view of what it gathered, changes unnoticed.)
            shard: the local shard, where it was moved off the parameter's device (CPU offload).

        Returns:
            One tensor for each of ``config.casts("weight")``.

        Collectives: for each cast one all-reduce of 4 bytes per scale, if what a scale covers is
        sharded and the scales are not known.
        """
        # What an evaluation under inference_mode leaves in the cache, training may save.
        with torch.inference_mode(False), torch.no_grad():
            return self._cast_weight(source, shard)

    def _cast_weight(self, source: Source, shard: torch.Tensor | None) -> tuple[Float8Tensor, ...]:
        cache, weight = self.weight_cache, self.weight
        shard = self.local_shard() if shard is None else shard
        fresh = cache.is_fresh(weight, local_tensor(weight))
        if fresh and cache.float8 is not None and cache.float8[0].device == shard.device:
            return cache.float8
        float8 = self._cast_with_known_scaling(source, shard)
        kept = isinstance(weight, nn.Parameter) and self.config.cache_float8_shards
        cache.float8 = float8 if kept and shard.device == weight.device else None
        return float8

    def _cast_with_known_scaling(
        self, source: Source, shard: torch.Tensor
    ) -> tuple[Float8Tensor, ...]:
        casts = self.config.casts("weight")
        known = (self._known_scaling(source, shard, i) for i in range(len(casts)))
        return tuple(
            cast_local(shard, cast.dtype, scaling)
            for cast, scaling in zip(casts, known, strict=True)
        )

    def _known_scaling(self, source: Source, shard: torch.Tensor, index: int) -> Scaling:
        dims = reduced_dims(self.config.casts("weight")[index].covers, 2)
        return known_scaling(self, self._name, shard, dims, source, str(index))

    def scaling_at_run_time(self, x: torch.Tensor, source: Source, index: str) -> Scaling:
        """The scales of the weight's shard ``x`` for one of its casts, as its values are now."""
        cache, weight, casts = self.weight_cache, self.weight, self.config.casts("weight")
        cast = casts[int(index)]
        if not cache.is_fresh(weight, local_tensor(weight)):
            cache.warn_if_stale(weight, self.fqn)
            if source == "evaluation" or not isinstance(weight, nn.Parameter):
                return self._dynamic_scaling(x, cast)
            scaling = {each: self._dynamic_scaling(x, each) for each in casts}
            cache.store(weight, scaling, source, local_tensor(weight))
        assert cache.scaling is not None
        return cache.scaling[cast]

    def extra_repr(self) -> str:
        config = self.config
        casts = {
            "i": config.cast_config("input", "output").short_str("input"),
            "w": config.cast_config("weight", "output").short_str("weight"),
            "go": config.cast_config("grad_output", "grad_input").short_str("grad_output"),
        }
        second = {
            "i_gw": config.cast_config("input", "grad_weight").short_str("input"),
            "w_gi": config.cast_config("weight", "grad_input").short_str("weight"),
            "go_gw": config.cast_config("grad_output", "grad_weight").short_str("grad_output"),
        }
        casts |= {k: v for k, v in second.items() if v != casts[k.split("_")[0]]}
        shown = ",".join(f"{name}:{cast}" for name, cast in casts.items())
        others = [
            f"{field.name}={getattr(config, field.name)}"
            for field in dataclasses.fields(config)
            if not field.name.startswith(("cast_config", "gemm_config"))
            and getattr(config, field.name) != field.default
        ]
        return ", ".join([super().extra_repr(), f"casts={shown}", *others])

    def _weight_casts(self) -> WeightCasts:
        """The local weight in each of its casts, for this forward."""
        if not self.config.casts("weight"):
            return WeightCasts()
        local, plain = local_tensor(self.weight), self.local_shard()
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            check_gathered(self.fqn, self.config, local)
            return WeightCasts(((local.qdata, self._recorded(local.scale)),))
        source: Source = "forward"
        if torch.compiler.is_compiling():
            source = "forward" if torch.is_grad_enabled() else "evaluation"
        else:
            self._warn_if_flags_have_no_effect(plain is not local)
        if self._weight_is_fsdps:
            return self._casts_of_gathered(source, plain)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                casts = self._cast_with_known_scaling(source, plain)
        else:
            casts = self.cast_weight(source)
        return WeightCasts(tuple((cast.qdata, self._recorded(cast.scale)) for cast in casts))

    def _casts_of_gathered(self, source: Source, gathered: torch.Tensor) -> WeightCasts:
        """Casts of a weight that FSDP2 gathered in high precision: the output's; scales of all."""
        of_output, of_grad_input = (
            self.config.cast("weight", gemm) for gemm in ("output", "grad_input")
        )
        flat: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        multiplier = None
        with torch.inference_mode(False), torch.no_grad():
            for index, cast in enumerate(self.config.casts("weight")):
                m, scale = self._known_scaling(source, gathered, index)
                qdata = quantize(gathered, m, cast.dtype) if cast == of_output else None
                flat.append((qdata, scale))
                multiplier = m if cast == of_grad_input else multiplier
        return WeightCasts(tuple((q, self._recorded(scale)) for q, scale in flat), multiplier)

    def _recorded(self, scale: torch.Tensor) -> torch.Tensor:
        """The weight's scale as a training step takes it: a delayed one records its amax then.

        (Not when the weight is cast: FSDP2 gathers without gradients in training too.)
        """
        if "weight" not in self.histories or not torch.is_grad_enabled():
            return scale
        return self.histories["weight"].recorded(scale)

    def _dynamic_scaling(self, shard: torch.Tensor, cast: Cast) -> Scaling:
        """The scales of the local shard for a cast of the weight, from its values or history."""
        layout = Layout.of(self.weight)
        tensor = shard if layout is None else layout.wrap(shard)
        if cast.delayed:
            return self.histories["weight"].scaling_of(tensor, record=False)
        power_of_2 = self.config.round_scales_to_power_of_2
        return scaling_of(tensor, cast.dtype, cast.covers, power_of_2)

    def _warn_if_flags_have_no_effect(self, wrapped: bool) -> None:
        if wrapped:
            warn_once(
                "float8 gather without FSDP2",
                f"{self.fqn}: enable_fsdp_float8_all_gather=True has no effect on this layer: "
                "FSDP2 does not manage its weight. Call fully_shard on the model (after "
                "convert_to_float8_training), or leave the flag off",
            )
        elif self.weight_cache.precomputed_for_another(self.weight):
            warn_once(
                "precompute without float8 gather",
                f"{self.fqn}: the precomputed scale is not used, because the weight of this "
                "forward is not the parameter that it was computed from: FSDP2 gathered it in "
                "high precision (set enable_fsdp_float8_all_gather=True), or functional_call "
                "replaced it",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 exchanges parameters in this way where a module class has a __setattr__.
        if name == "weight" and "weight_cache" in self.__dict__:
            self.weight_cache.parameter_replaced()
            now, then = Layout.of(getattr(self, "weight", None)), Layout.of(value)
            self._weight_is_fsdps |= (now and now.mesh) != (then and then.mesh)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._name = name_of(self)  # a copy is another layer

    def _apply(self, fn: Any, recurse: bool = True) -> "Float8Linear":
        # module.to(), .cuda(), to_empty() and their like change the weight unnoticed.
        self.weight_cache.reset()
        return super()._apply(fn, recurse)

    def _plain(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight on the same storage as a plain tensor or DTensor, detached."""
        return self._converted(weight.detach(), self.fsdp_weight_type.unwrap)

    def _wrapped(self, weight: torch.Tensor) -> nn.Parameter:
        """The weight on the same storage as a parameter that FSDP2 gathers in float8."""
        wrapped = self._converted(weight.detach(), self.fsdp_weight_type.wrap)
        return nn.Parameter(wrapped, requires_grad=weight.requires_grad)

    @staticmethod
    def _converted(weight: torch.Tensor, convert: Any) -> torch.Tensor:
        layout = Layout.of(weight)
        local = convert(local_tensor(weight))
        return local if layout is None else layout.wrap(local)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = self._plain(self.weight)
        # Not among the keys, which are nn.Linear's: torch hands the metadata to whoever loads.
        saved = {name: history.state() for name, history in self.histories.items()}
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if saved and metadata is not None:
            metadata[_HISTORIES] = {n: value for n, value in saved.items() if value is not None}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        key = prefix + "weight"
        assign = local_metadata.get("assign_to_params_buffers", False)
        if assign and key in state_dict and self.config.enable_fsdp_float8_all_gather:
            state_dict[key] = self._wrapped(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self.weight_cache.drop()
        if self.histories:
            load_histories(self.histories, local_metadata.get(_HISTORIES, {}), self.meshes())


def invalidate_float8_scales(module: nn.Module) -> None:
    """Forget every precomputed scale and cached float8 weight in ``module``.

    For changes that can't be noticed: writes to a weight through ``.data`` or ``to_local()``, or
    in-place foreach ops outside an optimizer. Call it on all ranks; it issues no collectives.
    """
    for layer in float8_layers(module).values():
        layer.weight_cache.drop()


def float8_layers(module: nn.Module) -> dict[str, Float8Linear]:
    """The converted layers in ``module`` by their names in it."""
    return {n: m for n, m in module.named_modules() if isinstance(m, Float8Linear)}
