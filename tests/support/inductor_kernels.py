"""Code that Inductor generates for a fake GPU, and the Triton kernels in it."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_cuda import inductor
from fake_cuda.device import FakeCudaMode

from fp8_dist.kernels.quantization import fusible_copies


def product_as_float8(
    a: torch.Tensor, b: torch.Tensor, known: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The float8 copies of a product and of its transpose, cast with a known amax."""
    return fusible_copies(a * b, known, dtype, [False, True], saturate=True)


def code_of_product(
    sizes: tuple[int, int],
    high: torch.dtype,
    dtype: torch.dtype,
    product: Callable[..., list[torch.Tensor]] = product_as_float8,
) -> str:
    """Inductor's code for the casts of a product; call it in the process of a fake CUDA device."""
    found: list[str] = []
    with FakeCudaMode():
        a, b = (torch.empty(sizes, dtype=high, device="cuda") for _ in range(2))
        known = torch.empty((), device="cuda")

    def noted(code: str) -> inductor.Call:
        found.append(code)
        return lambda args: [known] * 3

    with inductor.inductor_for_the_device(noted, lambda *args, **kwargs: None), torch.no_grad():
        torch.compile(product, fullgraph=True)(a, b, known, dtype)
    (code,) = found
    return code


def sources(code: str) -> dict[str, str]:
    """The source of each kernel in generated code."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL))


def loaded(folder: Path, name: str, source: str) -> Any:
    """The ``triton.jit`` function of a kernel, without its launcher."""
    imports, _, rest = source.partition("triton_helpers.set_driver_to_gpu()")
    file = folder / f"{name}.py"  # Triton reads the code of a function from its file
    file.write_text(imports + rest[rest.index("@triton.jit") :])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return getattr(module, name)
