"""Names of recipes, which parsers of commands offer without an import of torch."""

import enum
from typing import Literal

ExpertsRecipe = Literal["rowwise_folded", "tensorwise", "blockwise", "mxfp8"]


class Float8LinearRecipeName(enum.Enum):
    """Names of the ready-made configs of :meth:`fp8_dist.Float8LinearConfig.from_recipe_name`.

    Attributes:
        TENSORWISE: one dynamic scale per tensor; float8 weight, input and output-gradient gathers.
        ROWWISE: one scale per row of each GEMM's operands, hence two casts of each tensor, along
            different dims. Gathers stay in high precision.
        ROWWISE_WITH_GW_HP: as rowwise; the weight in the GEMM of grad_input has one scale, and the
            GEMM of grad_weight is left in high precision.
        ROWWISE_FOLDED: one scale per row; what runs along a contraction is folded into grad_output
            (see :mod:`fp8_dist.linear.rowwise_folded`), so that one copy serves all GEMMs and
            float8 weight, input and output-gradient gathers, without amax all-reduces for what is
            gathered.
        BLOCKWISE: one scale per 128 values of a row of input and grad_output, and per 128 x 128
            values of the weight. One copy of each operand serves all GEMMs and float8 gathers: for
            the GEMM that contracts the tokens it is blocked again (:mod:`fp8_dist.kernels.blocks`).
            No amax all-reduces but for blocks that shards cut.
        MXFP8: as blockwise, with blocks of 32 values and of 32 x 32, and scales that are exponents
            of MX, rounded up (``scale_rule="ceil"``).
        DELAYED: one scale per tensor, from the history of its amax; float8 gathers as tensorwise,
            and one all-reduce per step in ``sync_float8_amax_and_scale_history``.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    ROWWISE_FOLDED = "rowwise_folded"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    DELAYED = "delayed"
