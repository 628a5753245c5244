"""What a compiled kernel must keep, so that a GPU is not slower than its memory, nor less exact."""

import re
from typing import Any

# Of an H200: multiprocessors, clock in Hz, bytes per second of the memory that kernels reach;
# registers, bytes of shared memory and warps of a multiprocessor.
PROCESSORS, CLOCK, MEMORY = 132, 1.7e9, 4e12
REGISTERS, SHARED, WARPS = 65536, 228 * 1024, 64
BYTES_PER_CYCLE = MEMORY / PROCESSORS / CLOCK
WARPS_PER_CYCLE = 4  # that issue an instruction

# What would change bits: flushed subnormals, fused or approximate operations.
INEXACT = (".ftz", "fma.", ".approx", "div.full", "ex2", "lg2")


def is_exact(kernel: dict[str, Any]) -> bool:
    """Return whether all operations on floats round to nearest, as in torch (NVIDIA)."""
    return not any(each in kernel["assembly"] for each in INEXACT)


def has_relaxed_atomics(kernel: dict[str, Any]) -> bool:
    """Return whether no atomic orders other accesses of memory, for which a kernel would wait."""
    assembly = kernel["assembly"]
    atomics = re.findall(r"\b(?:atom|red)\.\S+", assembly)
    return all(".relaxed." in each for each in atomics) and "buffer_wbl2" not in assembly


def blocks_per_processor(kernel: dict[str, Any]) -> int:
    """Return how many instances a multiprocessor holds at a time."""
    registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["warps"]
    return min(
        REGISTERS // registers, SHARED // (kernel["shared"] + 1024), WARPS // kernel["warps"]
    )


def broken(kernel: dict[str, Any]) -> set[str]:
    """Return which bounds a choice of block sizes does not keep on a Hopper.

    - "spills": registers are kept in memory.
    - "blocks": a multiprocessor does not hold two instances.
    - "exact", "atomics": see above.
    - "narrow": a tenth of the bytes is moved less than 4 at a time by a thread.
    - "conflicts": wavefronts of shared memory are 1.2 times as many as without conflicts of banks,
      and the others take a tenth of the time of the bytes.
    - "shared", "issue": all wavefronts, or the instructions, take longer than the bytes.
    """
    traffic = kernel["traffic"]
    cycles = traffic["bytes"] / BYTES_PER_CYCLE
    waves, free = traffic["wavefronts"], traffic["free_wavefronts"]
    issue = kernel["instructions"] * kernel["warps"] / WARPS_PER_CYCLE
    kept = {
        "spills": kernel["spilled"] == 0,
        "blocks": blocks_per_processor(kernel) >= 2,
        "exact": is_exact(kernel),
        "atomics": has_relaxed_atomics(kernel),
        "narrow": traffic["narrow_bytes"] <= 0.1 * traffic["bytes"],
        "conflicts": waves <= 1.2 * free + 0.1 * cycles,
        "shared": waves <= cycles,
        "issue": issue <= cycles,
    }
    return {name for name, holds in kept.items() if not holds}
