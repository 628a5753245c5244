"""Float8Callback in transformers' Trainer, and accelerate's plain loop, on two gloo ranks."""

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from ranks import RankPools
from reference import all_warnings, raised
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import FSDP, Audit, dataset, launched, llama, single_process, train
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import fp8_dist.integrations.transformers as integration
import fp8_dist.integrations.transformers.trainer as trainer_module
from fp8_dist import Float8LinearConfig, convert_to_float8_training, float8_layers, skip_head
from fp8_dist.debug import comm_audit
from fp8_dist.integrations.transformers import Float8Callback

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
LARGER = {"cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT"}


def one_process() -> list[float]:
    model = llama()
    return single_process(convert_to_float8_training(model, module_filter_fn=skip_head(model)))


def trained_and_resumed(
    folder: str,
    dtype: torch.dtype = torch.float32,
    recipe: str = "",
    adapters: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train six steps; repeat the last three from a checkpoint, in a model with other weights.

    adapters: use LoRA adapters on a frozen base, which is not in the checkpoint.
    """

    def model(seed: int) -> Any:
        lora = LoraConfig(target_modules=["q_proj", "up_proj"], r=8)
        return get_peft_model(llama(), lora) if adapters else llama(seed).to(dtype)

    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else None
    with launched(fsdp="fsdp" in arguments), all_warnings() as texts:
        audit = Audit()
        trainer, losses = train(folder, [Float8Callback(config), audit], model(0), **arguments)
        trainer.save_model(f"{folder}/final")
        evaluated = trainer.evaluate()["eval_loss"]
        checkpoint = f"{folder}/checkpoint-3"
        _, resumed = train(
            folder, [Float8Callback(config)], model(1), resume=checkpoint, **arguments
        )
    return {
        "losses": losses,
        "resumed": resumed,
        "float8 gathers": audit.gathers,
        "amax messages": audit.amaxes,
        "evaluated": evaluated,
        "layers": list(float8_layers(trainer.model)),
        "warnings": [text for text in texts if "amax histories" in text],
    }


BF16 = {"bf16": True, "dtype": torch.bfloat16}
LARGE = FSDP | {"fsdp_config": FSDP["fsdp_config"] | LARGER}
# By name: the arguments, and the largest distance of losses from one process, if compared.
RUNS: dict[str, tuple[dict[str, Any], float | None]] = {
    "FSDP2": (FSDP, 2e-3),
    # accelerate upcasts the weights, moves them to the meta device, and loads them again.
    "delayed, loaded on one rank": (LARGE | BF16 | {"recipe": "delayed"}, None),
    "DDP with LoRA": ({"adapters": True}, None),
}
SHORT = ("FSDP2",)


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(n, marks=pytest.mark.full) for n in RUNS if n not in SHORT)]
)
def test_training_and_resuming(ranks: RankPools, tmp_path: Path, name: str) -> None:
    arguments, distance = RUNS[name]
    found = ranks(2).run_same(trained_and_resumed, str(tmp_path), **arguments, timeout=180.0)
    assert found["resumed"] == found["losses"], "a resumed run is the same, bit for bit"
    assert found["losses"]["eval_loss"][-1] == found["evaluated"]
    assert len(found["layers"]) == 14
    assert not any("lora_" in layer or "lm_head" in layer for layer in found["layers"])
    assert found["warnings"] == []
    if "delayed" not in name:
        # For two micro-batches; none with DDP.
        assert found["float8 gathers"] == [(8, 294_912) if name == "FSDP2" else (0, 0)] * 6
    if "DDP" not in name:
        assert found["amax messages"] == [1] * 6
    if distance is not None:  # others save shards, or only adapters
        assert found["losses"]["loss"] == pytest.approx(one_process(), abs=distance)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
        assert not float8_layers(model)
        texts = torch.stack([text["input_ids"] for text in dataset(8)])
        with torch.no_grad():
            loss = float(model(input_ids=texts, labels=texts).loss)
        assert loss == pytest.approx(found["evaluated"], abs=distance)


def loaded_best(folder: str) -> dict[str, Any]:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    with launched(fsdp=True):
        callback = Float8Callback()
        trainer, losses = train(folder, [callback], **FSDP, **best, greater_is_better=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with comm_audit() as audit:
                evaluated = trainer.evaluate()["eval_loss"]
    amaxes = [row for row in audit.rows if row.dtype is torch.int32]
    return {"losses": losses["eval_loss"], "evaluated": evaluated, "amaxes": len(amaxes)}


def test_the_best_model_has_scales_when_training_ends(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(loaded_best, str(tmp_path))
    assert found["evaluated"] == max(found["losses"])
    assert found["amaxes"] == 0


def refusals(folder: str) -> list[str]:
    def trainer(model: nn.Module, callback: Float8Callback) -> Any:
        return train(folder, [callback], model, steps=1, save_strategy="no")  # type: ignore[arg-type]

    with launched():
        wrapped = DistributedDataParallel(llama())
        return [
            raised(ValueError, lambda: trainer(wrapped, Float8Callback())),
            raised(ValueError, lambda: trainer(converted(), Float8Callback(GATHERED))),
        ]


def converted() -> nn.Module:
    model = llama()
    return convert_to_float8_training(model, module_filter_fn=skip_head(model))


def test_what_is_refused_on_ranks(ranks: RankPools, tmp_path: Path) -> None:
    in_ddp, again = ranks(2).run_same(refusals, str(tmp_path))
    assert "is wrapped in DistributedDataParallel already; pass the Trainer the model it" in in_ddp
    assert "the model is converted already, so config and module_filter_fn have no eff" in again


def test_back_ends_that_are_refused() -> None:
    """The back ends are faked in accelerate's state, because none of the three runs on CPUs."""
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"deepspeed_plugin": object()}, 1, "the Trainer uses DeepSpeed; use FSDP2"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, 1, "the Trainer uses FSDP1; set fsdp"),
        ({}, 2, "the Trainer uses nn.DataParallel; start one process for each GPU"),
    ]
    for state, gpus, message in cases:
        args: Any = SimpleNamespace(n_gpu=gpus, fsdp=None)
        accelerator = SimpleNamespace(**state)
        with (
            patch.object(trainer_module, "AcceleratorState", lambda found=accelerator: found),
            pytest.raises(NotImplementedError, match=message),
        ):
            Float8Callback().on_init_end(args, TrainerState(), TrainerControl(), model=llama())


