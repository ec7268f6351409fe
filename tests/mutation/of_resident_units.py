"""Mutants of resident units: the order of uses of their memory, their commits, and when they are refused."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_USES = ("tests/tiers/test_resident.py",)
_WRITER = ("tests/tiers/test_state_writer.py",)
_GRADIENTS = ("tests/units/test_resident_gradients.py",)
_RUNS = ("tests/sim/test_resident.py",)
_RANKS = ("tests/sim/test_ranks.py",)
_PLAN = ("tests/plan/test_resident_units.py",)

OF_RESIDENT_UNITS = [
    Mutant(
        "a read on the device waits for the last write",
        "infinity/tiers/resident.py",
        "        self._wait_for_write(here)\n        self._readers[here] = None\n",
        "        self._readers[here] = None\n",
        _USES,
    ),
    Mutant(
        "a write on the device waits for the last write",
        "infinity/tiers/resident.py",
        "        self._wait_for_write(here)\n        for stream, event in self._readers.items():\n",
        "        for stream, event in self._readers.items():\n",
        _USES,
    ),
    Mutant(
        "a write on the device waits for reads of other streams",
        "infinity/tiers/resident.py",
        "            if stream != here:\n",
        "            if False:\n",
        _USES,
    ),
    Mutant(
        "a write on the device waits for copies to the store",
        "infinity/tiers/resident.py",
        "        for event in self._copies:\n",
        "        for event in ():\n",
        _USES,
    ),
    Mutant(
        "reads that go on after a write are waited for",
        "infinity/tiers/resident.py",
        "{stream: None for stream, event in self._readers.items() if event is None}",
        "{}",
        _USES,
    ),
    Mutant(
        "a read within other reads does not end them",
        "infinity/tiers/resident.py",
        "            if not goes_on:\n",
        "            if True:\n",
        _USES,
    ),
    Mutant(
        "states are copied for a commit when they are computed",
        "infinity/tiers/state_writer.py",
        "lease, memory.uses.written)",
        "lease, [])",
        _WRITER,
    ),
    Mutant(
        "the next update waits for the copies of a commit",
        "infinity/tiers/state_writer.py",
        "        memory.uses.copied(event)\n",
        "",
        _WRITER,
    ),
    Mutant(
        "a piece is written to the store when its copy is done",
        "infinity/tiers/state_writer.py",
        "            after=landed,\n",
        "",
        _WRITER,
    ),
    Mutant(
        "a commit of the device's states ends when all their bytes are written",
        "infinity/tiers/state_writer.py",
        "return self.pieces == 0 and (",
        "return (",
        _WRITER,
    ),
    Mutant(
        "gradients that become fp32 in place do not overwrite those that are still to be converted",
        "infinity/units/resident_gradients.py",
        "begin = (end + 1) // 2\n",
        "begin = end // 2\n",
        _GRADIENTS,
    ),
    Mutant(
        "a gradient is added behind what other streams did",
        "infinity/units/resident_gradients.py",
        "        with self.memory.uses.writing():\n            if add:\n",
        "        with self.memory.uses.reading():\n            if add:\n",
        _GRADIENTS,
    ),
    Mutant(
        "an update waits for sums of squares in its temporary memory",
        "infinity/units/resident_gradients.py",
        "            uses.enter_context(self._scratch.uses.writing())\n",
        "",
        _RUNS,
    ),
    Mutant(
        "an update waits for the last use of its temporary memory",
        "infinity/units/resident_update.py",
        "(weight, flag, scratch, *states)",
        "(weight, flag, *states)",
        _RUNS,
    ),
    Mutant(
        "an update is ordered before the next forward's reads",
        "infinity/units/resident_update.py",
        "uses.enter_context(each.writing())",
        "uses.enter_context(each.reading())",
        _RUNS,
    ),
    Mutant(
        "arithmetic that changes during a run stops it",
        "infinity/units/resident_update.py",
        "            if verdict.difference is not None:\n",
        "            if False:\n",
        _RUNS,
    ),
    Mutant(
        "states whose arithmetic differs stay in RAM",
        "infinity/plan/resident_units.py",
        "and (reason := refusal())",
        "and False",
        _RUNS,
    ),
    Mutant(
        "a resident unit's gradients have room for a second backward pass",
        "infinity/plan/plan_input.py",
        "    return passes != 1 or config.vertical\n",
        "    return config.vertical\n",
        _RUNS,
    ),
    Mutant(
        "memory of resident units begins as zeros, as states in the store do",
        "infinity/tiers/resources.py",
        "        clear(memory)\n",
        "        pass\n",
        _RUNS,
    ),
    Mutant(
        "after a piece that never ends no further piece begins",
        "infinity/tiers/state_writer.py",
        "write.failure = write.failure or self._cut_off",
        "pass",
        _WRITER,
    ),
    Mutant(
        "Ctrl-C does not come while a piece gets memory",
        "infinity/tiers/state_writer.py",
        "with interrupts_deferred():",
        "if True:",
        _WRITER,
    ),
    Mutant(
        "the memory of resident units is given back when the model is closed",
        "infinity/tiers/resources.py",
        "            for unit in self.units:\n                unit.give_back()\n",
        "",
        (*_RUNS, "-k", "memory_is_free"),
    ),
    Mutant(
        "with weights: device the weights of all units are counted",
        "infinity/plan/resident_units.py",
        'if config.weights != "device":',
        "if True:",
        ("tests/plan/test_resident_units.py",),
    ),
    Mutant(
        "the ring leaves activations their half beside resident units",
        "infinity/plan/budgets.py",
        "limits.device if limits.activations is None and not resident else limits.beside_activations",
        "limits.device",
        ("tests/plan/test_resident_units.py",),
    ),
    Mutant(
        "weights and gradients go up when the update before has used their memory",
        "infinity/tiers/operands.py",
        "        with buffer.uses.writing(self._up):\n",
        "        with buffer.uses.reading(self._up):\n",
        _RANKS,
    ),
    Mutant(
        "new weights go to RAM behind their update",
        "infinity/tiers/operands.py",
        "        with operands.weight.uses.reading(self._stream):\n",
        "        if True:\n",
        _RANKS,
    ),
    Mutant(
        "a rank tells the others of new weights when they have come from the device",
        "infinity/units/resident_update.py",
        "        return self.landed\n\n    def done",
        "        return None\n\n    def done",
        _RANKS,
    ),
    Mutant(
        "new weights are written to the store when they have come from the device",
        "infinity/units/resident_update.py",
        "copy_index=each.copy_index, after=landed.future",
        "copy_index=each.copy_index",
        _RANKS,
    ),
    Mutant(
        "ranks that do not share all weights keep their states in RAM",
        "infinity/plan/resident_units.py",
        '    if limits.gathers or (limits.slice_count and config.weights == "nvme"):\n',
        "    if False:\n",
        _RANKS,
    ),
    Mutant(
        "the gradients of updates on the device have room in RAM",
        "infinity/plan/placement.py",
        "        if inputs.updated_there <= each.in_ram:",
        "        if True:",
        _PLAN,
    ),
]
