"""Mutants of `infinity finetune`: the files beside an output, the resumed state of a run, and its input."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_STEPS = "tests/cli/test_step_watch.py"
_RUN_FILE = "tests/cli/test_run_file.py"

OF_RUNS = [
    Mutant(
        "directories of other runs stay as they are",
        "infinity/cli/ownership_mark.py",
        "        if not ours:\n",
        "        if False:\n",
        (_STEPS, "-k", "another_run"),
    ),
    Mutant(
        "how often models are saved may change when a run goes on",
        "infinity/cli/trainer.py",
        "        self.state.compute_steps(self.args, self.args.max_steps)",
        "        pass",
        (_STEPS, "-k", "another_interval"),
    ),
    Mutant(
        "the last model is the output and no best model beside it",
        "infinity/cli/step_watch.py",
        "is_best and state.global_step < state.max_steps:",
        "is_best:",
        (_STEPS, "-k", "not_saved_twice"),
    ),
    Mutant(
        "a best model that was not saved is not named",
        "infinity/cli/run_directory.py",
        'places.get(best.step, "its model could not be saved")',
        "folder_of(directory, best.step)",
        (_STEPS, "-k", "not_claimed"),
    ),
    Mutant(
        "each rank draws random numbers of its own",
        "infinity/cli/trainer.py",
        "        rng.restore(drawn)  # a Trainer gives all ranks one seed, but each rank needs its own numbers\n",
        "",
        ("tests/cli/test_several_ranks.py", "-k", "of_its_own"),
    ),
    Mutant(
        "nothing is learned of rows that fill up",
        "infinity/cli/trainers.py",
        ".masked_fill(filling[:, None], TokenBatch.NOTHING)",
        "",
        ("tests/cli/test_evaluation.py", "-k", "mean_over"),
    ),
    Mutant(
        "each token that is learned counts the same",
        "infinity/cli/trainers.py",
        "model(**inputs).loss * share",
        "model(**inputs).loss / self.current_gradient_accumulation_steps",
        ("tests/cli/test_training.py", "-k", "answers"),
    ),
    Mutant(
        "random numbers of evaluations",
        "infinity/cli/trainer.py",
        "            rng.restore(drawn)\n",
        "            pass\n",
        (_STEPS, "-k", "change_nothing"),
    ),
    Mutant(
        "an evaluation that an interruption prevented is done when the run goes on",
        "infinity/cli/training.py",
        "self._data.held_out is not None and bool(due) and not there",
        "False",
        ("tests/cli/test_evaluation.py", "-k", "stopped_run"),
    ),
    Mutant(
        "code is trusted by each process anew",
        "infinity/cli/finetuned_model.py",
        '"trust_remote_code": bool(options.trust_remote_code)}',
        '"trust_remote_code": True}',
        ("tests/cli/test_remote_code.py",),
    ),
    Mutant(
        "the command of the report names the model that the run began with",
        "infinity/cli/rerun_command.py",
        '"model": origin.model, "trainer": None}',
        '"trainer": None}',
        (_RUN_FILE, "-k", "from_a_copy"),
    ),
    Mutant(
        "a role that nobody knows",
        "infinity/cli/training_examples.py",
        "if meant not in ROLES and not self.names(meant):",
        "if False:",
        ("tests/cli/test_data.py", "-k", "another_shape"),
    ),
]
