"""A communication hook of DDP: gradients travel in float8 and are summed in fp32."""

import torch
import torch.distributed as dist

from fp8_dist.device import current_stream, side_stream
from fp8_dist.fsdp.gradient_transport import SUMMED_DTYPES, seed_of_rounding
from fp8_dist.transport import Part, all_reduce, seed_of


class Float8DDPState:
    """State of :func:`float8_ddp_hook`: its options.

    Give the same options on all ranks. They are not compared.

    Args:
        process_group: the group that DDP was given; None for the default one.
        stochastic_rounding: round up or down at random instead of to nearest, the means too, so
            that the expectation is the value. An int, including 0, is the seed; True is 1. It
            repeats as in :func:`set_gradient_transport`.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        stochastic_rounding: bool | int = False,
    ) -> None:
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(
                f"Float8DDPState: process_group is {process_group!r}; pass the ProcessGroup that "
                "DDP was given, or None, and options by name, such as stochastic_rounding=True"
            )
        self.process_group = process_group
        self.seed = seed_of_rounding("Float8DDPState", stochastic_rounding)
        # The parameters in the order of their first reduction, which is the same in each run.
        self._numbers: dict[torch.Tensor, int] = {}

    def group(self) -> dist.ProcessGroup:
        """Return the process group."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def average(self, gradients: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Replace the gradients of a bucket, ``[S]``, with their means over ranks."""
        group, numbers = self.group(), self._numbers
        parts = [Part(numbers.setdefault(p, len(numbers)), p.numel(), "float8") for p in parameters]
        seed, ranks = seed_of(self.seed, group.rank()), group.size()
        mean = all_reduce(gradients, parts, group, sums="float8", divisor=ranks, seed=seed)
        gradients.copy_(mean)


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
