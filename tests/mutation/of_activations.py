"""Mutants of the tier of activations: the order of copies, the lifetime of memory, and errors."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_TIER = "infinity/tiers/activations.py"
_ORDER = "infinity/plan/activation_order.py"
_SCHEDULES = ("tests/sim/test_activations.py",)
_RUNS = ("tests/runtime/test_activations.py",)
_SCRATCH = ("tests/io/test_scratch.py",)
_LEARNED = ("tests/plan/test_activation_order.py",)
_PIECES = ("tests/tiers/test_activations.py",)

OF_ACTIVATIONS = [
    Mutant(
        "a kept tensor is copied behind the kernels that compute it",
        _TIER,
        "        after = [self._accelerator.record(self._accelerator.current())]\n",
        "        after: list[Event] = []\n",
        _SCHEDULES,
    ),
    Mutant(
        "a kept tensor comes back behind the kernels that used its memory",
        _TIER,
        "        begin = [self._accelerator.record(self._accelerator.current())]\n",
        "        begin: list[Event] = []\n",
        _SCHEDULES,
    ),
    Mutant(
        "compute waits for a kept tensor that comes back",
        _TIER,
        "            self._copies.order(self._copies.current(), chunk.event)\n",
        "            pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "a kept tensor's memory is held until its copy has ended",
        _TIER,
        "                if not crowded:\n                    return\n"
        "                self._copies.order(piece.stream, event)\n",
        "                pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "compute waits for the copy of a kept tensor that must leave",
        _TIER,
        "                self._copies.order(piece.stream, event)\n            del",
        "                pass\n            del",
        _SCHEDULES,
    ),
    Mutant(
        "memory that was copied ahead in vain is freed behind its copy",
        _TIER,
        "                self._copies.order(piece.stream, chunk.event)\n",
        "                pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "memory whose tensor is gone is held until its copy has ended",
        _TIER,
        "            chunk.source = piece.source\n",
        "            chunk.source = None\n",
        _SCHEDULES,
    ),
    Mutant(
        "a kept tensor is written behind its copy",
        _TIER,
        "self._scratch.write(chunk.place, lease.view(), after=landed)",
        "self._scratch.write(chunk.place, lease.view(), after=None)",
        _SCHEDULES,
    ),
    Mutant(
        "the event of a copy lives until the write behind it has ended",
        _TIER,
        "lease, event=event, down=event)",
        "lease, event=event)",
        ("tests/tiers/test_activations.py",),
    ),
    Mutant(
        "host memory is free behind the copy that uses it",
        _TIER,
        "            self._copies.synchronize(chunk.event)\n",
        "            pass\n",
        _SCHEDULES,
    ),
    Mutant(
        "host memory that may be in use is not idle",
        _TIER,
        "        return (chunk.transfer is None or chunk.transfer.done()) and self._copies.reached(chunk.event)\n",
        "        return chunk.transfer is None or chunk.transfer.done()\n",
        _SCHEDULES,
    ),
    Mutant(
        "a chunk is copied behind its read",
        _TIER,
        "        if read:\n            self._wait(chunk, piece)\n",
        "",
        _SCHEDULES + _RUNS,
    ),
    Mutant(
        "a kept tensor that was changed in place is an error",
        _TIER,
        "        unchanged(moved.witness, moved.version, moved.size)\n",
        "",
        _RUNS,
    ),
    Mutant(
        "a storage of another version is another piece",
        _TIER,
        "self.storage() is not None and self.version == tensor._version and not freed",
        "self.storage() is not None and not freed",
        _RUNS,
    ),
    Mutant(
        "a freed storage is another piece",
        _TIER,
        "self.storage() is not None and self.version == tensor._version and not freed",
        "self.version == tensor._version and not freed",
        _RUNS,
    ),
    Mutant(
        "a piece lives as long as one of its tensors",
        _TIER,
        "            if piece.handles == 0:\n",
        "            if piece.unused == 0:\n",
        _RUNS,
    ),
    Mutant(
        "a lost tensor is an error",
        _TIER,
        "            piece.failed = piece.failed or transfer\n",
        "            pass\n",
        _RUNS,
    ),
    Mutant(
        "an error does not keep its graph",
        _TIER,
        "        except SwapIOError:\n            piece.failed",
        "        except SwapIOError as error:\n            piece.raised = error  # type: ignore[attr-defined]\n"
        "            piece.failed",
        _RUNS,
    ),
    Mutant(
        "a scratch file has no name",
        "infinity/io/scratch.py",
        "                os.unlink(path)\n",
        "",
        _SCRATCH,
    ),
    Mutant(
        "scratch files have checksums",
        "infinity/io/scratch.py",
        "            file.keep_checksums(size)\n",
        "            pass\n",
        _SCRATCH,
    ),
    Mutant(
        "what stays is limited",
        _ORDER,
        "number in kept.like.stays and nbytes <= kept.room:",
        "number in kept.like.stays:",
        _LEARNED,
    ),
    Mutant(
        "memory that a kept tensor borrows has no other use",
        _TIER,
        "        weakref.finalize(view, self._returned.append, lease).atexit = False\n",
        "        self._returned.append(lease)\n",
        _PIECES,
    ),
    Mutant(
        "some memory is never borrowed",
        _TIER,
        " and borrowed <= self._space.nbytes // 2\n",
        "\n",
        _PIECES,
    ),
]
