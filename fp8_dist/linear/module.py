"""``Float8Linear``: nn.Linear whose three GEMMs multiply float8 operands."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fp8_dist.config import Float8LinearConfig, check_config
from fp8_dist.config_text import config_text
from fp8_dist.env import strict_alignment
from fp8_dist.linear.autograd import LinearSpec
from fp8_dist.linear.call import call_declared, call_linear
from fp8_dist.linear.class_change import change_class, why_class_is_kept, why_forward_is_kept
from fp8_dist.linear.in_graph import Settled, linear_in_graph, settle
from fp8_dist.mesh import Placements
from fp8_dist.operand.cast import check_layout
from fp8_dist.operand.history import AMAXES_KEY, AmaxHistory, load_histories
from fp8_dist.operand.in_graph import takes_operators
from fp8_dist.torch_internals import is_exporting, own_load_hooks
from fp8_dist.transport import Encoding
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.local_placements import LocalPlacements
from fp8_dist.weight.stored_weight import bind
from fp8_dist.weight.weights import checked_module, float8_weights, load_weights, save_weights


class Float8Linear(nn.Linear):
    """A linear layer that computes in float8; a drop-in for nn.Linear.

    Shapes: input ``[..., in_features]``, output ``[..., out_features]`` in the input's dtype (the
    autocast dtype under autocast). Parameters stay in high precision, so a ``state_dict`` is
    interchangeable with nn.Linear's. Create layers with
    :func:`fp8_dist.convert_to_float8_training`, :meth:`from_float`, or the constructor, which takes
    nn.Linear's arguments and ``config``.

    Collectives: none on one device. On DTensors, those of the table in :mod:`fp8_dist.mesh.rules`.
    If a scale covers sharded values, and is neither cached nor from a history, also an all-reduce
    of 4 bytes per scale.

    Attributes:
        config: the configuration of casts and GEMMs.
        fqn: the layer's name in the converted model, for messages.
        output_placements: the placements of a DTensor output; ``None`` keeps the placements
            that the GEMM produces. The tensor-parallel styles set it.
        reduce_transport: the encoding in which summands of the output and grad_input are sent.
            The styles and ``declare_placements`` set it.
        local_placements: the placements of plain local tensors on a mesh, if they are declared.
            ``fp8_dist.tensor_parallel.declare_placements`` sets it.
        float8_weight: the object that casts the weight.
        prepared_by: for each ``PrepareFloat8ModuleInput`` around the layer, the ``fqn`` of the
            first layer whose config it follows.
        prepared_input: the amax history of a float8 input that the layer shares with others.
            ``PrepareFloat8ModuleInput`` and ``share_input`` set it.
        histories: the amax history of each operand whose scaling is DELAYED, and the history of an
            input that ``PrepareFloat8ModuleInput`` casts by the layer's config.
        settled: the name of what is settled about the layer (:mod:`fp8_dist.linear.in_graph`).
        hidden_attributes: the nn.Linear's own ones of these names, for ``become_linear``.
    """

    config: Float8LinearConfig
    fqn: str
    output_placements: Placements | None = None
    reduce_transport: Encoding = None
    local_placements: LocalPlacements | None = None
    float8_weight: Float8Weight
    prepared_by: frozenset[str] = frozenset()
    prepared_input: AmaxHistory | None = None
    histories: dict[str, AmaxHistory]
    settled: str
    hidden_attributes: dict[str, Any]
    plain_class = nn.Linear  # the class before conversion

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
        self._set_up(_checked(config), "")

    @classmethod
    def from_float(
        cls, mod: nn.Linear, config: Float8LinearConfig | None = None, *, fqn: str = ""
    ) -> "Float8Linear":
        """Create a float8 layer that shares the parameters, hooks and attributes of ``mod``.

        References to ``mod`` are not redirected; :func:`fp8_dist.convert_to_float8_training`
        converts in place.

        Args:
            mod: the layer to convert; it is not changed.
            config: defaults to ``Float8LinearConfig()``.
            fqn: the layer's name, for messages.

        Raises:
            TypeError: ``mod`` is not an nn.Linear or has a quantized weight, or ``config`` is not a
                Float8LinearConfig.
            ValueError: ``forward`` was replaced on the instance ``mod`` or on nn.Linear, or the
                class of ``mod`` has a forward of its own.
        """
        if not isinstance(mod, nn.Linear):
            raise TypeError(f"Float8Linear.from_float: expected an nn.Linear, got {type(mod)}")
        if why := Float8Weight.why_not(mod.weight):
            raise TypeError(
                f"Float8Linear.from_float: the weight of {fqn or 'the layer'} is {why}; convert a "
                "layer with a weight in high precision"
            )
        if not isinstance(mod, Float8Linear) and (why := why_class_is_kept(type(mod))):
            raise ValueError(
                f"Float8Linear.from_float: {fqn or 'the layer'} can't be converted: {why}"
            )
        if "forward" in vars(mod):
            raise ValueError(
                f"Float8Linear.from_float: the forward of {fqn or 'the layer'} was replaced "
                "(accelerate's hooks do so), and calls this layer, not a new one; convert in place "
                "(convert_to_float8_training), or before forward is replaced"
            )
        new, config, attributes = cls.__new__(cls), _checked(config), vars(mod)
        if isinstance(mod, Float8Linear):
            attributes = {n: v for n, v in attributes.items() if n not in _OWN_ATTRIBUTES}
            attributes |= mod.hidden_attributes
        for name, value in attributes.items():
            # Copy containers (parameters, hooks), and share their contents.
            new.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
        own_load_hooks(new)
        new._set_up(config, fqn)
        return new

    def _set_up(self, config: Float8LinearConfig, fqn: str) -> None:
        attributes = self.__dict__
        self.hidden_attributes = {n: attributes.pop(n) for n in _OWN_ATTRIBUTES if n in attributes}
        self.config = config
        self.fqn = fqn or type(self).__name__
        recipe, length = self.config.recipe, self.config.amax_history_len
        self.histories = {
            str(operand): AmaxHistory(scheme, length) for operand, scheme in recipe.delayed.items()
        }
        self.float8_weight = Float8Weight(self, self.config, self.fqn, self.histories)
        self._settle()

    def _settle(self) -> None:
        """Note what is settled about the layer, for graphs."""
        facts = {name: getattr(self, name) for name in Settled._fields}
        self.settled = settle(Settled(**facts))

    def to_linear(self) -> nn.Linear:
        """Return a new nn.Linear that shares this layer's parameters, as plain tensors.

        It is in the training mode of this layer. Hooks and other attributes do not carry over.
        """
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        values = self.float8_weight.high_precision()
        linear.weight = nn.Parameter(values, requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    @property
    def float8_weights(self) -> dict[str, Float8Weight]:
        """The float8 parameters of the layer by name: the weight."""
        return {"weight": self.float8_weight}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute ``input @ weight^T + bias`` in float8. See the class for shapes and collectives.

        Raises:
            TypeError: the input is not floating point.
            ValueError: the input's last dim is not ``in_features``; the input and the weight are
                neither DTensors on one mesh nor both plain; features are misaligned
                (``pad_inner_dim``); a float8 input or gathered weight was not cast as the config
                requires; ``reduce_transport`` does not apply; or local tensors do not fit their
                declared placements.
            NotImplementedError: the input is nested or sparse, a transform of ``torch.func`` or
                forward-mode differentiation is active, torch.jit.trace runs, or a layer with
                DELAYED scales is exported or captured in a CUDA graph.
        """
        if input.is_nested or input.layout is not torch.strided:
            check_layout(self.fqn, input)
        if not input.dtype.is_floating_point:
            raise TypeError(f"{self.fqn}: the input must be floating point, got {input.dtype}")
        # Read it once: each access may run a parametrization, or a gather (SimpleFSDP).
        weight, declared = self.weight, self.local_placements
        # If a DTensor was made from uneven local tensors, its shape is only torch's guess.
        is_plain = declared is None and not isinstance(input, DTensor)
        if is_plain and (input.ndim == 0 or input.shape[-1] != self.in_features):
            raise ValueError(
                f"{self.fqn}: the last dim of the input must be in_features={self.in_features}, "
                f"got an input of shape {tuple(input.shape)}"
            )
        is_prepared = bool(self.histories) and self.prepared_input is not None
        if torch.compiler.is_compiling() and takes_operators():
            owner = self.float8_weight
            return linear_in_graph(input, weight, self.bias, owner, self.settled, is_prepared)
        if self.histories and is_exporting():
            raise NotImplementedError(
                f"{self.fqn}: a layer with DELAYED scales can't be exported, because its amax "
                "histories are kept by Python; convert the model with another recipe (the "
                "state_dict is the same), or export layer.to_linear()"
            )
        spec = LinearSpec(
            config=self.config,
            output_placements=self.output_placements,
            fqn=self.fqn,
            histories=self.histories,
            weight=self.float8_weight,
            training=torch.is_grad_enabled(),
            is_prepared=is_prepared,
            reduce_transport=self.reduce_transport,
        )
        if declared is not None:
            return call_declared(input, weight, self.bias, spec, declared)
        return call_linear(input, weight, self.bias, weight, spec)

    def extra_repr(self) -> str:
        """Return nn.Linear's text, the recipe, and the operands that are gathered in float8.

        The recipe is followed by the options that differ from it. It is ``custom`` if no recipe has
        these casts. Also shown are float8 storage (:func:`fp8_dist.freeze_to_float8`) and
        ``reduce_transport``.
        """
        shown = super().extra_repr()
        if "float8_weight" not in self.__dict__:  # the layer is being constructed
            return shown
        shown += f", {config_text(self.config)}"
        if (stored := self.float8_weight.stored()) is not None:
            shown += f", stored in {'mxfp4' if stored.is_packed else 'float8'}"
        if self.reduce_transport is not None:
            shown += f", reduce_transport={self.reduce_transport}"
        return shown

    def __setattr__(self, name: str, value: Any) -> None:
        if "float8_weight" in self.__dict__:
            # FSDP2 exchanges parameters through __setattr__ if a module class defines it.
            if name == "weight":
                if self.float8_weight.is_exchanged(value):
                    self._parameters[name] = value
                    return
                if why := Float8Weight.why_not(value):
                    raise TypeError(
                        f"{self.fqn}: the weight of a float8 layer can't be {why}; call "
                        "convert_to_linear(model) before the weights are quantized"
                    )
                self.float8_weight.parameter_replaced(value)
            elif name in ("config", "fqn"):
                setattr(self.float8_weight, name, value)
        super().__setattr__(name, value)
        if name in Settled._fields and "float8_weight" in self.__dict__:
            self._settle()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in Settled._fields and "float8_weight" in self.__dict__:
            self._settle()

    def become_linear(self) -> None:
        """Convert the layer to an nn.Linear in place: the inverse of :func:`become_float8`.

        A weight that FSDP2 gathers in float8 must be unwrapped first.
        """
        hidden = self.hidden_attributes
        for name in _OWN_ATTRIBUTES:
            self.__dict__.pop(name, None)
        change_class(self, _plain_class(type(self)))  # type: ignore[arg-type]
        self.__dict__.update(hidden)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "float8_weight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.float8_weight = Float8Weight(self, self.config, self.fqn, self.histories)
        bind(self.float8_weight, self._parameters.get("weight"))
        self._settle()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is Float8Linear or "plain_class" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return _new_layer, (self.plain_class,), self.__getstate__()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and prefix + "weight" in destination:  # not if parametrized
            save_weights(self, destination, prefix, None)
        # Histories are in the metadata, because the keys must be nn.Linear's. load_state_dict
        # passes the metadata back.
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if self.histories and metadata is not None:
            metadata[AMAXES_KEY] = {name: h.amaxes() for name, h in self.histories.items()}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        # Run load_weights as the last pre-hook, because others may change the entries.
        with self.register_load_state_dict_pre_hook(load_weights):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        errors, key = args[-1], f"{prefix}weight"
        if why := errors and Float8Weight.why_not(state_dict.get(key)):
            errors.append(f"{key} in the state dict is {why}; load a state dict of these values")
        if self.histories:  # loading them needs a collective
            self.float8_weight.compare("load_state_dict")
            saved, meshes = local_metadata.get(AMAXES_KEY, {}), self.float8_weight.meshes()
            load_histories(self.histories, saved, meshes, self.weight.device)


