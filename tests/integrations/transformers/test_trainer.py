"""Float8Callback in transformers' Trainer; accelerate's plain loop. Two gloo ranks."""

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from expecttest import assert_expected_inline
from peft import LoraConfig, get_peft_model
from ranks import RankPools
from reference import raised
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import (
    ACCUMULATION,
    FSDP,
    MICRO_BATCH,
    Audit,
    dataset,
    launched,
    llama,
    single_process,
    train,
)
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import fp8_dist.integrations.transformers as integration
import fp8_dist.integrations.transformers.trainer as trainer_module
import fp8_dist.warn
from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    skip_head,
)
from fp8_dist.debug import comm_audit
from fp8_dist.integrations.transformers import Float8Callback

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
LARGER = {"cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT"}


def one_process() -> list[float]:
    model = llama()
    return single_process(convert_to_float8_training(model, module_filter_fn=skip_head(model)))


def trained_and_resumed(
    folder: str, dtype: torch.dtype = torch.float32, recipe: str = "", **arguments: Any
) -> dict[str, Any]:
    """Six steps; the last three again from the checkpoint, with a model of other weights."""
    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else None
    fp8_dist.warn._warned.clear()
    with (
        launched(fsdp="fsdp" in arguments),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        audit = Audit()
        callbacks = [Float8Callback(config), audit]
        trainer, losses = train(folder, callbacks, llama().to(dtype), **arguments)
        trainer.save_model(f"{folder}/final")
        evaluated = trainer.evaluate()["eval_loss"]
        again = llama(seed=1).to(dtype)
        checkpoint = f"{folder}/checkpoint-3"
        _, resumed = train(folder, [Float8Callback(config)], again, resume=checkpoint, **arguments)
    return {
        "losses": losses,
        "resumed": resumed,
        "table": audit.tables[4],
        "amax messages": audit.scales,
        "evaluated": evaluated,
        "head": type(trainer.model.lm_head).__name__,
        "layers": len(float8_layers(trainer.model)),
        "warnings": [str(w.message) for w in caught if "amax histories" in str(w.message)],
    }


def check_run(found: dict[str, Any]) -> None:
    assert found["resumed"] == found["losses"], "a resumed run is the same, bit for bit"
    assert found["losses"]["eval_loss"][-1] == found["evaluated"]
    assert found["layers"] == 14
    assert "Float8" not in found["head"]


def reloaded_loss(folder: Path) -> float:
    """That of the saved model, in plain transformers, on the texts of evaluation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not float8_layers(model)
    texts = torch.stack([text["input_ids"] for text in dataset(8)])
    with torch.no_grad():
        loss = model(input_ids=texts, labels=texts).loss
    return float(loss)


def test_fsdp2(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(trained_and_resumed, str(tmp_path), **FSDP, timeout=180.0)
    check_run(found)
    assert found["losses"]["loss"] == pytest.approx(one_process(), abs=2e-3)
    assert reloaded_loss(tmp_path / "final") == pytest.approx(found["evaluated"], abs=2e-3)
    # One step of two micro-batches: the float32 gathers are those of embedding, norms and head.
    assert_expected_inline(
        found["table"],
        """\
op              axis   dtype          count  elements    bytes
all_gather      world  float32            6    24,704   98,816
all_gather      world  float8_e4m3fn      8   294,912  294,912
all_gather      world  float32            +     1,024    4,096
reduce_scatter  world  float32            4    82,240  328,960
all_reduce      world  float32            1        21       84
all_reduce      world  int32              1        14       56
total                                    20            726,924
  float8                                               294,912
  other                                                432,012""",
    )
    assert found["amax messages"] == [1] * 6


def test_fsdp2_of_a_bf16_model_loaded_on_one_rank(ranks: RankPools, tmp_path: Path) -> None:
    """accelerate upcasts the weights, moves them to the meta device, and loads them again."""
    config = FSDP["fsdp_config"] | LARGER
    arguments = {"fsdp": FSDP["fsdp"], "fsdp_config": config, "bf16": True, "dtype": torch.bfloat16}
    found = ranks(2).run_same(trained_and_resumed, str(tmp_path), **arguments, timeout=180.0)
    check_run(found)
    assert found["losses"]["loss"] == pytest.approx(one_process(), abs=2e-2)
    (gathers,) = [line.split() for line in found["table"].splitlines() if "e4m3fn" in line]
    assert gathers == ["all_gather", "world", "float8_e4m3fn", "8", "294,912", "294,912"]
    assert found["amax messages"] == [1] * 6


def test_ddp(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(trained_and_resumed, str(tmp_path), timeout=180.0)
    check_run(found)
    assert found["losses"]["loss"] == pytest.approx(one_process(), abs=2e-3)
    assert reloaded_loss(tmp_path / "final") == pytest.approx(found["evaluated"], abs=2e-3)
    # The int32 all-reduce is DDP's own (find_unused_parameters), of the 21 parameters.
    assert_expected_inline(
        found["table"],
        """\
op          axis   dtype    count  elements    bytes
broadcast   world  float32      1        16       64
all_reduce  world  float32      1    82,240  328,960
all_reduce  world  int32        1        21       84
total                           3            329,108
  float8                                           0
  other                                      329,108""",
    )


def test_delayed_scales(ranks: RankPools, tmp_path: Path) -> None:
    """One sync for each step; a resumed run goes on with the histories of the first."""
    arguments = FSDP | {"recipe": "delayed", "fsdp_config": FSDP["fsdp_config"] | LARGER}
    found = ranks(2).run_same(trained_and_resumed, str(tmp_path), **arguments, timeout=180.0)
    check_run(found)
    assert found["amax messages"] == [1] * 6
    assert found["warnings"] == []


def lora(folder: str) -> dict[str, Any]:
    """The base is frozen and in float8; adapters of rank 8 are trained, in high precision."""
    adapters = LoraConfig(target_modules=["q_proj", "up_proj"], r=8)
    with launched(fsdp=True):
        audit = Audit()
        model = get_peft_model(llama(), adapters)
        trainer, losses = train(folder, [Float8Callback(), audit], model, steps=4, **FSDP)
        again = get_peft_model(llama(), adapters)
        checkpoint = f"{folder}/checkpoint-3"
        _, resumed = train(folder, [Float8Callback()], again, resume=checkpoint, steps=4, **FSDP)
    return {
        "losses": losses,
        "resumed": resumed,
        "layers": list(float8_layers(trainer.model)),
        "table": audit.tables[-1],
    }


def test_lora(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(lora, str(tmp_path))
    assert found["resumed"] == found["losses"]
    assert len(found["layers"]) == 14
    assert not any("lora_" in name for name in found["layers"])
    (gathers,) = [line.split() for line in found["table"].splitlines() if "e4m3fn" in line]
    assert gathers[3:] == ["8", "294,912", "294,912"]


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


def refusals(folder: str) -> dict[str, str]:
    def trainer(model: nn.Module | None = None, **arguments: Any) -> Any:
        callback = arguments.pop("callback", None) or Float8Callback()
        return train(folder, [callback], model or llama(), steps=1, save_strategy="no", **arguments)

    def again(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, module_filter_fn=skip_head(model))

    found = {}
    with launched():
        wrapped = DistributedDataParallel(llama())
        found["in DDP"] = raised(ValueError, lambda: trainer(wrapped))
        callback = Float8Callback(GATHERED)
        found["converted"] = raised(ValueError, lambda: trainer(again(llama()), callback=callback))
    return found


def test_what_is_refused_on_ranks(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(refusals, str(tmp_path))
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
in DDP: Float8Callback: the model is wrapped in DistributedDataParallel already; pass the Trainer the model itself, which it wraps after the conversion
converted: Float8Callback: the model is converted already, so config and module_filter_fn have no effect; leave them out, or leave the conversion to the callback""",
    )


