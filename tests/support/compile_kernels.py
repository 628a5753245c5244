"""Compile every Triton kernel for an architecture, as it would be launched, and print the results.

    python tests/support/compile_kernels.py 90

JSON, for each kernel: its name, its assembly, and the size of its code. It needs no GPU.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_dist.kernels.cuda import triton as kernels
from fp8_dist.kernels.cuda.triton import launch

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
        constants = constants | chosen.kwargs
        types, attributes = {}, {}
        for n, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, tuple):
                types[name] = tuple(map(type_of, value))
                attributes |= {(n, i): DIVISIBLE for i, each in enumerate(value) if by_16(each)}
                continue
            if value is None or (isinstance(value, int) and value == 1):
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
        self.results.append(result)


def call_all() -> None:
    """Call every function once, on tensors whose values don't matter."""
    e4m3 = torch.float8_e4m3fn
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    rows, columns = torch.zeros(256, 1), torch.zeros(1, 512)
    for dims in (None, [0], [1]):
        kernels.amax(x, dims)
    kernels.amax_of_rows_and_columns(x)
    kernels.amaxes([x, x])
    kernels.row_amaxes([x, x])
    kernels.quantize_many([x, x], rows.new_ones(512), e4m3, True)
    kernels.cast(x, torch.zeros(()), e4m3, True, column_major=True)
    kernels.quantize(x, columns, e4m3, column_major=True)
    kernels.cast_rows(x, e4m3, True, column_major=True)
    kernels.cast_rows_and_columns(x, rows, columns, e4m3, True)
    kernels.fold_rows(x, columns.view(-1), rows.view(-1), e4m3)
    kernels.fold_columns(x, rows, rows.view(-1), columns, e4m3)
    numbers = kernels.cast_blocks(x, e4m3, (1, 128, 0, 0), None).exponents
    kernels.cast_blocks(x, e4m3, (128, 128, 0, 0), "ceil", column_major=True)
    kernels.quantize_blocks(x, numbers, e4m3, (1, 128, 0, 0))
    kernels.block_exponents(x, e4m3, (32, 32, 0, 0), "floor")
    data = torch.zeros(256, 512, dtype=torch.uint8).view(e4m3)
    kernels.reblock(data, numbers, (1, 128, 0, 0), 128, "ceil", True)
    kernels.dequantize(data, numbers, (1, 128, 0, 0), torch.bfloat16)
    parts = [(128, 128, 0, 0)] * 2
    every = kernels.exponents_of_many([x, x], e4m3, parts, "ceil")
    kernels.quantize_many_blocks([x, x], every, e4m3, parts)
    kernels.gemm_scales(numbers, numbers, 4)
    kernels.tiled_exponents(numbers, numbers)
    codes, each = kernels.encode_float8(x, 1)
    kernels.encode_float8(x, -1)
    kernels.sum_of_float8(codes.view(2, 128, 512), each.view(2, 128, 4), x[:128], 1)
    kernels.sum_of_rows(x.view(2, 128, 512), x[:128].float(), 1)
    kernels.transpose(x.view(torch.uint8))
    kernels.transpose_many([x.view(torch.uint8)] * 7)


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
