"""Order and lifetimes at the device seam: what a missing wait, or memory reused too soon, would turn into wrong bits.

Each check queues a kernel that sleeps where the host runs ahead in training, and looks at the values afterwards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.cuda import DEVICE, Sleeper, current_device, pinned_arena
from infinity.io.arena import PinnedArena
from infinity.tiers.accelerator import CudaDevice, CudaSlot

_MIB = 1 << 20
_POISON = 0xEE


def open_seam() -> CudaDevice:
    return CudaDevice(current_device())


def _source(arena: PinnedArena, value: int, nbytes: int, at: int = 0) -> torch.Tensor:
    tensor = torch.frombuffer(arena.native.view(at, nbytes), dtype=torch.uint8)
    tensor.fill_(value)
    return tensor


def _poison(nbytes: int) -> None:
    """Leave memory that the next allocation of this size gets full of a value that no source has."""
    torch.full((nbytes,), _POISON, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()


def upload_overlaps(sleeper: Sleeper, *, queued_before: bool) -> dict[str, Any]:
    """Whether an upload ends while a kernel sleeps that was queued before it, or after it."""
    seam = open_seam()
    arena = pinned_arena(64 * _MIB)
    source = _source(arena, 7, 64 * _MIB)
    seam.upload(source, lambda: None)  # memory of this size is at hand from here on
    seam.reclaim(wait=True)
    torch.cuda.synchronize()
    slept = torch.cuda.Event()
    if queued_before:
        sleeper.sleep(300)
        slept.record()
    slot = seam.upload(source, lambda: None)
    if not queued_before:
        sleeper.sleep(300)
        slept.record()
    seam.reclaim(wait=True)
    overlapped = not slept.query()
    torch.cuda.synchronize()
    return {"overlapped": overlapped, "right": bool((slot.tensor == 7).all())}


def missing_wait_shows(sleeper: Sleeper) -> dict[str, bool]:
    """The canary: with a late copy, a read that does not wait sees what was there before, and one that waits does
    not. Where the first is right as well, none of the other checks means anything."""
    seam = open_seam()
    arena = pinned_arena(16 * _MIB)
    source = _source(arena, 7, 16 * _MIB)
    _poison(16 * _MIB)
    with torch.cuda.stream(_upload_stream(seam)):
        sleeper.sleep(100)
    slot = seam.upload(source, lambda: None)
    unwaited = slot.tensor.clone()
    slot.wait()
    waited = slot.tensor.clone()
    torch.cuda.synchronize()
    return {"unwaited is stale": not bool((unwaited == 7).any()), "waited is right": bool((waited == 7).all())}


def _upload_stream(seam: CudaDevice) -> torch.cuda.Stream:
    return seam._up


def evict_under_sleep(sleeper: Sleeper, *, side_stream: bool, rounds: int = 20) -> dict[str, int]:
    """A slot is given up, and others are uploaded, while the kernel that reads it has not begun."""
    seam = open_seam()
    nbytes = 4 * _MIB
    arena = pinned_arena(nbytes * 8)
    sources = [_source(arena, 10 + index, nbytes, index * nbytes) for index in range(8)]
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    wrong = 0
    for _ in range(rounds):
        _poison(nbytes)
        slot: CudaSlot | None = seam.upload(sources[0], lambda: None)
        if slot is None:
            raise AssertionError("no slot")
        with torch.cuda.stream(stream):
            slot.wait()
            sleeper.sleep(5)
            seen = slot.tensor.clone()
        slot.free()
        slot = None
        others = [seam.upload(source, lambda: None) for source in sources[1:]]
        torch.cuda.synchronize()
        wrong += int(not bool((seen == 10).all()))
        wrong += sum(int(not bool((other.tensor == 11 + at).all())) for at, other in enumerate(others))
        seam.reclaim(wait=True)
        del others
    return {"rounds": rounds, "wrong": wrong}


@dataclass
class _Schedule:
    """One random order of uploads, uses, evictions, gradients and sleeps, and what must be true at its end."""

    seam: CudaDevice
    sources: list[torch.Tensor]
    landing: list[torch.Tensor]
    sleeper: Sleeper
    number: int
    random: random.Random
    side: torch.cuda.Stream
    slots: dict[int, CudaSlot] = field(default_factory=dict)
    seen: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    gradients: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def run(self, operations: int, streams: list[torch.cuda.Stream]) -> int:
        """Returns how many values were wrong."""
        for index, source in enumerate(self.sources):  # other values than the schedule before: what is left of it shows
            source.fill_(self._value(index))
        for landing in self.landing:
            landing.fill_(_POISON)
        for _ in range(operations):
            self.random.choice((self._upload, self._use, self._use, self._evict, self._gradient, self._sleep))(streams)
        self.seam.synchronize_downloads()
        wrong = sum(int(not bool((landed == value).all())) for landed, value in self.gradients)
        torch.cuda.synchronize()
        self.seam.reclaim(wait=True)
        return wrong + sum(int(not bool((seen == value).all())) for seen, value in self.seen)

    def _upload(self, streams: list[torch.cuda.Stream]) -> None:
        index = self.random.randrange(len(self.sources))
        self.slots.pop(index, None)
        self.slots[index] = self.seam.upload(self.sources[index], lambda: None)

    def _use(self, streams: list[torch.cuda.Stream]) -> None:
        if not self.slots:
            return
        index = self.random.choice(sorted(self.slots))
        self.slots[index].wait()
        self.seen.append((self.slots[index].tensor.clone(), self._value(index)))

    def _value(self, index: int) -> int:
        """Of source `index` in this schedule; never _POISON."""
        return (self.number * len(self.sources) + index) % _POISON

    def _evict(self, streams: list[torch.cuda.Stream]) -> None:
        if self.slots:
            self.slots.pop(self.random.choice(sorted(self.slots))).free()

    def _gradient(self, streams: list[torch.cuda.Stream]) -> None:
        if len(self.gradients) == len(self.landing):
            return
        into = self.landing[len(self.gradients)]
        value = 100 + len(self.gradients)
        gradient = torch.full((into.numel(),), value, dtype=torch.uint8, device=DEVICE)
        self.seam.download(gradient, into)
        self.gradients.append((into, value))

    def _sleep(self, streams: list[torch.cuda.Stream]) -> None:
        with torch.cuda.stream(self.random.choice(streams)):
            self.sleeper.sleep(self.random.choice((0.05, 0.2, 1.0)))


def random_schedules(sleeper: Sleeper, count: int, left_s: Any = None) -> dict[str, Any]:
    """Schedules from seeds 0, 1, …; `left_s` says how many seconds there are."""
    sizes = [4096 * (1 << index % 6) + 512 * index for index in range(8)]
    landing_bytes = 64 << 10
    arena = pinned_arena(4 * _MIB)
    sources, at = [], 0
    for index, size in enumerate(sizes):
        sources.append(_source(arena, index + 1, size, at))
        at += (size + 4095) // 4096 * 4096
    landing = [_source(arena, 0, landing_bytes, at + index * landing_bytes) for index in range(8)]
    side, failed, done = torch.cuda.Stream(), [], 0
    for seed in range(count):
        if left_s is not None and left_s() < 10:
            break
        seam = open_seam()
        schedule = _Schedule(seam, sources, landing, sleeper, seed, random.Random(seed), side)
        main = torch.cuda.current_stream()
        if schedule.run(40, [main, _upload_stream(seam), seam._down]):
            failed.append(seed)
        done += 1
    return {"schedules": done, "wrong seeds": failed[:20]}
