"""Integration with transformers (extra ``hf``): tensor parallelism, the Trainer, and loading."""

from importlib.util import find_spec

if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
    raise ImportError(
        f"fp8_dist.integrations.transformers needs {' and '.join(missing)}: pip install "
        '"fp8-dist[hf]"'
    )

from fp8_dist.integrations.transformers.quantizer import Fp8DistConfig
from fp8_dist.integrations.transformers.tp_plan import hf_tp_plan
from fp8_dist.integrations.transformers.trainer import Float8Callback

__all__ = ["Float8Callback", "Fp8DistConfig", "hf_tp_plan"]
