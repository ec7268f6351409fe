"""The training job that is killed.

It has every kind of state that a resumed run can restore, in a model of a few thousand parameters.

The job resumes from the state on its disk, or starts a new run. The job appends its progress to a log outside the swap
directories: how the process began, each step's loss, and each generation whose final name appeared. A later process
(life) of the job appends to the same log.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.durable.commits import Commits
from infinity.io import atomic_file, directory, engine, generation_pins, store
from infinity.plan import planner
from infinity.runtime.pins import pin, pinned, unpin
from infinity.tiers import activations, state_writer
from tests.conftest import residuals_of, states_of, weights_of
from tests.mixture import Mixture
from tests.sim.fixtures import Simulation
from tests.sim.queues import random_policy

WIDTH = 32
SAVES = (2, 4)
ACT, LIFE, PROMISE, AWAITED = b"A", b"L", b"P", b"K"
"""Letters of this job's own records in the engine's journal.

ACT: an operation on a small file. LIFE: a process that begins. PROMISE: a generation that the run considers durable.
AWAITED: a sync that the run has waited for.
"""
RECORD = struct.Struct("<c7xQqQQQ")
"""Header of a journal record (csrc/aio/backend.hpp): letter, number, result, offset, bytes of data and of the path.

The data and the path follow the header.
"""


@dataclass(frozen=True)
class Setup:
    """Settings that differ between jobs.

    Attributes:
        loader: whether batches are read beside two forked workers, which hang when the job is killed.
        pins: number of pins of the store, one for each checkpoint folder; the job saves a folder after each step in
            SAVES.
        resident: units that keep all their states on a simulated device: none of them, the second, or all.
        experts: whether a block is a mixture of experts, each of which is a unit.
    """

    weights: Literal["host", "nvme", "auto"] = "nvme"
    optimizer: Literal["host", "nvme", "device"] = "nvme"
    engine: Literal["io_uring", "threads"] = "io_uring"
    commit_every: int = 1
    keep: int = 1
    paths: int = 1
    steps: int = 6
    loader: bool = False
    pins: int = 0
    overlap: Literal["auto", "during_backward"] = "auto"
    frozen: Literal["auto", "int8", "nf4"] = "auto"
    activations: Literal["keep", "nvme"] = "keep"
    resident: Literal["none", "some", "all"] = "none"
    experts: bool = False

    def directories(self, root: Path) -> list[Path]:
        return [root / "disk" / f"swap{index}" for index in range(self.paths)]

    def config(self, root: Path) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "overlap": self.overlap,
            "activations": self.activations,
            "memory": {"device": "80KiB" if self.resident == "none" else "1MiB", "host": "16MiB"},
            "nvme": {"paths": [str(path) for path in self.directories(root)], "engine": self.engine, "block": "16KiB"},
            "update": {"tile": "8KiB", "threads": 1},
            "commit_every": self.commit_every,
            "keep": self.keep,
            "pins": self.pins,
            "frozen": self.frozen,
        }

    def __str__(self) -> str:
        disks = f" on {self.paths} paths" if self.paths > 1 else ""
        return (
            f"weights {self.weights}, optimizer {self.optimizer}, {self.engine}{disks}, commit_every "
            f"{self.commit_every}, keep {self.keep}, overlap {self.overlap}, frozen {self.frozen}, activations "
            f"{self.activations}, resident {self.resident}{', experts apart' * self.experts}"
        )


@dataclass(frozen=True)
class AtAct:
    """Kill the job when `moment` ("begin rename", …) occurs for the `nth` time (from 0) for a file of the
    kind `file`.
    """

    moment: str
    file: str
    nth: int = 0


@dataclass(frozen=True)
class AtOperation:
    """Let the engine kill the job at an operation: see Fault."""

    kind: Literal["kill", "kill_after"]
    operation: Literal["read", "write", "sync"]
    index: int = 0
    begin: int = 0
    end: int = 2**64 - 1

    @property
    def numbers_all_writes(self) -> bool:
        """Whether `index` counts all writes of the run. If not, it counts only the writes to one range."""
        return self.operation == "write" and (self.begin, self.end) == (0, 2**64 - 1)


@dataclass(frozen=True)
class AtTime:
    """Kill the job from outside, `seconds` after its process was started."""

    seconds: float


@dataclass(frozen=True)
class AtPiece:
    """Kill the job at a piece of a state on its way from the device to the store.

    Attributes:
        moment: "copied": the copy of the piece to host memory is queued; "written": its write is queued, too.
        nth: number of the piece in the life, from 0.
    """

    moment: Literal["copied", "written"]
    nth: int


Kill = AtAct | AtOperation | AtTime | AtPiece


class Block(nn.Module):
    """bf16 matrices and an fp32 norm; one matrix is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH).bfloat16()
        self.fixed = nn.Linear(2 * WIDTH, 2 * WIDTH).bfloat16().requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH, WIDTH).bfloat16()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.fixed(torch.relu(self.up(self.norm(x).bfloat16())))
        return x + self.dropout(self.down(inner).float())


