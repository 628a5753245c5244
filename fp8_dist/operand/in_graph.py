"""What the library's composite operators have in common; see Note [One operator per layer]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8_dist import torch_internals as internals
from fp8_dist.device import stores_transposed
from fp8_dist.mesh import this_rank
from fp8_dist.operand.history import AmaxHistory, HistoryInGraph
from fp8_dist.operand.state import owner_of
from fp8_dist.scaling.fingerprint import PROCESS, code_fingerprint


def takes_operators() -> bool:
    """Whether code runs in a graph that has composite operators, which dynamo does not trace.

    Graphs for ``torch.export`` have none, because another process runs them. In inference mode
    torch does not run an operator's implementation before those of tensor subclasses.
    """
    if not torch.compiler.is_dynamo_compiling() or internals.is_exporting():
        return False
    return not _is_inference_mode()


@internals.constant_in_graphs
def _is_inference_mode() -> bool:
    return torch.is_inference_mode_enabled()


@internals.constant_in_graphs
def context() -> str:
    """What implementations of composite operators depend on besides the other arguments."""
    process = "" if internals.CACHE_TELLS_SUBCLASSES else PROCESS
    # Torch's own keys have the device, but not the ptxas that Triton takes.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    code = f"{code_fingerprint()} {process} {stores_transposed(device)}"
    return f"{code} rank {this_rank()} of {internals.process_groups()}"


def handles_of(history: AmaxHistory) -> list[Tensor]:
    """The handles that an operator takes for an amax history: its own, and that of a frozen weight.

    :func:`history_of` is the inverse.
    """
    return [history.handle, history.frozen.handle]


def history_of(handles: Sequence[Tensor]) -> AmaxHistory:
    """The amax history with these handles, in the implementation of an operator."""
    own, of_frozen = handles
    if isinstance(own, internals.STAND_INS):
        return HistoryInGraph(own, of_frozen)
    history: AmaxHistory = owner_of(own)  # a backend runs the graph of dynamo as it is
    return history
