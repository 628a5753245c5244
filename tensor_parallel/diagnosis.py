"""Search for the entry of a plan that makes a model fail, or differ from one device.

The shapes of what modules take and return under the plan are compared with those on one device.
They tell which tensors are whole, and which are parts. No other rank is asked, because a forward
may have failed on this rank alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
)

from fp8_dist.linear import Float8Linear
from fp8_dist.mesh import Layout, local_pieces, taken
from fp8_dist.tensor_parallel.lengths import layouts_read
from fp8_dist.text import without_wrappers

# The name of a module, and the number of its call.
CallKey = tuple[str, int]


class SeenCall:
    """The floating-point tensors of a module's call.

    Attributes:
        inputs: by position or name.
        outputs: None until the call has ended.
    """

    def __init__(self, inputs: Mapping[int | str, Any]) -> None:
        tensors = {place: x for place, x in inputs.items() if isinstance(x, torch.Tensor)}
        self.inputs = {place: _Seen.of(x) for place, x in tensors.items() if x.is_floating_point()}
        self.outputs: list[_Seen] | None = None

    def ended(self, outputs: list[torch.Tensor]) -> None:
        """Record the outputs."""
        self.outputs = [_Seen.of(x) for x in outputs]


class _Seen(NamedTuple):
    """The shape of a tensor, and the placement of a DTensor."""

    shape: torch.Size
    placement: Placement | None

    @staticmethod
    def of(x: torch.Tensor) -> "_Seen":
        return _Seen(x.shape, x.placements[0] if isinstance(x, DTensor) else None)


class _Tensor(NamedTuple):
    """A tensor under a plan.

    Attributes:
        given: Replicate if it is whole, or Shard with a dim that is not negative; None if it is
            neither whole nor this rank's part along one dim.
        shape, whole: its shape, and that on one device.
        is_plain: whether it is no DTensor.
    """

    given: Placement | None
    shape: torch.Size
    whole: torch.Size
    is_plain: bool

    @staticmethod
    def of(seen: _Seen, whole: _Seen, mesh: DeviceMesh) -> "_Tensor":
        sizes = enumerate(zip(seen.shape, whole.shape, strict=False))
        dims = [dim for dim, (size, full) in sizes if size != full]
        given: Placement | None = seen.placement and positive(seen.placement, len(whole.shape))
        if seen.placement is None and seen.shape == whole.shape:
            given = Replicate()
        elif seen.placement is None and len(seen.shape) == len(whole.shape) and len(dims) == 1:
            given = Shard(dims[0]) if seen.shape == part_of(whole.shape, dims[0], mesh) else None
        is_known = isinstance(given, Shard | Replicate)
        return _Tensor(given if is_known else None, seen.shape, whole.shape, seen.placement is None)

    @property
    def features(self) -> Shard:
        """The placement of parts of the features."""
        return Shard(len(self.whole) - 1)

    @property
    def is_divided(self) -> bool:
        """Whether it is a part of the features."""
        return self.given == self.features

    def layout(self, placement: Placement | None) -> str:
        """A placement as an argument of a style."""
        if not isinstance(placement, Shard):
            return "Replicate()"
        return f"Shard({-1 if placement.dim == self.features.dim else placement.dim})"

    @property
    def input_layouts(self) -> list[str]:
        """The argument of a style that reads it; none for a tensor that styles read by default."""
        is_part = isinstance(self.given, Shard) and self.is_plain
        return [f"input_layouts={self.layout(self.given)}"] if is_part else []

    def __str__(self) -> str:
        if self.given is None and self.shape != self.whole:
            return f"{list(self.shape)} of {list(self.whole)}"
        if not isinstance(self.given, Shard):
            return f"whole, {list(self.shape)}"
        return f"this rank's part of dim {self.given.dim}, {list(self.shape)} of {list(self.whole)}"


class _Reader(NamedTuple):
    """A module whose entry reads a tensor as a part of one dim, or as a whole (None)."""

    name: str
    dim: int | None
    shape: torch.Size

    def reads(self, summand: _Tensor) -> Placement:
        """The placement of a summand, whose dims are the last ones of the tensor."""
        if self.dim is None:
            return Replicate()
        dim = self.dim - len(self.shape) + len(summand.whole)
        return Replicate() if dim < 0 or summand.whole[dim] == 1 else Shard(dim)

    def __str__(self) -> str:
        part = "all" if self.dim is None else f"a part of dim {self.dim}"
        return f"{part} of {list(self.shape)}"


class _Called(NamedTuple):
    """A call under a plan; ``output``: the first floating-point one, if the call has ended."""

    name: str
    inputs: dict[int | str, _Tensor]
    output: _Tensor | None

    @property
    def gives_part(self) -> bool:
        """Whether the output is a part of the features."""
        return self.output is not None and self.output.is_divided

    @property
    def gives_whole(self) -> bool:
        return self.output is not None and not self.output.is_divided


def unwrapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their names without wrappers, of which it has only the inside."""
    return {without_wrappers(name): module for name, module in model.named_modules()}


