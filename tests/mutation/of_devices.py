"""Mutants of the order of a device's work, and of native threads' work for the device."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_HELD = ("tests/native/test_held_updates.py", "tests/native/test_landings.py")
_UPLOADS = ("tests/native/test_uploads.py",)

OF_DEVICES = [
    Mutant(
        "an update waits for all its inputs",
        "csrc/update/driver.cpp",
        "  } else if (--job->awaited == 0) {\n",
        "  } else {\n",
        _HELD,
    ),
    Mutant(
        "an update fails with its inputs",
        "csrc/update/driver.cpp",
        "    drop_held(take_held(job->future), *failure);\n",
        "    enter(take_held(job->future));\n",
        _HELD,
    ),
    Mutant(
        "the wait for a gradient's event",
        "csrc/device/landings.cpp",
        "    if (!broken && event != nullptr) broken = gate->synchronize(event);\n",
        "",
        ("tests/native/test_landings.py",),
    ),
    Mutant(
        "nothing lands after an error of the device",
        "csrc/device/landings.cpp",
        "    future.complete(broken);\n",
        "    future.complete(std::exchange(broken, std::nullopt));\n",
        ("tests/native/test_landings.py",),
    ),
    Mutant(
        "an upload waits for the last use of the slot",
        "csrc/device/upload_driver.cpp",
        "  auto failure = queue_waits(job);\n",
        "  std::optional<Failure> failure;\n",
        _UPLOADS,
    ),
    Mutant(
        "the wait before a piece of the bounce buffer is used again",
        "csrc/device/upload_driver.cpp",
        "  if (const auto failure = gate_->synchronize(oldest->piece.event)) {\n",
        "  if (const std::optional<Failure> failure; failure) {\n",
        _UPLOADS,
    ),
    Mutant(
        "the wait for the copies of a failed upload",
        "csrc/device/upload_driver.cpp",
        "  wait_for_copies(job);\n",
        "",
        _UPLOADS,
    ),
    Mutant(
        "the wait for the copies when uploads close",
        "csrc/device/upload_driver.cpp",
        "  wait_for_all_copies();\n}\n\n// Queues",
        "}\n\n// Queues",
        _UPLOADS,
    ),
    Mutant(
        "the failed read of an upload",
        "csrc/device/upload_driver.cpp",
        "    if (failure) fail(job, *failure);\n",
        "",
        _UPLOADS,
    ),
    Mutant(
        "a part of an upload waits for its weights",
        "csrc/device/upload_driver.cpp",
        "    job->arrived.push_back(after == nullptr);\n",
        "    job->arrived.push_back(true);\n",
        _UPLOADS,
    ),
    Mutant(
        "an upload waits for the last uses of its slot",
        "infinity/tiers/uploads.py",
        "pairs = [(into.memory[:plain], home[:plain], into.after)]",
        "pairs = [(into.memory[:plain], home[:plain], ())]",
        ("tests/tiers/test_uploads.py",),
    ),
    Mutant(
        "a slot is given back with its last uses",
        "infinity/tiers/slots.py",
        "self._slab.give_back(self._leased, self._uses.events() or [self._ready])",
        "self._slab.give_back(self._leased, [])",
        ("tests/tiers/test_slots.py",),
    ),
    Mutant(
        "a slot that nobody used is reused behind its decoding",
        "infinity/tiers/slots.py",
        "self._uses.events() or [self._ready])",
        "self._uses.events())",
        ("tests/tiers/test_slots.py", "-k", "behind_its_decoding"),
    ),
    Mutant(
        "a home changes once no copy reads it",
        "infinity/tiers/uploads.py",
        "            self._accelerator.synchronize(self._reading[-1])\n",
        "",
        ("tests/tiers/test_uploads.py",),
    ),
    Mutant(
        "the ring is given back behind the copy down",
        "infinity/tiers/downloads.py",
        "self._ring.give_back(packed.lease, [packed.landing.event])",
        "self._ring.give_back(packed.lease, [])",
        ("tests/tiers/test_downloads.py",),
    ),
    Mutant(
        "a gradient takes the place of one that has landed",
        "infinity/units/gradients.py",
        "if not add and down.sent(spec.name):",
        "if False:",
        ("tests/units/test_gradients.py",),
    ),
]