class Tiny(nn.Module):
    """Three blocks, a parameter with a gradient in every other step only, and a buffer that changes.

    Args:
        experts: the second block is a mixture of experts, each of which is a unit.
    """

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if experts:
            self.blocks[1] = Mixture(WIDTH, experts=8).bfloat16()
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        self.seen += x.detach().mean(0)
        for block in self.blocks:
            x = block(x)
        return ((x * self.gate if gated else x) ** 2).mean() + self.seen.mean() ** 2


class Rows:
    """Shuffled rows, epoch after epoch, with noise from torch's own generator; its state_dict has the position."""

    def __init__(self) -> None:
        self._rows = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(5))
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            epoch, batch = divmod(self._at, 3)
            order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
            self._at += 1
            rows = self._rows[order[8 * batch : 8 * batch + 8]]
            yield rows + 0.1 * torch.randn(rows.shape) * random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class Hanging(torch.utils.data.Dataset[int]):
    """Dataset that returns two rows and then hangs, like one that reads from a dead network disk."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= 2:
            signal.pause()
        return index


def append(log: Path, line: str) -> None:
    """Append a line with a single write, so that a kill leaves complete lines."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def kind_of(path: Path) -> str:
    """Return the kind of a small file, which may still have its temporary name.

    The kinds are "header", "manifest", "swap", "directory", "pins", "pinned" (the manifest of a pinned generation) and
    "marker".
    """
    name = path.name.removesuffix(atomic_file.ASIDE)
    kinds = {directory.HEADER_NAME: "header", directory.SWAP_NAME: "swap"}
    kinds |= {generation_pins.PINS_NAME: "pins", generation_pins.MARKER_NAME: "marker"}
    beginnings = {"generation-": "manifest", "pinned-": "pinned"}
    return kinds.get(name) or next((kind for each, kind in beginnings.items() if name.startswith(each)), "directory")


