"""The models of `scripts.measure.hf_plans`, and the outcomes of their plans."""

import argparse
import dataclasses
import re
import warnings
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.models.auto import configuration_auto, modeling_auto

from fp8_dist import convert_to_float8_training, skip_head
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish

RIGHT, CLOSE = 80.0, 15.0  # dB: of each gradient of the plain model; of all in float8
LARGEST = 3_000_000  # the most parameters that a tried model may have
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# These fields are also set, in configs that have them (encoder-decoders, audio and vision too).
_NAMES = """
1 n_shared_experts first_k_dense_replace n_group topk_group
2 num_experts_per_tok num_experts_per_token n_layer num_layers num_decoder_layers
2 encoder_layers decoder_layers depth
4 num_local_experts num_experts moe_num_experts n_routed_experts n_head num_heads
4 encoder_attention_heads decoder_attention_heads
8 patch_size
16 head_dim query_pre_attn_scalar q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
16 v_head_dim d_kv num_mel_bins
32 max_source_positions image_size
64 sliding_window moe_intermediate_size shared_expert_intermediate_size n_embd d_model embed_dim
64 out_hidden_size
128 ffn_hidden_size d_ff encoder_ffn_dim decoder_ffn_dim max_target_positions
"""
_LINES = (line.split() for line in _NAMES.strip().splitlines())
OTHERS = {name: int(size) for size, *names in _LINES for name in names}


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a plan; `kind` is "right", "wrong", "refused" or "failed"."""

    kind: str
    text: str


def every_model() -> dict[str, tuple[str, str]]:
    """By model type, the class of the model and the class of its config."""
    configs = configuration_auto.CONFIG_MAPPING_NAMES
    # If a model type has several classes, the last one is tried.
    kinds = ("MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds]
    classes = {kind: name for m in mappings for kind, name in m.items() if kind in configs}
    # A class that several model types share is tried once.
    by_class = {name if isinstance(name, str) else name[0]: k for k, name in classes.items()}
    return {kind: (name, configs[kind]) for name, kind in sorted(by_class.items())}


def small(settings: Any) -> Any:
    """A config with small sizes and without dropout, and likewise its sub-configs."""
    known = settings()
    changes = {k: v for k, v in (SIZES | OTHERS).items() if k in SIZES or hasattr(known, k)}
    changes |= {k: 0.0 for k, v in vars(known).items() if "drop" in k and isinstance(v, float)}
    parts = {name: getattr(known, name, None) for name in settings.sub_configs}
    changes |= {name: small(type(part)) for name, part in parts.items() if part is not None}
    if "mrope_section" in getattr(settings, "ignore_keys_at_rope_validation", ()):
        changes["rope_parameters"] = known.rope_parameters | {"mrope_section": [2, 3, 3]}
    return settings(**changes)


def build(model: str, config: str, converted: bool = False, device: str = "cpu") -> nn.Module:
    """A small model, always with the same weights. 1-D parameters are made random, too."""
    make, settings = getattr(transformers, model), small(getattr(transformers, config))
    with torch.device("meta"):
        small_model: nn.Module = make(settings)
    size = sum(p.numel() for p in small_model.parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:,} parameters")
    if device == "cpu":
        torch.manual_seed(0)
        small_model = make(settings)
        for parameter in small_model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    if converted:
        convert_to_float8_training(small_model, module_filter_fn=skip_head(small_model))
    return small_model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The full gradients of a loss on fixed tokens; zeros for parameters without a gradient."""
    ids = torch.randint(3, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def refusal(names: tuple[str, str], mesh: DeviceMesh, sequence: bool) -> Found | None:
    """The outcome if the plan of a model is refused, else None; tried on the meta device."""
    for converted in (False, True):
        try:
            parallel(build(*names, converted, device="meta"), mesh, sequence)
        except (NotImplementedError, ValueError) as error:
            return Found("refused", reason(error))
        except Exception as error:
            return failed(error)
    return None


def failed(error: Exception) -> Found:
    return Found("failed", f"{type(error).__name__}: {reason(error)}")


def parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """The model, parallelized with its plan."""
    apply_tp_plan(model, mesh, hf_tp_plan(model, sequence_parallel=sequence))
    return model


def compare(names: tuple[str, str], mesh: DeviceMesh, sequence: bool, twins: Any) -> Found:
    """Compare a model's plan on ranks with `twins`: the gradients of the model on one device."""
    plain, float8 = twins
    on_ranks = [
        gradients(parallel(build(*names, converted), mesh, sequence)) for converted in (False, True)
    ]
    # (Gradients that are 0 except for rounding, such as those of key biases, are left out.)
    least = 1e-6 * max(a.norm().item() for a in plain)
    pairs = zip(plain, on_ranks[0], strict=True)
    worst = min(sqnr(a, b) for a, b in pairs if a.norm().item() > least)
    close = sqnr(*(torch.cat([g.flatten() for g in grads]) for grads in (float8, on_ranks[1])))
    kind = "right" if worst >= RIGHT and close >= CLOSE else "wrong"
    return Found(kind, f"{worst:.0f} / {close:.0f} dB")


def outcome(names: tuple[str, str], mesh: DeviceMesh, sequence: bool, twins: Any) -> Found:
    """As `compare`, but an error becomes an outcome as well."""
    try:
        return compare(names, mesh, sequence, twins)
    except Exception as error:
        return failed(error)


def reason(error: Exception) -> str:
    """The text of an error, shortened for a table."""
    text = " ".join(str(error).split()).replace("|", "/")
    if "hf_tp_plan does not know all of" in text:  # a list of the unknown modules follows
        text = re.split(
            r" (?:Try sequence_parallel=False|Write a plan)", text.partition(": - ")[2]
        )[0]
    return shorten(text.split(". ")[0], 100, placeholder=" ...")


def try_all(kinds: Sequence[str]) -> dict[str, list[Found] | str]:
    """The outcomes of each model, or the reason why it was not tried; called on every rank."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results: dict[str, list[Found] | str] = {}
    every = every_model()
    for kind in tqdm(kinds, unit="model", disable=mesh.get_rank() > 0):
        names = every[kind]
        try:
            build(*names, device="meta")
            refusals = [refusal(names, mesh, sequence) for sequence in (True, False)]
            if all(refusals):
                results[kind] = [refused for refused in refusals if refused]
                continue
            twins = [gradients(build(*names, converted)) for converted in (False, True)]
        except Exception as error:
            results[kind] = reason(error)
            continue
        ways = zip((True, False), refusals, strict=True)
        results[kind] = [refused or outcome(names, mesh, way, twins) for way, refused in ways]
    return results


def blocks(results: dict[str, list[Found] | str]) -> dict[str, str]:
    """A table of models with a plan, and lists of models without one, or that were not tried."""
    every, rows, without, untried = every_model(), [], [], []
    for kind, outcomes in results.items():
        name = every[kind][0]
        if isinstance(outcomes, str):
            untried.append(name)
        elif all(f.kind == "refused" and "declares no plan" in f.text for f in outcomes):
            without.append(name)
        else:
            cells = [f.text if f.kind == "right" else f"{f.kind}: {f.text}" for f in outcomes]
            rows.append([name, cells[0], cells[1] if cells[1] != cells[0] else "the same"])
    return {
        "models with a plan": table(["model", "with sequence parallelism", "without"], rows),
        "models without a plan": ", ".join(without),
        "models that were not tried": ", ".join(untried),
    }


def run(args: argparse.Namespace) -> int:
    results, others = run_on_ranks(2, try_all, args.only, threads=args.threads)
    tried = {kind: found for kind, found in results.items() if not isinstance(found, str)}
    bad = [k for k, o in tried.items() if any(f.kind in ("wrong", "failed") for f in o)]
    checks = [
        Check("both ranks find the same", results == others),
        Check(f"{len(tried)} models: no plan is wrong, none fails {bad or ''}".strip(), not bad),
    ]
    return finish(args, blocks(results), checks)
