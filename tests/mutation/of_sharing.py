"""Mutants of memory that ranks share: who waits for whom, and who frees it."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_HOMES = "tests/sharded/test_shared_homes.py"
_MAILBOXES = "tests/sharded/test_mailboxes.py"
_MEMORY = "tests/ranks/test_shared_memory.py"
_WORLD = "tests/sharded/test_sharing_world.py"
_ALONE = "tests/runtime/test_rank_alone.py"
_WRITES = "tests/runtime/test_rank_writes.py"
_DEVICES = "tests/sim/test_ranks.py"
_SLOW = (_DEVICES, "-k", "slow_upload")

_DECIDE = """        with self.health.failing(PeerError), self.timeline.stall("gradient"):
            decided = self.gradients.decide({**facts, "the step": self.steps + 1}, skip, self.commits.payload())
"""

OF_SHARING = [
    Mutant(
        "a fetch waits for the slices of all ranks",
        "infinity/sharded/shared_slots.py",
        "        if behind:\n",
        "        if False:\n",
        (_HOMES, "-k", "a_fetch_waits"),
    ),
    Mutant(
        "a prefetch begins when all ranks have the version",
        "infinity/sharded/shared_slots.py",
        " and not self._shared.behind(unit.index, unit.version)",
        "",
        (_HOMES, "-k", "is_not_prefetched"),
    ),
    Mutant(
        "a version is published when the update is computed",
        "infinity/sharded/shared_homes.py",
        "                each.written.result()\n",
        "                pass\n",
        (_HOMES, "-k", "before_they_are_published"),
    ),
    Mutant(
        "a rank whose update failed tells the others, which wait for its weights",
        "infinity/sharded/shared_homes.py",
        "                self._world.fail(error)  #",
        "                pass  #",
        (_HOMES, "-k", "before_they_are_published"),
    ),
    Mutant(
        "new weights in a shadow are copied to the slice",
        "infinity/sharded/shared_homes.py",
        "            if each.memory is not None and each.moves:\n",
        "            if False:\n",
        (_HOMES, "-k", "before_they_are_published"),
    ),
    Mutant(
        "an update ends after its publication",
        "infinity/units/update.py",
        "        return works if self.publication is None else [*works, self.publication]\n",
        "        return works\n",
        ("tests/units/test_update.py", "-k", "publication"),
    ),
    Mutant(
        "the last rank that closes frees the memory",
        "infinity/sharded/shared_arena.py",
        " == self._cut.count - 1:\n",
        " == 0:\n",
        (_HOMES, "-k", "given_back_by_the_last"),
    ),
    Mutant(
        "a piece is read when it is complete",
        "infinity/sharded/mailboxes.py",
        "            self._wait(self._ready(rank), check)\n",
        "",
        (_MAILBOXES, "-k", "same_exchange"),
    ),
    Mutant(
        "a region is written again when all have read it",
        "infinity/sharded/mailboxes.py",
        "            self._wait(self._copied(rank), check)\n",
        "            pass\n",
        (_MAILBOXES, "-k", "same_exchange"),
    ),
    Mutant(
        "gradients are complete before other ranks read them",
        "infinity/sharded/outbox.py",
        "                after=[*landed, partial(_zero_missing, box, shard, group_index)],\n",
        "                after=[partial(_zero_missing, box, shard, group_index)],\n",
        (_DEVICES,),
    ),
    Mutant(
        "a half of the window is filled once all ranks have copied what was in it",
        "infinity/sharded/device_gather_memory.py",
        "            is_free = self._users[0] is user\n",
        "            is_free = True\n",
        (_DEVICES,),
    ),
    Mutant(
        "slices stay in the window until they are on the device",
        "infinity/sharded/mailboxes.py",
        "        copies.wait(check)\n",
        "",
        (_DEVICES,),
    ),
    Mutant(
        "a slot is written when its bytes have no other use on the device",
        "infinity/sharded/device_gather_memory.py",
        "        copies.after += slot.after\n",
        "",
        (_DEVICES,),
    ),
    Mutant(
        "a rank ends its uploads before the others write the weights",
        "infinity/coordinator/coordinator.py",
        "            self.fetcher.finish_fetches()\n            self.resources.synchronize_uploads()\n",
        "            self.fetcher.finish_fetches()\n",
        _SLOW,
    ),
    Mutant(
        "a rank agrees on a step after its uploads have ended",
        "infinity/coordinator/coordinator.py",
        "        self._rest_for_step()\n        self.gradients.drop_cleared(self.places)\n" + _DECIDE,
        "        self.gradients.drop_cleared(self.places)\n" + _DECIDE + "        self._rest_for_step()\n",
        _SLOW,
    ),
    Mutant(
        "nobody writes weights while another rank compares them",
        "infinity/access/gathering.py",
        '    coordinator.world.tell("comparing weights", None)\n',
        "",
        (_WRITES,),
    ),
    Mutant(
        "another user is not given the memory",
        "infinity/ranks/shared_memory.py",
        "                if _user_of(connected) == os.getuid():\n",
        "                if True:\n",
        (_MEMORY, "-k", "is_passed_nothing"),
    ),
    Mutant(
        "one rank says for all that they share no memory",
        "infinity/sharded/rank_agreement.py",
        " and ranks.local_world == ranks.world and world.leads:\n",
        " and ranks.local_world == ranks.world:\n",
        (_MEMORY, "-k", "one_line"),
    ),
    Mutant(
        "the size of the memory is sealed",
        "infinity/ranks/shared_memory.py",
        "                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)\n",
        "                pass\n",
        (_MEMORY, "-k", "size_is_sealed"),
    ),
    Mutant(
        "rank 0 does its work without the others",
        "infinity/sharded/sharing_world.py",
        "        if not self.leads:\n",
        '        self.tell(what.partition("/")[0], None)\n        if not self.leads:\n',
        (_ALONE,),
    ),
    Mutant(
        "another rank waits for the work of rank 0",
        "infinity/ranks/collective_queue.py",
        "            if len(ends) >= number:\n",
        "            if len(same) >= number:\n                return '', ''\n            if len(ends) >= number:\n",
        (_WORLD, "-k", "waits_for_the_work"),
    ),
    Mutant(
        "the host of the store ends when all ranks know that it leaves",
        "infinity/ranks/watch.py",
        "        if self._works:\n            self._stay_until_heard()\n",
        "",
        (_ALONE, "-k", "rank_0_has_ended"),
    ),
    Mutant(
        "the error of rank 0 is the error of all",
        "infinity/sharded/sharing_world.py",
        "            if kind:\n",
        "            if False:\n",
        (_WORLD, "-k", "error_of_all"),
    ),
]
