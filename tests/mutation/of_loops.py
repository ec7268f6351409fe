"""Mutants of the saved state of a loop, of writes between steps, and of rows that select the learned tokens."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_LOOPS, _PUT_BACK, _FIELDS = (
    "tests/runtime/test_loop_tops.py",
    "tests/runtime/test_put_back.py",
    "tests/cli/test_dataset_rows.py",
)

OF_LOOPS = [
    Mutant(
        "a commit that is begun again is no step's end",
        "infinity/coordinator/coordinator.py",
        "self.commits.begin_again(self.steps)",
        "self.commits.begin(self.steps)",
        (_LOOPS, "-k", "around_its_item"),
    ),
    Mutant(
        "a write behind the loop's top finds the commit frozen",
        "infinity/durable/commits.py",
        "not self.frozen and self.tracking.at_top and self._maker.decides_alone:",
        "False:",
        (_LOOPS, "-k", "around_its_item"),
    ),
    Mutant(
        "a commit waits for the loop's top",
        "infinity/durable/commits.py",
        "if self.tracking.has_data and not self.tracking.at_top and not self._several_steps_an_item:",
        "if len(self._optimizers) > 1 and not self.tracking.at_top:",
        (_LOOPS, "-k", "around_its_item"),
    ),
    Mutant(
        "several steps for an item are learned",
        "infinity/durable/commits.py",
        "            self._several_steps_an_item = True\n",
        "            pass\n",
        (_LOOPS, "-k", "several_steps"),
    ),
    Mutant(
        "gradients that no step has used",
        "infinity/durable/commits.py",
        "        if noted.gradients:\n",
        "        if False:\n",
        (_LOOPS, "-k", "gradients_that_a_step"),
    ),
    Mutant(
        "a forward whose backward may come",
        "infinity/durable/commits.py",
        "        if noted.graphs:\n",
        "        if False:\n",
        (_LOOPS, "-k", "taken_before_its_iteration"),
    ),
    Mutant(
        "weights that a write leaves alone keep their masters",
        "infinity/coordinator/masters_before_write.py",
        "        fresh[same] = rest[same]\n",
        "",
        (_PUT_BACK,),
    ),
    Mutant(
        "masters come back with their weights",
        "infinity/coordinator/masters_before_write.py",
        "        fresh[was.at[back]] = was.rest[back]\n",
        "",
        (_PUT_BACK,),
    ),
    Mutant(
        "a step forgets old masters",
        "infinity/coordinator/coordinator.py",
        "        self.masters.forget()\n",
        "",
        (_PUT_BACK, "-k", "after_a_step"),
    ),
    Mutant(
        "a message that is not to be learned",
        "infinity/cli/training_examples.py",
        "answers[number - 1] is not False",
        "answers[number - 1] is not None",
        (_FIELDS,),
    ),
    Mutant(
        "a text that does not repeat an instruction and its output",
        "infinity/cli/dataset_rows.py",
        "return isinstance(value, str) and all(",
        "return True or all(",
        (_FIELDS,),
    ),
]
