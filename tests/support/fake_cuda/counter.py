"""Count the kernels that eager code launches, and the bytes that they move.

A *kernel* is one launch on the device, by an operator that computes or copies, or by Triton. Views
and allocations launch nothing. Operators that are known to launch several kernels count several
times (:func:`_launches_of`). The *bytes* of a kernel are those of the tensors that it reads and
writes, each counted once, as if there were no cache. Collectives are counted separately.

For custom operators of the library, the launches of their CUDA implementation are counted. Triton
kernels do not run; each tensor argument of a launch counts as read or written once.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_cuda.layouts import block_mm_problems, scaled_mm_problems
from fake_cuda.triton_kernels import forget_addresses

GEMMS = ("_scaled_mm", "_scaled_mm_v2", "mm", "addmm", "bmm")
GROUPED_GEMMS = ("_grouped_mm", "_scaled_grouped_mm")
REDUCTIONS = ("amax", "amin", "aminmax", "linalg_vector_norm", "max", "sum", "_foreach_norm")
COPIES = ("clone", "contiguous", "copy_", "reshape", "to", "_to_copy")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Operators that make the host wait for the device. (Blocking copies do, too.)
_READS_BY_HOST = (
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
)
_LARGE = 2**20  # bytes; for less data, the launch dominates
# Limits of torch's multi-tensor kernels: elements per chunk, chunks per launch, and tensors per
# launch by the number of lists.
_CHUNK, _CHUNKS, _TENSORS = 65536, 320, (110, 64, 48, 36, 30)


def rewrites_ops(types: Iterable[type]) -> bool:
    """Whether a tensor type replaces an op with others, which a mode then sees instead.

    The mode then returns NotImplemented. FakeTensor, which DTensor uses for shapes, does not count.
    """
    return any(
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not issubclass(kind, FakeTensor)
        for kind in types
    )


class Kernel(NamedTuple):
    """A launch, or several launches of one operator.

    Attributes:
        name: the name of the operator or Triton kernel.
        kind: "gemm", "reduction", "transposing copy", "elementwise", "tiny" (less than 1 MiB).
        launches: the number of launches.
        read, written: bytes.
        flops: the FLOPs of a GEMM.
        precision: for a GEMM, "bf16" (any that is not float8), "float8", or "float8 fast" (with
            fast accumulation).
    """

    name: str
    kind: str
    launches: int
    read: int
    written: int
    flops: int = 0
    precision: str = ""

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        return self.read + self.written


@dataclass
class Counts:
    """The work of the device.

    Attributes:
        kernels: the kernels, in the order of their launches.
        collectives: the number of collectives by name.
        syncs: a reason for each time that the host had to wait for the device.
        problems: arguments that the device's float8 GEMM, or NCCL, would refuse.
    """

    kernels: list[Kernel] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    syncs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """The number of launched kernels, including GEMMs."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def bytes_besides_gemms(self) -> int:
        """The bytes that all kernels except GEMMs move."""
        return sum(kernel.bytes for kernel in self.kernels if kernel.kind != "gemm")

    def by_kind(self, kind: str) -> list[Kernel]:
        """The kernels of a kind."""
        return [kernel for kernel in self.kernels if kernel.kind == kind]


