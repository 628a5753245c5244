"""Training on a mesh, compared with a twin in one process whose weights are always cast anew.

Before each pass the weights of the model are copied to the twin. The twin runs the batches of all
data-parallel ranks. A pass is right if

- the operands of each float8 GEMM are bitwise this rank's parts of the twin's;
- the output equals the twin's, bitwise without TP, otherwise up to the order of summation;
- the gradients are the means of the twin's, up to the order of summation.

In every third pass nothing observes the GEMMs, so that the library may use casts that it has kept.

With a delayed scale, a NaN or inf is at first seen only by the rank that holds it
(docs/numerics.md). If a scale of the twin is NaN, tensor-parallel ranks and shards of weights are
therefore only checked for having lost it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gemm_records import GemmRecord, record_gemms
from nets import GatedMLP, Net, net_plan
from property_cases import MESHES, TrainCase, processes
from property_values import DTYPES, values
from property_verdicts import WrongResult, documented
from ranks import device_mesh
from reference import same_values, scales_of
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    Float8Tensor,
    convert_to_float8_training,
    float8_layers,
    invalidate_float8_scales,
    update_float8_scales,
)
from fp8_dist.mesh import full_tensors, local_tensor
from fp8_dist.tensor_parallel import apply_tp_plan


class GatedNet(Net):
    """Gated MLPs; with TP only one, because reductions change the bits of the next inputs."""

    def __init__(self, case: TrainCase, layers: int) -> None:
        super().__init__(layers=0)
        with torch.random.fork_rng():
            torch.manual_seed(case.seed)
            self.layers = nn.ModuleList(GatedMLP(case.dim, case.hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# For each GEMM, the dims of the left and right operands that a tensor-parallel style shards.
COLUMN = {"output": (None, 1), "grad_input": (1, 0), "grad_weight": (0, None)}
ROW = {"output": (1, 0), "grad_input": (None, 1), "grad_weight": (None, 1)}
SPLIT = {"w1": COLUMN, "w3": COLUMN, "w2": ROW}
WHOLE = dict.fromkeys(COLUMN, (None, None))


class World:
    """The model on this rank, the twin, and the state of the case."""

    def __init__(self, case: TrainCase) -> None:
        self.case = case
        other = case.other if processes(case.other or case.mesh) == processes(case.mesh) else ""
        self.meshes = (case.mesh, other or case.mesh)
        self.mesh_name = case.mesh
        self.rank = dist.get_rank() if processes(case.mesh) > 1 else 0
        self.passes = 0
        self.checkpointing = False
        self.spoiled = False  # whether a local NaN scale has affected the twin in this step
        self.refused: list[str] = []
        self.twin_grads: list[list[torch.Tensor | None]] = []
        self.tokens: list[torch.Tensor] = []
        four_bits = {"weight_format": "mxfp4"} if case.in_four_bits else {}
        config = Float8LinearConfig.from_recipe_name(case.recipe, **four_bits)
        self.config = replace(config, **dict(case.flags))
        if case.differs and self.rank == processes(case.mesh) - 1:
            self.config = replace(self.config, emulate=not self.config.emulate)
        make = torch.optim.SGD if case.optimizer == "SGD" else torch.optim.AdamW
        foreach = case.optimizer.endswith("foreach")
        self.make_optimizer = lambda net: make(net.parameters(), lr=0.05, foreach=foreach)
        self.build()

    @property
    def tp(self) -> int:
        return MESHES[self.mesh_name][2]

    @property
    def replicas(self) -> int:
        replicate, shard, _, _ = MESHES[self.mesh_name]
        return replicate * shard

    @property
    def sequence_parallel(self) -> bool:
        return MESHES[self.mesh_name][3]

    @property
    def has_policy(self) -> bool:
        return self.case.precision == "MixedPrecisionPolicy" and self.replicas > 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        lower = self.has_policy or self.case.precision == "autocast"
        return torch.bfloat16 if lower else DTYPES[self.case.dtype]

    @property
    def configs(self) -> tuple[Float8LinearConfig, Float8LinearConfig]:
        """The configs of the model and the twin."""
        gather = self.case.gather if self.replicas > 1 else False
        return replace(self.config, enable_fsdp_float8_all_gather=gather), self.config

    def build(self) -> None:
        """Make a new model and a new twin."""
        self.net, self.twin = (self.model(config) for config in self.configs)
        self.distribute()
        self.lower_twin()
        self.optimizer = self.make_optimizer(self.net)
        self.has_run = False
        # Those of FSDP2 are registered while they are sharded alone.
        self.sharded = dict(self.net.named_parameters()) if self.replicas > 1 else None

    def model(self, config: Float8LinearConfig) -> GatedNet:
        has_tp = any(MESHES[name][2] > 1 for name in self.meshes)
        net = GatedNet(self.case, layers=1 if has_tp else 2).to(DTYPES[self.case.dtype])
        convert_to_float8_training(net, config=config)
        return net

    def distribute(self) -> None:
        if processes(self.case.mesh) > 1:
            replicate, shard, tp, _ = MESHES[self.mesh_name]
            self.mesh = device_mesh(replicate=replicate, shard=shard, tp=tp)
        if self.tp > 1:
            apply_tp_plan(self.net, self.mesh["tp"], net_plan(self.net, self.sequence_parallel))
        if self.replicas > 1:
            hybrid = self.mesh["replicate"].size() > 1
            data = self.mesh["replicate", "shard"] if hybrid else self.mesh["shard"]
            dtypes = (torch.bfloat16, torch.float32) if self.has_policy else ()
            sharding = self.case.sharding
            keeps = {"reshard_after_forward": False} if sharding == "layers, kept" else {}
            for module in [self.net] if sharding == "model" else [*self.net.layers, self.net]:
                fully_shard(module, mesh=data, mp_policy=MixedPrecisionPolicy(*dtypes), **keeps)

    def lower_twin(self) -> None:
        """Cast the twin's parameters to the dtype of FSDP2's policy.

        Not those that FSDP2 gathers in float8, because these are cast from the sharded parameters.
        """
        if not self.has_policy:
            return
        in_float8 = float8_layers(self.twin) if self.configs[0].fsdp_float8_all_gather else ()
        kept = {f"{name}.weight" for name in in_float8}
        for name, parameter in self.twin.named_parameters():
            if name not in kept:
                parameter.grad = None
                parameter.data = parameter.data.to(torch.bfloat16)

    def update(self) -> None:
        """Update the scales of the model and the twin after an optimizer step."""
        update_float8_scales(self.net)
        update_float8_scales(self.twin)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        """Apply a change to the model and the twin. Both must refuse it, or neither."""
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
        """The output gradient. It is drawn, because outputs may differ by the order of sums."""
        overflows = self.overflow and replica == self.passes % self.replicas
        return self.drawn("inf" if overflows else "magnitudes", replica + 5)

    def drawn(self, kind: str, number: int) -> torch.Tensor:
        case = self.case
        shape = (case.batch, case.sequence, case.dim)
        return values(kind, shape, self.compute_dtype, 1000 * case.seed + 10 * self.passes + number)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by name."""
        return dict(self.net.named_parameters()) if self.sharded is None else self.sharded

    def weights(self) -> dict[str, torch.Tensor]:
        """The full parameters of the model, by name."""
        parameters = self.parameters()
        full = full_tensors([*parameters.values()])
        return {name: next(full).clone() for name in parameters}

    def gradients(self) -> list[tuple[str, torch.Tensor | None]]:
        """The full gradients of the model, by name."""
        grads = {name: p.grad for name, p in self.parameters().items()}
        full = full_tensors([grad for grad in grads.values() if grad is not None])
        return [(name, None if grad is None else next(full)) for name, grad in grads.items()]

    def reshard(self) -> None:
        """Put FSDP2's sharded parameters in place, as code that writes to them must do."""
        for module in self.net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def same_weights(self) -> None:
        """Copy the weights of the model to the twin."""
        theirs = dict(self.twin.named_parameters())
        with torch.no_grad():
            for name, mine in self.weights().items():
                theirs[name].copy_(mine)

    def is_frozen(self) -> bool:
        """Whether some weights are frozen."""
        return not all(parameter.requires_grad for parameter in self.parameters().values())

    def observed(self) -> Any:
        """A context that yields a list of the GEMMs of this pass; None if nothing observes them."""
        return nullcontext() if self.passes % 3 == 0 else record_gemms()

    def evaluate(self) -> None:
        """Run a forward as an evaluation does, and compare it. It must leave no trace."""
        mode, own = self.case.evaluation, self.rank // self.tp
        if mode == "inference_mode" and self.replicas > 1 and not self.has_run:
            mode = "no_grad"  # without float8, too, FSDP2's first gather fails there
        modes = {"inference_mode": torch.inference_mode, "eval()": nullcontext}
        self.same_weights()
        self.passes += 1
        self.net.train(not mode.startswith("eval()"))
        with modes.get(mode, torch.no_grad)(), self.observed() as found:
            mine = self.forward(self.net, self.given(self.batch(own)), self.checkpointing)
        self.net.train()
        self.has_run = True
        with torch.no_grad():
            records, output, summed = self.twin_pass(own, trains=False)
        mine = local_tensor(mine).detach()
        finite = self.is_finite(mine)
        if self.spoiled or self.is_local(records):  # perhaps on this replica alone
            self.together(lambda: self.check_not_lost((output, finite), []))
        else:
            self.together(
                lambda: self.check_operands(found, records),
                lambda: self.check_output(mine, self.part(output), records, summed),
            )

    def run(self, accumulates: bool = False, overflow: bool = False) -> None:
        """Run a forward and a backward of the model and the twin, and compare them.

        Args:
            accumulates: whether to add to the gradients of the previous pass.
            overflow: whether the output gradient of one replica has an infinite value.
        """
        self.overflow = overflow
        self.same_weights()
        self.passes += 1
        if not accumulates:
            self.optimizer.zero_grad()
            if self.case.recipe == "delayed" and self.is_frozen():
                # With frozen weights, histories don't notice that gradients were dropped.
                self.both(invalidate_float8_scales)
            self.spoiled = False
            self.twin_grads, self.tokens = [], []
        own = self.rank // self.tp
        with self.observed() as found:
            mine = self.forward(self.net, self.given(self.batch(own)), self.checkpointing)
            mine.backward(self.part(self.grad(own)))
        self.has_run = True
        # The histories of the twin need the passes of all replicas.
        runs_all = bool(self.config.recipe.delayed)
        by_replica: dict[int, list[torch.Tensor | None]] = {}
        for replica in range(self.replicas) if runs_all else [own]:
            # With None, the twin would discard the amaxes that it recorded for other replicas.
            first = not (self.twin_grads or by_replica)
            self.twin.zero_grad(set_to_none=first)
            found_in_twin = self.twin_pass(replica, trains=True)
            self.spoiled |= self.is_local(found_in_twin[0])
            by_replica[replica] = gradients(self.twin)
            if replica == own:
                expected, output, summed = found_in_twin
        grads = [*by_replica.values()] if runs_all else self.of_replicas(by_replica[own])
        self.twin_grads += grads
        self.tokens += [self.grad(replica).abs().sum() for replica in range(self.replicas)]
        whole, mine = self.gradients(), local_tensor(mine).detach()
        finite = self.is_finite(mine)
        if self.spoiled:
            self.together(lambda: self.check_not_lost((output, finite), whole))
            self.both(invalidate_float8_scales)  # the recorded amaxes differ, too
            return
        self.together(
            lambda: self.check_operands(found, expected),
            lambda: self.check_output(mine, self.part(output), expected, summed),
            lambda: self.check_gradients(whole),
        )

    def twin_pass(
        self, replica: int, trains: bool
    ) -> tuple[list[GemmRecord], torch.Tensor, list[torch.Tensor]]:
        """Run the twin on a batch: its GEMMs, its output, and the inputs of its last layer."""
        with record_gemms() as records, inputs_of(self.twin.layers[-1].w2) as inputs:
            output = self.forward(self.twin, self.batch(replica))
            if trains:
                output.backward(self.grad(replica))
        return records, output.detach(), inputs

    def of_replicas(self, mine: list[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """The gradients of the twins on all ranks, one list per replica, from those of this one."""
        if self.replicas == 1:
            return [mine]
        found = [grad for grad in mine if grad is not None]
        sent = torch.cat([grad.view(-1).view(torch.uint8) for grad in found])
        messages = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, sent)
        sizes = [grad.numel() * grad.itemsize for grad in found]
        grads = []
        for message in messages[:: self.tp]:
            parts = zip(found, message.split(sizes), strict=True)
            own = iter([part.clone().view(grad.dtype).view(grad.shape) for grad, part in parts])
            grads.append([None if grad is None else next(own) for grad in mine])
        return grads

    def is_finite(self, output: torch.Tensor) -> bool:
        """Whether the output is finite on all ranks of this replica; looked at with histories."""
        if not self.config.recipe.delayed:
            return True
        own = self.rank // self.tp * self.tp
        return all(self.values_of_ranks(bool(output.isfinite().all()))[own : own + self.tp])

    def is_local(self, records: list[GemmRecord]) -> bool:
        """Whether only some ranks may see a NaN scale of the twin."""
        if not self.config.recipe.delayed or processes(self.case.mesh) == 1:
            return False
        scales = [scale for record in records for x in record[2:4] for scale in x.scales]
        in_weights = not all_finite(self.twin.parameters())
        return in_weights or (self.tp > 1 and any(bool(scale.isnan().any()) for scale in scales))

    def check_not_lost(
        self,
        outputs: tuple[torch.Tensor, bool],
        net_grads: list[tuple[str, torch.Tensor | None]],
    ) -> None:
        """Check that results that are not finite in the twin are not finite on the ranks.

        Args:
            outputs: the output of the twin, and whether the outputs of the ranks are finite.
            net_grads: the gradients of the model.
        """
        theirs, finite = outputs
        if finite and not theirs.isfinite().all():
            raise WrongResult(f"the output is finite, and is not in the twin: {theirs}")
        twin_grads = [grad for grads in self.twin_grads for grad in grads if grad is not None]
        mine = [grad for _, grad in net_grads if grad is not None]
        if mine and all_finite(mine) and not all_finite(twin_grads):
            raise WrongResult("all gradients are finite, and are not in the twin")

    def values_of_ranks(self, value: Any) -> list[Any]:
        """Gather a value from all ranks."""
        if processes(self.case.mesh) == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def together(self, *checks: Callable[[], None]) -> None:
        """Run checks. If one fails on any rank, raise on all ranks, so that all stop."""
        problem = ""
        try:
            for check in checks:
                check()
        except WrongResult as error:
            problem = str(error)
        if processes(self.case.mesh) > 1:
            failed = torch.tensor(bool(problem), dtype=torch.uint8)
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if not failed:
                return
        for rank, text in enumerate(self.values_of_ranks(problem)):
            if text:
                raise WrongResult(f"rank {rank}: {text}")

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of an output."""
        return part_of(x, 1, self.tp, self.rank % self.tp) if self.sequence_parallel else x

    def forward(self, net: GatedNet, x: torch.Tensor, checkpoints: bool = False) -> torch.Tensor:
        # (With several replicas, the whole model is called, so that FSDP2's root hooks run.)
        parts = net.layers if checkpoints and self.replicas == 1 else [net]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.precision == "autocast"):
            for part in parts:
                x = checkpoint(part, x, use_reentrant=False) if checkpoints else part(x)
        return x

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input. With SP it is a DTensor, because parts may be uneven."""
        if not self.sequence_parallel:
            return x
        whole = DTensor.from_local(x, self.mesh["tp"], [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)])

    def check_operands(self, found: list[GemmRecord] | None, expected: list[GemmRecord]) -> None:
        if found is None:
            return
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
                # Scales of empty rows are not used, and neither are values folded with them.
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

    def check_output(
        self,
        mine: torch.Tensor,
        theirs: torch.Tensor,
        expected: list[GemmRecord],
        inputs: list[torch.Tensor],
    ) -> None:
        """Check the output. inputs: those of the twin's last layer, which may not be float8."""
        if self.tp == 1 and not same_values(mine, theirs):
            raise WrongResult(f"output {mine}, twin {theirs}")
        a, b = inputs[-1], self.twin.layers[-1].w2.weight.detach().T
        for last in [record for record in expected if record.gemm == "output"][-1:]:
            a, b = last.a.dequantize(), last.b.dequantize()
        terms = [a.double().abs() @ b.double().abs(), theirs]
        check_near("output", mine, theirs, terms, self.compute_dtype)

    def check_gradients(self, net_grads: list[tuple[str, torch.Tensor | None]]) -> None:
        for (name, mine), theirs in zip(net_grads, zip(*self.twin_grads, strict=True), strict=True):
            summed = [grad for grad in theirs if grad is not None]
            if (mine is None) is bool(summed):
                raise WrongResult(f"gradient of {name}: {mine}, twin {summed}")
            if mine is not None:
                # (A sum may overflow in the dtype before it is divided.)
                mean = torch.stack(summed).double().sum(0).div(self.replicas).to(mine.dtype)
                terms = [*summed, *(self.tokens if name.endswith("w2.bias") else ())]
                check_near(f"gradient of {name}", mine, mean, terms, self.compute_dtype)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements of all tensors are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients of all parameters."""
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@contextmanager
def inputs_of(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that collects the inputs of a layer in the block."""
    inputs: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    yield inputs
    handle.remove()


