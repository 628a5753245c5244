"""The casts of inference engines, by their own formulas, as references for float8 bits.

They are in numpy, whose fp32 division is correctly rounded, and use no code under test.
"""

import numpy as np
import torch
from reference import nearest

E4M3 = torch.float8_e4m3fn
FORMS = ("ue8m0", "vllm")


def engine_cast(
    x: torch.Tensor, form: str, rows: int = 1, columns: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast in blocks of ``rows x columns``: (e4m3 codes ``[M, K]``, fp32 scales ``[R, C]``).

    ``form``: "vllm" for vLLM's ``per_token_group_quant_fp8``, "ue8m0" for it with ``use_ue8m0``.
    """
    values = x.detach().to(torch.float32).numpy()
    m, k = values.shape
    scales = np.zeros((-(-m // rows), -(-k // columns)), dtype=np.float32)
    scaled = np.zeros_like(values)
    for r, c in np.ndindex(*scales.shape):
        block = np.s_[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
        amax = max(np.abs(values[block]).max(), np.float32(1e-10))
        scale = amax / np.float32(448)
        if form == "ue8m0":
            scale = np.exp2(np.ceil(np.log2(scale)))
        scales[r, c] = scale
        scaled[block] = values[block] / scale
    codes = nearest(torch.from_numpy(scaled).double(), E4M3).to(torch.float32).to(E4M3)
    return codes, torch.from_numpy(scales)