def one_rank(folder: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"use_cpu": True, "max_steps": 1, "report_to": []}
    args = TrainingArguments(str(folder), save_strategy="no", disable_tqdm=True, **settings)
    return Trainer(**{"args": args, "train_dataset": dataset(), **changes})


def test_what_is_refused_when_training_begins(tmp_path: Path) -> None:
    with launched(), patch("builtins.print"):

        def check(message: str, trainer: Trainer) -> None:
            assert message in raised(ValueError, trainer.train)

        callbacks = [Float8Callback()]
        again = one_rank(tmp_path, model_init=lambda: llama(), callbacks=callbacks)
        check("convert in model_init if you use that", again)
        one_rank(tmp_path, model_init=converted, callbacks=[Float8Callback()]).train()

        late = one_rank(tmp_path, model=llama())
        late.add_callback(Float8Callback())
        check("not add_callback", late)

        two = [Float8Callback(), Float8Callback()]
        check("has 2 of these callbacks", one_rank(tmp_path, model=llama(), callbacks=two))

        # An optimizer that was created before the conversion still works.
        model = llama()
        optimizers = (torch.optim.SGD(model.parameters(), lr=1e-3), None)
        callbacks = [Float8Callback(GATHERED)]
        one_rank(tmp_path, model=model, callbacks=callbacks, optimizers=optimizers).train()


def warnings_of(folder: str) -> list[list[str]]:
    """The callback's warnings in two consecutive trainings, for each set of arguments."""
    found = []
    for arguments in (FSDP, {}):
        with launched(), all_warnings() as texts:
            for _ in range(2):
                train(folder, [Float8Callback()], steps=1, save_strategy="no", **arguments)
        found.append([text for text in texts if "Float8Callback" in text])
    return found


def test_what_is_warned_of_once(ranks: RankPools, tmp_path: Path) -> None:
    (no_fsdp,), none = ranks(2).run_same(warnings_of, str(tmp_path))
    assert "accelerate shards on GPUs only" in no_fsdp
    assert none == []


def test_scales_follow_skipped_steps_too(tmp_path: Path) -> None:
    """If a GradScaler skips a step, optimizer hooks don't run, but DELAYED scales need a sync."""
    config = Float8LinearConfig.from_recipe_name("delayed")
    model = llama()
    with launched():
        trainer = one_rank(tmp_path, model=model, callbacks=[Float8Callback(config)])
        with patch("torch.optim.AdamW.step", lambda *args, **kwargs: None), patch("builtins.print"):
            trainer.train()
    layer = model.model.layers[0].mlp.up_proj
    assert all(len(history.amaxes()) == 1 for history in layer.histories.values())


def test_the_extra_is_named_where_it_is_missing() -> None:
    with patch("importlib.util.find_spec", lambda name: None):
        message = raised(ImportError, lambda: importlib.reload(integration))
    assert message.endswith('needs transformers and accelerate: pip install "fp8-dist[hf]"')
