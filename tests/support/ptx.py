"""One program instance of a kernel, run on the integers of its PTX: the addresses that it uses.

Addresses, loops and masks depend on integers alone, so that no GPU is needed, and no data but
tables of integers. What else is loaded, or computed from floats, is unknown. A branch on an unknown
value is not taken, and an access by an unknown address is not counted.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BANKS, WARP, SECTOR = 32, 32, 32
_LIMIT = 400_000  # executed instructions

Value = Any  # an int64 array, one number per thread (or a scalar); None is unknown

_ACCESS = re.compile(r"(?:ld|st|atom|red)\.(global|shared)((?:\.\w+)*)")
_ADDRESS = re.compile(r"\[\s*([^\]+\s]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*);")
_COMPARE: dict[str, Callable[[Value, Value], Value]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
}
_BINARY: dict[str, Callable[[Value, Value], Value]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul},
    **{"and": operator.and_, "or": operator.or_, "xor": operator.xor},
    **{"min": np.minimum, "max": np.maximum},
    "div": lambda a, b: np.sign(a) * np.sign(b) * (abs(a) // abs(b)),
    "rem": lambda a, b: np.sign(a) * (abs(a) % abs(b)),
    "shl": lambda a, b: np.left_shift(a, b),
    "shr": lambda a, b: np.right_shift(a, b),
}


@dataclass
class Traffic:
    """What one program instance moves.

    Attributes:
        bytes: of loads and stores in the memory of the device.
        narrow_bytes: those of them of which a thread moves less than 4 at a time.
        wavefronts: of shared memory, of all warps.
        free_wavefronts: what there would be of them without conflicts of banks.
        rounds: how often each loop was run, in the order of their beginnings.
        unknown: accesses whose addresses are unknown.
    """

    bytes: int = 0
    narrow_bytes: int = 0
    wavefronts: int = 0
    free_wavefronts: int = 0
    rounds: list[int] = field(default_factory=list)
    unknown: int = 0


class Instance:
    """A program instance of an entry, with all of its threads in step.

    Args:
        ptx: with one entry.
        parameters: of the entry: integers, and addresses.
        tables: int64 arrays that may be loaded, by address.
    """

    def __init__(
        self, ptx: str, parameters: Sequence[int], tables: dict[int, Value] | None = None
    ) -> None:
        self._parameters = parameters
        self._tables = tables or {}
        (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
        self._threads = int(threads)
        self._values: dict[str, Value] = {"global_smem": np.int64(0)}
        self._values |= {f"%ctaid.{d}": np.int64(0) for d in "xyz"}
        self._values["%tid.x"] = np.arange(self._threads, dtype=np.int64)
        self._code: list[tuple[str, str, str, list[str]]] = []
        self._labels: dict[str, int] = {}
        self._headers: list[int] = []
        for line in ptx[ptx.index(".reqntid") :].splitlines():
            text, _, comment = line.partition("//")
            if "Loop Header" in comment:
                self._headers.append(len(self._code))
            if label := re.fullmatch(r"(\$\w+):", text := text.strip()):
                self._labels[label[1]] = len(self._code)
            elif (found := _INSTRUCTION.fullmatch(text)) and not text.startswith("."):
                negated, predicate, op, arguments = found.groups(default="")
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+", arguments)
                self._code.append((negated, predicate, op, operands))

    def run(self) -> Traffic:
        """Run the instance, and return what it moves."""
        traffic, at, executed = Traffic(), 0, 0
        headers = dict.fromkeys(self._headers, 0)
        while at < len(self._code):
            if at in headers:
                headers[at] += 1
            negated, predicate, op, operands = self._code[at]
            at, executed = at + 1, executed + 1
            assert executed < _LIMIT, "the kernel does not end"
            active = self._mask(negated, predicate)
            if op.startswith("bra"):
                if not predicate or (active is not None and bool(np.all(active))):
                    at = self._labels[operands[0]]
            elif op in ("ret", "exit"):
                if active is not None and bool(np.all(active)):
                    break
            elif found := _ACCESS.match(op):
                self._access(traffic, active, *found.groups(), operands)
                if op.startswith(("ld", "atom")):
                    self._load(operands)
            elif op.startswith(("ldmatrix", "stmatrix")):
                size = int(re.search(r"\.x(\d)\.", op)[1])  # type: ignore[index]
                self._matrices(traffic, operands, size)
            else:
                self._values[operands[0]] = self._result(op, operands)
        traffic.rounds = list(headers.values())
        return traffic

    def _load(self, operands: list[str]) -> None:
        """Leave what a table has in the first operand; other results are unknown."""
        base, offset = _ADDRESS.fullmatch(operands[1]).groups()  # type: ignore[union-attr]
        address, (first, *others) = self._value(base), re.findall(r"%\w+", operands[0])
        self._values |= dict.fromkeys((first, *others))
        for start, table in self._tables.items() if address is not None and not others else ():
            place = (address + int(offset or 0) - start) // 8
            if np.all((place >= 0) & (place < len(table))):
                self._values[first] = table[place]

    def _value(self, operand: str) -> Value:
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            return np.int64(number - 2**64 if number >= 2**63 else number)
        return self._values.get(operand)

    def _mask(self, negated: str, predicate: str) -> Value:
        """Which threads run an instruction; None is unknown."""
        if not predicate:
            return np.True_
        found = self._values.get(predicate)
        return None if found is None else (found == 0 if negated else found != 0)

    def _result(self, op: str, operands: list[str]) -> Value:
        name, *kinds = op.split(".")
        if op.startswith("ld.param"):
            number = int(re.search(r"param_(\d+)", operands[1])[1])  # type: ignore[index]
            # What Triton adds at the end is not used.
            return np.int64(self._parameters[number]) if number < len(self._parameters) else None
        kind = kinds[-1] if kinds else ""
        given = [self._value(operand) for operand in operands[1:]]
        if any(value is None for value in given) or (kind.startswith("f") and name != "selp"):
            return None
        if kind == "pred":
            kind = "b1"
        if name not in ("mov", "cvt", "selp", "setp", "mad", "bfe", "neg", "not", *_BINARY):
            return None
        bits = int(re.sub(r"\D", "", kind) or 0)
        signed = kind.startswith("s")
        if name == "setp":
            a, b = (_as_number(value, bits, signed) for value in given[:2])
            return _COMPARE[kinds[0]](a, b).astype(np.int64)
        if name == "selp":
            return np.where(given[2] != 0, given[0], given[1])
        if name == "mov":
            return given[0]
        if name == "cvt":
            return _as_number(given[0], bits, signed) if not kinds[0].startswith("f") else None
        if name == "bfe":
            return (given[0] >> given[1]) & ((np.int64(1) << given[2]) - 1)
        if name in ("neg", "not"):
            value = -given[0] if name == "neg" else ~given[0]
            return _as_number(value, bits, False) if bits < 64 else value
        a, b = (_as_number(value, bits, signed) for value in given[:2])
        if name in ("shl", "shr"):
            b = np.minimum(given[1], 63)
        if name == "mad":
            product = a * b + given[2]
            return product if "wide" in kinds else _as_number(product, bits, False)
        result = _BINARY[name](a, b)
        return result if "wide" in kinds else _as_number(result, bits, False)

    def _access(
        self,
        traffic: Traffic,
        active: Value,
        space: str,
        suffix: str,
        operands: list[str],
    ) -> None:
        (place,) = (each for each in operands if each.startswith("["))
        base, offset = _ADDRESS.fullmatch(place).groups()  # type: ignore[union-attr]
        many = re.search(r"\.v(\d)", suffix)
        bits = re.search(r"\.[bsuf](\d+)$", suffix)
        size = int(bits[1]) // 8 * (int(many[1]) if many else 1)  # type: ignore[index]
        addresses = self._value(base)
        known = active is not None
        active = np.broadcast_to(active if known else np.True_, self._threads)
        if addresses is None:
            traffic.unknown += 1
            return
        addresses = np.broadcast_to(addresses, self._threads) + int(offset or 0)
        if space == "global":
            # What several threads of a warp load counts once, in whole sectors.
            warps = (addresses // SECTOR).reshape(-1, WARP), active.reshape(-1, WARP)
            sectors = sum(len(np.unique(a[used])) for a, used in zip(*warps, strict=True))
            moved = min(size * int(active.sum()), SECTOR * sectors)
            traffic.bytes += moved
            traffic.narrow_bytes += moved if size < 4 else 0
            return
        lanes = max(1, WARP * 4 // max(size, 4))
        _count(traffic, addresses.reshape(-1, lanes), active.reshape(-1, lanes), size)

    def _matrices(self, traffic: Traffic, operands: list[str], matrices: int) -> None:
        (place,) = (each for each in operands if each.startswith("["))
        base, offset = _ADDRESS.fullmatch(place).groups()  # type: ignore[union-attr]
        addresses = self._value(base)
        if addresses is None:
            traffic.unknown += 1
            return
        # Eight lanes have the addresses of a matrix's rows, of 16 bytes.
        each = np.broadcast_to(addresses, self._threads).reshape(-1, WARP)[:, : 8 * matrices]
        each = each.reshape(-1, 8) + int(offset or 0)
        _count(traffic, each, np.ones_like(each, dtype=bool), 16)


def _count(traffic: Traffic, addresses: Value, active: Value, size: int) -> None:
    """Count the wavefronts of groups of threads that are served together: ``[groups, lanes]``."""
    for group, used in zip(addresses, active, strict=True):
        if not used.any():
            continue
        starts = group[used]
        words = np.unique((starts[:, None] + np.arange(0, size, 4)[None, :]) // 4)
        traffic.wavefronts += int(np.bincount(words % BANKS).max())
        traffic.free_wavefronts += 1


def _as_number(value: Value, bits: int, signed: bool) -> Value:
    """Values of so many bits as numbers of int64."""
    if bits >= 64:
        return value
    if bits == 1:
        return value != 0
    value = value & ((1 << bits) - 1)
    return (value ^ (1 << (bits - 1))) - (1 << (bits - 1)) if signed else value
