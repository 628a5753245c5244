"""The export of a model with torch.compile's wrappers, which change names of modules."""

import torch
from nets import Net
from reference import same_bits
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_quantization_config,
    float8_state_dict,
    skip_head,
)


def test_names_are_those_of_the_model() -> None:
    net = Net(dim=128)
    net.lm_head = torch.nn.Linear(128, 8)
    config = Float8LinearConfig.from_recipe_name("blockwise")
    convert_to_float8_training(net, module_filter_fn=skip_head(net), config=config)
    expected = float8_state_dict(net)
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    net.layers[1] = torch.compile(net.layers[1], backend="aot_eager")  # type: ignore[call-overload]
    assert list(float8_state_dict(net)) == list(expected)  # in the original order
    compiled = torch.compile(net, backend="aot_eager")
    found = float8_state_dict(compiled)
    assert list(found) == list(expected)
    assert "layers.1.w2.weight_scale_inv" in found
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert float8_quantization_config(compiled)["modules_to_not_convert"] == ["lm_head"]