# Attributes whose values are settled before a call.

# Attributes of a Float8Linear that an nn.Linear does not have.
_OWN_ATTRIBUTES = tuple(Float8Linear.__annotations__)


def become_float8(layer: nn.Linear, config: Float8LinearConfig | None, fqn: str) -> None:
    """Convert an nn.Linear to a Float8Linear in place.

    Hooks, closures and lists that refer to the layer refer to the converted one. If it is an
    instance of a subclass of nn.Linear, it stays one. The weight is not changed.

    Raises:
        TypeError: ``config`` is not a Float8LinearConfig.
    """
    config = _checked(config)
    change_class(layer, _float8_class(type(layer)))  # type: ignore[arg-type]
    assert isinstance(layer, Float8Linear)
    layer._set_up(config, fqn)


def _checked(config: Float8LinearConfig | None) -> Float8LinearConfig:
    if config is not None:
        check_config("Float8Linear", config, Float8LinearConfig)
    strict_alignment()  # raises for an unknown value of the environment variable
    return Float8LinearConfig() if config is None else config


@cache
def _float8_class(plain: type[nn.Linear]) -> type[Float8Linear]:
    """Return the class of a converted layer, given its class before conversion."""
    if plain is nn.Linear:
        return Float8Linear
    body = {"plain_class": plain, "__module__": plain.__module__}
    return type(f"Float8{plain.__name__}", (Float8Linear, plain), body)


