"""A callback for transformers' Trainer that converts the model and updates the scales."""

from pathlib import Path
from typing import Any

import torch.nn as nn
from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from fp8_dist.config import Float8LinearConfig
from fp8_dist.debug import Float8Stats, float8_stats
from fp8_dist.fsdp import attach_update, update_float8_scales
from fp8_dist.linear import float8_layers
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import skip_head
from fp8_dist.model.state import Float8State
from fp8_dist.moe.experts import FilterFn
from fp8_dist.report import RunWriter
from fp8_dist.text import warn_once


class Float8Callback(TrainerCallback, ExportableState):
    """A callback that trains a Trainer's model in float8: ``callbacks=[Float8Callback()]``.

    The callback converts the model when the Trainer is made, before accelerate wraps or shards it
    and before the optimizer is made. A model that is already converted stays as it is. After each
    optimizer step, the callback calls :func:`fp8_dist.update_float8_scales`: once for all
    micro-batches of a step, and before evaluation and saving. Amax histories of DELAYED operands
    are saved in ``trainer_state.json``, and ``resume_from_checkpoint`` restores them.

    A warning is issued once if FSDP is requested on CPUs, where accelerate does not use it.

    Args:
        config: the config of the layers. Default: the ``tensorwise`` recipe, whose weights FSDP2
            gathers in float8.
        module_filter_fn: a function ``(module, fqn) -> bool`` that returns whether to convert a
            layer. Default: :func:`fp8_dist.skip_head` of the model.
        run: a folder into which the run is written for ``python -m fp8_dist.report``
            (:class:`fp8_dist.report.RunWriter`): the metrics that the Trainer logs, and statistics
            of the casts in training. Default: nothing is written.
        stats_every: with ``run``, record the casts of steps whose numbers are multiples of this.

    Collectives: those of ``float8_stats`` in recorded steps, and of ``update_float8_scales`` (with
    dynamic scales one all-reduce under FSDP2, none under DDP) when training begins, after each
    step, and at the end of training if the best model is loaded.

    Raises:
        ValueError: when the Trainer is made: ``convert_to_float8_training`` refuses the model; the
            model is already converted, and ``config`` or ``module_filter_fn`` is given; or the
            model is already wrapped in DDP. When training begins: the model is not converted,
            because the Trainer made a new one (``model_init``) or got the callback after the model
            (``add_callback``); the optimizer updates none of the converted weights; or the Trainer
            has the callback twice.
        NotImplementedError: when the Trainer is made: it uses FSDP1, DeepSpeed or
            ``nn.DataParallel``.
    """

    def __init__(
        self,
        config: Float8LinearConfig | None = None,
        module_filter_fn: FilterFn | None = None,
        *,
        run: str | Path | None = None,
        stats_every: int = 10,
    ) -> None:
        self.config = config
        self.module_filter_fn = module_filter_fn
        self.run, self.stats_every = run, stats_every
        self._model: nn.Module | None = None
        self._stats: Float8Stats | None = None
        self._writer: RunWriter | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer saves with its own state: rank 0's amax histories."""
        layers = {} if self._model is None else Float8State(self._model).state_dict()
        histories = {layer: rows for layer, rows in layers.items() if any(rows.values())}
        return {"args": {}, "attributes": {"histories": histories}}

    def on_init_end(self, args: TrainingArguments, *_: Any, model: nn.Module, **kw: Any) -> None:
        """Convert the model, before the Trainer wraps it and makes its optimizer."""
        _check_back_end(args)
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
            raise ValueError(
                "Float8Callback: the model is wrapped in DistributedDataParallel already; pass the "
                "Trainer the model itself, which it wraps after the conversion"
            )
        if float8_layers(model):
            if self.config is not None or self.module_filter_fn is not None:
                raise ValueError(
                    "Float8Callback: the model is converted already, so config and "
                    "module_filter_fn have no effect; leave them out, or leave the conversion to "
                    "the callback"
                )
            return
        gathered = getattr(AcceleratorState(), "fsdp_plugin", None) is not None
        convert_to_float8_training(
            model,
            config=self.config or Float8LinearConfig(enable_fsdp_float8_all_gather=gathered),
            module_filter_fn=self.module_filter_fn or skip_head(model),
        )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        model: nn.Module,
        optimizer: Any,
        **kw: Any,
    ) -> None:
        """Check the model and optimizer that the Trainer made, and compute the first scales."""
        if not (layers := float8_layers(model)):
            raise ValueError(
                "Float8Callback: the model was wrapped for training before the callback could "
                "convert it. Pass the callback when the Trainer is made (callbacks=[...], not "
                "add_callback), and convert in model_init if you use that"
            )
        # Called for its checks alone. The Trainer's event updates the scales instead, because a
        # hook of the optimizer does not run for steps that a GradScaler skips.
        attach_update(optimizer, model).remove()
        self._model = model
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        if isinstance(saved, list):  # the Trainer makes a list for several callbacks of one class
            raise ValueError(
                f"Float8Callback: the Trainer has {len(saved)} of these callbacks; leave one"
            )
        if histories := saved.get("attributes", {}).get("histories", {}):
            Float8State(model).load_state_dict(histories)
        elif state.global_step == 0:  # new training ignores histories that were loaded
            for history in (h for layer in layers.values() for h in layer.histories.values()):
                history.restored = False
        update_float8_scales(model)
        if self.run is not None:
            self._stats = float8_stats(model, every=self.stats_every, on_anomaly="warn")
            config = {"steps": state.max_steps, "ranks": args.world_size}
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
                config[name] = getattr(args, name)
            first = state.global_step + 1 if state.global_step else None
            self._writer = RunWriter(self.run, self._stats, config=config, first=first)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kw: Any
    ) -> None:
        """Begin to record the casts of all micro-batches of a step."""
        if self._stats is not None:
            self._stats.at(state.global_step + 1).__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **kw: Any
    ) -> None:
        """Update the scales after the optimizer step, before evaluation and saving."""
        if self._stats is not None and self._writer is not None:
            self._stats.__exit__(None, None, None)
            self._writer.log(state.global_step)
        update_float8_scales(model)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, Any], **kw: Any
    ) -> None:
        """Write the metrics that the Trainer logs, except the summary at the end of training."""
        if self._writer is not None and "train_runtime" not in logs:
            numbers = {k: v for k, v in logs.items() if isinstance(v, int | float) and k != "epoch"}
            self._writer.log(state.global_step, **numbers)

    def on_train_end(self, args: TrainingArguments, *_: Any, model: nn.Module, **kw: Any) -> None:
        """Update the scales if the Trainer may have loaded the best model after the last step."""
        if args.load_best_model_at_end:
            update_float8_scales(model)


def _check_back_end(args: TrainingArguments) -> None:
    """Raise for back ends that change parameters unnoticed; warn if requested FSDP is not used."""
    state = AcceleratorState()
    fsdp = getattr(state, "fsdp_plugin", None)
    if args.fsdp and fsdp is None:
        warn_once(
            "no FSDP on CPUs",
            "Float8Callback: the Trainer was asked for FSDP, but accelerate shards on GPUs only. "
            "Here nothing is gathered, in float8 or otherwise",
        )
    unsupported = ""
    if getattr(state, "deepspeed_plugin", None) is not None:
        unsupported = "DeepSpeed; use FSDP2: fsdp=True, fsdp_config={'version': 2}"
    elif fsdp is not None and fsdp.fsdp_version != 2:
        unsupported = "FSDP1; set fsdp_config={'version': 2}"
    elif args.n_gpu > 1:
        unsupported = "nn.DataParallel; start one process for each GPU with torchrun"
    if unsupported:
        raise NotImplementedError(f"Float8Callback: the Trainer uses {unsupported}")
