"""Float8 training with float8 communication, on any mesh.

Convert a model, shard it, train::

    config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
    convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_update(optimizer, model)

The whole library is imported with torch, or when a name of it is first used. Only
``fp8_dist.debug``, ``fp8_dist.doctor``, ``fp8_dist.report`` and ``fp8_dist.tensor_parallel`` are
imported when they are first used themselves.
"""

from typing import TYPE_CHECKING

from fp8_dist.imports import export
from fp8_dist.version import __version__ as __version__

if TYPE_CHECKING:
    from fp8_dist import debug as debug
    from fp8_dist import doctor as doctor
    from fp8_dist import integrations as integrations
    from fp8_dist import moe as moe
    from fp8_dist import report as report
    from fp8_dist import tensor_parallel as tensor_parallel
    from fp8_dist.api import *

export(__name__, "fp8_dist.api", ("debug", "doctor", "report", "tensor_parallel"))