def _new_layer(plain: type[nn.Linear]) -> Float8Linear:
    """Make a converted layer without state, given its class before (for pickle and copy)."""
    cls = _float8_class(plain)  # type: ignore[arg-type]
    return cls.__new__(cls)


@cache
def _plain_class(cls: Any) -> Any:
    """Return a layer's class before conversion; rebuild a class that fully_shard derived."""
    if "plain_class" in vars(cls):
        return cls.plain_class
    bases = [_plain_class(b) if issubclass(b, Float8Linear) else b for b in cls.__bases__]
    return type(cls.__name__.replace("Float8", "", 1), tuple(bases), dict(vars(cls)))


def invalidate_float8_scales(module: nn.Module) -> None:
    """Drop the cached scales of the weights in ``module``.

    Also drop the amaxes that DELAYED scales have recorded since the last sync. This is needed after
    a dry run whose gradients were set to zero. (Setting them to None is noticed.)

    Call it, on all ranks, after changes that can't be noticed: writes through the tensors of
    ``state_dict()`` by foreach ops, ``.data`` or collectives, and through numpy. The table of
    docs/state.md lists all of them.

    Collectives: none.
    """
    for weight in float8_weights(module).values():
        weight.forget()


def float8_layers(module: nn.Module) -> dict[str, Float8Linear]:
    """The converted layers in ``module``, by name, in the order of ``named_modules()``.

    A layer with several names appears under the first one. If ``module`` itself is a converted
    layer, its name is empty.

    Raises:
        TypeError: ``module`` is not an nn.Module.
    """
    return {n: m for n, m in checked_module(module).named_modules() if isinstance(m, Float8Linear)}


