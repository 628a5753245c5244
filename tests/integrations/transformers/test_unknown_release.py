"""A release of transformers whose tensor parallelism the library doesn't know."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fp8_dist.integrations.transformers import native_tp


def test_tensor_parallelism_that_is_not_known() -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(distributed_config=SimpleNamespace(tp_size=2, tp_plan=None))
    )
    message = "Fp8DistConfig: the tensor parallelism of this release of transformers is not known"
    with (
        mock.patch.object(native_tp, "_FLOAT8_NAMES", {}),
        pytest.raises(NotImplementedError, match=message),
    ):
        native_tp.check_plan(model)
