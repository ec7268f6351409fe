"""What each mutant takes away, and the tests that must then fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one file that a test must notice.

    Attributes:
        name: what is taken away.
        path: the file; `old` occurs in it once and becomes `new`.
        tests: arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def native(self) -> bool:
        return self.path.startswith("csrc/")


_RESUME = "tests/runtime/test_resume.py"
_LOOPS = "tests/runtime/test_loops.py"
_GATHERED = "tests/runtime/test_gathered.py"
_RELEASED = "tests/runtime/test_released.py"
_OVERLAP = "tests/runtime/test_overlap.py"
_CRASH = ("tests/crash/test_kill.py", "tests/crash/test_power_loss.py")
_CORRUPTION = "tests/runtime/test_corruption.py"
_PINS = ("tests/io/test_pins.py", "tests/crash/test_pins.py")
_DURABLE = "tests/io/test_durable.py"
_HEADERS = ("tests/io/test_headers.py",)
_FINISHED = ("tests/cli/test_finished.py",)
_FAULTS = ("tests/native/test_engine_faults.py", "tests/runtime/test_faults.py")

MUTANTS = [
    Mutant(
        "note of a finished run before its store goes",
        "infinity/cli/finished.py",
        "        durable.write_file(first / FINISHED_NAME, [note.model_dump_json().encode()])\n",
        "",
        _FINISHED,
    ),
    Mutant(
        "store of another run stays when a run is finished",
        "infinity/io/directory.py",
        "                if read_header(directory.header_path).run == run:\n",
        "                if True:\n",
        _FINISHED,
    ),
    Mutant(
        "note of an earlier end of the run is not believed",
        "infinity/cli/finished.py",
        "run == note.run and newest <= note.steps else None",
        "run == note.run else None",
        _FINISHED,
    ),
    Mutant(
        "next run removes the note of a finished one",
        "infinity/io/directory.py",
        "        left = os.path.lexists(self.header_path)\n        durable.remove(self.path / FINISHED_NAME)\n",
        "        left = os.path.lexists(self.header_path)\n",
        _FINISHED,
    ),
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
        "fsync of a manifest before its rename",
        "infinity/io/durable.py",
        '            with act("fsync", aside):\n                os.fsync(descriptor)\n',
        '            with act("fsync", aside):\n                pass\n',
        (_DURABLE,),
    ),
    Mutant(
        "fsync act of a manifest before its rename, as a power cut sees it",
        "infinity/io/durable.py",
        '            with act("fsync", aside):\n                os.fsync(descriptor)\n',
        "            pass\n",
        ("tests/crash/test_power_loss.py",),
    ),
    Mutant(
        "fsync of the directory after a rename",
        "infinity/io/durable.py",
        "    sync_directory(path.parent)\n",
        "",
        (_DURABLE,),
    ),
    Mutant(
        "fsync of the directory before the older manifest goes",
        "infinity/io/durable.py",
        "    sync_directory(path.parent)\n",
        "",
        ("tests/crash/test_power_loss.py",),
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
        "a copy that no generation names for what is written next",
        "infinity/io/generations.py",
        "        if extent.copy not in self._named(extent):\n            return extent.copy\n",
        "        return extent.copy\n",
        _CRASH,
    ),
    Mutant(
        "older manifests go after the new one, not before",
        "infinity/io/generations.py",
        "        durable.write_file(path, write_manifest(manifest))\n",
        "        for old in sorted(self._kept):\n"
        "            durable.remove(directory.generation_path(old))\n"
        "        durable.write_file(path, write_manifest(manifest))\n",
        _CRASH,
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
        "the fsync of the directory before a resume goes on",
        "infinity/io/generations.py",
        "        durable.sync_directory(directory.path)\n        found = directory.generations()\n",
        "        found = directory.generations()\n",
        (_LOOPS, "-k", "fsyncs"),
    ),
    Mutant(
        "a copy that a pinned generation names is not written",
        "infinity/io/generations.py",
        "for named in (self._kept, self._pinned) for copies",
        "for named in (self._kept,) for copies",
        _PINS,
    ),
    Mutant(
        "a resume protects the generations that folders pin",
        "infinity/io/generations.py",
        "        self._pinned = pinned\n",
        "",
        _PINS,
    ),
    Mutant(
        "pins that could not be written leave protected what was pinned before",
        "infinity/io/generations.py",
        "        self._pins.write(pins)\n        named = {pin.digest for pin in self._pins.entries}\n",
        "        pins = list(pins)\n        named = {pin.digest for pin in pins}\n"
        "        self._pinned = {digest: copies for digest, copies in self._pinned.items() if digest in named}\n"
        "        self._pins.write(pins)\n",
        _PINS,
    ),
    Mutant(
        "the marker of a folder goes before its pin",
        "infinity/io/generations.py",
        "        self._pins.unmark(pin)\n"
        "        self._write_pins(each for each in self._pins.entries if each is not pin)\n",
        "        self._write_pins(each for each in self._pins.entries if each is not pin)\n"
        "        self._pins.unmark(pin)\n",
        _PINS,
    ),
    Mutant(
        "the pin of a folder is durable before its marker",
        "infinity/io/generations.py",
        "        self._write_pins(pins)\n        self._pins.mark(new, marked)\n",
        "        self._pins.mark(new, marked)\n        self._write_pins(pins)\n",
        _PINS,
    ),
    Mutant(
        "an older marker goes before a folder pins another generation",
        "infinity/io/generations.py",
        "        remove_marker(folder)\n",
        "",
        _PINS,
    ),
    Mutant(
        "a pinned generation has a manifest of its own before the pin",
        "infinity/io/generations.py",
        "            durable.write_file(self._directory.path / new.manifest_name, [manifest])\n        self._pinned[",
        "            pass\n        self._pinned[",
        _PINS,
    ),
    Mutant(
        "a run that went back is found where it went",
        "infinity/io/generations.py",
        "durable.write_file(self._directory.generation_path(self.newest), [self._unsettled.manifest])\n",
        "pass\n",
        _PINS,
    ),
    Mutant(
        "a pin whose folder has no marker is let go",
        "infinity/io/generations.py",
        "            if self._pins.over(pin):\n                continue\n",
        "",
        (*_PINS, "tests/runtime/test_pins.py"),
    ),
    Mutant(
        "a folder that is written again does not look resumable meanwhile",
        "infinity/checkpoint/pinned.py",
        "    remove_marker(place)\n",
        "",
        ("tests/crash/test_pins.py", "tests/checkpoint/test_pinned.py"),
    ),
    Mutant(
        "a rebuilt header is written once a generation was whole, not before",
        "infinity/io/store.py",
        '                logger.warning("%s", each.rebuilt)\n',
        "                path = self.directories[each.header.member].header_path\n"
        "                durable.write_file(path, write_header(each.header))\n",
        _HEADERS,
    ),
    Mutant(
        "checksums prove a rebuilt header",
        "infinity/io/whole.py",
        "            _require_provable(store, manifest)\n",
        "",
        _HEADERS,
    ),
    Mutant(
        "a rebuilt header goes only where some of the generation lies",
        "infinity/io/store.py",
        "        if unproven:\n",
        "        if False:\n",
        _HEADERS,
    ),
    Mutant(
        "a manifest that cannot be read now is not given up",
        "infinity/io/whole.py",
        "        require_readable(manifest)\n        try:\n",
        "        try:\n",
        _HEADERS,
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
        "all of a generation is checked before it is resumed",
        "infinity/io/whole.py",
        "            _require_undamaged(list(verify(store, extents, manifest, memory)))\n",
        "            list(verify(store, extents, manifest, memory))\n",
        (_CORRUPTION,),
    ),
    Mutant(
        "the checksum of a manifest",
        "infinity/io/document.py",
        "    if data[:end] != _header(kind, written, json_bytes, data_bytes, _digest(written, memoryview(data)[end:]))",
        "    if False",
        ("tests/io/test_document.py", _CORRUPTION),
    ),
    Mutant(
        "nothing is committed while an exception is on its way",
        "infinity/coordinator/coordinator.py",
        "        broken = broken or sys.exc_info()[0] is not None\n",
        "",
        (_RESUME, "-k", "exception"),
    ),
    Mutant(
        "children close the lock",
        "infinity/io/directory.py",
        "        fork.close_in_children(self)\n",
        "",
        ("tests/io/test_directory.py", "tests/crash/test_kill.py"),
    ),
    Mutant(
        "a lock that is another file, too, is not written to",
        "infinity/io/directory.py",
        "            if mine.st_nlink > 1:\n                os.unlink(path)\n",
        "            return True\n",
        ("tests/io/test_directory.py",),
    ),
    Mutant(
        "only regular files are read",
        "infinity/files.py",
        "        if not stat.S_ISREG(found.st_mode):\n",
        "        if False:\n",
        ("tests/test_files.py", "--timeout", "60"),
    ),
    Mutant(
        "two extents of a manifest have no byte in common",
        "infinity/io/manifest.py",
        '    _require_apart(columns["offset"], columns["nbytes"])\n',
        "",
        ("tests/io/test_manifest.py",),
    ),
    Mutant(
        "a copy's files are compared with their checksums",
        "infinity/checkpoint/portable.py",
        "                if digest != sums[file.relative_to(self.directory).as_posix()]:\n",
        "                if False:\n",
        ("tests/checkpoint/test_carry_on.py", "-k", "damaged_file"),
    ),
    Mutant(
        "a header of another run is none of the store's",
        "infinity/io/headers.py",
        "len(runs) == 1 and each.run not in runs:\n",
        "False:\n",
        ("tests/cli/test_checkpoint.py", "-k", "foreign or another_run"),
    ),
    Mutant(
        "a group that goes to another copy goes there as a whole",
        "infinity/units/update.py",
        "        whole=streams.elsewhere,\n",
        "        whole=False,\n",
        (_RESUME, "-k", "buffers_frozen"),
    ),
    Mutant(
        "the result of a sync",
        "csrc/aio/lane_thread.cpp",
        '      if (result.res < 0) request.fail(block.failure(-result.res, ""));\n    } else if',
        "    } else if",
        ("tests/native/test_engine_sync.py",),
    ),
    Mutant(
        "the error of a transfer",
        "csrc/aio/lane_thread.cpp",
        '      request.fail(block.failure(error, ""));\n    } else if',
        "    } else if",
        _FAULTS,
    ),
    Mutant(
        "a short transfer goes on",
        "csrc/aio/lane_thread.cpp",
        "      if (!request.failed() && continue_short(block, static_cast<std::uint32_t>(result.res))) return;\n",
        "",
        _FAULTS,
    ),
    Mutant(
        "the checksums of a fetch",
        "csrc/aio/lane_thread.cpp",
        "      if (request.io.kind == OpKind::read && !request.failed()) verify(block);\n",
        "",
        _FAULTS,
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
        "fdatasync by the threads",
        "csrc/aio/thread_backend.cpp",
        "    if (op.kind == OpKind::sync) return fdatasync(op.file->fd()) == 0 ? 0 : -errno;\n",
        "    if (op.kind == OpKind::sync) return 0;\n",
        ("tests/native/test_engine_sync.py",),
    ),
    Mutant(
        "fdatasync by io_uring",
        "csrc/aio/uring_backend.cpp",
        "      io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);\n",
        "      io_uring_prep_nop(sqe);\n",
        ("tests/native/test_engine_sync.py",),
    ),
    Mutant(
        "fdatasync of every member",
        "csrc/aio/engine.cpp",
        "    if (io.kind == OpKind::sync) touched = all;\n",
        "    if (io.kind == OpKind::sync) touched = 1;\n",
        ("tests/native/test_engine_sync.py",),
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
        " and self.residency is not Residency.STALE:\n",
        ":\n",
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
        "resumed run keeps the room for pins that its store has",
        "infinity/integrations/folders.py",
        '    return config.model_copy(update={"pins": pins})\n',
        "    return config\n",
        ("tests/integrations/test_accelerate.py",),
    ),
    Mutant(
        "forked process lets no generation go",
        "infinity/integrations/folders.py",
        "        ours = os.getpid() == process  #",
        "        ours = True  #",
        ("tests/integrations/test_models.py",),
    ),
]