@pytest.mark.parametrize(
    ("state", "gpus", "message"),
    [
        ({"deepspeed_plugin": object()}, 1, "the Trainer uses DeepSpeed; use FSDP2"),
        (
            {"fsdp_plugin": SimpleNamespace(fsdp_version=1)},
            1,
            "the Trainer uses FSDP1; set fsdp_config",
        ),
        ({}, 2, "the Trainer uses nn.DataParallel; start one process for each GPU with torchrun"),
    ],
)
def test_back_ends_that_are_refused(state: dict[str, Any], gpus: int, message: str) -> None:
    """By what accelerate says of them: none of the three runs on CPUs."""
    accelerator = SimpleNamespace(**state)
    args: Any = SimpleNamespace(n_gpu=gpus, fsdp=None)
    with patch.object(trainer_module, "AcceleratorState", lambda: accelerator):
        text = raised(
            NotImplementedError,
            lambda: Float8Callback().on_init_end(
                args, TrainerState(), TrainerControl(), model=llama()
            ),
        )
    assert message in text


def one_rank(folder: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"use_cpu": True, "max_steps": 1, "report_to": []}
    args = TrainingArguments(str(folder), save_strategy="no", disable_tqdm=True, **settings)
    return Trainer(**{"args": args, "train_dataset": dataset(), **changes})


def test_a_model_made_again_is_refused_unless_it_is_converted(tmp_path: Path) -> None:
    def converted() -> nn.Module:
        model = llama()
        return convert_to_float8_training(model, module_filter_fn=skip_head(model))

    with launched(), patch("builtins.print"):
        trainer = one_rank(tmp_path, model_init=lambda: llama(), callbacks=[Float8Callback()])
        assert "convert in model_init if you use that" in raised(ValueError, trainer.train)
        one_rank(tmp_path, model_init=converted, callbacks=[Float8Callback()]).train()


def test_a_callback_that_comes_later_is_refused(tmp_path: Path) -> None:
    with launched():
        trainer = one_rank(tmp_path, model=llama())
        trainer.add_callback(Float8Callback())
        assert "not add_callback" in raised(ValueError, trainer.train)


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    with launched():
        callbacks = [Float8Callback(), Float8Callback()]
        trainer = one_rank(tmp_path, model=llama(), callbacks=callbacks)
        assert "has 2 of these callbacks; leave one" in raised(ValueError, trainer.train)


