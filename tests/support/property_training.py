"""Actions on a model on a mesh, beside a twin in one process whose weights are always cast anew.

Before each pass the twin is given the weights of the model. It runs the batches of all data-parallel
ranks. A pass is right if

- the operands of each float8 GEMM are bitwise this rank's parts of the twin's;
- the output is the twin's: bitwise without tensor parallelism, else but for the order of a sum;
- the gradients are the means of the twin's, but for the order of the sum.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from nets import MLP, Net, full, net_plan
from property_cases import MESHES, TrainCase, ranks_of
from property_casts import part_of
from property_values import DTYPES, values
from property_verdicts import WrongResult, documented
from ranks import device_mesh
from reference import same_values, scale_of_elements
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    Float8Tensor,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.linear.observing import GemmRecord, record_gemms
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan


class GatedMLP(MLP):
    """Without silu, whose last bit depends on where a value stands in a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


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
        self.twin = self.model(config)
        gather = case.gather if self.replicas > 1 else False
        self.net = self.model(replace(config, enable_fsdp_float8_all_gather=gather))
        if ranks_of(case) > 1:
            self.mesh = device_mesh(replicate=replicate, shard=shard, tp=tp)
            self.distribute()
        make = torch.optim.SGD if case.optimizer == "SGD" else torch.optim.AdamW
        foreach = case.optimizer.endswith("foreach")
        self.make_optimizer = lambda net: make(net.parameters(), lr=0.05, foreach=foreach)
        self.optimizer = self.make_optimizer(self.net)

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
        with torch.no_grad():
            pairs = zip(self.twin.parameters(), self.net.parameters(), strict=True)
            for theirs, mine in pairs:
                theirs.copy_(full(mine))
        invalidate_float8_scales(self.twin)

    def run(self, training: bool) -> None:
        """A pass of the model beside the twin's."""
        self.same_weights()
        self.passes += 1
        self.net.zero_grad()
        self.twin.zero_grad()
        own = self.rank // self.tp
        with torch.set_grad_enabled(training):
            with record_gemms() as found:
                mine = self.forward(self.net, self.given(self.batch(own)))
                if training:
                    mine.backward(self.part(self.grad(own)))
            of_twin: list[list[torch.Tensor | None]] = []
            for replica in range(self.replicas) if training else [own]:
                self.twin.zero_grad()
                with record_gemms() as records:
                    theirs = self.twin(self.batch(replica))
                    if training:
                        theirs.backward(self.grad(replica))
                of_twin.append([p.grad for p in self.twin.parameters()])
                if replica == own:
                    expected, output = records, theirs
        of_net = [
            (name, full(p.grad) if p.grad is not None else None)
            for name, p in self.net.named_parameters()
        ]
        self.together(
            lambda: self.check_operands(found, expected),
            lambda: self.check_output(
                local_tensor(mine).detach(), self.part(output.detach()), expected
            ),
            lambda: self.check_gradients(of_net, of_twin) if training else None,
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
                qdata, scale, own_scale = theirs.qdata, theirs.scale, mine.scale
                if scale.dtype is torch.uint8:  # a part may begin within a block
                    scale, own_scale = scale_of_elements(theirs), scale_of_elements(mine)
                if dim is not None:
                    qdata = part_of(qdata, dim, self.tp, rank)
                    if scale.ndim and scale.shape[dim] > 1:
                        scale = part_of(scale, dim, self.tp, rank)
                # Scales of empty rows are of no use, and neither is what was folded with them.
                if empty and (scale.ndim or own_scale.ndim):
                    continue
                if not same_values(own_scale, scale):
                    raise WrongResult(f"{name}: {side} scale {mine.scale}, twin {scale}")
                if not same_values(with_one_zero(mine.qdata), with_one_zero(qdata)):
                    raise WrongResult(
                        f"{name}: {side} bytes {mine}, twin {Float8Tensor(qdata, scale, theirs.dtype)}"
                    )
        missing = by_name.keys() - {(r.fqn, r.gemm) for r in found}
        if missing:
            raise WrongResult(f"no float8 GEMM for {sorted(missing)}")

    def check_output(
        self, mine: torch.Tensor, theirs: torch.Tensor, expected: list[GemmRecord]
    ) -> None:
        if self.tp == 1 and not same_values(mine, theirs):
            raise WrongResult(f"output {mine}, twin {theirs}")
        last = [record for record in expected if record.gemm == "output"][-1]
        a, b = last.a.dequantize().double().abs(), last.b.dequantize().double().abs()
        check_near("output", mine, theirs, [a @ b, theirs])

    def check_gradients(
        self,
        of_net: list[tuple[str, torch.Tensor | None]],
        of_twin: list[list[torch.Tensor | None]],
    ) -> None:
        tokens = [self.grad(replica).abs().sum() for replica in range(self.replicas)]
        for (name, mine), theirs in zip(of_net, zip(*of_twin, strict=True), strict=True):
            summed = [grad for grad in theirs if grad is not None]
            if (mine is None) is bool(summed):
                raise WrongResult(f"gradient of {name}: {mine}, twin {summed}")
            if mine is not None:
                # (A sum may overflow in the dtype before it is divided.)
                mean = torch.stack(summed).double().sum(0).div(self.replicas).to(summed[0].dtype)
                terms = [*summed, *(tokens if name.endswith("w2.bias") else ())]
                check_near(f"gradient of {name}", mine, mean, terms)


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
        getattr(local, "_tensor", local).data.mul_(3)
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


def merge(world: World) -> None:
    """What PEFT does to frozen weights, in the midst of training: it writes through ``.data``."""
    weights = [layer.w1.weight for layer in world.net.layers]
    world.both(partial(freeze, True))
    for factor in (None, 3.0, 1 / 3):
        for weight in weights if factor else ():
            weight.data *= factor
        world.run(training=True)
    world.both(partial(freeze, False))


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
    for _ in range(2):
        world.run(training=True)
    world.optimizer.step()
    world.update()


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
    "merge": merge,
    "dcp.load": load_checkpoint,
    "sync": changed(sync_float8_amax_and_scale_history),
    "invalidate": changed(invalidate_float8_scales),
}
