"""Mutants of the seam to a device: each wait, each event and each last use is taken away."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_SCHEDULES = ("tests/sim/test_schedules.py",)
_DISTURBED = ("tests/sim/test_disturbed.py",)
_SEAM = ("tests/sim", "tests/tiers")

OF_SEAM = [
    Mutant(
        "an upload from RAM waits for the last use of its bytes",
        "infinity/tiers/uploads.py",
        "on=self._stream, after=into.after)",
        "on=self._stream)",
        _SCHEDULES,
    ),
    Mutant(
        "an upload from NVMe is told of the last use of its bytes",
        "infinity/tiers/uploads.py",
        "waits=[self._accelerator.handle(event) for event in into.after],",
        "waits=[],",
        _SCHEDULES,
    ),
    Mutant(
        "a lease knows who used its bytes before",
        "infinity/tiers/slab.py",
        "        return SlabLease(lease, self._memory[begin : begin + nbytes], after)\n",
        "        return SlabLease(lease, self._memory[begin : begin + nbytes], ())\n",
        _SCHEDULES,
    ),
    Mutant(
        "who computes waits for the upload",
        "infinity/tiers/slots.py",
        "        self._uses.begin()\n",
        "        return\n",
        _SCHEDULES,
    ),
    Mutant(
        "who begins to use memory waits for what came before",
        "infinity/tiers/slab.py",
        "                self._accelerator.wait(stream, event)\n",
        "                pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "a stream that uses memory again has a new last use",
        "infinity/tiers/slab.py",
        "        self._last[stream] = None\n",
        "        self._last.setdefault(stream, None)\n",
        _SCHEDULES,
    ),
    Mutant(
        "a slot is given back with its last uses",
        "infinity/tiers/slots.py",
        "self._slab.give_back(self._leased, self._uses.events())",
        "self._slab.give_back(self._leased, ())",
        _SCHEDULES,
    ),
    Mutant(
        "parameters of a unit at rest may not be read",
        "infinity/units/weights.py",
        "        if rests and self.require_slot().rest():\n            self._views.close()\n",
        "        if rests:\n            self.require_slot().rest()\n",
        _SCHEDULES,
    ),
    Mutant(
        "weights that somebody refers to do not rest",
        "infinity/units/weights.py",
        "not self.in_use and not self.referred_to()",
        "not self.in_use",
        _SCHEDULES,
    ),
    Mutant(
        "the stream that asks for weights waits for them",
        "infinity/coordinator/coordinator.py",
        "            slot.wait()  # the stream that asks may be another than the one it was brought for\n",
        "",
        _SEAM,
    ),
    Mutant(
        "who packs into the ring waits for the copy of what was there",
        "infinity/tiers/downloads.py",
        "        packed.uses.begin()\n",
        "",
        _SCHEDULES,
    ),
    Mutant(
        "a copy down waits for what was packed",
        "infinity/tiers/downloads.py",
        "on=self._stream, after=after\n",
        "on=self._stream\n",
        _SCHEDULES,
    ),
    Mutant(
        "a piece of the ring is given back with its copy",
        "infinity/tiers/downloads.py",
        "        self._ring.give_back(packed.lease, [event])\n",
        "        self._ring.give_back(packed.lease, [])\n",
        _SCHEDULES,
    ),
    Mutant(
        "a piece of the ring that nobody wants is given back with its uses",
        "infinity/tiers/downloads.py",
        "[*packed.lease.after, *packed.uses.events()]",
        "[]",
        _SCHEDULES,
    ),
    Mutant(
        "a landing waits for its copy",
        "infinity/tiers/downloads.py",
        "self._native.land(self._accelerator.handle(event), pieces)",
        "self._native.land(0, pieces)",
        _SCHEDULES,
    ),
    Mutant(
        "a bounce buffer is used until its gradients have landed",
        "infinity/tiers/downloads.py",
        "        self._bounced.append((landing, lease))\n",
        "        lease.release()\n",
        _SCHEDULES,
    ),
    Mutant(
        "an update waits for gradients on their way",
        "infinity/units/update.py",
        "[*gradients.on_their_way(), *weights.on_their_way]",
        "weights.on_their_way",
        _SCHEDULES,
    ),
    Mutant(
        "an update waits for weights on their way",
        "infinity/units/update.py",
        "[*gradients.on_their_way(), *weights.on_their_way]",
        "gradients.on_their_way()",
        _SCHEDULES,
    ),
    Mutant(
        "a copy of weights waits for their upload",
        "infinity/tiers/downloads.py",
        "on=self._stream, after=[ready])",
        "on=self._stream)",
        _SCHEDULES,
    ),
    Mutant(
        "a slot is used until its weights are copied",
        "infinity/tiers/slots.py",
        "            self._uses.also(copy.event)\n",
        "            pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "gradients leave for the store when they have landed",
        "infinity/tiers/window.py",
        'io_class="states", after=landed)',
        'io_class="states")',
        _SCHEDULES,
    ),
    Mutant(
        "gradients are widened when they have landed",
        "infinity/units/gradients.py",
        "        self.settle()\n        if not self._spilled and",
        "        if not self._spilled and",
        _SCHEDULES,
    ),
    Mutant(
        "gradients that are forgotten are waited for",
        "infinity/units/gradients.py",
        "            self._on_way[0].wait()\n            del",
        "            del",
        _SCHEDULES,
    ),
    Mutant(
        "weights at home are changed when no upload reads them",
        "infinity/coordinator/coordinator.py",
        "            self.resources.synchronize_uploads()\n",
        "            pass\n",
        _DISTURBED,
    ),
    Mutant(
        "the end waits for uploads",
        "infinity/tiers/uploads.py",
        "        self._accelerator.synchronize(self._accelerator.record(self._stream))\n",
        "",
        _DISTURBED,
    ),
    Mutant(
        "the end waits for gradients",
        "infinity/tiers/downloads.py",
        "        self._native.close()\n        self._accelerator.synchronize(self._accelerator.record(self._stream))\n"
        "\n    def _send",
        "        self._native.close()\n\n    def _send",
        _DISTURBED,
    ),
    Mutant(
        "a slot whose upload failed keeps its last uses",
        "infinity/tiers/slots.py",
        '        """Nothing is on its way there any more."""\n        self._slab.give_back(lease, lease.after)\n',
        '        """Nothing is on its way there any more."""\n        self._slab.give_back(lease, ())\n',
        _SEAM,
    ),
]
