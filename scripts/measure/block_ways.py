"""Ways to cast operands in blocks, in plain torch and fp64, without calling the library.

x = input [M, K], w = weight [N, K], g = grad_output [M, N]; every block has a scale that is a power
of two. The ways differ in the blocks of x and g, and in what grad_weight multiplies::

    two casts     1 x size for output and grad_input; for grad_weight size x 1, cast from x and g
    one copy      1 x size; for grad_weight that copy is cast again, size x 1
    square        one copy in blocks of size x size

The weight has square blocks in all of them. "one copy" is what the recipes blockwise and mxfp8 do.
Two ways differ from it in one point. "copy as it is" multiplies the first copy in grad_weight,
which no float8 GEMM can: it shows what the second cast loses. "weight in lines" casts the weight
twice, in blocks along the contraction of each of its GEMMs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.common.gemms import GEMMS
from scripts.measure.operands import WORST, Operands

# The size of blocks, and whether their scales follow the rule floor.
RECIPES = {"blockwise": (128, False), "mxfp8": (32, False)}
BLOCKS = RECIPES | {"mxfp8, floor": (32, True)}
TWO_CASTS, ONE_COPY, SQUARE = "two casts", "one copy", "square"
AS_IT_IS, LINES = "copy as it is", "weight in lines"
OF_ACTIVATIONS = (*GEMMS, "worst tokens of output", *(f for f in WORST if "grad_weight" in f))
OF_WEIGHTS = ("output", "grad_input", "worst columns of output", "worst columns of grad_input")


def cast(tensor: Tensor, rows: int, columns: int, floor: bool = False) -> Tensor:
    """What e4m3 keeps of a matrix (fp64), with a scale for each block of ``rows x columns``.

    floor: the exponent of a scale is that of OCP MX v1.0; otherwise the least by which no value
        saturates.
    """
    m, n = tensor.shape
    padded = F.pad(tensor, (0, -n % columns, 0, -m % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(amax.log2().floor() - 8 if floor else (amax / 448).log2().ceil())
    data = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (data.double() * scale).flatten(2, 3).flatten(0, 1)[:m, :n]


def products(operands: Operands, size: int, floor: bool) -> dict[str, dict[str, Tensor]]:
    """The output and the two gradients, fp64, by way and GEMM."""
    x, w, g = (tensor.double() for tensor in operands)
    in_rows = [cast(each, 1, size, floor) for each in (x, g)]
    # (No value of such a copy saturates: that is the library's rule for it.)
    again = [cast(each, size, 1) for each in in_rows]
    squares = [cast(each, size, size, floor) for each in (x, g)]
    square = cast(w, size, size, floor)
    lines = cast(w, 1, size, floor), cast(w, size, 1, floor)
    two_casts = [cast(each, size, 1, floor) for each in (x, g)]
    of_ways = (
        (TWO_CASTS, in_rows, two_casts, (square, square)),
        (ONE_COPY, in_rows, again, (square, square)),
        (AS_IT_IS, in_rows, in_rows, (square, square)),
        (SQUARE, squares, squares, (square, square)),
        (LINES, in_rows, again, lines),
    )
    found = {}
    for way, (x1, g1), (x2, g2), (w1, w2) in of_ways:
        results = (x1 @ w1.t(), g1 @ w2, g2.t() @ x2)
        found[way] = dict(zip(GEMMS, results, strict=True))
    return found
