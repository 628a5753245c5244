"""A layer of a transformers model under a tensor-parallel plan, compiled."""

import pytest
from hf_models import batch, converted
from nets import full
from ranks import RankPools, device_mesh
from reference import sqnr
from torch._dynamo.utils import counters

from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan


def compiled_step(kind: str) -> tuple[float, float, int]:
    """Runs on two ranks: SQNR of logits and of the worst gradient, and how many graph breaks."""
    model, twin = (
        apply_tp_plan(each, device_mesh(tp=2), hf_tp_plan(each))
        for each in (converted(kind), converted(kind))
    )
    model.model.layers[1].compile(backend="aot_eager")
    counters.clear()
    ids = batch(0)
    found, expected = (each(input_ids=ids, labels=ids) for each in (model, twin))
    found.loss.backward()
    expected.loss.backward()
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    worst = min(sqnr(full(p.grad), full(q.grad)) for p, q in pairs)
    return sqnr(expected.logits, found.logits), worst, sum(counters["graph_break"].values())


@pytest.mark.full
def test_a_compiled_layer(ranks: RankPools) -> None:
    for logits, worst, breaks in ranks(2).run(compiled_step, "llama", timeout=180):
        assert logits > 60
        assert worst > 60
        assert breaks == 0
