"""A layer of a transformers model under a tensor-parallel plan, compiled."""

import pytest
from hf_models import batch, converted
from nets import full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import sqnr
from torch._dynamo.utils import counters

from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan


@pytest.mark.full
@on_ranks(2, timeout=180)
def test_a_compiled_layer() -> None:
    model, twin = (
        apply_tp_plan(each, device_mesh(tp=2), hf_tp_plan(each))
        for each in (converted("llama"), converted("llama"))
    )
    model.model.layers[1].compile(backend="aot_eager")
    counters.clear()
    ids = batch(0)
    found, expected = (each(input_ids=ids, labels=ids) for each in (model, twin))
    found.loss.backward()
    expected.loss.backward()
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    assert min(sqnr(full(p.grad), full(q.grad)) for p, q in pairs) > 60
    assert sqnr(expected.logits, found.logits) > 60
    assert not counters["graph_break"]