class KernelCounter(TorchDispatchMode):
    """A mode that counts, in ``counts``, the work on fake CUDA tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        forget_addresses()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if rewrites_ops(types):
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        if space == "fp8_dist":
            return self._inside(func, args, kwargs)
        if name in _READS_BY_HOST and any(map(_is_cuda, tree_leaves((args, kwargs)))):
            self.counts.syncs.append(name)
        result = func(*args, **kwargs)
        if name == "triton_kernel":
            self._note_triton_kernel(*args)
        elif space in ("c10d", "_c10d_functional", "_dtensor"):
            if name != "wait_tensor":
                self.counts.collectives[name] += 1
            moved = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if not all(map(_is_cuda, moved)):
                self.counts.problems.append(f"{name} of a tensor on the CPU, which NCCL refuses")
        elif space != "prim" and name != "record_stream":
            self._note(func, name, args, kwargs, result)
        return result

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a custom operator by the implementation that the dispatcher would choose."""
        keys = torch._C.DispatchKey
        key = keys.CUDA if args[0].is_cuda else keys.CPU
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        reads, writes, updates = traffic(func, args, kwargs, result)
        if not any(map(_is_cuda, (*reads, *writes))):
            return
        blocks = not _arguments(func, args, kwargs).get("non_blocking")
        if name in COPIES and blocks and not all(map(_is_cuda, (*reads, *writes))):
            devices = f"from {reads[0].device.type} to {writes[0].device.type}"
            self.counts.syncs.append(f"{name} {devices}")
        if name in ALLOCATIONS or not writes:
            return
        if not any(t.numel() for t in writes):
            return
        if name.startswith("_scaled_mm"):
            check = scaled_mm_problems if name == "_scaled_mm" else block_mm_problems
            self.counts.problems += check(_arguments(func, args, kwargs))
        reads = [*reads, *updates]
        read, written = sum(map(_bytes, reads)), sum(map(_bytes, writes))
        kind = _kind(name, reads, writes, read + written)
        kernel = Kernel(name, kind, _launches_of(name, args), read, written)
        if kind == "gemm":
            left = reads[1 if name == "addmm" else 0]
            flops = 2 * math.prod(writes[0].shape) * left.shape[-1]
            if name in GROUPED_GEMMS and writes[0].ndim == 3:
                flops //= len(writes[0])  # each group sums over some of the rows
            precision = "bf16"
            if name.startswith("_scaled"):
                fast = _arguments(func, args, kwargs).get("use_fast_accum")
                precision = "float8 fast" if fast else "float8"
            kernel = kernel._replace(flops=flops, precision=precision)
        self.counts.kernels.append(kernel)

    def _note_triton_kernel(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        size = sum(map(_bytes, tensors))
        reduces = name.startswith(("triton_red_", "triton_per_"))  # Inductor's names
        kind = "tiny" if size < _LARGE else "reduction" if reduces else "elementwise"
        self.counts.kernels.append(Kernel(name, kind, 1, size, 0))


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _is_cuda(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor in memory, without copies in expanded dims."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or not size) * tensor.itemsize


def traffic(
    func: Any, args: Any, kwargs: Any, result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator only reads, only writes, and both reads and writes."""
    schema = func._schema
    if schema.name == "fsdp::all_gather_copy_in":
        # Its schema does not show that it writes this rank's part of the all-gather buffer.
        return list(args[0]), [result[0]], []
    reads: list[torch.Tensor] = []
    mutated: list[torch.Tensor] = []
    updates: list[torch.Tensor] = []
    overwrites = schema.name.partition("::")[2] in _OVERWRITE
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if argument.alias_info is None or not argument.alias_info.is_write:
            reads += tensors
            continue
        mutated += tensors
        if not overwrites and not argument.is_out:
            updates += tensors
    storages = {t.untyped_storage()._cdata for t in (*reads, *mutated)}
    returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    new = [t for t in returned if t.untyped_storage()._cdata not in storages]
    return reads, mutated + new, updates


_OVERWRITE = (
    "copy_",
    "fill_",
    "zero_",
    "_foreach_copy_",
    "_foreach_zero_",
    "split_with_sizes_copy",
    "chunk_cat",
)


def _kind(name: str, reads: Any, writes: Any, size: int) -> str:
    if name in (*GEMMS, *GROUPED_GEMMS):
        return "gemm"
    if size < _LARGE:
        return "tiny"
    if name in REDUCTIONS:
        return "reduction"
    if name in COPIES and _order(reads[0]) != _order(writes[0]):
        return "transposing copy"
    return "elementwise"


def _order(tensor: torch.Tensor) -> list[int]:
    """The dims of a tensor in memory order, the slowest first."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


def _launches_of(name: str, args: Any) -> int:
    if name == "constant_pad_nd":
        return 2  # fills all, then copies
    if name.startswith("_foreach_"):
        lists = [a for a in args if isinstance(a, list | tuple) and a and _is_cuda(a[0])]
        new = not name.endswith("_") and name != "_foreach_norm"  # also writes a list of results
        most = _TENSORS[len(lists) - 1 + new]
        chunks = sum(-(-t.numel() // _CHUNK) for t in lists[0])
        launches = max(-(-chunks // _CHUNKS), -(-len(lists[0]) // most))
        # A second kernel sums the norms of chunks.
        return launches + (-(-len(lists[0]) // most) if name == "_foreach_norm" else 0)
    if name == "_fused_rms_norm_backward":
        return 2
    if name == "_scaled_dot_product_flash_attention_backward":
        return 3
    if name in ("cat", "stack"):
        return -(-len(args[0]) // 128)
    return 1
