"""Order and lifetimes at the device seam: a missing wait, or memory reused too soon, would give wrong bits.

Each check enqueues a sleeping kernel at a point where the host is ahead of the device in training, and compares the
values afterwards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.cuda import DEVICE, Sleeper
from gpu.seam import MIB, POISON, Seam, group_of
from infinity.io.arena import Lease
from infinity.tiers.downloads import GradientLanding
from infinity.tiers.slots import SlabSlot


def upload_overlaps(sleeper: Sleeper, *, queued_before: bool) -> dict[str, Any]:
    """Return whether an upload ends while a kernel sleeps; the kernel was enqueued before or after the upload."""
    seam = Seam(slots=64 * MIB, host=64 * MIB)
    home = seam.home(7, 64 * MIB)
    slept = torch.cuda.Event()
    if queued_before:
        sleeper.sleep(300)
        slept.record()
    slot = seam.upload(home)
    if not queued_before:
        sleeper.sleep(300)
        slept.record()
    seam.up.synchronize()
    overlapped = not slept.query()
    slot.wait()
    right = bool((slot.tensor == 7).all())
    seam.close()
    return {"overlapped": overlapped, "right": right}


def missing_wait_shows(sleeper: Sleeper) -> dict[str, bool]:
    """Return whether a missing wait is visible. Without this check, the other checks would prove nothing.

    If a copy is late, a read without a wait must return the old values, and a read with a wait must return the new
    values. If the read without a wait returns the new values, too, the other checks prove nothing.
    """
    seam = Seam(slots=16 * MIB)
    home = seam.home(7, 16 * MIB)
    with torch.cuda.stream(seam.up):
        sleeper.sleep(100)
    slot = seam.upload(home)
    unwaited = slot.tensor.clone()
    slot.wait()
    waited = slot.tensor.clone()
    torch.cuda.synchronize()
    seam.close()
    return {"unwaited is stale": not bool((unwaited == 7).any()), "waited is right": bool((waited == 7).all())}


def missing_last_use_shows(sleeper: Sleeper) -> dict[str, bool]:
    """Return whether it is visible if a slot is reused without waiting for its last uses.

    If the reuse is not visible, the other checks of reuse prove nothing.

    Weights are uploaded into a slot that an enqueued kernel has not read yet. If the slot's last uses are given, the
    upload waits for the kernel. If they are not given, the kernel reads the newer weights.
    """
    found = {}
    for kept in (True, False):
        seam = Seam(slots=16 * MIB, host=32 * MIB)
        first, second = seam.home(7, 16 * MIB), seam.home(8, 16 * MIB)
        slot = seam.upload(first)
        slot.wait()
        torch.cuda.synchronize()
        sleeper.sleep(100)
        seen = slot.tensor.clone()
        seam.slots.give_back(slot._leased, slot._uses.events() if kept else [])
        again = seam.upload(second)
        again.wait()
        later = again.tensor.clone()
        torch.cuda.synchronize()
        if kept:
            found["with the last use both are right"] = bool((seen == 7).all()) and bool((later == 8).all())
        else:
            found["without it the kernel reads what came later"] = bool((seen == 8).all())
        seam.close()
    return found


def evict_under_sleep(sleeper: Sleeper, *, side_stream: bool, rounds: int = 20) -> dict[str, int]:
    """Free a slot and upload other weights before the kernel that reads the slot begins; return the number of wrong
    values."""
    nbytes, count = 4 * MIB, 8
    seam = Seam(slots=2 * nbytes, host=count * nbytes)  # each upload reuses the bytes of the slot before the last one
    homes = [seam.home(10 + index, nbytes) for index in range(count)]
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    wrong = 0
    for _ in range(rounds):
        seen: list[torch.Tensor] = []
        for home in homes:
            slot = seam.upload(home)
            with torch.cuda.stream(stream):
                slot.wait()
                sleeper.sleep(1)
                seen.append(slot.tensor.clone())
            slot.free()
        torch.cuda.synchronize()
        wrong += sum(int(not bool((each == 10 + index).all())) for index, each in enumerate(seen))
    seam.close()
    return {"rounds": rounds, "wrong": wrong}


@dataclass
class _Schedule:
    """One random sequence of uploads, uses, evictions, gradients and sleeps, and the expected state at its end."""

    seam: Seam
    homes: list[Lease]
    targets: list[Lease]
    sleeper: Sleeper
    number: int
    random: random.Random
    slots: dict[int, SlabSlot] = field(default_factory=dict)
    seen: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    gradients: list[tuple[GradientLanding, Lease, int]] = field(default_factory=list)

    def run(self, operations: int, streams: list[torch.cuda.Stream]) -> int:
        """Run the schedule and return how many values are wrong."""
        for index, home in enumerate(self.homes):  # values differ from the previous schedule, so leftovers are detected
            home.tensor().fill_(self._value(index))
        for target in self.targets:
            target.tensor().fill_(POISON)
        for _ in range(operations):
            self.random.choice((self._upload, self._use, self._use, self._evict, self._gradient, self._sleep))(streams)
        wrong = sum(int(not self._landed(*each)) for each in self.gradients)
        torch.cuda.synchronize()
        for slot in self.slots.values():
            slot.free()
        self.seam.uploads.synchronize()
        return wrong + sum(int(not bool((seen == value).all())) for seen, value in self.seen)

    def _upload(self, streams: list[torch.cuda.Stream]) -> None:
        index = self.random.randrange(len(self.homes))
        while index in self.slots or self.seam.slots.free_bytes < self.homes[index].nbytes:
            if not self.slots:
                return
            self._evict(streams)
        try:
            self.slots[index] = self.seam.upload(self.homes[index])
        except AssertionError:  # the free memory is fragmented
            self._evict(streams)

    def _use(self, streams: list[torch.cuda.Stream]) -> None:
        if not self.slots:
            return
        index = self.random.choice(sorted(self.slots))
        self.slots[index].wait()
        self.seen.append((self.slots[index].tensor.clone(), self._value(index)))

    def _value(self, index: int) -> int:
        """Return the value of home `index` in this schedule; never POISON."""
        return (self.number * len(self.homes) + index) % POISON

    def _evict(self, streams: list[torch.cuda.Stream]) -> None:
        if self.slots:
            self.slots.pop(self.random.choice(sorted(self.slots))).free()

    def _gradient(self, streams: list[torch.cuda.Stream]) -> None:
        if len(self.gradients) == len(self.targets):
            return
        target, value = self.targets[len(self.gradients)], self.number % 64 + len(self.gradients) + 1
        group = group_of(str(len(self.gradients)), target.nbytes // 2)
        packed = self.seam.gradients.begin(group, target.view(), torch.bfloat16)
        gradient = torch.full((group.numel,), value, dtype=torch.bfloat16, device=DEVICE)
        self.seam.gradients.pack(packed, group.specs[0], gradient, add=False)
        self.gradients.append((self.seam.gradients.send(packed), target, value))

    def _landed(self, landing: GradientLanding, target: Lease, value: int) -> bool:
        numel = target.nbytes // 2
        total = sum(part for parts in landing.sums().values() for part in parts)
        return bool((target.tensor().view(torch.bfloat16) == value).all()) and total == numel * value**2

    def _sleep(self, streams: list[torch.cuda.Stream]) -> None:
        with torch.cuda.stream(self.random.choice(streams)):
            self.sleeper.sleep(self.random.choice((0.05, 0.2, 1.0)))


def random_schedules(sleeper: Sleeper, count: int, left_s: Any = None) -> dict[str, Any]:
    """Run schedules with the seeds 0, 1, …; `left_s` returns how many seconds are left."""
    sizes = [4096 * (1 << index % 6) for index in range(8)]
    gradient_bytes = 64 << 10
    seam = Seam(slots=sum(sizes) // 2, ring=2 * gradient_bytes, host=4 * MIB, piece=gradient_bytes)
    homes = [seam.home(0, size) for size in sizes]
    targets = [seam.home(0, gradient_bytes) for _ in range(8)]
    failed, done = [], 0
    for seed in range(count):
        if left_s is not None and left_s() < 10:
            break
        schedule = _Schedule(seam, homes, targets, sleeper, seed, random.Random(seed))
        if schedule.run(40, [torch.cuda.current_stream(), seam.up, seam.down]):
            failed.append(seed)
        done += 1
    seam.close()
    return {"schedules": done, "wrong seeds": failed[:20]}
