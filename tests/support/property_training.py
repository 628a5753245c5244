"""Actions on a model on a mesh, beside a twin in one process whose weights are always cast anew.

Before each pass the twin is given the weights of the model. It runs the batches of all data-parallel
ranks. A pass is right if

- the operands of each float8 GEMM are bitwise this rank's parts of the twin's;
- the output is the twin's: bitwise without tensor parallelism, else but for the order of a sum;
- the gradients are the means of the twin's, but for the order of the sum.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gemm_records import GemmRecord, record_gemms
from nets import GatedMLP, Net, full, net_plan
from property_cases import MESHES, TrainCase, ranks_of
from property_casts import part_of
from property_values import DTYPES, values
from property_verdicts import WrongResult, documented
from ranks import device_mesh
from reference import same_values, scales_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    Float8Tensor,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    freeze_to_float8,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
    unfreeze_from_float8,
    update_float8_scales,
)
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan


class GatedNet(Net):
    """A second MLP where its inputs are bitwise one device's: not behind a reduction."""

    def __init__(self, case: TrainCase, layers: int) -> None:
        super().__init__(layers=0)
        with torch.random.fork_rng():
            torch.manual_seed(case.seed)
            self.layers = nn.ModuleList(GatedMLP(case.dim, case.hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# The dim of the left and the right operand of each GEMM that a tensor-parallel style splits.
COLUMN = {"output": (None, 1), "grad_input": (1, 0), "grad_weight": (0, None)}
ROW = {"output": (1, 0), "grad_input": (None, 1), "grad_weight": (None, 1)}
SPLIT = {"w1": COLUMN, "w3": COLUMN, "w2": ROW}
WHOLE = dict.fromkeys(COLUMN, (None, None))


def run_training(case: TrainCase) -> list[str]:
    """Runs on each of the case's ranks; raises WrongResult, or what the library refuses.

    Returns the documented errors of actions. After them the model must be as it was.
    """
    world = World(case)
    for i, action in enumerate(case.actions):
        try:
            ACTIONS[action](world)
        except WrongResult as error:
            raise WrongResult(f"after {list(case.actions[: i + 1])}: {error}") from None
    if case.differs:
        raise WrongResult("a rank with another config was not noticed")
    return world.refused


class World:
    """The model on this rank, the twin, and what was done to both."""

    def __init__(self, case: TrainCase) -> None:
        self.case = case
        replicate, shard, tp, self.sequence_parallel = MESHES[case.mesh]
        self.tp, self.replicas = tp, replicate * shard
        self.rank = dist.get_rank() if ranks_of(case) > 1 else 0
        self.passes = 0
        self.checkpointing = False
        self.refused: list[str] = []
        config = replace(Float8LinearConfig.from_recipe_name(case.recipe), **dict(case.flags))
        if case.differs and self.rank == ranks_of(case) - 1:
            config = replace(config, emulate=not config.emulate)
        gather = case.gather if self.replicas > 1 else False
        # Of the model and the twin.
        self.configs = (replace(config, enable_fsdp_float8_all_gather=gather), config)
        make = torch.optim.SGD if case.optimizer == "SGD" else torch.optim.AdamW
        foreach = case.optimizer.endswith("foreach")
        self.make_optimizer = lambda net: make(net.parameters(), lr=0.05, foreach=foreach)
        if ranks_of(case) > 1:
            self.mesh = device_mesh(replicate=replicate, shard=shard, tp=tp)
        self.build()

    def build(
        self,
        after: Callable[[nn.Module], object] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """A new model and a new twin.

        Args:
            after: a change before the model is distributed.
            weights: those to begin with.
        """
        self.net, self.twin = (self.model(config) for config in self.configs)
        for model in (self.net, self.twin) if weights is not None else ():
            model.load_state_dict(weights)
        if after is not None:
            self.both(after)
        self.distribute()
        self.optimizer = self.make_optimizer(self.net)

    def rebuild(self, after: Callable[[nn.Module], object] | None = None) -> None:
        """Goes on with another model and another twin, in which all weights are trained."""
        self.same_weights()
        histories = [Float8State(model).state_dict() for model in (self.net, self.twin)]
        self.build(after, self.twin.state_dict())
        for model, saved in zip((self.net, self.twin), histories, strict=True):
            Float8State(model).load_state_dict(saved)

    def model(self, config: Float8LinearConfig) -> GatedNet:
        net = GatedNet(self.case, layers=1 if self.tp > 1 else 2).to(DTYPES[self.case.dtype])
        convert_to_float8_training(net, config=config)
        return net

    def distribute(self) -> None:
        if self.tp > 1:
            apply_tp_plan(self.net, self.mesh["tp"], net_plan(self.net, self.sequence_parallel))
        if self.replicas > 1:
            hybrid = self.mesh["replicate"].size() > 1
            data = self.mesh["replicate", "shard"] if hybrid else self.mesh["shard"]
            for module in (*self.net.layers, self.net):
                fully_shard(module, mesh=data)

    def update(self) -> None:
        """After an optimizer step; the twin's delayed histories end the step, too."""
        update_float8_scales(self.net)
        update_float8_scales(self.twin)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        """The change of the model and the twin; both refuse it, or neither does."""
        texts = []
        for model in (self.net, self.twin):
            try:
                change(model)
            except Exception as error:
                if self.case.differs or not documented(error):
                    raise
                texts.append(f"{type(error).__name__}: {error}")
        if len(texts) == 1:
            raise WrongResult(f"only one of model and twin refuses: {texts[0]}")
        self.refused += texts[:1]

    def refuses(self, change: Callable[[nn.Module], object]) -> None:
        """The change of the model, which must be a documented error on all of its meshes."""
        try:
            change(self.net)
        except Exception as error:
            if not documented(error):
                raise
        else:
            raise WrongResult(f"{change} of a distributed model is not refused")

    def batch(self, replica: int) -> torch.Tensor:
        return self.drawn(
            self.case.values if replica == self.passes % self.replicas else "normal", replica
        )

    def grad(self, replica: int) -> torch.Tensor:
        """The gradient of the output: given, since outputs are equal but for the order of sums."""
        return self.drawn("magnitudes", replica + 5)

    def drawn(self, kind: str, number: int) -> torch.Tensor:
        case = self.case
        shape = (case.batch, case.sequence, case.dim)
        return values(kind, shape, DTYPES[case.dtype], 1000 * case.seed + 10 * self.passes + number)

    def same_weights(self) -> None:
        """The twin's weights become the model's; frozen ones in float8 stay as they are."""
        stored = {f"{name}.weight" for name in stored_layers(self.net)}
        mine = dict(self.net.named_parameters())
        with torch.no_grad():
            for name, theirs in self.twin.named_parameters():
                if name.removesuffix("_scale_inv") not in stored:
                    theirs.copy_(full(mine[name]))

    def is_frozen(self) -> bool:
        """Whether some weights are frozen."""
        return not all(parameter.requires_grad for parameter in self.net.parameters())

    def run(self, training: bool, accumulates: bool = False) -> None:
        """A pass of the model beside the twin's.

        Args:
            training: whether there is a backward.
            accumulates: add to the gradients of the pass before.
        """
        self.same_weights()
        self.passes += 1
        if not accumulates:
            self.net.zero_grad()
            if self.case.recipe == "delayed" and self.is_frozen():
                # That these gradients are gone is not noticed where weights are frozen.
                self.both(invalidate_float8_scales)
            self.of_twin: list[list[torch.Tensor | None]] = []
            self.tokens: list[torch.Tensor] = []
        own = self.rank // self.tp
        with torch.set_grad_enabled(training):
            with record_gemms() as found:
                mine = self.forward(self.net, self.given(self.batch(own)))
                if training:
                    mine.backward(self.part(self.grad(own)))
            for replica in range(self.replicas) if training else [own]:
                # With None, what the twin records for other replicas would be of gradients thrown away.
                self.twin.zero_grad(set_to_none=not self.of_twin)
                with record_gemms() as records, inputs_of(self.twin.layers[-1].w2) as inputs:
                    theirs = self.twin(self.batch(replica))
                    if training:
                        theirs.backward(self.grad(replica))
                self.of_twin.append(gradients(self.twin))
                self.tokens.append(self.grad(replica).abs().sum())
                if replica == own:
                    expected, output, summed = records, theirs, inputs
        of_net = [(name, p.grad) for name, p in self.net.named_parameters()]
        whole = [(name, full(grad) if grad is not None else None) for name, grad in of_net]
        self.together(
            lambda: self.check_operands(found, expected),
            lambda: self.check_output(
                local_tensor(mine).detach(), self.part(output.detach()), expected, summed
            ),
            lambda: self.check_gradients(whole) if training else None,
        )

    def together(self, *checks: Callable[[], None]) -> None:
        """Runs checks; raises what one finds on all ranks, so that none goes on alone."""
        problems = [""]
        try:
            for check in checks:
                check()
        except WrongResult as error:
            problems = [str(error)]
        if ranks_of(self.case) > 1:
            own, problems = problems[0], [""] * dist.get_world_size()
            dist.all_gather_object(problems, own)
        for rank, text in enumerate(problems):
            if text:
                raise WrongResult(f"rank {rank}: {text}")

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of an output."""
        return part_of(x, 1, self.tp, self.rank % self.tp) if self.sequence_parallel else x

    def forward(self, net: GatedNet, x: torch.Tensor) -> torch.Tensor:
        # (Of several replicas the root's hooks run outside.)
        for part in [net] if self.replicas > 1 or not self.checkpointing else net.layers:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointing else part(x)
        return x

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input; a DTensor, since parts may be uneven."""
        if not self.sequence_parallel:
            return x
        whole = DTensor.from_local(x, self.mesh["tp"], [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)])

    def check_operands(self, found: list[GemmRecord], expected: list[GemmRecord]) -> None:
        by_name = {(r.fqn, r.gemm): r for r in expected}
        rank = self.rank % self.tp
        for record in found:
            name = f"{record.fqn}, GEMM of {record.gemm}"
            twin = by_name[record.fqn, record.gemm]
            split = SPLIT[record.fqn.rpartition(".")[2]] if self.tp > 1 else WHOLE
            empty = not (record.a.numel() and record.b.numel())
            sides = zip(["left", "right"], record[2:4], twin[2:4], split[record.gemm], strict=True)
            for side, mine, theirs, dim in sides:
                qdata, scale = theirs.qdata, scales_of(theirs)
                if dim is not None:
                    qdata, scale = (part_of(x, dim, self.tp, rank) for x in (qdata, scale))
                # Scales of empty rows are of no use, and neither is what was folded with them.
                if empty and (theirs.scale.ndim or mine.scale.ndim):
                    continue
                if not same_values(scales_of(mine), scale):
                    raise WrongResult(f"{name}: {side} scale {mine.scale}, twin {scale}")
                if not same_values(with_one_zero(mine.qdata), with_one_zero(qdata)):
                    raise WrongResult(
                        f"{name}: {side} bytes {mine}, twin {Float8Tensor(qdata, scale, theirs.dtype)}"
                    )
        wanted = by_name.keys() | {(name, "output") for name in float8_layers(self.net)}
        missing = wanted - {(r.fqn, r.gemm) for r in found}
        if missing:
            raise WrongResult(f"no float8 GEMM for {sorted(missing)}")

    def check_weights(self) -> None:
        mine = dict(self.net.named_parameters())
        pairs = [(name, full(mine[name]), p) for name, p in self.twin.named_parameters()]

        def check() -> None:
            for name, ours, theirs in pairs:
                if not same_values(ours, theirs):
                    raise WrongResult(f"{name} is {ours}, twin {theirs}")

        self.together(check)

    def check_output(
        self,
        mine: torch.Tensor,
        theirs: torch.Tensor,
        expected: list[GemmRecord],
        inputs: list[torch.Tensor],
    ) -> None:
        """inputs: of the twin's last layer, which may be no float8 layer."""
        if self.tp == 1 and not same_values(mine, theirs):
            raise WrongResult(f"output {mine}, twin {theirs}")
        a, b = inputs[-1], self.twin.layers[-1].w2.weight.detach().T
        for last in [record for record in expected if record.gemm == "output"][-1:]:
            a, b = last.a.dequantize(), last.b.dequantize()
        check_near("output", mine, theirs, [a.double().abs() @ b.double().abs(), theirs])

    def check_gradients(self, of_net: list[tuple[str, torch.Tensor | None]]) -> None:
        for (name, mine), theirs in zip(of_net, zip(*self.of_twin, strict=True), strict=True):
            summed = [grad for grad in theirs if grad is not None]
            if (mine is None) is bool(summed):
                raise WrongResult(f"gradient of {name}: {mine}, twin {summed}")
            if mine is not None:
                # (A sum may overflow in the dtype before it is divided.)
                mean = torch.stack(summed).double().sum(0).div(self.replicas).to(summed[0].dtype)
                terms = [*summed, *(self.tokens if name.endswith("w2.bias") else ())]
                check_near(f"gradient of {name}", mine, mean, terms)


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients."""
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@contextmanager
def inputs_of(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list of the inputs that the layer is given inside the block."""
    inputs: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    yield inputs
    handle.remove()


def stored_layers(net: nn.Module) -> dict[str, nn.Linear]:
    """The layers whose weight is stored in float8."""
    return {n: each for n, each in float8_layers(net).items() if each.float8_weight.is_stored}


def with_one_zero(x: torch.Tensor) -> torch.Tensor:
    """float8 data without the signs of zeros, which a GEMM of another shape may change."""
    return x.view(torch.uint8).masked_fill(x.float() == 0, 0).view(x.dtype)


def check_near(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, terms: list[torch.Tensor]
) -> None:
    """Equal but for the order of a sum, relative to the largest values of its terms."""
    if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
        raise WrongResult(
            f"{name} {mine.dtype} {tuple(mine.shape)}, twin {theirs.dtype} {tuple(theirs.shape)}"
        )
    finite, limits = theirs.isfinite(), torch.finfo(theirs.dtype)
    if (~finite).any() and mine.isfinite()[~finite].any():
        raise WrongResult(f"{name} is finite, and is not in the twin: {mine}, {theirs}")
    finite_terms = [term[term.isfinite()].double().abs() for term in terms]
    largest = sum(term.max().item() for term in finite_terms if term.numel())
    # Near the limits of the dtype a sum may overflow in one order and not in the other.
    if largest < limits.max / 1e6:
        error = (mine[finite].double() - theirs[finite].double()).abs()
        allowed = largest * 32 * limits.eps + limits.smallest_normal
        if not bool((error <= allowed).all()):
            raise WrongResult(f"{name} {mine}, twin {theirs}: off by {error.max():.3g}")


def load(net: nn.Module) -> None:
    with torch.no_grad():
        net.load_state_dict({name: tensor * 3 for name, tensor in net.state_dict().items()})


def edit(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)


def write_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        getattr(local, "plain", local).data.mul_(3)
    invalidate_float8_scales(net)


def write_after_precompute(world: World) -> None:
    """A write between precompute and the next pass, of one of the kinds that are noticed there."""
    precompute_float8_dynamic_scale(world.net)
    weights = [parameter for parameter in world.net.parameters() if parameter.ndim == 2]
    local = [local_tensor(weight) for weight in weights]
    counted = all(isinstance(each, Float8AllGatherWeight) for each in local)
    kinds: list[Callable[[], object]] = [
        lambda: torch._foreach_mul_(weights, 3.0),
        lambda: [weight.data.mul_(3) for weight in weights],
        lambda: [weight.data[1:].mul_(3) for weight in weights],
        lambda: [each.detach().mul_(3) for each in local],
        lambda: [weight.copy_(weight.detach() * 3) for weight in weights],
    ]
    write = world.case.seed + world.passes
    with torch.no_grad():
        kinds[write % 5 if counted else 3 + write % 2]()
    world.run(training=write % 3 > 0)


def load_checkpoint(world: World) -> None:
    """One ``dcp.load`` takes the model and its histories back to where they were saved."""
    # (The twin is in a state_dict of its own: its histories are the same.)
    histories = Float8State(world.twin).state_dict()
    with checkpoint_folder(ranks_of(world.case)) as folder:
        state = {"model": world.net, "float8": Float8State(world.net)}
        no_dist = ranks_of(world.case) == 1
        dcp.save(state, checkpoint_id=folder, no_dist=no_dist)
        step(world)
        dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    Float8State(world.twin).load_state_dict(histories)
    world.run(training=True)


@contextmanager
def checkpoint_folder(ranks: int) -> Iterator[str]:
    """A folder that exists until all ranks are done with it."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if ranks > 1:
            dist.broadcast_object_list(folders)
        yield folders[0]
        if ranks > 1:
            dist.barrier()


def freeze(frozen: bool, net: GatedNet) -> None:
    for layer in net.layers:
        layer.w1.weight.requires_grad_(not frozen)


def step(world: World, update: bool = True) -> None:
    world.run(training=True)
    world.optimizer.step()
    if update:
        world.update()


def micro_batches(world: World) -> None:
    for first in (True, False):
        world.run(training=True, accumulates=not first)
    world.optimizer.step()
    world.update()


def store_frozen(world: World) -> None:
    """Weights that are frozen in float8 before the model is distributed, and trained again."""

    def store(net: nn.Module) -> None:
        freeze(True, net)
        freeze_to_float8(net)

    world.rebuild(after=store)
    for _ in range(2):
        step(world)
    world.run(training=False)
    if stored_layers(world.net):
        world.same_weights()
        unfreeze_from_float8(world.twin)
        if world.replicas > 1:
            world.refuses(unfreeze_from_float8)
            world.rebuild()
        else:
            unfreeze_from_float8(world.net)
            world.check_weights()
    world.both(partial(freeze, False))
    world.optimizer = world.make_optimizer(world.net)
    world.run(training=True)


def linear_and_back(world: World) -> None:
    """Layers that become nn.Linear in the midst of training, and are converted again."""
    world.both(convert_to_linear)
    # (torch's own styles take no other sizes. Of an empty batch DTensor never finds the views.)
    case, tp = world.case, world.tp
    if tp == 1 or (case.batch and not (case.hidden % tp or case.sequence % tp)):
        world.run(training=True)
    if ranks_of(world.case) > 1:
        world.refuses(convert_to_float8_training)
        world.rebuild()
    else:
        world.both(partial(convert_to_float8_training, config=world.configs[0]))
    world.run(training=True)


def deep_copy(world: World) -> None:
    if world.replicas == 1:  # FSDP2 refuses to be copied
        world.net = copy.deepcopy(world.net)
        world.optimizer = world.make_optimizer(world.net)
    world.run(training=True)


def changed(change: Callable[[nn.Module], object]) -> Callable[[World], None]:
    """The change in training: the pass after it uses the new values."""

    def take(world: World) -> None:
        world.both(change)
        world.run(training=True)

    return take


def toggle_checkpointing(world: World) -> None:
    world.checkpointing = not world.checkpointing
    world.run(training=True)


ACTIONS: dict[str, Callable[[World], None]] = {
    "step": step,
    "step without update": partial(step, update=False),
    "micro-batches": micro_batches,
    "evaluate": lambda world: world.run(training=False),
    "load_state_dict": changed(load),
    "edit in place": changed(edit),
    "write .data, invalidate": changed(write_data),
    "freeze": changed(partial(freeze, True)),
    "unfreeze": changed(partial(freeze, False)),
    "deepcopy": deep_copy,
    "checkpointing": toggle_checkpointing,
    "precompute": changed(precompute_float8_dynamic_scale),
    "precompute, write": write_after_precompute,
    "dcp.load": load_checkpoint,
    "freeze to float8, unfreeze": store_frozen,
    "convert_to_linear and back": linear_and_back,
    "sync": changed(sync_float8_amax_and_scale_history),
    "invalidate": changed(invalidate_float8_scales),
}