def why_unconvertible(layer: nn.Linear) -> str:
    """Return the reason why a linear layer can't be converted, or an empty string."""
    weight, kind = layer._parameters.get("weight"), type(layer).__name__
    if is_parametrized(layer) or weight is None:
        return "its weight is computed from other parameters (a parametrization, weight_norm)"
    if isinstance(layer, LazyModuleMixin):
        return "it is lazy: run it once, so that it knows its sizes"
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return f"its class {kind} is read by nn.MultiheadAttention, never called"
    if why := why_class_is_kept(type(layer)) or why_forward_is_kept(layer):
        return why
    names = {*dir(type(layer)), *layer._parameters, *layer._buffers, *layer._modules}
    names |= vars(layer).keys() - _OWN_ATTRIBUTES  # those can be hidden
    new_names = {*_OWN_ATTRIBUTES, *vars(Float8Linear)}.difference(dir(nn.Linear))
    if taken := names & new_names:
        return f"its {min(taken)} has the name of an attribute of Float8Linear"
    if not weight.dtype.is_floating_point:
        return f"its weight is {weight.dtype}, not floating point"
    why = Float8Weight.why_not(weight)
    return f"its weight is {why}" if why else ""


def other_users(
    module: nn.Module, parameters: Mapping[str, torch.Tensor], known: Iterable[nn.Module]
) -> list[str]:
    """Describe, in a phrase each, the uses of parameters (by FQN) in modules not ``known``."""
    fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
    known_modules = set(known)
    return [
        f"{fqns[id(parameter)]} is also {fqn + '.' if fqn else ''}{name}"
        for fqn, other in module.named_modules()
        if other not in known_modules
        for name, parameter in other.named_parameters(recurse=False)
        if id(parameter) in fqns
    ]
