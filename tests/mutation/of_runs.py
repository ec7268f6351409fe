"""Mutants of `infinity finetune`: what lies beside an output, what a run goes on with, and what is read."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_MEANWHILE = "tests/cli/test_meanwhile.py"
_RUN_FILE = "tests/cli/test_run_file.py"

OF_RUNS = [
    Mutant(
        "directories of other runs stay as they are",
        "infinity/cli/marked.py",
        "        if not ours:\n",
        "        if False:\n",
        (_MEANWHILE, "-k", "another_run"),
    ),
    Mutant(
        "models of steps that are done again go",
        "infinity/cli/saved_steps.py",
        " or (number is not None and number > done):\n",
        ":\n",
        (_MEANWHILE, "-k", "half_made"),
    ),
    Mutant(
        "without a limit no model of a step goes",
        "infinity/cli/saved_steps.py",
        "        if self._limit is not None:\n            old |= ",
        "        if True:\n            old |= ",
        (_MEANWHILE, "-k", "another_interval"),
    ),
    Mutant(
        "a best model that was not saved is not named",
        "infinity/cli/saved_steps.py",
        "if best.step == self._linked_step() else",
        "if True else",
        (_MEANWHILE, "-k", "not_claimed"),
    ),
    Mutant(
        "random numbers of loggers",
        "infinity/cli/loggers.py",
        "            rng.restore(drawn)\n",
        "            pass\n",
        (_MEANWHILE, "-k", "random_numbers"),
    ),
    Mutant(
        "TensorBoard is written again from its beginning",
        "infinity/cli/loggers.py",
        "purge_step=0)",
        "purge_step=None)",
        (_MEANWHILE, "-k", "interrupted_run"),
    ),
    Mutant(
        "code is trusted by each process anew",
        "infinity/cli/models.py",
        '"trust_remote_code": bool(options.trust_remote_code)}',
        '"trust_remote_code": True}',
        ("tests/cli/test_remote_code.py",),
    ),
    Mutant(
        "the command of the report names the model that the run began with",
        "infinity/cli/again.py",
        '(values_of(options) | {"model": origin.model})',
        "values_of(options)",
        (_RUN_FILE, "-k", "from_a_copy"),
    ),
    Mutant(
        "a role that nobody knows",
        "infinity/cli/records.py",
        "    _require_roles(messages, where, tokenizer)\n",
        "",
        ("tests/cli/test_data.py", "-k", "another_shape"),
    ),
]
