"""Messages that name a command, an option or a call, and the tests that follow their advice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.messages import HOLE, template

_NAMES = re.compile(
    r"infinity (?:run|finetune|plan|generate|checkpoint|doctor|convert)\b|(?<![\w-])--[a-z][a-z-]+"
    r"|\b(?:infinity|model|trainer|accelerator|layer|datasets|scaler|optimizer)\.[A-Za-z_.]+\("
)
_SUBJECT = re.compile(rf"^--[a-z-]+( {HOLE})?")
_SENTENCE_CHARS_MIN = 30
_HELP = (
    "cli/subcommands.py",
    "cli/finetune_options.py",
    "cli/bench/main.py",
    "cli/bench/options.py",
    "cli/planning/options.py",
    "cli/deepspeed/keys.py",
)
"""Files whose strings are printed by --help or shown in a table of a page."""


def advice_in(source: str) -> Iterator[str]:
    """Yield the messages in a file that name a command, an option or a call. Each value in a message is replaced by a
    HOLE.

    An option at the beginning of a sentence is the subject of the sentence and does not count.
    """
    for text in _outermost(ast.parse(source)):
        if len(text) > _SENTENCE_CHARS_MIN and " " in text and _NAMES.search(_SUBJECT.sub("", text)):
            yield text


def advice_below(root: Path) -> dict[str, list[str]]:
    """Return the messages of all files below `root`, by file."""
    found = {str(path.relative_to(root)): list(advice_in(path.read_text())) for path in sorted(root.rglob("*.py"))}
    return {name: texts for name, texts in found.items() if texts and name not in _HELP}


def _outermost(tree: ast.AST) -> Iterator[str]:
    """Yield all strings except docstrings; a string inside an f-string is a part of the f-string."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        found = template(node) if isinstance(node, ast.expr) else None
        if found is None:
            yield from _outermost(node)
        else:
            yield found


