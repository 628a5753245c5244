"""Compile every Triton kernel for an architecture, as it would be launched, and print the results.

    python tests/support/compile_kernels.py 90

JSON, for each kernel: its name, its assembly, the size of its code, and whether it writes data
(and not exponents alone). It needs no GPU.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_dist import kernels
from fp8_dist.kernels import CustomOp, block_gemm, cuda, encoding
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.kernels.folding import fold_gradient
from fp8_dist.kernels.transposing import transposed_copies

assert cuda.HAS_TRITON

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DIVISIBLE = [["tt.divisibility", 16]]


def type_of(value: torch.Tensor | int) -> str:
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def is_one(value: torch.Tensor | int) -> bool:
    return isinstance(value, int) and value == 1


def by_16(value: torch.Tensor | int) -> bool:
    return isinstance(value, torch.Tensor) or value % 16 == 0


class Compiler:
    """Takes the place of launches."""

    def __init__(self, architecture: str) -> None:
        self.amd = architecture.startswith("gfx")
        number = architecture if self.amd else int(architecture)
        self.target = GPUTarget(*(("hip", number, 64) if self.amd else ("cuda", number, 32)))
        self.results: list[dict[str, Any]] = []

    def compile(
        self, tuned: launch.Tuned, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Compile a kernel for these arguments and its first choice of block sizes."""
        names, chosen = tuned.kernel.arg_names, tuned.configs[0]
        constants = {**constants, **chosen.kwargs}
        types, attributes = {}, {}
        for n, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, tuple):
                ones = {
                    (n, i): each for i, each in enumerate(value) if each is None or is_one(each)
                }
                constants |= ones
                types[name] = tuple(
                    "constexpr" if (n, i) in ones else type_of(each) for i, each in enumerate(value)
                )
                attributes |= {
                    (n, i): DIVISIBLE
                    for i, each in enumerate(value)
                    if (n, i) not in ones and by_16(each)
                }
                continue
            if value is None or is_one(value):
                constants[name] = value
                continue
            types[name] = type_of(value)
            if by_16(value):
                attributes[(n,)] = DIVISIBLE
        signature = {name: types.get(name, "constexpr") for name in names}
        options = {"num_warps": chosen.num_warps, "enable_fp_fusion": False}
        source = ASTSource(tuned.kernel, signature, constants, attributes)
        found = triton.compile(source, target=self.target, options=options).asm
        assembly, code = ("amdgcn", "hsaco") if self.amd else ("ptx", "cubin")
        name = tuned.kernel.__name__
        result = {"name": name, "assembly": found[assembly], "bytes": len(found[code])}
        outputs = dict(zip(names, args, strict=False))
        outputs = [outputs[each] for each in ("copies", "out") if each in outputs]
        result["writes_data"] = not any(each in (None, (None, None)) for each in outputs)
        self.results.append(result)


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
    run(kernels.quantize_each, x, [x], rows.new_ones(512), e4m3, True)
    run(kernels.cast_copies, x, [one], e4m3, True, [0, 0], both)
    run(kernels.cast_copies, x, [rows, columns], e4m3, True, [0, 1], both)
    run(kernels.quantize_copies, x, [columns], e4m3, [0, 0], both)
    run(kernels.cast_rows, x, e4m3, True, both)
    run(kernels.cast_and_record, x, one, one, e4m3, both, one)
    run(fold_gradient, x, e4m3, columns.view(-1), rows.view(-1), True)
    numbers, data = run(kernels.cast_blocks, x, e4m3, (1, 128, 0, 0), None, [False])
    run(kernels.cast_blocks, x, e4m3, (128, 128, 0, 0), "ceil", both)
    run(kernels.quantize_blocks, x, numbers, e4m3, (1, 128, 0, 0))
    run(kernels.block_exponents, x, e4m3, (32, 32, 0, 0), "floor")
    run(kernels.reblock, data, numbers, (1, 128, 0, 0), 128, "ceil", True)
    run(block_gemm.dequantize_blocks, data, numbers, (1, 128, 0, 0), torch.bfloat16)
    parts = [128, 128, 0, 0] * 2
    every = run(kernels.block_exponents_of_each, x, [x], e4m3, parts, "ceil")
    run(kernels.quantize_blocks_of_each, x, [x], every, e4m3, parts)
    run(block_gemm.gemm_scales, numbers, numbers, 4)
    run(block_gemm.tiled_exponents, numbers, numbers, 1)
    codes, each = run(encoding.encode_float8, x, 1)
    run(encoding.encode_float8, x, -1)
    codes, each = codes.view(2, 128, 512), each.view(2, 128, 4)
    run(encoding.sum_of_float8, codes, each, x[:128], 1)
    run(encoding.sum_of_rows, x.view(2, 128, 512), x[:128].float(), 1)
    run(transposed_copies, data, [data] * 6)


def main(architecture: str) -> None:
    compiler = Compiler(architecture)
    launch.Tuned.__call__ = lambda tuned, grid, key, device, *args, **constants: compiler.compile(  # type: ignore[method-assign]
        tuned, args, constants
    )
    launch.converts = lambda dtype, device: architecture == "90"
    call_all()
    print(json.dumps(compiler.results))


if __name__ == "__main__":
    main(sys.argv[1])