def part_of(tensor: torch.Tensor, dim: int, ranks: int, rank: int) -> torch.Tensor:
    """A rank's shard of a tensor along a dim, as DTensor divides it."""
    size = tensor.shape[dim]
    length = -(-size // ranks)
    start = min(rank * length, size)
    return tensor.narrow(dim, start, min(length, size - start))


def with_one_zero(x: torch.Tensor) -> torch.Tensor:
    """float8 data with -0 replaced by 0: the signs of zeros may depend on the shape of a GEMM."""
    return x.view(torch.uint8).masked_fill(x.float() == 0, 0).view(x.dtype)


def check_near(
    name: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    terms: list[torch.Tensor],
    computed_in: torch.dtype,
) -> None:
    """Check that sums differ only by rounding, relative to the largest values of their terms."""
    if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
        raise WrongResult(
            f"{name} {mine.dtype} {tuple(mine.shape)}, twin {theirs.dtype} {tuple(theirs.shape)}"
        )
    finite, limits = theirs.isfinite(), torch.finfo(theirs.dtype)
    if (~finite).any() and mine.isfinite()[~finite].any():
        raise WrongResult(f"{name} is finite, and is not in the twin: {mine}, {theirs}")
    finite_terms = [term[term.isfinite()].double().abs() for term in terms]
    largest = sum(term.max().item() for term in finite_terms if term.numel())
    # Near the limits of the dtype, whether a sum overflows may depend on the order.
    if largest < limits.max / 1e6:
        error = (mine[finite].double() - theirs[finite].double()).abs()
        eps = max(limits.eps, torch.finfo(computed_in).eps)
        allowed = largest * 32 * eps + limits.smallest_normal
        if not bool((error <= allowed).all()):
            raise WrongResult(f"{name} {mine}, twin {theirs}: off by {error.max():.3g}")