def live(setup: Setup, root: Path, kill: Kill | None = None, journal: Path | None = None) -> None:
    """Run the job in this process, to its end or until it is killed. The result is written to a file."""
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            stack.enter_context(atomic_file.observed(Watch(root / "log", kill)))
            if journal is not None:
                Journal(journal).record(stack)
            if setup.resident != "none":
                stack.enter_context(_simulated_device(setup, root, kill))
            _run(setup, root, _faults(kill))
    except BaseException:
        (root / "error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _faults(kill: Kill | None) -> list[_native.Fault]:
    if not isinstance(kill, AtOperation):
        return []
    return [_native.Fault(kill.index, kill.kind, operation=kill.operation, begin=kill.begin, end=kill.end)]


class Watch:
    """Observer of file operations that logs each generation when its manifest appears, and kills the process at the
    requested moment.
    """

    def __init__(self, log: Path, kill: Kill | None) -> None:
        self._log = log
        self._kill = kill if isinstance(kill, AtAct) else None
        self._seen = 0

    def __call__(self, moment: str, path: Path, target: Path | None, data: bytes) -> None:
        if moment == "end rename" and target is not None and kind_of(target) == "manifest":
            append(self._log, f"commit {step_of(target)}")
        if self._kill is None or (moment, kind_of(path)) != (self._kill.moment, self._kill.file):
            return
        self._seen += 1
        if self._seen > self._kill.nth:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _simulated_device(setup: Setup, root: Path, kill: Kill | None) -> Iterator[None]:
    """Let the job compute on a simulated device, and kill the process at the requested piece of a state. At the end,
    the number of pieces is written to a file.
    """
    pieces = {"copied": 0, "written": 0}

    def counted(moment: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = method(*given)
            if result is not False:  # the ring had no room for a piece
                if isinstance(kill, AtPiece) and (kill.moment, kill.nth) == (moment, pieces[moment]):
                    os.kill(os.getpid(), signal.SIGKILL)
                pieces[moment] += 1
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        if setup.resident == "some":
            patch.setattr(planner, "resident_units", lambda *given, **options: frozenset({1}))
        patch.setattr(state_writer, "_PIECE_BYTES", 4096)
        for moment, name in (("copied", "_copy"), ("written", "_begin_piece")):
            patch.setattr(state_writer.StateWriter, name, counted(moment, getattr(state_writer.StateWriter, name)))
        simulation = Simulation(patch, random_policy(0))
        yield
        simulation.finish()
    (root / "pieces").write_text(str(pieces["written"]))


def step_of(manifest: Path) -> int:
    return int(manifest.name.split("-")[1][:12])


class Journal:
    """Recorder that adds operations on small files, and generations that the run considers durable, to the engine's
    journal. The journal has one order for all records, including the engine's writes and syncs. Fsyncs are recorded at
    the system call, not when `durable` reports them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._append(LIFE)

    def record(self, stack: ExitStack) -> None:
        """Record from now on."""
        opened = functools.partial(_native.IOEngine, journal=str(self.path))
        stack.enter_context(atomic_file.observed(self._act))
        stack.enter_context(mock.patch.object(engine, "_native", SimpleNamespace(IOEngine=opened)))
        stack.enter_context(mock.patch.object(os, "fsync", functools.partial(self._fsync, os.fsync)))
        stack.enter_context(mock.patch.object(store.SwapStore, "sync", self._syncing(store.SwapStore.sync)))
        stack.enter_context(mock.patch.object(Commits, "finish", self._promising(Commits.finish)))

    def _act(self, moment: str, path: Path, target: Path | None, data: bytes) -> None:
        if "fsync" not in moment:
            self._append(ACT, "\0".join((moment, str(path), str(target or ""))).encode(), data)

    def _fsync(self, fsync: Callable[[int], None], descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self._append(ACT, f"begin fsync\0{path}\0".encode())
        fsync(descriptor)
        self._append(ACT, f"end fsync\0{path}\0".encode())

    def _syncing(self, sync: Callable[[store.SwapStore], engine.Transfer]) -> Callable[[store.SwapStore], Any]:
        def recorded(of: store.SwapStore) -> Any:
            transfer = sync(of)
            return SimpleNamespace(done=transfer.done, result=lambda: (transfer.result(), self._append(AWAITED)))

        return recorded

    def _promising(self, finish: Callable[..., None]) -> Callable[..., None]:
        def recorded(commits: Commits, **options: Any) -> None:
            finish(commits, **options)
            self._append(PROMISE, number=commits.newest or 0)

        return recorded

    def _append(self, letter: bytes, names: bytes = b"", data: bytes = b"", *, number: int = 0) -> None:
        os.write(self._descriptor, RECORD.pack(letter, number, 0, 0, len(data), len(names)) + names + data)


def _open(model: nn.Module, setup: Setup, root: Path, faults: list[_native.Fault]) -> nn.Module:
    """Resume the run, or start a new run if there is nothing to resume. infinity.offload refuses to start a new run if
    there is something to resume.
    """
    (root / "disk").mkdir(exist_ok=True)
    config, device = setup.config(root), None if setup.resident == "none" else "cpu"
    activations.PIECE_BYTES_MIN = 256  # this process trains nothing else
    try:
        return infinity.resume(model, config, device=device, faults=faults)
    except infinity.ResumeError as error:
        append(root / "log", f"nothing {error}")
    return infinity.offload(model, config, device=device, faults=faults)


def _run(setup: Setup, root: Path, faults: list[_native.Fault]) -> None:
    log = root / "log"
    store._probe = lambda *_: 1e9  # so that the disks are not measured
    store.STRIPE_BYTES = 4096  # stripes are small, because the states would not fill a stripe of the usual size
    torch.manual_seed(0)
    random.seed(0)
    model = _open(Tiny(experts=setup.experts), setup, root, faults)
    optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step))
    rows = Rows()
    done = infinity.track(scheduler, rows)
    append(log, f"began {done}")
    batches = _rows_and_workers(rows, log) if setup.loader else iter(rows)
    for step in range(done, setup.steps):
        loss = model(next(batches), gated=step % 2 == 1)
        loss.backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
        append(log, f"loss {step + 1} {loss.item().hex()}")
        if setup.pins and step + 1 in SAVES:
            _save(model, setup, root, step + 1)
    infinity.commit(model)
    _write_result(model, scheduler, root)
    infinity.close(model)


def _save(model: nn.Module, setup: Setup, root: Path, step: int) -> None:
    """Save a checkpoint folder. If all pins are in use, unpin the oldest folder first."""
    folder = root / "disk" / f"checkpoint-{step}"
    others = [each for each in pinned(model) if each != folder]
    for each in others[: len(others) + 1 - setup.pins]:
        unpin(model, each)
    pin(model, folder)
    append(root / "log", f"saved {step} {digest_of(model)}")


def look(setup: Setup, root: Path, folder: Path) -> None:
    """Resume from the generation that a folder pins, log its digest, and exit the process."""
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.ERROR)
    store._probe = lambda *_: 1e9
    store.STRIPE_BYTES = 4096
    model = infinity.resume(Tiny(experts=setup.experts), setup.config(root), folder=folder)
    append(root / "log", f"found {step_in(folder)} {digest_of(model)}")
    os._exit(0)


def step_in(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _rows_and_workers(rows: Rows, log: Path) -> Iterator[torch.Tensor]:
    """Yield the rows unchanged. Once the model is in use, fork two workers, which soon hang."""
    # a separate generator, so that torch's generator draws the same numbers as without a loader
    generator = torch.Generator()
    hanging = torch.utils.data.DataLoader(Hanging(), num_workers=2, multiprocessing_context="fork", generator=generator)
    loader = None
    for batch in rows:
        yield batch
        if loader is None:
            loader = iter(hanging)
            next(loader), next(loader)  # both workers have started
            append(log, "workers " + " ".join(str(child.pid) for child in multiprocessing.active_children()))


def digest_of(model: Tiny, *more: object) -> str:
    """Return a digest of all states and buffers."""
    digest = hashlib.sha256("".join(map(repr, more)).encode())
    for name, value in [*weights_of(model).items(), *states_of(model).items(), ("seen", model.seen)]:
        digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, value in residuals_of(model):
        digest.update(name.encode() + value)
    return digest.hexdigest()


def _write_result(model: Tiny, scheduler: Any, root: Path) -> None:
    digest = digest_of(model, scheduler.state_dict()["last_epoch"])
    extents = [
        {
            "state": extent.state,
            "begin": extent.offsets[0],
            "end": extent.offsets[-1] + extent.nbytes,
            "changes": len(extent.offsets) > 1,
        }
        for extent in registry.coordinator_of(model).resources.generations._extents
    ]
    (root / "result").write_text(json.dumps({"digest": digest, "extents": extents}))
