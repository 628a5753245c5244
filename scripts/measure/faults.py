"""Faults for `scripts.measure.mutations`: what each replaces, and the test that must notice."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A small mistake that someone could make.

    Attributes:
        file: where, from the root of the checkout.
        what: the mistake, in a few words.
        before: text that stands in the file once.
        after: what takes its place.
        test: a test, or several in one file, as pytest takes them; one must fail.
    """

    file: str
    what: str
    before: str
    after: str
    test: str


FAULTS: tuple[Fault, ...] = (
    Fault(
        file="fp8_dist/auto_filter.py",
        what="the smallest part of an uneven division is taken for the quotient",
        before="smallest = max(0, shape[dim] - largest * (ranks - 1))",
        after="smallest = shape[dim] // ranks",
        test="tests/unit/test_auto_filter.py::test_parts_are_those_of_torch",
    ),
    Fault(
        file="fp8_dist/checkpoint_policy.py",
        what="selective checkpointing computes the exponents of blocks again",
        before="    block_exponents.overload,\n",
        after="",
        test=(
            "tests/distributed/test_checkpointing.py"
            "::test_same_bits_and_nothing_twice[1-2-blockwise]"
        ),
    ),
    Fault(
        file="fp8_dist/config.py",
        what="the inner dim of grad_weight is padded only where it is asked for",
        before='self.pad_inner_dim or gemm == "grad_weight"',
        after="self.pad_inner_dim",
        test="tests/distributed/test_alignment.py::test_rows_are_padded_in_any_case",
    ),
    Fault(
        file="fp8_dist/config.py",
        what="an operand with two different casts may be gathered in float8",
        before=(
            "return first if first == second and first and first.granularity.can_gather else None"
        ),
        after="return first if second and first and first.granularity.can_gather else None",
        test=(
            "tests/unit/test_config.py"
            "::test_auto_gathers_in_float8_where_one_copy_serves_both_gemms"
        ),
    ),
    Fault(
        file="fp8_dist/convert.py",
        what="layers that share a weight get a weight each",
        before="new.weight = weights.setdefault(id(layer.weight), cast(nn.Parameter, new.weight))",
        after="new.weight = weights.setdefault(id(layer), cast(nn.Parameter, new.weight))",
        test="tests/unit/test_convert.py::test_tied_weights_stay_tied_or_are_refused",
    ),
    Fault(
        file="fp8_dist/debug/captures/files.py",
        what="an unfinished file has the name of a finished one",
        before='unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")',
        after="unfinished = path",
        test="tests/unit/debug/test_debug_capture.py::test_a_killed_run_leaves_no_half_file",
    ),
    Fault(
        file="fp8_dist/debug/captures/recorder.py",
        what="calls are counted on from the step before",
        before="        self._calls.clear()\n",
        after="",
        test="tests/unit/debug/test_debug_capture.py::test_steps_and_calls",
    ),
    Fault(
        file="fp8_dist/debug/communication/audit.py",
        what="the bytes of scales that travel with their rows are not counted",
        before="parts = [tensor.qdata, tensor.scale] if tensor.scale.ndim else [tensor.qdata]",
        after="parts = [tensor.qdata]",
        test=(
            "tests/distributed/test_recipes_on_meshes.py"
            "::test_rowwise_folded_gathers_float8_rows_with_their_scales"
        ),
    ),
    Fault(
        file="fp8_dist/debug/communication/collectives.py",
        what="a gather has the bytes of one rank's part",
        before=(
            "c10d::gather_                                           gather          "
            "input_tensors   share"
        ),
        after=(
            "c10d::gather_                                           gather          input_tensors"
        ),
        test="tests/distributed/test_debug.py::test_every_kind_of_collective",
    ),
    Fault(
        file="fp8_dist/debug/communication/table.py",
        what="a time that is not known counts as zero in a sum",
        before="return sum(known) if known and len(known) == len(seconds) else None",
        after="return sum(known) if known else None",
        test="tests/unit/debug/test_audit.py::test_a_sum_of_times_is_known_where_all_of_them_are",
    ),
    Fault(
        file="fp8_dist/debug/module_path.py",
        what="what FSDP2 gathers in the backward counts for the module before",
        before=(
            "    for key in [key for key in hooks if key != handle.id]:\n"
            "        hooks[key] = hooks.pop(key)\n"
        ),
        after="",
        test=(
            "tests/unit/debug/test_module_path.py"
            "::test_what_hooks_of_a_module_do_in_backward_is_inside_of_it"
        ),
    ),
    Fault(
        file="fp8_dist/debug/recipes/comparison.py",
        what="a layer whose SQNR is NaN is the best one",
        before="return -math.inf if math.isnan(value) else value",
        after="return math.inf if math.isnan(value) else value",
        test=(
            "tests/unit/debug/test_debug_compare_recipes.py"
            "::test_a_layer_whose_sqnr_is_nan_is_the_worst"
        ),
    ),
    Fault(
        file="fp8_dist/debug/recipes/recipe_runs.py",
        what="each call of a layer is compared with the first",
        before="        turns[name, what] += 1\n",
        after="",
        test="tests/unit/debug/test_debug_compare_recipes.py::test_layers_that_run_several_times",
    ),
    Fault(
        file="fp8_dist/debug/recipes/untouched.py",
        what="buffers keep what the runs wrote",
        before="                    buffer.copy_(values)\n",
        after="",
        test="tests/unit/debug/test_debug_compare_recipes.py::test_the_model_is_left_as_it_was",
    ),
    Fault(
        file="fp8_dist/debug/slots.py",
        what="of several patterns the last one alone counts",
        before="chosen |= found",
        after="chosen = found",
        test=(
            "tests/unit/debug/test_debug_capture.py::test_patterns_choose_layers_operands_and_gemms"
        ),
    ),
    Fault(
        file="fp8_dist/debug/statistics/anomalies.py",
        what="the limit of a lag is a factor",
        before="fits * 2**limits.lag < row.amax",
        after="fits * 2 * limits.lag < row.amax",
        test="tests/unit/debug/test_stats.py::test_limits_are_octaves",
    ),
    Fault(
        file="fp8_dist/debug/statistics/combining.py",
        what="global rank 0 alone warns, so that other stages of a pipeline are silent",
        before=(
            "return all(resolve_process_group(group).rank() == 0 for group in "
            "self._groups_of[name])"
        ),
        after="return not dist.is_initialized() or dist.get_rank() == 0",
        test="tests/distributed/test_distributed_stats.py::test_warnings_are_those_of_one_rank",
    ),
    Fault(
        file="fp8_dist/debug/statistics/measuring.py",
        what="the smallest scale is the largest one",
        before="scale.max(), -scale.min()",
        after="scale.max(), -scale.max()",
        test="tests/unit/debug/test_stats.py::test_measures",
    ),
    Fault(
        file="fp8_dist/debug/statistics/recorder.py",
        what="an infinite amax is usual from then on",
        before=("        if math.isfinite(row.amax):\n            amaxes.append(row.amax)\n"),
        after="        amaxes.append(row.amax)\n",
        test="tests/unit/debug/test_stats.py::test_limits_are_octaves",
    ),
    Fault(
        file="fp8_dist/debug/step_recorder.py",
        what="at() gives the number of the step before",
        before="self.step = step - 1",
        after="self.step = step - 2",
        test="tests/unit/debug/test_stats.py::test_steps",
    ),
    Fault(
        file="fp8_dist/doctor.py",
        what="an uneven last part is left out",
        before="parts = {min(part, size - start) for start in range(0, size, part)}",
        after="parts = {part for start in range(0, size, part)}",
        test="tests/unit/test_doctor.py::test_alignment_is_that_of_the_layers",
    ),
    Fault(
        file="fp8_dist/export.py",
        what="weights are cast before FSDP2's rounding",
        before="shard = shard.to(gathered_as)",
        after="pass",
        test=(
            "tests/distributed/test_export_on_meshes.py"
            "::test_bits_are_those_that_a_forward_multiplies"
        ),
    ),
    Fault(
        file="fp8_dist/integrations/transformers/native_tp.py",
        what="styles for unconverted layers are not refused",
        before=(
            "if plain := {key: style for key, style in override.items() if style in _FLOAT8_NAMES}:"
        ),
        after=(
            "if plain := {key: style for key, style in override.items() if key in _FLOAT8_NAMES}:"
        ),
        test=(
            "tests/integrations/transformers/test_quantizer.py"
            "::test_plans_that_hand_layers_local_tensors"
        ),
    ),
    Fault(
        file="fp8_dist/integrations/transformers/quantizer.py",
        what="weights do not get back the type that loading has lost",
        before="        rewrap_float8_weights(model)\n",
        after="",
        test="tests/integrations/transformers/test_quantizer.py::test_loaded_as_if_converted",
    ),
    Fault(
        file="fp8_dist/integrations/transformers/tp_plan.py",
        what="features are counted as heads",
        before="{name: layer.out_features // head_dim for name, layer in readers.items()}",
        after="{name: layer.out_features for name, layer in readers.items()}",
        test="tests/integrations/transformers/test_tp_plan.py::test_heads_that_ranks_cannot_share",
    ),
    Fault(
        file="fp8_dist/integrations/transformers/tp_styles.py",
        what="uneven parts of a sequence are plain tensors",
        before="if isinstance(placement, Shard) and x.shape[placement.dim] % size == 0:",
        after="if isinstance(placement, Shard):",
        test=(
            "tests/integrations/transformers/test_tp_plan.py"
            "::test_sequences_that_ranks_cannot_share_evenly"
        ),
    ),
    Fault(
        file="fp8_dist/integrations/transformers/trainer.py",
        what="scales are not updated after the best model was loaded",
        before="        if args.load_best_model_at_end:",
        after="        if not args.load_best_model_at_end:",
        test=(
            "tests/integrations/transformers/test_trainer.py"
            "::test_the_best_model_has_scales_when_training_ends"
        ),
    ),
    Fault(
        file="fp8_dist/layer_filter.py",
        what="a layer called 'score' is a head wherever it stands",
        before="bool(_HEADS_OF_A_MODEL & set(parts[:1]))",
        after="bool(_HEADS_OF_A_MODEL & set(parts))",
        test="tests/unit/test_layer_filter.py::test_heads_by_their_names",
    ),
    Fault(
        file="fp8_dist/products.py",
        what="the FLOPs are those of all experts, not of those that a token visits",
        before="flops = flops // shape[0] * (visited or shape[0])",
        after="flops = flops // shape[0] * shape[0]",
        test="tests/unit/test_summary.py::test_the_data",
    ),
    Fault(
        file="fp8_dist/state.py",
        what="a state without errors of gradients leaves those of before",
        before="                errors.zero_()\n",
        after="                pass\n",
        test="tests/distributed/test_gradient_transport.py::test_errors_that_do_not_fit_are_told",
    ),
    Fault(
        file="fp8_dist/state.py",
        what="loading histories leaves a weight's cast by the scale of before",
        before="            layer.float8_weight.cache.drop()\n",
        after="",
        test="tests/unit/linear/test_delayed_state.py::test_float8_state_alone_replaces_casts",
    ),
    Fault(
        file="fp8_dist/summary.py",
        what="converted layers and others are on one line",
        before="key = (pattern, row.shape, row.converted, row.reason)",
        after="key = (pattern, row.shape)",
        test="tests/unit/test_summary.py::test_layers_that_are_not_alike_have_lines_of_their_own",
    ),
    Fault(
        file="fp8_dist/transport/encoding.py",
        what="blocks of 128 values span parameters",
        before='seed < 0 and not (encoding == "float8" and last and last.size % BLOCK)',
        after="seed < 0",
        test=(
            "tests/distributed/test_gradient_transport.py::test_shards_are_the_sums_of_what_arrived"
        ),
    ),
    Fault(
        file="fp8_dist/transport/encoding.py",
        what="stochastic rounding has one seed for all parameters",
        before="own_seed = seed_of(seed, number)",
        after="own_seed = seed",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_every_rounding_has_a_seed_of_its_own"
        ),
    ),
    Fault(
        file="fp8_dist/transport/exchange.py",
        what="both stages of a hierarchy round by one seed",
        before="x = _exchange(rows, runs, stage, number, seed_of(seed, number), errors)",
        after="x = _exchange(rows, runs, stage, number, seed, errors)",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_every_rounding_has_a_seed_of_its_own"
        ),
    ),
    Fault(
        file="fp8_dist/transport/exchange.py",
        what="a rank keeps an error of its own piece, which is not rounded",
        before="        left[stage.rank] = 0.0\n",
        after="",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_error_feedback_makes_up_for_what_was_left_out"
        ),
    ),
    Fault(
        file="fp8_dist/transport/shards.py",
        what="what ranks divide unevenly is padded in front",
        before="(0, chunk * ranks - size))",
        after="(chunk * ranks - size, 0))",
        test="tests/distributed/test_reduce_transport.py::test_distance",
    ),
    Fault(
        file="fsdp/attach.py",
        what="an optimizer is refused though all float8 weights are frozen",
        before="if trained and not fitting:",
        after="if not fitting:",
        test="tests/distributed/test_attach.py::test_frozen_float8_weights_need_no_optimizer",
    ),
    Fault(
        file="fsdp/clip.py",
        what="the norms of several meshes are added",
        before="total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)",
        after="total = torch.stack(norms).sum()",
        test="tests/distributed/test_meshes.py::test_gradient_clipping",
    ),
    Fault(
        file="fsdp/encoded_reduction.py",
        what="stochastic rounding has one seed on all ranks",
        before="self.seed = seed_of(seed, replica * shards.size() + shards.rank())",
        after="self.seed = seed_of(seed, replica)",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_every_rounding_has_a_seed_of_its_own"
        ),
    ),
    Fault(
        file="fsdp/encoded_reduction.py",
        what="the sums of replicas are rounded by the seed of the shards",
        before="seed, errors = seed_of(self.shards.seed, _OF_REPLICAS), self.errors",
        after="seed, errors = self.shards.seed, self.errors",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_every_rounding_has_a_seed_of_its_own"
        ),
    ),
    Fault(
        file="fsdp/encoded_reduction.py",
        what="the first parameters are taken for those that are reduced",
        before="self.parts = [self.all_parts[i] for i in reduced]",
        after="self.parts = self.all_parts[: len(reduced)]",
        test=(
            "tests/distributed/test_gradient_transport.py::test_shards_are_the_sums_of_what_arrived"
        ),
    ),
    Fault(
        file="fsdp/gradient_errors.py",
        what="the place of an encoded part leaves out the parts that are not encoded",
        before=(
            "            if part.encoding is not None:\n"
            "                yield part, start\n"
            "            start += part.size"
        ),
        after=(
            "            if part.encoding is not None:\n"
            "                yield part, start\n"
            "                start += part.size"
        ),
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_error_feedback_makes_up_for_what_was_left_out"
        ),
    ),
    Fault(
        file="fsdp/gradient_transport.py",
        what="tensor-parallel ranks are not compared",
        before="for mesh in {group.mesh_info.mesh, *of_parameters} - {None}:",
        after="for mesh in {group.mesh_info.mesh}:",
        test="tests/distributed/test_gradient_transport.py::test_tensor_parallel_ranks_that_differ",
    ),
    Fault(
        file="fsdp/gradient_transport.py",
        what="stochastic rounding has one seed for all modules",
        before="seed = seed_of(int(stochastic_rounding), number)",
        after="seed = int(stochastic_rounding)",
        test=(
            "tests/distributed/test_gradient_transport.py"
            "::test_every_rounding_has_a_seed_of_its_own"
        ),
    ),
    Fault(
        file="fsdp/joining.py",
        what="tensors of one storage are taken for adjacent",
        before="if storage_address(vector) != storage or vector.storage_offset() != end:",
        after="if storage_address(vector) != storage:",
        test="tests/unit/test_joining.py::test_joined",
    ),
    Fault(
        file="fsdp/local_amaxes.py",
        what="local amaxes are padded from the first dim on, not from the last",
        before="added = [start, size - start - n, *added]",
        after="added = [*added, start, size - start - n]",
        test="tests/distributed/test_blocks_on_meshes.py::test_the_same_bits",
    ),
    Fault(
        file="fsdp/local_amaxes.py",
        what="whether shards are even is asked of the wrong dim",
        before="if gathered and len(local_sizes(layout, 0)) > 1:",
        after="if gathered and len(local_sizes(layout, 1)) > 1:",
        test=(
            "tests/distributed/test_recipes_on_meshes.py"
            "::test_precompute_finds_all_scales_of_uneven_rows"
        ),
    ),
    Fault(
        file="fsdp/precompute.py",
        what="the digits of a slot are added",
        before="slot * axis.size + axis.coordinate(rank)",
        after="slot + axis.coordinate(rank)",
        test=(
            "tests/distributed/test_meshes.py"
            "::test_weights_that_differ_along_two_axes_that_they_lack"
        ),
    ),
    Fault(
        file="fsdp/resharding.py",
        what="layers that share a gathered weight may round its scale in two ways",
        before="if same_cast and other.config",
        after="if not same_cast and other.config",
        test=(
            "tests/distributed/test_recipes_on_meshes.py"
            "::test_layers_that_share_a_gathered_weight_round_its_scale_alike"
        ),
    ),
    Fault(
        file="fsdp/rewrap.py",
        what="a gradient is lost with the parameter that is replaced",
        before="        new[id(old)].grad = old.grad\n",
        after="",
        test=(
            "tests/distributed/test_rebuilt_weights.py"
            "::test_rewrapping_keeps_ties_gradients_and_attributes"
        ),
    ),
    Fault(
        file="fsdp/shard_casts.py",
        what="a shard that was cast ahead for an evaluation is cast again",
        before=("            cache.begin_evaluation()\n            cache.is_cast_ahead = True\n"),
        after="            cache.begin_evaluation()\n",
        test=(
            "tests/distributed/test_shard_casts.py"
            "::test_an_evaluation_casts_all_shards_anew_together"
        ),
    ),
    Fault(
        file="fsdp/sync.py",
        what="amaxes of histories are reduced over the first axis of a mesh",
        before="common_groups({mesh: range(mesh.ndim) for mesh in meshes})",
        after="common_groups({mesh: range(1) for mesh in meshes})",
        test="tests/distributed/test_delayed_meshes.py::test_hybrid_sharding_reduces_over_all_axes",
    ),
    Fault(
        file="fsdp/sync.py",
        what="gathers do not wait for the scales of histories",
        before="    note_made(layers)\n",
        after="",
        test="tests/fake_cuda/test_streams.py::test_steps[delayed-event, prefetch]",
    ),
    Fault(
        file="fsdp/update.py",
        what="a model with dynamic and delayed scales is not synced",
        before="    if any(layer.histories for layer in layers.values()):",
        after="    elif any(layer.histories for layer in layers.values()):",
        test="tests/distributed/test_update.py::test_layers_of_all_kinds_in_one_model",
    ),
    Fault(
        file="fsdp/weight.py",
        what="a gather in the backward of a model in eval() is taken for an evaluation",
        before="evaluates = not (module.training or in_backward())",
        after="evaluates = not module.training",
        test="tests/distributed/test_freshness.py::test_a_model_in_eval_may_be_trained",
    ),
    Fault(
        file="fsdp/weight.py",
        what="a version may fall when .data is assigned",
        before=(
            "        self._writes.count += _version_of(self._tensor)  # the version must not fall\n"
        ),
        after="",
        test=(
            "tests/distributed/test_rebuilt_weights.py"
            "::test_data_assigned_after_writes_drops_scales"
        ),
    ),
    Fault(
        file="fsdp/weight.py",
        what="a captured gather takes scales that were found before",
        before="every = None if captured else cache.all_scales",
        after="every = cache.all_scales",
        test=(
            "tests/fake_cuda/test_capture.py"
            "::test_a_captured_gather_finds_the_scales_of_uneven_rows"
        ),
    ),
    Fault(
        file="fsdp/weight.py",
        what="writes to a view of a weight are not counted",
        before="                view._writes = args[0]._writes\n",
        after="                pass\n",
        test="tests/distributed/test_rebuilt_weights.py::test_writes_through_data_drop_scales",
    ),
    Fault(
        file="tensor_parallel/local.py",
        what="a weight that is declared to be a part keeps the scales of the whole",
        before=("    layer.float8_weight.cache.reset()\n    return layer"),
        after="    return layer",
        test=(
            "tests/distributed/test_local_placements.py"
            "::test_scales_are_those_of_the_global_weight_once_it_is_declared"
        ),
    ),
    Fault(
        file="tensor_parallel/local.py",
        what="the gradient of a shared input does not travel as its layers declare",
        before="transport = reduce_transport if declared is None else first.reduce_transport",
        after="transport = reduce_transport",
        test="tests/distributed/test_reduce_transport.py::test_layers_of_plain_tensors",
    ),
    Fault(
        file="tensor_parallel/plan.py",
        what="the heads of keys and values may not be divisible",
        before=('_HEAD_COUNTS = ("n_heads", "n_kv_heads", "num_heads", "num_key_value_heads")'),
        after='_HEAD_COUNTS = ("n_heads", "num_heads")',
        test="tests/distributed/test_plans.py::test_heads_that_the_ranks_cannot_share",
    ),
    Fault(
        file="tensor_parallel/reductions.py",
        what="the gradient of a gathered input travels in high precision",
        before="return reduced_to(grad, placements, ctx.spec.transport), None",
        after="return reduced_to(grad, placements, None), None",
        test="tests/distributed/test_reduce_transport.py::test_bytes",
    ),
    Fault(
        file="tensor_parallel/shared_casts.py",
        what="a shared input is cast before autocast has rounded it",
        before="    x = autocast(x)\n",
        after="",
        test="tests/compile/test_compiled_autocast.py::test_inputs_that_a_style_casts[tensorwise]",
    ),
    Fault(
        file="tensor_parallel/siblings.py",
        what="layers in units of FSDP2 wait for their siblings",
        before=("            if isinstance(inner, FSDPModule):\n                break\n"),
        after="",
        test="tests/distributed/test_gradient_amax.py::test_fsdp2_frees_weights_after_the_gemms",
    ),
    Fault(
        file="tensor_parallel/styles.py",
        what="the history of a prepared input is not reduced over its mesh",
        before="cast, first.config.amax_history_len, power_of_2, device_mesh\n",
        after="cast, first.config.amax_history_len, power_of_2\n",
        test=(
            "tests/distributed/test_delayed_meshes.py"
            "::test_an_input_may_be_prepared_for_plain_weights"
        ),
    ),
    Fault(
        file="tensor_parallel/ties.py",
        what="a column-parallel embedding is taken for one that is sharded by rows",
        before="return Shard(1) if is_embedding else Shard(0)",
        after="return Shard(0)",
        test=(
            "tests/distributed/test_plans.py::test_plans_that_leave_or_divide_ties_alike_are_applied"
        ),
    ),
)
