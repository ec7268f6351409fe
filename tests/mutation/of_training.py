"""Mutants of what trains: units, updates, commits, the optimizers' pipeline."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_RESUME = "tests/runtime/test_resume.py"
_LOOPS = "tests/runtime/test_loops.py"
_GATHERED = "tests/runtime/test_gathered.py"
_RELEASED = "tests/runtime/test_released.py"
_OVERLAP = "tests/runtime/test_overlap.py"

OF_TRAINING = [
    Mutant(
        "commit_every: auto asks whether the disk has room",
        "infinity/plan/planner.py",
        "    if missing > 0 and not resumes:\n",
        "    if missing > 0 and False:\n",
        ("tests/plan/test_frequency.py",),
    ),
    Mutant(
        "what due() answered for a step stays",
        "infinity/durable/pace.py",
        "        return step % self._asked_every == 0\n",
        "        return step % self._every == 0\n",
        ("tests/durable/test_pace.py",),
    ),
    Mutant(
        "the fdatasync of the swap file",
        "infinity/durable/commits.py",
        "            self._commit.synced(self._resources.require_store().sync())\n",
        '            self._commit.synced(type("Done", (), {"result": lambda _: None, "done": lambda _: True})())\n',
        ("tests/crash/test_power_loss.py",),
    ),
    Mutant(
        "the wait for the fdatasync, and so its result",
        "infinity/durable/commits.py",
        "        commit.sync.result()\n",
        "",
        (_RESUME, "-k", "failed_fdatasync"),
    ),
    Mutant(
        "a commit is finished before the next step",
        "infinity/durable/commits.py",
        "        if self.frozen:\n            self.finish()\n",
        "",
        (_RESUME, "-k", "that_was_decided"),
    ),
    Mutant(
        "the manifest after the fdatasync, not before",
        "infinity/durable/commits.py",
        "        commit.sync.result()\n        generations.make(commit.step, facts_of(self._resources), body)\n",
        "        generations.make(commit.step, facts_of(self._resources), body)\n        commit.sync.result()\n",
        (_RESUME, "-k", "failed_fdatasync"),
    ),
    Mutant(
        "the loop is noted when its loader is asked",
        "infinity/durable/tracked.py",
        "        if self._between:\n            self.iteration_ended()\n",
        "        pass\n",
        (_LOOPS, "-k", "wherever"),
    ),
    Mutant(
        "what is in RAM is written before a commit",
        "infinity/durable/commits.py",
        "        self._write_dirty()\n",
        "",
        (_RESUME,),
    ),
    Mutant(
        "a commit's writes have ended before the fdatasync",
        "infinity/durable/commits.py",
        "        finally:\n            wait_all(writes)\n",
        "        finally:\n            pass\n",
        (_RESUME, "-k", "failed_write"),
    ),
    Mutant(
        "nothing is committed while an exception is on its way",
        "infinity/coordinator/coordinator.py",
        "        broken = broken or sys.exc_info()[0] is not None\n",
        "",
        (_RESUME, "-k", "exception"),
    ),
    Mutant(
        "a group that goes to another copy goes there as a whole",
        "infinity/units/update.py",
        "        whole=streams.elsewhere,\n",
        "        whole=False,\n",
        (_RESUME, "-k", "buffers_frozen"),
    ),
    Mutant(
        "the checksums of the states in an update",
        "csrc/update/tile.cpp",
        "    if (damage[index]) return;\n",
        "    damage[index].reset();\n",
        ("tests/runtime/test_faults.py", "tests/native/test_update.py"),
    ),
    Mutant(
        "the failed transfer of an update's tile",
        "csrc/update/driver.cpp",
        "  if (failure) fail(job, *failure);\n",
        "",
        ("tests/runtime/test_faults.py", "tests/native/test_update.py"),
    ),
    Mutant(
        "the wait for an update's writes",
        "csrc/update/driver.cpp",
        "    transfer(tile, OpKind::write, states);\n",
        "    transfer(tile, OpKind::write, states);\n    tile->pending = 0;\n    leave(tile);\n",
        ("tests/runtime/test_faults.py", "tests/native/test_update.py", "tests/crash/test_power_loss.py"),
    ),
    Mutant(
        "updates go where no generation is",
        "csrc/update/tile.cpp",
        "  const std::uint64_t offset = kind == OpKind::read ? stream.offset : stream.write_offset;\n",
        "  const std::uint64_t offset = stream.offset;\n",
        (_RESUME,),
    ),
    Mutant(
        "a commit undoes speculative updates",
        "infinity/coordinator/coordinator.py",
        "        self._speculator.drop()  # they write where others may write now\n",
        "",
        (_OVERLAP, "-k", "commit_between"),
    ),
    Mutant(
        "an update does not begin with weights that are stale",
        "infinity/units/weights.py",
        " or self.residency is Residency.STALE else",
        " else",
        (_OVERLAP, "-k", "second_step"),
    ),
    Mutant(
        "views that were taken of an earlier slot count",
        "infinity/units/room.py",
        "        if moves and self._is_viewed(slot):\n",
        "        if moves and slot.outstanding():\n",
        (_OVERLAP, "-k", "view_of_weights"),
    ),
    Mutant(
        "a written weight has a master of its value",
        "infinity/coordinator/gathering.py",
        "            write_parts(resources, states.residual, fresh)\n",
        "            pass\n",
        (_GATHERED, "-k", "master_of_exactly"),
    ),
    Mutant(
        "what is written by hand goes where no generation is",
        "infinity/coordinator/ingest.py",
        "    copy = resources.destination(extent)\n",
        "    copy = extent.copy\n",
        (_GATHERED, "-k", "crash"),
    ),
    Mutant(
        "what was written by hand after a commit is committed at the end",
        "infinity/durable/commits.py",
        "        self._touched = self.newest is not None\n",
        "",
        (_GATHERED, "-k", "resumed"),
    ),
    Mutant(
        "parameters are closed when the forward ends",
        "infinity/runtime/hooks.py",
        "        self.coordinator.forward_ends()\n",
        "        self.coordinator.readers.forward_ends()\n",
        (_RELEASED, "-k", "outside"),
    ),
    Mutant(
        "a weight is lent to those only who may read",
        "infinity/coordinator/coordinator.py",
        "        if not self.readers.may_read:\n",
        "        if False:\n",
        (_RELEASED, "-k", "outside"),
    ),
    Mutant(
        "nothing of an update that was undone is in flight",
        "infinity/units/updates.py",
        "            failure = _wait_canceled(transfers)\n",
        "            failure = None\n",
        ("tests/units/test_updates.py",),
    ),
    Mutant(
        "gradients that were lost are missed until they are forgotten",
        "infinity/tiers/window.py",
        "            self._failure = error\n            self._release(_Where.EMPTY)\n",
        "            self._release(_Where.EMPTY)\n",
        ("tests/tiers/test_window.py",),
    ),
    Mutant(
        "a unit that somebody holds views of does not go",
        "infinity/units/room.py",
        "        return not weights.referred_to()\n",
        "        return True\n",
        ("tests/units/test_room.py", "-k", "does_not_go"),
    ),
    Mutant(
        "weights saved for backward are refused after an update",
        "infinity/units/room.py",
        "        unit.weights.bump()\n",
        "",
        ("tests/runtime/test_errors.py", "-k", "old_weights"),
    ),
    Mutant(
        "offloading anew reads only files that are as they were",
        "infinity/runtime/anew.py",
        "isinstance(source, Lasting) and source.unchanged()",
        "isinstance(source, Lasting)",
        ("tests/runtime/test_anew.py",),
    ),
    Mutant(
        "offloading anew keeps all bits of the master",
        "infinity/coordinator/exact.py",
        "    if states is None or states.residual is None or not spec.numel:\n",
        "    if True:\n",
        ("tests/runtime/test_anew.py",),
    ),
    Mutant(
        "a model with gradients is not offloaded anew",
        "infinity/runtime/anew.py",
        "    if why:\n",
        "    if False:\n",
        ("tests/runtime/test_anew.py",),
    ),
]