_COLUMNS = "cli/test_dataset_layouts.py::test_a_public_layout_that_is_refused_is_read_with_its_columns_named"
FOLLOWED: dict[str, dict[str, str]] = {
    "config.py": {
        "is a config of DeepSpeed, not a swap config.": "test_config.py::test_a_config_of_deepspeed_is_converted",
    },
    "access/exact.py": {
        "`infinity checkpoint export` writes the whole state": "runtime/test_ranks_together.py::"
        "test_moments_of_several_ranks_are_refused_by_name_and_written_whole_as_the_error_says",
    },
    "checkpoint/merged_adapters.py": {
        "call model.unmerge_adapter() first": "checkpoint/test_merged_adapters.py::"
        "test_adapters_that_are_merged_already_are_not_merged_again",
    },
    "access/gathering.py": {
        "Gather one module at a ": "runtime/test_gathered.py::test_copies_that_do_not_fit_are_refused_with_the_number",
        "or iterate over infinity.state_dict(model), which keeps": "runtime/test_gathered.py::"
        "test_copies_that_do_not_fit_are_refused_with_the_number",
        "change the parameter in the same way on all ranks": "runtime/test_rank_writes.py::"
        "test_ranks_that_write_different_things_write_nothing_and_the_same_things_all",
        "model.resize_token_embeddings() needs no infinit": "runtime/test_errors.py::"
        "test_what_is_resized_in_vain_in_gathered_is_resized_without_it",
        "Change it before infinity.offload, or set frozen: bf16": "runtime/test_frozen.py::"
        "test_encoded_weights_are_read_and_written_as_the_error_says_only",
        "before the first step, or set commit_every: 0": "runtime/test_gathered.py::"
        "test_frozen_weights_are_written_after_a_step_without_generations",
    },
    "access/lent_gradients.py": {
        "grads=True) before scaler.unscale_()": "runtime/test_gathered_gradients.py::"
        "test_unscaled_gradients_in_float16_are_refused_with_the_order",
        "Enter the context between backward() and zero_grad().": "runtime/test_gathered_gradients.py::"
        "test_without_gradients_it_is_refused_by_name",
    },
    "access/resuming.py": {
        "`infinity checkpoint export` and infinity.offload_from_checkpoint": "runtime/test_loops.py::"
        "test_states_of_another_form_are_moved_as_the_error_says",
        "or infinity finetune --from-checkpoint": "cli/test_resume.py::"
        "test_a_run_moves_to_other_disks_and_forms_as_a_portable_copy",
    },
    "checkpoint/save_adapters.py": {
        "Call model.save_pretrained(directory)": "checkpoint/test_save_adapters.py::"
        "test_what_peft_computes_of_weights_is_not_written_as_a_placeholder",
    },
    "checkpoint/tensor_names.py": {
        "tile by tile; use infinity.state_dict(model)": "checkpoint/test_tiles.py::"
        "test_a_model_whose_tiles_cannot_be_written_gives_its_weights_as_the_error_says",
    },
    "checkpoint/pinned.py": {
        "with `<> --all-gone` while no process uses the store, or with infinity.run": "checkpoint/test_pinned.py::"
        "test_a_folder_that_is_gone_can_hold_no_copy_and_each_way_on_is_one",
    },
    "checkpoint/portable.py": {
        "no <>); make a copy with `infinity checkpoint export`, or load ": "cli/test_resume.py::"
        "test_where_a_run_goes_on_is_said_and_each_way_on_is_one",
    },
    "cli/documents.py": {
        "is read as text: give files of rows": "cli/test_pairs.py::test_text_is_no_pair_and_rows_are",
    },
    "cli/order.py": {
        "the run: give the same --data": "cli/test_resume.py::test_an_option_that_would_change_the_run_is_named",
    },
    "cli/bench/scratch.py": {
        "set --size to at most": "cli/bench/test_survey.py::test_some_space_stays_free",
    },
    "cli/checkpoint.py": {
        "files into its directory, or give --model with the director": "cli/test_model_limits.py::"
        "test_an_export_whose_tokenizer_is_gone_says_so",
    },
    "cli/suggested_command.py": {
        "torchrun --nproc-per-node <> -m infinity": "cli/test_suggested_command.py::"
        "test_a_rank_names_the_launcher_for_what_ranks_do_together",
    },
    "cli/convert.py": {
        "give --force to replace it": "cli/test_convert.py::test_nothing_is_overwritten_without_force",
        "--force does nothing without --output": "cli/test_convert.py::test_nothing_is_overwritten_without_force",
    },
    "cli/data.py": {
        "Give a larger --sequence-length": "cli/test_examples.py::test_the_length_that_a_message_asks_for_is_one",
        "longer than --sequence-length": "cli/test_examples.py::test_an_example_that_is_too_long_is_cut_and_said",
        "answer begins after --sequence-length": "cli/test_examples.py::test_the_length_that_a_message_asks_for_is_one",
        "or a smaller --sequence-length": "cli/test_examples.py::test_the_length_that_a_message_asks_for_is_one",
        "give --eval-data instead": "cli/test_evaluation.py::test_data_of_one_sequence_is_evaluated_on_data_apart",
    },
    "cli/deepspeed/config_reader.py": {
        "OUT --safe_serialization` writes": "cli/deepspeed/test_config_reader.py::"
        "test_a_checkpoint_of_deepspeed_is_named_with_a_command_that_finds_its_script",
        "Write this to swap.yaml": "cli/deepspeed/test_config_reader.py::"
        "test_where_nothing_says_where_states_rest_the_swap_configs_that_are_named_can_be_written",
        "config; it names one: infinity convert <>": "cli/test_convert.py::"
        "test_a_file_that_names_a_config_is_refused_with_a_command_that_converts_that",
        "a swap config, which `infinity run` takes": "cli/test_convert.py::"
        "test_a_swap_config_is_refused_and_infinity_run_takes_it",
    },
    "cli/deepspeed/conversion_report.py": {
        "# Made by `infinity convert <>`. Each value i": "cli/test_convert.py::"
        "test_a_file_that_names_a_config_is_refused_with_a_command_that_converts_that",
        "measured or chosen; `infinity run --verbose` prints": "cli/test_convert.py::"
        "test_training_starts_as_the_report_says",
        "accelerate launch --config_file <>": "cli/test_convert.py::test_training_starts_as_the_report_says",
        "Remove `--fsdp_config <>` and `-": "cli/test_convert.py::test_training_starts_as_the_report_says",
        "Remove `--deepspeed <>` from ITS AR": "cli/test_convert.py::test_training_starts_as_the_report_says",
        "  <> --model MODEL --data DATA": "cli/test_convert.py::test_training_starts_as_the_report_says",
    },
    "cli/default_dtype.py": {
        "dtype <>: <> (--dtype chooses another)": "cli/test_default_dtype.py::"
        "test_a_run_trains_in_the_default_and_one_line_says_so",
        "so 16 bits are slower (--dtype bf16 takes half t": "cli/test_default_dtype.py::"
        "test_a_run_trains_in_the_default_and_one_line_says_so",
    },
    "cli/doctor/with_torch.py": {
        "<>; <>, so --dtype is fp32 by defaul": "cli/doctor/test_with_torch.py::"
        "test_the_processor_and_the_default_dtype_by_its_flags_are_named",
        "<>; <>, so --dtype is <> by default": "cli/doctor/test_with_torch.py::"
        "test_the_processor_and_the_default_dtype_by_its_flags_are_named",
    },
    "cli/dataset_rows.py": {
        "has no <>, which --columns names": "cli/test_dataset_layouts.py::test_a_column_that_a_row_has_not_is_named",
        "If its columns have other names, give --columns": _COLUMNS,
        "name the columns to read, such as --columns": _COLUMNS,
        "name the columns to read: --columns": _COLUMNS,
    },
    "cli/finetune.py": {
        "use --gradient-accumulation instead": "cli/test_trainers.py::"
        "test_what_a_method_does_not_do_is_refused_and_the_way_on_trains",
        "to train further, give a larger --steps": "cli/test_resume.py::test_a_finished_run_goes_on_with_more_steps",
        "To write the model again, give another --o": "cli/test_resume.py::test_a_finished_run_goes_on_with_more_steps",
        "is the output of the resumed run; --output DIR)": "cli/test_resume.py::"
        "test_where_a_run_goes_on_is_said_and_each_way_on_is_one",
        "--min-lr is <>, but the rate falls from --lr <>": "cli/test_finetune.py::"
        "test_a_rate_that_would_rise_is_refused_and_one_that_stays_or_falls_is_not",
    },
    "cli/finished_run.py": {
        "With --keep-store a run can be resumed": "cli/test_resume.py::test_a_finished_run_goes_on_with_more_steps",
        "(--keep-store keeps it)": "cli/test_finished_run.py::test_keep_store_keeps_it",
        "starts from it with --model.": "cli/test_finished_run.py::test_a_finished_run_has_nothing_to_go_on_with",
    },
    "cli/generate.py": {
        "--frozen chooses another form": "cli/test_frozen.py::"
        "test_adapters_write_beside_the_form_that_they_were_trained_with",
        "infinity generate runs in one proce": "cli/test_generate.py::"
        "test_several_processes_are_refused_and_one_writes",
        "give a --prompt, or the prompt on": "cli/test_generate.py::test_the_prompt_may_come_from_stdin",
        "model's chat template (--raw passes it unchanged": "cli/test_generate.py::"
        "test_a_prompt_is_a_users_message_where_there_is_a_chat_template",
    },
    "cli/job.py": {
        "after <>: from now on --schedule is computed for <>": "cli/test_resume.py::"
        "test_the_learning_rates_of_a_run_with_more_steps_are_those_of_its_new_end",
        "first of nvme.paths in --config (<>): a run is res": "cli/test_resume.py::"
        "test_where_a_run_goes_on_is_said_and_each_way_on_is_one",
        "directory of the run: --resume DIR, or --config ": "cli/test_resume.py::"
        "test_where_a_run_goes_on_is_said_and_each_way_on_is_one",
        "resume from it with --from-checkpoint": "cli/test_resume.py::"
        "test_where_a_run_goes_on_is_said_and_each_way_on_is_one",
        "that `infinity finetune` did not make; resume the run with ": "cli/test_resume.py::"
        "test_a_run_of_another_program_is_resumed_by_that",
    },
    "cli/model_limits.py": {
        "give a smaller --sequence-length. A model with rot": "cli/test_model_limits.py::"
        "test_a_model_with_rotary_positions_learns_more_of_them_where_its_config_says_so",
    },
    "cli/main.py": {
        "infinity finetune trains with TRL, and <> cannot be": "cli/test_model_limits.py::"
        "test_a_library_that_is_missing_is_named_with_the_command_that_installs_it",
        "infinity finetune needs <><>, but <> is": "cli/test_model_limits.py::test_a_library_that_is_too_old_is_named",
        "--batch-size times --sequence-length is <> tokens in o": "cli/test_model_limits.py::"
        "test_a_pass_of_too_many_tokens_is_done_in_several",
        "<>. Use a smaller --batch-size or --sequence-len": "cli/test_model_limits.py::"
        "test_without_memory_for_a_pass_a_smaller_one_runs",
        "then the script: infinity run swap.yaml train.p": "cli/test_run_process.py::"
        "test_in_this_process_the_logger_is_as_before",
    },
    "cli/chat_messages.py": {
        "or give --loss-on all to learn whole conversations": "cli/test_dataset_rows.py::"
        "test_what_a_user_says_is_learned_as_the_message_says",
    },
    "cli/finetuned_model.py": {
        "are trained: train adapters (--lora 16), freeze a par": "cli/test_frozen.py::"
        "test_it_says_nothing_where_all_is_trained",
        "does nothing with --lora, which trains the": "cli/test_lora.py::"
        "test_freeze_beside_lora_is_refused_and_either_alone_trains",
        "adapters of <>: give --model <>, or merge both": "cli/test_lora.py::"
        "test_adapters_are_no_model_to_begin_with_and_their_base_and_both_in_one_are",
        "exclude the experts: --lora-targets": "cli/test_lora.py::"
        "test_experts_have_no_dropout_and_the_error_names_layers_that_have",
        "which are <> of the parameters (--lora-experts)": "cli/test_lora.py::"
        "test_a_mixture_trains_adapters_of_its_experts_if_asked_and_the_plan_counts_them",
        "With --trust-remote-code these files are run.": "cli/test_remote_code.py::"
        "test_each_process_is_told_anew_to_trust_code",
    },
    "cli/optimizers.py": {
        "<> does nothing with --optimizer <>; <> have it": "cli/test_finetune.py::"
        "test_an_option_that_does_nothing_does_something_with_the_optimizers_that_are_named",
        "--eps does nothing with --optimizer <>; <> have it": "cli/test_finetune.py::"
        "test_an_option_that_does_nothing_does_something_with_the_optimizers_that_are_named",
    },
    "cli/options.py": {
        "<> does nothing with --method <>: leave it out": "cli/test_trainers.py::"
        "test_what_a_method_does_not_do_is_refused_and_the_way_on_trains",
    },
    "cli/options_file.py": {
        "<>: <> is not an option of infinity finetune<>": "cli/test_run_file.py::"
        "test_an_option_that_a_message_proposes_is_one",
    },
    "cli/generation_pins.py": {
        "say which pins to remove: --folder FOLDER": "runtime/test_rank_pins.py::test_the_commands_know_what_ranks_pin",
        "or give `remove` the option --pinned": "runtime/test_rank_pins.py::test_the_commands_know_what_ranks_pin",
    },
    "plan/local_rates.py": {
        "`infinity-bench --path DIRECTORY` measur": "cli/planning/test_main.py::"
        "test_an_assumed_disk_is_measured_as_the_plan_says",
    },
    "cli/planning/plan_report.py": {
        "tokens (--batch-size <> × --sequence-length": "cli/planning/test_main.py::"
        "test_the_first_line_says_whether_it_fits_how_fast_it_is_and_what_the_drives_take",
    },
    "cli/run_data.py": {
        "the first document of --data, with the learned": "cli/test_examples.py::"
        "test_verbose_shows_the_first_document_of_the_data",
    },
    "cli/training_examples.py": {
        "such as --columns chosen=better rej": "cli/test_pairs.py::test_the_way_on_that_a_refusal_names_is_one",
        "Name the columns to read: --columns chosen=<>": "cli/test_pairs.py::"
        "test_the_way_on_that_a_refusal_names_is_one",
        "end both answers with the first message": "cli/test_pairs.py::test_the_way_on_that_a_refusal_names_is_one",
        "To learn only the chosen answers: --columns": _COLUMNS,
        "with --loss-on all, all tokens are": "cli/test_dataset_rows.py::"
        "test_answers_cannot_be_told_apart_where_everything_is_learned_or_the_template_marks_otherwise",
        "or give --loss-on all to learn whole conversations, incl": "cli/test_examples.py::"
        "test_each_way_on_of_a_template_without_marks_is_one",
    },
    "cli/reference_model.py": {
        "give --model with the original weights": "cli/test_trainers.py::test_a_killed_run_ends_in_the_same_bits",
    },
    "cli/run_command.py": {
        "give the swap config first, infinity run CONFIG SCRIPT": "cli/test_run_process.py::"
        "test_in_this_process_the_logger_is_as_before",
        "the script <> does not exist: infinity run CONFIG SCRIPT [AR": "cli/test_run_process.py::"
        "test_in_this_process_the_logger_is_as_before",
    },
    "cli/run_directory.py": {
        "keep fewer models (--save-limit)": "cli/test_run_directory.py::"
        "test_without_room_for_models_each_way_on_has_room",
        "free. <>, or choose an --output on another": "cli/test_run_directory.py::"
        "test_without_room_for_models_each_way_on_has_room",
        "the models of --save-every and --save-best and the files of --logger": "cli/test_step_watch.py::"
        "test_what_another_run_has_left_is_not_mixed_with",
        "<>, for the models of --save-every and --save-best and ": "cli/test_run_directory.py::"
        "test_a_place_that_cannot_be_written_is_named_before_the_run",
        "--save-best needs --eval-steps: without it only": "cli/test_run_directory.py::"
        "test_the_best_model_needs_evaluations_on_the_way",
    },
    "cli/packing_support.py": {
        "separation. Give --no-packing: each sequence th": "cli/test_examples.py::"
        "test_a_model_that_cannot_keep_examples_apart_trains_without_packing",
    },
    "cli/tracing.py": {
        "--trace <>: --output must be empty whe": "cli/test_finetune.py::"
        "test_steps_to_trace_are_traced_into_a_file_outside_the_output",
    },
    "cli/trainer.py": {
        "(<>): give a smaller --sequence-length or --batch-size, ": "cli/test_model_limits.py::"
        "test_without_memory_for_a_pass_a_smaller_one_runs",
        "(<>): give a smaller --sequence-length or --batch-size": "cli/test_model_limits.py::"
        "test_positions_that_the_config_does_not_tell_are_named_too",
    },
    "cli/trainer_options.py": {
        "model that --model names: leave it out": "cli/test_trainers.py::"
        "test_what_a_method_does_not_do_is_refused_and_the_way_on_trains",
        "leave it out, or give <>": "cli/test_trainers.py::"
        "test_what_a_method_does_not_do_is_refused_and_the_way_on_trains",
        "the loss is the model's own. Leave it out": "cli/test_trainers.py::"
        "test_what_a_method_does_not_do_is_refused_and_the_way_on_trains",
        "give --save-every or --save-best": "cli/test_trainer_options.py::"
        "test_the_option_that_a_refusal_names_does_what_was_asked",
        "is not an option of infinity finetune: <>": "cli/test_trainer_options.py::"
        "test_the_option_that_a_refusal_names_does_what_was_asked",
    },
    "cli/training.py": {
        "rate never reaches --lr": "cli/test_finetune.py::test_a_warmup_as_long_as_the_run_is_said",
    },
    "cli/verifying.py": {
        "leave --verify-output out, or give --merge": "cli/test_frozen.py::"
        "test_adapters_of_a_quantized_model_are_verified_merged_only",
    },
    "coordinator/gradient_handle.py": {
        "To keep its values, copy them in": "runtime/test_gathered_gradients.py::"
        "test_a_handle_that_is_kept_says_that_its_gradient_is_gone",
        "read or change its values in `with infinity.gathered": "runtime/test_gathered_gradients.py::"
        "test_what_needs_a_copy_that_stays_raises_and_works_as_the_message_says",
    },
    "coordinator/readers.py": {
        "Make one optimizer for model.parameters(), and call its step()": "runtime/test_errors.py::"
        "test_a_step_in_a_backward_pass_is_refused_and_one_after_it_does_the_same",
        "before the pass. Leave the context first.": "runtime/test_gathered_gradients.py::"
        "test_in_a_pass_it_is_refused_and_a_pass_in_it_too",
        "optimizer.step() inside `with inf": "runtime/test_gathered.py::test_a_step_in_the_context_is_refused",
    },
    "sharded/rank_stores.py": {
        "the old one with `infinity checkpoint remove <>`.": "sharded/test_rank_stores.py::"
        "test_what_is_in_the_way_goes_with_the_command_that_is_named",
        "<>. Unpin them with `infinity checkpoint unpin <> --folder": "runtime/test_rank_pins.py::"
        "test_the_commands_know_what_ranks_pin",
    },
    "units/speculative_updates.py": {
        "Give the optimizer accumulation_steps=": "runtime/test_accumulation.py::test_with_accumulation_steps_likewise",
        "but the last inside model.no_sync()": "runtime/test_accumulation.py::"
        "test_with_no_sync_updates_begin_in_the_last_pass_of_the_first_step_on",
    },
    "coordinator/structure.py": {
        "(with infinity.load_pretrained(defer=True): between": "runtime/test_reoffload.py::"
        "test_a_model_changed_after_it_was_loaded_has_the_bits_and_the_states_of_one_changed_before",
        "Or make the optimizer after the change and": "runtime/test_reoffload.py::"
        "test_following_the_advice_a_weight_is_computed_from_now_on",
        "call merged.save_pretrained(directory) in the": "checkpoint/test_save_adapters.py::"
        "test_a_model_merged_and_saved_in_gathered_has_the_logits_of_the_adapters",
    },
    "durable/commits.py": {
        "call infinity.commit(model) at the end of an it": "runtime/test_loop_tops.py::"
        "test_several_steps_for_an_item_go_on_where_an_iteration_ends_as_the_warnings_say",
    },
    "durable/resumed_generation.py": {
        "or call infinity.commit(model) at the end of an it": "runtime/test_loop_tops.py::"
        "test_several_steps_for_an_item_go_on_where_an_iteration_ends_as_the_warnings_say",
    },
    "integrations/accelerate.py": {
        "infinity run --resume": "integrations/test_accelerate.py::"
        "test_resume_and_load_state_go_on_to_the_bits_of_the_uninterrupted_loop",
        "Start the script with": "integrations/test_accelerate.py::"
        "test_resume_and_load_state_go_on_to_the_bits_of_the_uninterrupted_loop",
    },
    "integrations/chunked_loss.py": {
        "without labels, or call infinity.use_chunked_loss(model, False)": "integrations/test_chunked_loss.py::"
        "test_a_model_that_uses_its_logits_otherwise_keeps_its_loss",
    },
    "integrations/deepspeed_errors.py": {
        "--fsdp and --fsdp_config, or": "integrations/test_deepspeed_errors.py::"
        "test_fsdp_is_refused_and_its_config_is_one_that_can_be_converted",
        "-o swap.yaml` converts": "integrations/test_deepspeed_errors.py::"
        "test_fsdp_is_refused_and_its_config_is_one_that_can_be_converted",
    },
    "integrations/checkpoint_folders.py": {
        "If they were removed, `infinity checkpoint unpin <> --all-go": "cli/test_generation_pins.py::"
        "test_unpin_all_gone_leaves_the_folders_that_are_there",
    },
    "integrations/infinity_config.py": {
        "InfinityConfig needs transformers 5": "integrations/test_launcher.py::"
        "test_what_pip_is_told_to_install_is_a_version_that_works",
        "`torchrun --nproc-per-node N -m infinity.run swap.yaml SCRIPT`": "unchanged/test_several_ranks.py::"
        "test_ranks_train_as_with_ddp",
        "A Trainer pins with callbacks=[infinity.hf.Checkpoints()]": "integrations/test_plug_points.py::"
        "test_a_later_process_goes_on_from_a_folder_to_the_same_bits",
        "Leave vertical out of the swap config": "integrations/test_plug_points.py::"
        "test_vertical_is_refused_where_nothing_would_come_of_it",
    },
    "integrations/launcher.py": {
        "infinity run needs transformer": "integrations/test_launcher.py::"
        "test_what_pip_is_told_to_install_is_a_version_that_works",
    },
    "integrations/resume_hint.py": {
        "`infinity checkpoint export ": "integrations/test_stopped.py::"
        "test_a_second_run_without_a_folder_is_told_what_it_can_do_and_that_works",
        "`infinity checkpoint remove ": "integrations/test_stopped.py::"
        "test_a_second_run_without_a_folder_is_told_what_it_can_do_and_that_works",
    },
    "integrations/optimizers.py": {
        "the swap config, with infinity.runtime.pins.pin(model, folder): su": "integrations/test_accelerate.py::"
        "test_a_script_that_saves_a_state_dict_itself_goes_on_from_a_folder_that_it_pins_as_the_warning_says",
    },
    "integrations/plug_points.py": {
        "optimizers=(infinity.hf.optimizer_factory(model, lr=1e-5, ": "integrations/test_plug_points.py::"
        "test_an_optimizer_that_is_made_first_is_told_of_the_trainer_or_refused",
        "quantization_config=infinity.InfinityConfig(...)": "integrations/test_plug_points.py::"
        "test_a_later_process_goes_on_from_a_folder_to_the_same_bits",
    },
    "integrations/quantization.py": {
        "`infinity run` has a swap config already": "integrations/test_quantization.py::"
        "test_a_config_of_infinity_is_left_out_under_infinity_run",
    },
    "integrations/script_run.py": {
        "need it: <>. `infinity checkpoint remove --pinned <": "cli/test_generation_pins.py::"
        "test_remove_is_refused_while_folders_pin_and_leaves_none_that_looks_resumable",
    },
    "integrations/script_messages.py": {
        "For another loop, call infinity.offload(model, config)": "integrations/test_module_of_optimizer.py::"
        "test_a_script_that_offloads_its_module_itself_is_not_told_that_nothing_was",
    },
    "integrations/strategy.py": {
        "under `infinity run` a Lightning Trai": "integrations/test_lightning.py::"
        "test_a_trainer_without_the_strategy_that_is_refused_trains",
        "or infinity.AdamW(..., max_grad_norm": "integrations/test_lightning.py::"
        "test_what_clips_in_fp16_or_after_it_trains_as_the_refusal_says",
        "after `infinity plan --batch-size N` says that it fits": "integrations/test_lightning.py::"
        "test_finding_a_batch_size_is_done_by_runs_of_their_own_as_the_error_says",
        "torch.nn.utils.clip_grad_value_ in": "integrations/test_lightning.py::"
        "test_clipping_by_value_works_as_its_refusal_says",
        "`trainer.fit(..., ckpt_path=<>)`": "integrations/test_lightning.py::test_the_launchers_resume_names_ckpt_path",
        "infinity.state_dict(model) reads them one by one, after any": "integrations/test_lightning.py::"
        "test_a_callback_of_ones_own_averages_weights",
        "`infinity run` has a swap confi": "integrations/test_lightning.py::test_two_swap_configs_are_refused",
        "names its checkpoint itself: leave --resume out, and call tra": "integrations/test_lightning.py::"
        "test_the_launchers_resume_names_ckpt_path",
    },
    "integrations/transformers.py": {
        "Let trainer.train() make the optimizer": "integrations/test_trainer.py::"
        "test_an_optimizer_that_a_script_makes_before_train_is_refused_where_the_model_goes_on",
        "or remove resume_from_checkpoint": "integrations/test_trainer.py::"
        "test_a_script_that_names_another_folder_than_the_launcher_is_refused_and_both_ways_on_work",
    },
    "io/directory.py": {
        "`infinity checkpoint remove --pinned ": "runtime/test_rank_pins.py::test_the_commands_know_what_ranks_pin",
        "To start over: give this run": "integrations/test_stopped.py::"
        "test_a_second_run_without_a_folder_is_told_what_it_can_do_and_that_works",
        "in a loop of your own, infinity.resume": "runtime/test_pins.py::"
        "test_a_loop_in_a_directory_of_an_earlier_run_is_told_what_a_loop_does_and_it_works",
        "for a script under infinity run, `infinity run --resume FOLDER": "integrations/test_trainer.py::"
        "test_the_launchers_folder_is_where_the_first_train_of_a_script_goes_on",
        "No checkpoint folder names its generations": "integrations/test_stopped.py::"
        "test_a_second_run_without_a_folder_is_told_what_it_can_do_and_that_works",
    },
    "io/generations.py": {
        "a folder and resume: `infinity checkpoint unpin <> --folder": "cli/test_generation_pins.py::"
        "test_unpin_lets_one_folder_go_whether_it_is_there_or_not",
        "in <>: <>. `infinity checkpoint unpin <> --all-go": "cli/test_generation_pins.py::"
        "test_unpin_all_gone_leaves_the_folders_that_are_there",
        "Set pins: ": "runtime/test_pins.py::"
        "test_a_config_with_fewer_pins_than_there_are_is_refused_though_the_file_has_room",
        "Remove a folder that pins a": "runtime/test_pins.py::test_without_a_free_pin_nothing_is_written",
    },
    "io/headers.py": {
        "Name the present directories of all": "io/test_headers.py::"
        "test_a_copied_part_is_not_joined_with_the_originals_other_parts",
    },
    "io/generation_pins.py": {
        "checkpoint list` names those": "runtime/test_rank_pins.py::test_the_commands_know_what_ranks_pin",
    },
    "io/store.py": {
        "if it does, move the run with `infinity checkpoint export`": "cli/test_resume.py::"
        "test_a_run_whose_disk_cannot_be_told_moves_as_the_error_says",
        "or move the run with `infinity checkpoint export` and --fro": "runtime/test_frozen.py::"
        "test_a_run_is_not_resumed_with_another_form",
        "too. Copy it with `cp --reflink=auto`, and rename": "cli/test_checkpoint.py::"
        "test_a_swap_file_with_another_name_is_not_written_to",
    },
    "optim/groups.py": {
        "is not offloaded: call infinity.offload(model, config) bef": "optim/test_groups.py::"
        "test_tensors_that_are_refused_are_taken_when_they_are_offloaded",
        "add the modules, then call infinity.offload(whole, config)": "runtime/test_reoffload.py::"
        "test_a_head_around_an_offloaded_model_is_refused_and_trains_where_it_is_put_before",
        "are in the store. infinity.commit(model) and commit_": "optim/test_groups.py::"
        "test_instead_of_a_copy_of_the_optimizer_the_ways_that_its_error_names_have_its_states",
        "model.parameters() makes a new generator": "optim/test_groups.py::"
        "test_what_is_no_list_of_parameters_is_refused",
        "give its parameters, model.parameters()": "optim/test_groups.py::"
        "test_what_is_no_list_of_parameters_is_refused",
        "or a list of param groups": "optim/test_groups.py::test_what_is_no_list_of_parameters_is_refused",
        "which is not a parameter: give": "optim/test_groups.py::test_what_is_no_list_of_parameters_is_refused",
    },
    "optim/offloaded.py": {
        "infinity run --resume FOLDER),": "integrations/test_accelerate.py::"
        "test_resume_and_load_state_go_on_to_the_bits_of_the_uninterrupted_loop",
        "for a model of InfinityConfig(..., resume=FOLDER)": "integrations/test_plug_points.py::"
        "test_a_later_process_goes_on_from_a_folder_to_the_same_bits",
        "with infinity.resume, or from a copy": "optim/test_groups.py::"
        "test_instead_of_a_copy_of_the_optimizer_the_ways_that_its_error_names_have_its_states",
        "moments and step, call optimizer": "optim/test_adamw.py::"
        "test_a_moment_that_is_set_is_refused_and_cleared_states_begin_anew_as_the_message_says",
        "reads a copy; a change": "optim/test_adamw.py::"
        "test_a_moment_that_is_asked_for_in_state_is_read_as_the_message_says",
    },
    "optim/loss_scale.py": {
        "and do not call scaler.unscale_()": "runtime/test_loss_scaling.py::"
        "test_a_gradient_set_by_hand_after_unscaling_is_refused_and_one_that_is_scaled_is_taken",
    },
    "runtime/reoffload.py": {
        "the model, then call infinity.offload(model, config).": "runtime/test_reoffload.py::"
        "test_after_a_step_the_error_names_the_order",
    },
    "runtime/gathered.py": {
        "before or after the pass": "runtime/test_gathered.py::test_writing_in_a_forward_is_refused_and_after_it_works",
        "write infinity.gathered(model, parameter)": "runtime/test_gathered.py::"
        "test_a_parameter_without_its_model_is_refused_and_with_its_model_it_is_taken",
        "write infinity.gathered(model, *several)": "runtime/test_gathered.py::"
        "test_a_list_of_modules_is_refused_and_its_items_are_taken",
        "Enter the context between backward() and optim.step().": "runtime/test_gathered_gradients.py::"
        "test_in_a_pass_it_is_refused_and_a_pass_in_it_too",
    },
    "runtime/guards.py": {
        "To write it, use infinity.save_pretrained(model, directory)": "runtime/test_errors.py::"
        "test_nothing_passes_placeholders_on",
        "other.load_state_dict(model.state_dict())": "runtime/test_errors.py::test_nothing_passes_placeholders_on",
    },
    "runtime/hooks.py": {
        "or call model.to(torch.bfloat16) before infinity.offload": "runtime/test_errors.py::"
        "test_fp32_weights_under_autocast_are_refused_with_the_fix",
    },
    "runtime/offload.py": {
        "with infinity.offload_from_checkpoint(model, '<>', confi": "checkpoint/test_pinned.py::"
        "test_the_oldest_pin_becomes_a_portable_copy_of_its_bits",
        "load the model again, and offload the new one": "runtime/test_errors.py::test_offloading_twice_is_refused",
        "Leave max_norm out, and before the forward": "runtime/test_gathered_writes.py::"
        "test_an_embedding_with_max_norm_is_refused_and_what_the_error_says_does_the_same",
    },
    "runtime/saved_tensors.py": {
        "or from before infinity.gathered(..., write=True) c": "runtime/test_errors.py::"
        "test_backward_after_step_on_old_weights_is_an_error",
    },
    "runtime/tiles.py": {
        "(after infinity.load_pretrained(path, config, defe": "checkpoint/test_tiles.py::"
        "test_weights_of_a_tiled_model_are_read_again_when_it_is_offloaded_anew",
        "Take model.parameters() again, after the optimizer is made.": "integrations/test_module_of_optimizer.py::"
        "test_a_list_with_the_weight_of_a_layer_that_was_tiled_says_so_when_it_is_asked_for_gradients",
        "freeze the layer with layer.requires_grad_(False)": "runtime/test_tiles.py::"
        "test_the_whole_weight_is_read_and_never_changed_in_vain",
    },
    "runtime/commit_api.py": {
        "name one: infinity.track(..., model=model)": "runtime/test_loops.py::"
        "test_where_there_are_no_models_or_several_track_says_what_to_give",
        "call infinity.offload(model, config) before infinity.track(...)": "runtime/test_loops.py::"
        "test_where_there_are_no_models_or_several_track_says_what_to_give",
    },
    "units/released_parameters.py": {
        "forward, or in `with infinity.gathered(model, module):`, ": "runtime/test_released.py::"
        "test_where_the_error_says_that_values_are_they_are",
        "infinity.save_pretrained(model, directory) writes them": "runtime/test_released.py::"
        "test_where_the_error_says_that_values_are_they_are",
        "or load it with infinity.load_pretrained(path, dtype=...). ": "runtime/test_errors.py::"
        "test_a_conversion_is_done_before_the_model_is_offloaded_or_as_it_is_loaded",
        "of infinity, such as infinity.AdamW(model.parameters()": "runtime/test_released.py::"
        "test_a_weight_that_an_optimizer_of_torch_cannot_change_is_changed_by_one_of_infinity",
        "elsewhere use `with infinity.gathered(model, module):`, ": "runtime/test_errors.py::"
        "test_changing_a_weight_in_place_outside_the_forward_raises_whatever_is_on_the_device",
        "Change it in `with infinity.gathered(model, module, wri": "runtime/test_nested.py::"
        "test_a_forward_that_writes_to_a_released_weight_is_refused",
        "other.load_state_dict(model.state_dict()). <>": "runtime/test_errors.py::test_nothing_passes_placeholders_on",
    },
    "units/parameters.py": {
        "lost. Make it in `with infinity.gathered(model, module, wri": "runtime/test_errors.py::"
        "test_changing_a_weight_in_place_in_a_forward_is_noticed",
    },
}
"""Sentences by file: a part of each sentence, and the test below tests/ that follows the advice of the sentence."""