def positive(placement: Placement, ndim: int) -> Placement:
    """A placement whose dim is not negative."""
    return Shard(placement.dim % ndim) if type(placement) is Shard and ndim else placement


def part_of(whole: torch.Size, dim: int, mesh: DeviceMesh) -> torch.Size:
    """The shape of this rank's part of a tensor that is sharded on a dim."""
    pieces = local_pieces(Layout(mesh, (Shard(dim),), whole))
    return taken(torch.empty(whole, device="meta"), pieces).shape


class Diagnosis:
    """Search in the calls of modules under a plan.

    Args:
        model: the model, before the plan is applied.
        mesh: the tensor-parallel axis.
        styles: the styles of the plan, by names of modules.
        expected, found: the calls on one device, and those under the plan, which may have stopped;
            in the order in which they begin.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        styles: Mapping[str, Any],
        expected: Mapping[CallKey, SeenCall],
        found: Mapping[CallKey, SeenCall],
    ) -> None:
        self.modules, self.styles, self.expected = unwrapped_modules(model), styles, expected
        self.order = [name for name, _ in expected]
        self.calls = []
        for key in [key for key in found if key in expected]:
            whole, seen = expected[key], found[key]
            places = [place for place in seen.inputs if place in whole.inputs]
            inputs = {p: _Tensor.of(seen.inputs[p], whole.inputs[p], mesh) for p in places}
            outputs = zip(seen.outputs or (), whole.outputs or (), strict=False)
            output = next((_Tensor.of(*pair, mesh) for pair in outputs), None)
            self.calls.append(_Called(key[0], inputs, output))

    def cause(self, at: str) -> str:
        """Describe the entry that makes a module fail or differ, and ask for another one.

        Returns an empty string if no entry stands out.
        """
        is_layer = self._last_layer(at) in (None, at)
        scope = at.rpartition(".")[0] if is_layer else at
        calls = [call for call in self.calls if _is_in(call.name, scope)]
        layers = [call for call in calls if self._is_linear(call.name)]
        return (
            self._missing(at)
            or self._unlike_embeddings()
            or self._part_in_the_stream(scope, calls)
            or _first(map(self.misread, calls))
            or self._whole_beside_parts(layers)
            or self._forgotten_beside_parts(layers)
            or self._unlike_the_stream(scope, calls)
            or _first(map(self._unsummed, layers))
            or (self.returned_part() if self._is_behind(at) else self._part_in_code(at, layers))
        )

    def _missing(self, at: str) -> str:
        """Describe a module without an entry, whose plain weight fails beside a DTensor."""
        call = next((call for call in reversed(self.calls) if call.name == at), None)
        around = [style for name, style in self.styles.items() if _is_in(at, name)]
        is_placed = not all(isinstance(x, PrepareModuleInput | PrepareModuleOutput) for x in around)
        if call is None or call.output is not None or is_placed:
            return ""
        x = next((x for x in call.inputs.values() if not x.is_plain), None)
        if x is None or not [*self.modules[at].parameters(recurse=False)]:
            return ""
        beside = next((name for name in self.styles if self._is_alike(name, at)), None)
        layouts = []
        if isinstance(x.given, Shard):
            layouts = [f"input_layouts={x.layout(x.given)}"]
        found = "its input is a DTensor"
        style = ""
        if self._is_linear(at) and x.is_divided:
            style = f"{self._prefix(at)}RowwiseParallel"
        elif beside is not None:
            found = f"one for {self._shown(beside)} beside it"
            style = f"{self._prefix(at)}ColwiseParallel{_in_brackets(layouts)}"
        elif at == self._last_layer(""):
            layouts += ["output_layouts=Replicate()"]
            style = f"{self._prefix(at)}ColwiseParallel{_in_brackets(layouts)}"
        elif isinstance(self.modules[at], nn.LayerNorm | nn.RMSNorm) and x.given == Shard(1):
            style = "SequenceParallel"
        question = f". Did you mean {style}?" if style else ""
        return f"The plan has no entry for {at!r}, but {found}{question}"

    def _is_alike(self, name: str, other: str) -> bool:
        """Whether a column-parallel layer is beside another one that takes as many features."""
        layer = self.modules[name]
        other_layer = self.modules[other]
        is_column = isinstance(self.styles[name], ColwiseParallel) and not self._ends(other)
        if not is_column or _parent(name) != _parent(other):
            return False
        if not isinstance(layer, nn.Linear) or not isinstance(other_layer, nn.Linear):
            return False
        return layer.in_features == other_layer.in_features

    def _unlike_embeddings(self) -> str:
        """Describe embeddings that can't be added, before their sum has reached a module."""
        embeddings: dict[str, _Tensor] = {}
        for call in self.calls:
            parts = [*self.modules[call.name].modules()]
            if call.output is not None and not any(isinstance(m, nn.Embedding) for m in parts):
                embeddings.clear()  # as of an encoder, which has taken their sum
            if call.output is not None and isinstance(parts[0], nn.Embedding):
                embeddings[call.name] = call.output
        reader = self._first_reader([x.whole for x in embeddings.values()])
        if reader is None or not all(x.is_plain for x in embeddings.values()):
            dims = {_from_the_end(x) for x in embeddings.values()}
            listed = "; ".join(f"that of {self._shown(n)} is {x}" for n, x in embeddings.items())
            both = f"The outputs of embeddings are divided in different ways: {listed}. "
            advice = (
                "If they are added, divide both along the same dim (output_layouts), or neither"
            )
            return both + advice if len(dims) > 1 else ""
        if reader.name in [call.name for call in self.calls]:
            return ""
        for name, x in embeddings.items():
            wanted = reader.reads(x)
            if x.given in (None, wanted):
                continue
            layout = f"output_layouts={x.layout(wanted)}"
            style = f"RowwiseParallel(input_layouts=Replicate(), {layout})"
            return (
                f"The output of {self._shown(name)} is {x}, but {self._shown(reader.name)} behind "
                f"it reads {reader}. Did you mean {layout if name in self.styles else style}?"
            )
        return ""

    def _first_reader(self, shapes: list[torch.Size]) -> _Reader | None:
        """The module of the first entry that is yet to read a tensor of one of these shapes."""
        ended = {call.name for call in self.calls if call.output is not None}
        for (name, _), call in self.expected.items():
            if name in ended or name not in self.styles:
                continue
            reads = layouts_read(self.styles[name])
            for place, seen in call.inputs.items():
                layout = reads.get(place)
                if seen.shape in shapes and isinstance(layout, Shard | Replicate):
                    dim = layout.dim % len(seen.shape) if isinstance(layout, Shard) else None
                    if dim != len(seen.shape) - 1:  # no layer behind a column-parallel one
                        return _Reader(name, dim, seen.shape)
        return None

    def misread_by(self, name: str) -> str:
        """Describe an input of a module that is not as its entry reads it; empty if there is none.

        ``name``: the name of the module.
        """
        return _first(self.misread(call) for call in self.calls if call.name == name)

    def misread(self, call: _Called) -> str:
        """Describe an input that is not as the module's entry reads it."""
        style = self.styles.get(call.name)
        reads: Mapping[Any, Any] = {} if style is None else layouts_read(style)
        if style is None and self._is_linear(call.name):
            reads = {0: Replicate()}
        for place, x in call.inputs.items():
            layout = reads.get(place)
            if x.given is None or not isinstance(layout, Shard | Replicate):
                continue
            wanted = positive(layout, len(x.whole))
            # A style takes a DTensor as it is. Then, as without a style, only features matter.
            is_read = style is not None and x.is_plain
            if wanted != x.given and (is_read or x.features in (wanted, x.given)):
                reading = f"{self._shown(call.name)} reads its input as {x.layout(wanted)}, but"
                return f"{reading} it is {x}. {self._other_style(call, wanted, x)}"
        return ""

    def _other_style(self, call: _Called, wanted: Placement, x: _Tensor) -> str:
        is_row = self._is_linear(call.name) and wanted == x.features
        if self._is_linear(call.name) and x.is_divided:
            row = self._style(call.name, "RowwiseParallel", "input_layouts=Shard(-1)")
            return f"Did you mean {row}?"
        layout = f"input_layouts={x.layout(x.given)}"
        if is_row and x.given == Replicate():
            column = self._style(call.name, "ColwiseParallel", layout)
            other = "" if column == layout else f", or {layout}"
            return f"Did you mean {column}{other}?"
        if is_row and not self._ends(call.name):
            column = self._style(call.name, "ColwiseParallel", layout, [layout])
            return f"Did you mean {column}?"
        if is_row:
            return "Does the code before it take a part of the features for all of them?"
        before = self.calls[: self.calls.index(call)]
        source = next((c.name for c in reversed(before) if self._gives(c, x.given)), "")
        other = f"output_layouts={x.layout(wanted)} for {source!r}" if source else ""
        if isinstance(self.styles.get(call.name), SequenceParallel):
            return f"Did you mean {other or 'to divide the sequence before it'}?"
        return f"Did you mean {layout}, or {other}?" if other else f"Did you mean {layout}?"

    def _whole_beside_parts(self, layers: list[_Called]) -> str:
        """Describe a layer with all features beside one with a part, of the same input."""
        for call in layers:
            if not call.gives_part or self._ends(call.name):
                continue
            x = call.inputs.get(0)
            for other in layers:
                is_beside = _parent(other.name) == _parent(call.name) and not self._ends(other.name)
                if x is not None and x == other.inputs.get(0) and is_beside and other.gives_whole:
                    gives = "output_layouts=Shard(-1), the default"
                    style = self._style(other.name, "ColwiseParallel", gives, x.input_layouts)
                    return (
                        f"The output of {self._shown(other.name)} is {other.output}, but that of "
                        f"{self._shown(call.name)}, which reads the same input, is {call.output}. "
                        f"Did you mean {style}?"
                    )
        return ""

    def _forgotten_beside_parts(self, layers: list[_Called]) -> str:
        """Describe a layer without an entry beside column-parallel ones, as of cross-attention."""
        for other in layers:
            if other.name in self.styles or not other.gives_whole:
                continue
            beside = next((n for n in self.styles if self._is_alike(n, other.name)), None)
            if beside is None or self._outputs(beside) != self._outputs(other.name):
                continue
            x = other.inputs.get(0)
            arguments = [] if x is None else x.input_layouts
            style = f"{self._prefix(other.name)}ColwiseParallel{_in_brackets(arguments)}"
            return (
                f"The plan has no entry for {other.name!r}, but one for {self._shown(beside)} "
                f"beside it. Did you mean {style}?"
            )
        return ""

    def _outputs(self, name: str) -> int:
        layer: Any = self.modules[name]
        return int(layer.out_features)

    def _part_in_the_stream(self, scope: str, calls: list[_Called]) -> str:
        """Describe a layer whose output is a part of the features, for a module that has all."""
        writer = self._writer(scope, calls)
        if writer is None or not writer.gives_part:
            return ""
        return self._unlike_the_stream(scope, calls)

    def _unlike_the_stream(self, scope: str, calls: list[_Called]) -> str:
        """Describe a layer whose output is not divided as the input of the module around it."""
        writer = self._writer(scope, calls)
        around = next((call for call in reversed(calls) if call.name == scope), None)
        stream = next(iter(around.inputs.values()), None) if around is not None else None
        if writer is None or writer.output is None or stream is None or stream.given is None:
            return ""
        output, layout = writer.output, f"output_layouts={stream.layout(stream.given)}"
        if output.given in (None, stream.given) or output.whole != stream.whole:
            return ""
        if writer.name not in self.styles:
            return ""
        style = layout
        if output.is_divided:
            arguments = [] if stream.given == Replicate() else [layout]
            style = self._style(writer.name, "RowwiseParallel", layout, arguments)
        return (
            f"The output of {self._shown(writer.name)} is {output}, but the input of {scope!r} is "
            f"{stream}. Did you mean {style}?"
        )

    def _unsummed(self, call: _Called) -> str:
        """Describe a layer that leaves its output unsummed."""
        layouts = getattr(self.styles.get(call.name), "output_layouts", ())
        if not any(isinstance(layout, Partial) for layout in layouts):
            return ""
        return (
            f"{self._shown(call.name)} has output_layouts=Partial(), which leaves to the code "
            "behind it to sum its outputs over ranks. Did you mean output_layouts=Replicate()?"
        )

    def _part_in_code(self, at: str, layers: list[_Called]) -> str:
        """Describe the last part of the features that was given to code of a module."""
        for call in reversed(layers):
            if call.name != at and any(x.is_divided for x in call.inputs.values()):
                return ""  # a layer that took a part of the features, and agrees
            if call.gives_part:
                return (
                    f"The output of {self._shown(call.name)} is {call.output}. Does code behind it "
                    "take that for all features? Attention has a part of the heads: "
                    "unflatten(-1, (-1, head_dim)). To gather it, give the entry "
                    "output_layouts=Replicate()"
                )
        return ""

    def returned_part(self) -> str:
        """Describe the part of a tensor that the model returns, or takes for its result."""
        last = self._last_layer("")
        ends: list[tuple[_Called, _Tensor]] = []  # of the last layer and behind it, backwards
        for call in reversed(self.calls):
            x = call.output
            if call.name and x is not None and isinstance(x.given, Shard) and x.is_plain:
                ends.append((call, x))
            if call.name == last:
                break
        else:
            return ""  # the last layer has not run
        if not ends:
            return ""
        call, x = next((end for end in ends if end[0].name in self.styles), ends[-1])
        layout = f"output_layouts={x.layout(x.given)}"
        gathered = "output_layouts=Replicate()"
        if not self._gives(call, x.given):
            gathered = f"ColwiseParallel(input_layouts={x.layout(x.given)}, {gathered})"
        loss = ", and use loss_parallel" if x.is_divided else ""
        return (
            f"The output of {self._shown(call.name)} is {x}, a plain tensor that a loss takes for "
            f"the whole. Give it {gathered}, or keep it a DTensor ({layout}, "
            f"use_local_output=False){loss}"
        )

    def _is_behind(self, at: str) -> bool:
        """Whether a module is the model, or begins after the last layer."""
        last = self._last_layer("")
        after = self.order[len(self.order) - self.order[::-1].index(last) :] if last else []
        return at == "" or at in after

    def _style(self, name: str, kind: str, change: str, arguments: Sequence[str] = ()) -> str:
        """A style for a layer; or only an argument, if the layer's entry is of that style."""
        style = f"{self._prefix(name)}{kind}"
        is_same = type(self.styles.get(name)).__name__ == style
        return change if is_same else f"{style}{_in_brackets([*arguments])}"

    def _writer(self, scope: str, calls: list[_Called]) -> _Called | None:
        """The last layer of what has ended last in a module, if that ends with a layer."""
        children = [c.name for c in calls if _parent(c.name) == scope and c.output is not None]
        for name in reversed([child for child in children if child]):
            if (last := self._last_layer(name)) is not None:
                is_end = last != name or self._ends(name)
                return next((c for c in reversed(calls) if is_end and c.name == last), None)
        return None

    def _ends(self, name: str) -> bool:
        """Whether a layer is the last one of the module around it."""
        return self._last_layer(_parent(name)) == name

    def _last_layer(self, scope: str) -> str | None:
        """The linear layer in a module that runs last on one device."""
        layers = (name for name in reversed(self.order) if self._is_linear(name))
        return next((name for name in layers if _is_in(name, scope)), None)

    def _gives(self, call: _Called, given: Placement | None) -> bool:
        """Whether a module with an entry returns a tensor that is divided in a way."""
        return call.name in self.styles and call.output is not None and call.output.given == given

    def _is_linear(self, name: str) -> bool:
        return isinstance(self.modules[name], nn.Linear)

    def _prefix(self, name: str) -> str:
        """The beginning of the names of styles for a layer."""
        return "Float8" if isinstance(self.modules[name], Float8Linear) else ""

    def _shown(self, name: str) -> str:
        style = self.styles.get(name)
        return f"{name!r} ({'no entry' if style is None else type(style).__name__})"


def _first(texts: Iterable[str]) -> str:
    """The first text that is not empty, if there is one."""
    return next(filter(None, texts), "")


def _from_the_end(x: _Tensor) -> int | None:
    """The dim of which a tensor is a part, counted from the last one."""
    return x.given.dim - len(x.whole) if isinstance(x.given, Shard) else None


def _in_brackets(arguments: list[str]) -> str:
    return f"({', '.join(arguments)})" if arguments else ""


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_in(name: str, scope: str) -> bool:
    return not scope or f"{name}.".startswith(f"{scope}.")
