"""Mutants of storage: the engine, the store, generations, pins, and their removal."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_LOOPS = "tests/runtime/test_loops.py"
_CRASH = ("tests/crash/test_kill.py", "tests/crash/test_power_loss.py")
_CORRUPTION = "tests/runtime/test_corruption.py"
_PINS = ("tests/io/test_generation_pins.py", "tests/crash/test_pins.py")
_DURABLE = "tests/io/test_atomic_file.py"
_HEADERS = ("tests/io/test_headers.py",)
_FINISHED = ("tests/cli/test_finished_run.py",)
_FAULTS = ("tests/native/test_engine_faults.py", "tests/runtime/test_faults.py")

OF_STORAGE = [
    Mutant(
        "note of a finished run before its store goes",
        "infinity/cli/finished_run.py",
        "        atomic_file.write_file(first / FINISHED_NAME, [note.model_dump_json().encode()])\n",
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
        "infinity/cli/finished_run.py",
        "        return None if of_others or further else note\n",
        "        return None if of_others else note\n",
        _FINISHED,
    ),
    Mutant(
        "next run removes the note of a finished one",
        "infinity/io/directory.py",
        "        left = os.path.lexists(self.header_path)\n        atomic_file.remove(self.path / FINISHED_NAME)\n",
        "        left = os.path.lexists(self.header_path)\n",
        _FINISHED,
    ),
    Mutant(
        "fsync of a manifest before its rename",
        "infinity/io/atomic_file.py",
        '            with act("fsync", aside):\n                os.fsync(descriptor)\n',
        '            with act("fsync", aside):\n                pass\n',
        (_DURABLE,),
    ),
    Mutant(
        "fsync act of a manifest before its rename, as a power cut sees it",
        "infinity/io/atomic_file.py",
        '            with act("fsync", aside):\n                os.fsync(descriptor)\n',
        "            pass\n",
        ("tests/crash/test_power_loss.py",),
    ),
    Mutant(
        "fsync of the directory after a rename",
        "infinity/io/atomic_file.py",
        "    sync_directory(path.parent)\n",
        "",
        (_DURABLE,),
    ),
    Mutant(
        "fsync of the directory before the older manifest goes",
        "infinity/io/atomic_file.py",
        "    sync_directory(path.parent)\n",
        "",
        ("tests/crash/test_power_loss.py",),
    ),
    Mutant(
        "a copy that no generation names for what is written next",
        "infinity/io/generations.py",
        "        if extent.newest_copy not in self._named(extent):\n            return extent.newest_copy\n",
        "        return extent.newest_copy\n",
        _CRASH,
    ),
    Mutant(
        "older manifests go after the new one, not before",
        "infinity/io/generations.py",
        "        atomic_file.write_file(path, write_manifest(manifest))\n",
        "        for old in sorted(self._kept):\n"
        "            atomic_file.remove(directory.generation_path(old))\n"
        "        atomic_file.write_file(path, write_manifest(manifest))\n",
        _CRASH,
    ),
    Mutant(
        "the fsync of the directory before a resume goes on",
        "infinity/io/generations.py",
        "        atomic_file.sync_directory(directory.path)\n        found = directory.generations()\n",
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
        "        self._write_pins([*(pin for pin in self._pins.entries if pin.folder != new.folder), new])\n",
        "        self._pins.entries = [*(pin for pin in self._pins.entries if pin.folder != new.folder), new]\n",
        _PINS,
    ),
    Mutant(
        "an older marker goes before a folder pins another generation",
        "infinity/io/generation_pins.py",
        "    remove_marker(folder)\n",
        "",
        _PINS,
    ),
    Mutant(
        "a pinned generation has a manifest of its own before the pin",
        "infinity/io/generations.py",
        "            atomic_file.write_file(self._directory.path / new.manifest_name, [manifest])\n"
        "        self._pinned[",
        "            pass\n        self._pinned[",
        _PINS,
    ),
    Mutant(
        "a run that went back is found where it went",
        "infinity/io/generations.py",
        "atomic_file.write_file(self._directory.generation_path(self.newest), [self._pending_recovery.manifest])\n",
        "pass\n",
        _PINS,
    ),
    Mutant(
        "a pin whose folder has no marker is let go",
        "infinity/io/generations.py",
        "            if self._pins.over(pin) or pin.folder not in",
        "            if pin.folder not in",
        (*_PINS, "tests/runtime/test_pins.py"),
    ),
    Mutant(
        "a folder that is written again does not look resumable meanwhile",
        "infinity/checkpoint/pinned.py",
        "lambda: remove_marker(place))",
        "lambda: None)",
        ("tests/crash/test_pins.py", "tests/checkpoint/test_pinned.py"),
    ),
    Mutant(
        "a rebuilt header is written once a generation was whole, not before",
        "infinity/io/store.py",
        '            logger.warning("%s", each.rebuilt)\n',
        "            path = self.directories[each.header.member].header_path\n"
        "            durable.write_file(path, write_header(each.header))\n",
        _HEADERS,
    ),
    Mutant(
        "checksums prove a rebuilt header",
        "infinity/io/generation_scan.py",
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
        "infinity/io/generation_scan.py",
        "            require_readable(error)\n            problems.append(",
        "            problems.append(",
        _HEADERS,
    ),
    Mutant(
        "all of a generation is checked before it is resumed",
        "infinity/io/generation_scan.py",
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
        ("tests/checkpoint/test_from_portable.py", "-k", "damaged_file"),
    ),
    Mutant(
        "a header of another run is none of the store's",
        "infinity/io/headers.py",
        "len(runs) == 1 and each.run not in runs:\n",
        "False:\n",
        ("tests/cli/test_checkpoint.py", "-k", "foreign or another_run"),
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
        "resumed run keeps the room for pins that its store has",
        "infinity/integrations/checkpoint_folders.py",
        '    return config.model_copy(update={"pins": pins})\n',
        "    return config\n",
        ("tests/integrations/test_accelerate.py",),
    ),
    Mutant(
        "forked process lets no generation go",
        "infinity/integrations/checkpoint_folders.py",
        "        ours = os.getpid() == process  #",
        "        ours = True  #",
        ("tests/integrations/test_from_pretrained.py",),
    ),
    Mutant(
        "a model that is loaded twice draws the random numbers of one that is loaded once",
        "infinity/checkpoint/load_pretrained.py",
        "        rng.restore(before)\n        found = attempt(",
        "        found = attempt(",
        ("tests/checkpoint/test_missing_tensors.py",),
    ),
    Mutant(
        "loading waits for what it wrote before the memory is used again",
        "infinity/access/ingest.py",
        "            wait_all(transfers)\n        except SwapTimeoutError:",
        "            pass\n        except SwapTimeoutError:",
        ("tests/access/test_ingest_writes.py",),
    ),
    Mutant(
        "an update that does not speculate leaves its weights in the slot",
        "infinity/plan/link_traffic.py",
        "unit.trained_weight and unit.index in stale",
        "unit.trained_weight",
        ("tests/plan/test_link_traffic.py",),
    ),
]
