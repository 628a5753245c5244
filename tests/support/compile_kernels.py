"""Compile every Triton kernel for an architecture, as it would be launched, and print the results.

    python tests/support/compile_kernels.py 90

JSON, for each kernel: its name, its assembly, the size of its code, and whether it writes data
(and not exponents alone). It needs no GPU.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8_dist import kernels
from fp8_dist.kernels import CustomOp, cuda, encoding, gemm
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.kernels.folding import fold_gradient

assert cuda.HAS_TRITON


class Driver:
    """What compilers ask the driver of a GPU that is not here."""

    def __init__(self, architecture: str) -> None:
        self.amd = architecture.startswith("gfx")
        number = architecture if self.amd else int(architecture)
        self.target = GPUTarget(*(("hip", number, 64) if self.amd else ("cuda", number, 32)))

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(
    amd: bool, tuned: launch.Tuned, args: tuple[Any, ...], constants: dict[str, Any]
) -> dict[str, Any]:
    """Compile a kernel for these arguments and its first choice of block sizes."""
    chosen = tuned.configs[0].all_kwargs() | {"enable_fp_fusion": False}
    found = tuned.kernel.run(*args, grid=(1,), warmup=True, **constants, **chosen).asm
    assembly, code = ("amdgcn", "hsaco") if amd else ("ptx", "cubin")
    outputs = dict(zip(tuned.kernel.arg_names, args, strict=False))
    outputs = [outputs[each] for each in ("copies", "out") if each in outputs]
    return {
        "name": tuned.kernel.__name__,
        "assembly": found[assembly],
        "bytes": len(found[code]),
        "writes_data": not any(each in (None, (None, None)) for each in outputs),
    }


def run(op: CustomOp[..., Any], *args: Any) -> Any:
    """What is registered for GPUs, on tensors on the CPU."""
    return op.implementations["cuda"](*args)


def call_all() -> None:
    """Call every function once, on tensors whose values don't matter."""
    e4m3 = torch.float8_e4m3fn
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    rows, columns, one = torch.zeros(256, 1), torch.zeros(1, 512), torch.zeros(())
    both = [False, True]
    for dims in (None, [0], [1]):
        run(kernels.amax, x, dims)
    run(kernels.amaxes, x, ["row", "column"])
    run(kernels.amax_of_each, x, [x])
    run(kernels.amax_of_each, x, [x], True)
    run(kernels.scaling_from_amax, rows, e4m3)
    run(kernels.cast_copies, x, [one], e4m3, True, [0, 0], both)
    run(kernels.cast_copies, x, [rows, columns], e4m3, True, [0, 1], both)
    run(kernels.quantize_copies, x, [columns], e4m3, [0, 0], both)
    run(kernels.cast_rows, x, e4m3, True, both)
    run(kernels.cast_and_record, x, one, e4m3, True, both, one)
    run(fold_gradient, x, e4m3, columns.view(-1), rows.view(-1), True)
    numbers, data = run(kernels.cast_blocks, x, e4m3, (1, 128, 0, 0), None, [False])
    run(kernels.cast_blocks, x, e4m3, (128, 128, 0, 0), "ceil", both)
    run(kernels.quantize_blocks, x, numbers, e4m3, (1, 128, 0, 0))
    run(kernels.block_exponents, x, e4m3, (32, 32, 0, 0), "floor")
    run(kernels.reblock, data, numbers, (1, 128, 0, 0), 128, "ceil", True)
    run(gemm.dequantize_blocks, data, numbers, (1, 128, 0, 0), torch.bfloat16)
    run(gemm.gemm_scales, numbers, numbers, 4)
    run(gemm.tiled_exponents, numbers, numbers, 1)
    codes, each = run(encoding.encode_float8, x, 1)
    run(encoding.encode_float8, x, -1)
    codes, each = codes.view(2, 128, 512), each.view(2, 128, 4)
    run(encoding.sum_of_rows, codes, each, x[:128], 1)
    run(encoding.sum_of_rows, x.view(2, 128, 512), None, x[:128].float(), 1)
    run(kernels.transposed_copy, data)
    source = torch.arange(256)
    run(kernels.transposed_groups, data, source)
    s, group = columns.repeat(2, 1), source // 128
    run(kernels.fold_groups, data, rows, s, rows.view(-1), group, 2, source)


def main(architecture: str) -> None:
    target, results = Driver(architecture), []
    driver.set_active(target)
    launch.Tuned.__call__ = lambda tuned, grid, key, device, *args, **constants: results.append(  # type: ignore[method-assign]
        compiled(target.amd, tuned, args, constants)
    )
    launch.converts = lambda dtype, device: architecture == "90"
    call_all()
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
