"""A communication hook of DDP: gradients travel in float8 and are summed in fp32."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8_dist.device import current_stream, side_stream
from fp8_dist.fsdp.gradient_transport import SUMMED_DTYPES, check_rounding
from fp8_dist.kernels.encoding import NEAREST
from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import ddp_hook_states
from fp8_dist.transport import GradientErrors, Part, all_reduce, seed_of, split


class Float8DDPState:
    """State of :func:`float8_ddp_hook`: its options, and the errors that it keeps.

    Give the same options on all ranks. They are not compared.

    Args:
        process_group: the group that DDP was given; None for the default one.
        error_feedback: keep the errors of the encoding, and add them to the next gradient. Every
            rank keeps 1.008 bytes per element for its summands, and this amount divided by the
            number of ranks for the means that it encodes. ``fp8_dist.Float8State`` of the DDP model
            saves the errors. A parameter that no rank uses in a step loses its errors.
        stochastic_rounding: round up or down at random instead of to nearest, the means too, so
            that the expectation is the value. An int, including 0, is the seed; True is 1. It
            repeats as in :func:`set_gradient_transport`.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool = False,
        stochastic_rounding: bool | int = False,
    ) -> None:
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(
                f"Float8DDPState: process_group is {process_group!r}; pass the ProcessGroup that "
                "DDP was given, or None, and options by name, such as error_feedback=True"
            )
        check_rounding("Float8DDPState", error_feedback, stochastic_rounding)
        self.process_group = process_group
        self.error_feedback = error_feedback
        self.seed = NEAREST if stochastic_rounding is False else int(stochastic_rounding)
        # The parameters in the order of their first reduction, which is the same in each run.
        self._numbers: dict[torch.Tensor, int] = {}
        self._errors: GradientErrors | None = None
        self._with_errors: dict[int, Part] = {}

    def group(self) -> dist.ProcessGroup:
        """Return the process group."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def errors_of(self, parameters: Iterable[torch.Tensor]) -> GradientErrors | None:
        """Return the errors, with those of parameters seen first at zero; None if none are kept.

        Parameters are known by their ids, because DDP moves them to other buckets.
        """
        ranks = self.group().size()
        if not self.error_feedback or ranks == 1:
            return None
        own = [(p, _part(id(p), p)) for p in parameters]
        new = {part.number: part for _, part in own if part.number not in self._with_errors}
        if self._errors is None and own:
            self._errors = GradientErrors([(ranks, 1), ()], own[0][0].device)
        if self._errors is not None:
            if new:
                self._with_errors |= new
                self._errors.keep_for(split(list(self._with_errors.values()), ranks))
            self._errors.parts = split([part for _, part in own], ranks)
        return self._errors

    def average(self, gradients: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Replace the gradients of a bucket, ``[S]``, with their means over ranks."""
        group = self.group()
        errors = self.errors_of(parameters)
        parts = [_part(self._numbers.setdefault(p, len(self._numbers)), p) for p in parameters]
        seed, ranks = seed_of(self.seed, group.rank()), group.size()
        mean = all_reduce(
            gradients, parts, group, sums="float8", divisor=ranks, seed=seed, errors=errors
        )
        gradients.copy_(mean)


def _part(number: int, parameter: torch.Tensor) -> Part:
    return Part(number, parameter.numel(), "float8")


def float8_ddp_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over ranks, encoded in float8 on the wire.

    Use it as torch's own hooks::

        model = DistributedDataParallel(model)
        model.register_comm_hook(Float8DDPState(), float8_ddp_hook)

    Each rank sums a part of each gradient in fp32, in the order of ranks, divides the sum by their
    number, and encodes the mean. All ranks, the owner included, decode the same bytes, so their
    gradients have the same bits. Blocks are those of ``set_gradient_transport(model, "float8")``,
    and no block has values of two parameters. All gradients are encoded, also those of parameters
    with fewer than 2 dims, in at most 0.51 times the bytes of a ring's all-reduce in bf16. (Padding
    adds to it if most parameters have fewer than some thousand elements.)

    **The result depends on the number of ranks**, but not on the sizes of buckets. A gradient that
    is NaN or infinite is so on all ranks, and does not change other gradients.

    Args:
        state: a :class:`Float8DDPState`, or None for its defaults.
        bucket: gradients in fp32, bf16 or fp16.

    Returns:
        A future of the bucket's buffer. On a GPU the hook runs on a stream of its own, beside the
        backward. On a CPU it has ended when it returns.

    Collectives: per bucket, an all-to-all of 1.008 bytes per element, and an all-gather of as many
    bytes. One rank has none, and its gradients are not rounded.

    Raises:
        TypeError: for another state.
        NotImplementedError: for gradients that are sparse, or of other dtypes.
    """
    if state is None:
        state = Float8DDPState()
    if not isinstance(state, Float8DDPState):
        raise TypeError(
            f"float8_ddp_hook: the state is a {type(state).__name__}; pass a Float8DDPState, or "
            "None, to register_comm_hook"
        )
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.dtype not in SUMMED_DTYPES or buffer.layout is not torch.strided:
        raise NotImplementedError(
            f"float8_ddp_hook: bucket {bucket.index()} has gradients of {buffer.dtype}, "
            f"{buffer.layout}; sums are taken in fp32 of dense gradients in fp32, bf16 or fp16. "
            "Convert the model, or register no hook"
        )
    # A future of a GPU's devices records the current stream; DDP's stream waits for it.
    devices: list[int | str | torch.device] | None = (
        None if current_stream(buffer.device) is None else [buffer.device]
    )
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    with side_stream(buffer.device):
        if buffer.numel() and state.group().size() > 1:
            state.average(buffer, parameters)
        done.set_result(buffer)
    return done


def ddp_gradient_errors(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the errors that this rank keeps in a DDP model's hook: uint8, by name.

    Names are those of ``gradient_errors``, with the rank's place in the group of DDP.
    """
    found: dict[str, torch.Tensor] = {}
    named = model.module.named_parameters()
    names = {id(p): f"ddp.{without_wrappers(name)}" for name, p in named}
    trained = [p for p in model.module.parameters() if p.requires_grad]
    for state in ddp_hook_states(model):
        errors = state.errors_of(trained) if isinstance(state, Float8DDPState) else None
        if errors is not None:
            group = state.group()
            rank = f"rank{dist.get_rank()}.{group.rank()}of{group.size()}"
            found |= errors.tensors(names, rank)  # models may share a state
    return found