def test_an_optimizer_of_other_weights_is_refused(tmp_path: Path) -> None:
    """Float8 gathers make new parameters, which an optimizer made before the Trainer has not."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with launched():
        callbacks = [Float8Callback(GATHERED)]
        trainer = one_rank(tmp_path, model=model, callbacks=callbacks, optimizers=(optimizer, None))
        assert "updates none of the module's 14 float8 weights" in raised(ValueError, trainer.train)


def warnings_of(folder: str, **arguments: Any) -> list[str]:
    """Those of the callback, in two trainings one after the other."""
    fp8_dist.warn._warned.clear()
    with launched(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(folder, [Float8Callback()], steps=1, save_strategy="no", **arguments)
    return [str(w.message) for w in caught if "Float8Callback" in str(w.message)]


def test_fsdp_that_is_left_out_is_warned_of_once(ranks: RankPools, tmp_path: Path) -> None:
    (message,) = ranks(2).run_same(warnings_of, str(tmp_path), **FSDP)
    assert "accelerate shards on GPUs only" in message


def test_ranks_that_the_trainer_does_not_know_are_warned_of(
    ranks: RankPools, tmp_path: Path
) -> None:
    assert ranks(2).run_same(warnings_of, str(tmp_path)) == []
    (message,) = ranks(2).run_same(warnings_of, str(tmp_path), use_cpu=False)
    assert "WORLD_SIZE is 2, but the Trainer knows of one rank" in message


def test_scales_follow_skipped_steps_too(tmp_path: Path) -> None:
    """As those of a GradScaler: no hook of the optimizer runs, and DELAYED scales need a sync."""
    config = Float8LinearConfig.from_recipe_name("delayed")
    model = llama()
    with launched():
        trainer = one_rank(tmp_path, model=model, callbacks=[Float8Callback(config)])
        with patch("torch.optim.AdamW.step", lambda *args, **kwargs: None), patch("builtins.print"):
            trainer.train()
    layer = model.model.layers[0].mlp.up_proj
    assert all(len(history.history) == 1 for history in layer.histories.values())


def test_the_extra_is_named_where_it_is_missing() -> None:
    with patch("importlib.util.find_spec", lambda name: None):
        message = raised(ImportError, lambda: importlib.reload(integration))
    assert_expected_inline(
        message,
        """fp8_dist.integrations.transformers needs transformers and accelerate: pip install "fp8-dist[hf]\"""",
    )


def plain_loop(folder: str, fsdp: bool, **changes: Any) -> dict[str, Any]:
    """As docs/transformers.md has it for accelerate."""
    with launched(fsdp=fsdp):
        plugin = None
        if fsdp:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **changes
            )
        unused = DistributedDataParallelKwargs(find_unused_parameters=False)
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            gradient_accumulation_steps=ACCUMULATION,
            kwargs_handlers=[unused],
        )
        model = llama()
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=fsdp)
        convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        attach_update(optimizer, model)

        texts = torch.stack([text["input_ids"] for text in dataset()])
        batches = texts.split(MICRO_BATCH)[accelerator.process_index :: accelerator.num_processes]

        def steps(first: int, last: int) -> list[float]:
            losses = []
            for batch in batches[first * ACCUMULATION : last * ACCUMULATION]:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            return [
                sum(micro) / ACCUMULATION
                for micro in zip(*[iter(losses)] * ACCUMULATION, strict=True)
            ]

        losses = steps(0, 3)
        accelerator.save_state(folder)
        with comm_audit() as audit:
            losses += steps(3, 4)
        losses += steps(4, 6)
        accelerator.load_state(folder)
        resumed = steps(3, 6)
    gathers = [row for row in audit.rows if row.op == "all_gather" and row.dtype.itemsize == 1]
    amaxes = [row for row in audit.rows if row.dtype is torch.int32]
    return {
        "losses": losses,
        "resumed": resumed,
        "float8 gathers": sum(row.count for row in gathers),
        "amax messages": sum(row.count for row in amaxes),
    }


@pytest.mark.parametrize("changes", [{}, {"cpu_ram_efficient_loading": True}], ids=["", "meta"])
def test_accelerate_fsdp2(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    found = ranks(2).run_same(plain_loop, str(tmp_path), fsdp=True, **changes)
    assert found["losses"] == pytest.approx(one_process(), abs=2e-3)
    assert found["resumed"] == found["losses"][3:]
    assert found["float8 gathers"] == 8
    assert found["amax messages"] == 1


def converted_too_late() -> str:
    with launched(fsdp=True):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        return raised(ValueError, lambda: convert_to_float8_training(model))


def test_conversion_after_prepare_is_refused(ranks: RankPools) -> None:
    message = ranks(2).run_same(converted_too_late)
    assert "these weights are distributed already" in message
    assert "Convert the model first" in message


def test_accelerate_ddp(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run_same(plain_loop, str(tmp_path), fsdp=False)
    assert found["losses"] == pytest.approx(one_process(), abs=2e-3)
    assert found["resumed"] == found["losses"][3:]
    assert found["float8 gathers"] == found["amax messages"] == 0
