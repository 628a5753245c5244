"""The provided tensor-parallel plans, and their checked application.

Vocabulary: a *plan* maps module names to parallel styles, as for torch's `parallelize_module`; a
name may hold `*` in any of its dot-separated parts. The *consumers* of a block are the linear
layers that read the block's input: `wq`, `wk`, `wv` of attention, `w1`, `w3` of feed-forward.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.linear.module import Float8Linear
from fp8_dist.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

# Per sub-block of a layer: its norm, its consumers, and the layer that writes its output.
_LLAMA_BLOCKS = {
    "attention": ("attention_norm", ("wq", "wk", "wv"), "wo"),
    "feed_forward": ("ffn_norm", ("w1", "w3"), "w2"),
}
# Head counts that a tensor-parallel degree must divide, where an attention module states them.
_HEAD_COUNTS = ("n_heads", "n_kv_heads", "num_heads", "num_key_value_heads")


class ResidualRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel for a layer that writes to the residual stream.

    Its output is a plain local tensor, which costs least, unless the ranks can't share the
    sharded dim evenly. Then it is a DTensor: a plain one does not know how long the other ranks'
    shards are, as later gathers must. Every rank and every writer decides by the same two sizes,
    of the sequence and of the mesh, so that the two kinds never meet in a residual add.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=False
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_local_if_even)
        return module


class Float8ResidualRowwiseParallel(ResidualRowwiseParallel, Float8RowwiseParallel):
    """Float8RowwiseParallel with the output of ResidualRowwiseParallel."""


class EmbeddingRowwiseParallel(ResidualRowwiseParallel):
    """ResidualRowwiseParallel for the embedding, which starts the residual stream.

    Its output is waited for: the blocks that read it are often compiled one by one, and
    torch (2.13) loses the gradient of a tensor that is in flight when it enters a compiled graph
    (pytorch#191113).

    Any placement of its gradient is taken. torch replicates the output of some norms when there
    are fewer tokens than ranks (2.13: layer_norm; 2.15: rms_norm), and gives their gradient as a
    Partial, which it can't bring to an embedding whose weight is sharded.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = outputs.redistribute(placements=output_layouts, async_op=False)
        # Of a tensor that is there already, this moves only its gradient.
        return outputs.redistribute(placements=output_layouts)


def llama_tp_plan(
    model: nn.Module, *, sequence_parallel: bool = True, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """Returns the tensor-parallel plan of a Llama with the reference model's module names.

    The plan reads the model: a converted layer (`Float8Linear`) gets a float8 style, any other
    one torch's. The input of a block is cast and gathered in float8 once for all of its consumers
    when all of them cast it alike; otherwise it is gathered as it is, once, and each converted
    consumer casts it.

    Args:
        model: has `tok_embeddings`, `layers.<i>.{attention_norm,attention,ffn_norm,feed_forward}`
            (attention: `wq`, `wk`, `wv`, `wo`; feed_forward: `w1`, `w2`, `w3`), `norm`, `output`.
            Convert it first: layers that are converted later are not known to the plan.
        sequence_parallel: activations between blocks are sharded along dim 1 (sequence) and the
            norms run on shards. False: they are replicated and the norms are left alone. Between
            blocks are plain local tensors, or DTensors for a sequence of a length that the ranks
            can't share evenly.
        loss_parallel: the head returns logits as a DTensor sharded along the vocabulary, for
            `torch.distributed.tensor.parallel.loss_parallel`, in place of full plain logits.

    Raises:
        ValueError: modules are missing; all of them are listed.
    """
    layer_names = _check_llama_names(model)
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": EmbeddingRowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    }
    for layer in layer_names:
        for block, (norm, consumers, writer) in _LLAMA_BLOCKS.items():
            if sequence_parallel:
                plan[f"{layer}.{norm}"] = SequenceParallel()
            path = f"{layer}.{block}"
            plan[path] = _prepare_style(model, [f"{path}.{name}" for name in consumers], between)
            for name in consumers:
                plan[f"{path}.{name}"] = _colwise_style(model, f"{path}.{name}")
            plan[f"{path}.{writer}"] = _residual_style(model, f"{path}.{writer}", between)
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    plan["output"] = _colwise_style(
        model,
        "output",
        input_layouts=between,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    return plan


def apply_tp_plan(model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> nn.Module:
    """Parallelizes `model` in place after checking that every entry of `plan` means something.

    Args:
        model: convert it before; shard it with `fully_shard` after.
        mesh: the tensor-parallel axis, 1-D: `mesh["tp"]` of a larger one.
        plan: module names (with `*` for any part) to torch's styles or ours.

    Returns:
        `model`.

    Raises:
        TypeError: an entry's value is not a style.
        ValueError: the mesh is not 1-D, an entry matches no module, two match the same one, a
            float8 style is on a module that has no `Float8Linear`, or a head count is not
            divisible by the mesh's size. All offenders are listed, and nothing has been
            changed. Every rank raises alike: only the model's structure and the mesh's shape are
            looked at.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"apply_tp_plan needs a 1-D mesh, got one with shape {tuple(mesh.shape)} and axes "
            f"{mesh.mesh_dim_names}: pass its tensor-parallel axis, such as mesh['tp']"
        )
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"the plan's entry {pattern!r} is {style!r}, not a parallel style: give an "
                f"instance, such as ColwiseParallel()"
            )
    matches = {pattern: dict(_matches(model, pattern)) for pattern in plan}
    # One line each: the projections of an attention share what is wrong with its heads.
    offenders = dict.fromkeys(_offenders(model, mesh.size(), plan, matches))
    if offenders:
        listing = "\n".join(f"  - {offender}" for offender in offenders)
        raise ValueError(f"this tensor-parallel plan does not fit the model:\n{listing}")
    # The names that were checked, not the patterns: torch warns about every module on the way of
    # a pattern that matches elsewhere.
    resolved = {name: plan[pattern] for pattern in plan for name in matches[pattern]}
    return parallelize_module(model, mesh, resolved)


def _check_llama_names(model: nn.Module) -> list[str]:
    """Returns the names of the layers, or raises ValueError with every module that is missing."""
    modules = dict(model.named_modules())
    layers = [f"layers.{name}" for name, _ in modules.get("layers", nn.Module()).named_children()]
    expected = ["tok_embeddings", "norm", "output"]
    for layer in layers or ["layers.0"]:
        for block, (norm, consumers, writer) in _LLAMA_BLOCKS.items():
            expected += [f"{layer}.{norm}", f"{layer}.{block}"]
            expected += [f"{layer}.{block}.{name}" for name in (*consumers, writer)]
    missing = [name for name in expected if name not in modules]
    if missing:
        raise ValueError(
            f"llama_tp_plan does not know this {type(model).__name__}: it has no module "
            f"{', '.join(missing)}. Rename the modules, or write a plan of your own (a dict of "
            f"module names to styles) and pass it to apply_tp_plan"
        )
    return layers


def _is_converted(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), Float8Linear)


def _colwise_style(model: nn.Module, name: str, **arguments: Any) -> ParallelStyle:
    style = Float8ColwiseParallel if _is_converted(model, name) else ColwiseParallel
    return style(**arguments)


def _residual_style(model: nn.Module, name: str, output: Placement) -> ParallelStyle:
    converted = _is_converted(model, name)
    style = Float8ResidualRowwiseParallel if converted else ResidualRowwiseParallel
    return style(output_layouts=output)


def _local_if_even(module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
    """A forward hook: what ResidualRowwiseParallel says."""
    (placement,), size = output.placements, output.device_mesh.size()
    if isinstance(placement, Shard) and output.shape[placement.dim] % size:
        # A shard that was padded for its reduction keeps the strides of the padded one, which its
        # DTensor does not state: compiled blocks would be compiled again for it, or fail on it.
        return output.clone()
    return output.to_local()


def _prepare_style(model: nn.Module, consumers: list[str], layout: Placement) -> ParallelStyle:
    at: dict[str, Any] = {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
    casts = {_input_cast(model, name) for name in consumers}
    # One consumer that needs the high-precision input, or another cast of it, decides what must
    # travel.
    if len(casts) > 1 or None in casts:
        return PrepareModuleInput(**at)
    return PrepareFloat8ModuleInput(**at, fwd_config_submodule_fqn=consumers[0].rpartition(".")[2])


def _input_cast(model: nn.Module, name: str) -> tuple[Any, bool] | None:
    """How a layer casts its input, if one float8 copy serves both of its GEMMs."""
    layer = model.get_submodule(name)
    if not isinstance(layer, Float8Linear):
        return None
    cast = layer.config.gather_cast("input")
    return None if cast is None else (cast, layer.config.round_scales_to_power_of_2)


def _matches(module: nn.Module, pattern: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of what `parallelize_module` applies this entry of a plan to."""
    if not pattern:
        yield prefix, module
        return
    token, _, rest = pattern.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, token):
            yield from _matches(child, rest, f"{prefix}.{name}" if prefix else name)


def _offenders(
    model: nn.Module,
    size: int,
    plan: dict[str, ParallelStyle],
    matches: dict[str, dict[str, nn.Module]],
) -> Iterator[str]:
    """Yields what keeps `plan` from being applied on `size` ranks, a line each."""
    claimed: dict[str, str] = {}
    for pattern, style in plan.items():
        if not matches[pattern]:
            yield (
                f"{pattern!r} matches no module: a name has one part per level, as in "
                f"model.named_modules(), and '*' stands for one part"
            )
        for name, module in matches[pattern].items():
            if name in claimed:
                yield (
                    f"{name!r} is matched by two entries, {claimed[name]!r} and {pattern!r}: "
                    f"leave one of them"
                )
            claimed[name] = pattern
            yield from _check_float8_style(name, module, style)
            if isinstance(style, ColwiseParallel):
                yield from _check_heads(model, name, size)


def _check_float8_style(name: str, module: nn.Module, style: ParallelStyle) -> Iterator[str]:
    kind = type(module).__name__
    if isinstance(style, (Float8ColwiseParallel, Float8RowwiseParallel)):
        torch_style = ColwiseParallel if isinstance(style, ColwiseParallel) else RowwiseParallel
        if not isinstance(module, Float8Linear):
            yield (
                f"{name!r} has the style {type(style).__name__} but is a {kind}, not a "
                f"Float8Linear: convert it first (convert_to_float8_training), or use torch's "
                f"{torch_style.__name__}"
            )
    elif isinstance(style, PrepareFloat8ModuleInput) and not any(
        isinstance(child, Float8Linear) for child in module.modules()
    ):
        yield (
            f"{name!r} has the style PrepareFloat8ModuleInput but its {kind} contains no "
            f"Float8Linear: convert one first (convert_to_float8_training), or use torch's "
            f"PrepareModuleInput"
        )


def _check_heads(model: nn.Module, name: str, size: int) -> Iterator[str]:
    """Yields what keeps the attention that holds layer `name` from splitting its heads."""
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    for attribute in _HEAD_COUNTS:
        count = getattr(parent, attribute, None)
        if isinstance(count, int) and count % size:
            yield (
                f"{parent_name!r} has {attribute}={count}, which {size} tensor-parallel ranks "
                f"cannot share evenly: use a tensor-parallel size that divides it"
            )
