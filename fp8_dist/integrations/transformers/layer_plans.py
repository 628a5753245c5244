"""Tensor-parallel plans, layer by layer, of transformers models that declare none.

Their linear layers are known by name. The stream between them is replicated, as are embeddings,
norms and heads.
"""

import re
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.integrations.transformers.tp_styles import DividedHeads
from fp8_dist.tensor_parallel.plans import colwise_style, residual_style
from fp8_dist.transport import Encoding


class _Names(NamedTuple):
    """Patterns of the ends of names."""

    readers: str  # of layers that read the stream
    writers: str  # of layers that write to it
    tables: str = "(?!)"  # of embeddings with one column per head


_BERT = _Names(
    r"(cross)?attention\.self\.(query|key|value)|layer\.\d+\.intermediate\.dense",
    r"(cross)?attention\.output\.dense|layer\.\d+\.output\.dense",
)
_BART = _Names(r"(self|encoder)_attn\.[qkv]_proj|fc1", r"(self|encoder)_attn\.out_proj|fc2")
_T5 = _Names(
    r"(Self|EncDec)Attention\.[qkv]|DenseReluDense\.wi(_\d)?",
    r"(Self|EncDec)Attention\.o|DenseReluDense\.wo",
    r"SelfAttention\.relative_attention_bias",
)
_VIT = _Names(r"attention\.[qkv]_proj|mlp\.fc1", r"attention\.o_proj|mlp\.fc2")
# By model_type; scripts.measure.hf_plans tries them.
_KNOWN = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), _BERT),
    **dict.fromkeys(("bart", "marian", "mbart", "pegasus", "whisper"), _BART),
    **dict.fromkeys(("mt5", "t5"), _T5),
    "vit": _VIT,
}
_HEAD_SIZES = ("attention_head_size", "head_dim", "key_value_proj_dim")


def layer_plan(model: nn.Module, transport: Encoding = None) -> dict[str, ParallelStyle]:
    """Return the plan of a model whose layers are known by name; empty if they are not.

    ``transport``: the ``reduce_transport`` of the styles of converted layers.

    Collectives of the plan, for each block: an all-reduce of the output and, in the backward, one
    of the gradient of each layer's input.
    """
    known = _KNOWN.get(getattr(getattr(model, "config", None), "model_type", ""))
    plan: dict[str, ParallelStyle] = {}
    if known is None:
        return plan
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _ends(name, known.readers):
            plan[name] = colwise_style(module, transport)
            parent, _, child = name.rpartition(".")
            block: Any = model.get_submodule(parent)
            size = next((getattr(block, n) for n in _HEAD_SIZES if hasattr(block, n)), 1)
            heads = plan.setdefault(parent, DividedHeads())
            assert isinstance(heads, DividedHeads)
            heads.parts[child] = module.out_features // size
        elif isinstance(module, nn.Linear) and _ends(name, known.writers):
            at = {"input_layouts": Shard(-1), "output_layouts": Replicate()}
            plan[name] = residual_style(module, transport, **at)
        elif isinstance(module, nn.Embedding) and _ends(name, known.tables):
            plan[name] = ColwiseParallel()
    return plan


def _ends(name: str, pattern: str) -> bool:
    return re.search(rf"(^|\.)({pattern})$", name) is not None
