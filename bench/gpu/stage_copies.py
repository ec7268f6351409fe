"""Stage 2: bandwidth between host and GPU, for memory registered by infinity, pinned by torch, and pageable."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from gpu.adam_beside import repeated
from gpu.cuda import DEVICE, milliseconds, pinned_arena
from gpu.machine_facts import pcie
from gpu.record import Options, Record, run
from infinity import _native
from infinity.plan.machine_resources import usable_cores

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8 * _KIB, 64 * _KIB, 512 * _KIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB)
_LARGE = 256 * _MIB
_COPIES_PER_RUN = 400
_MOVED_PER_RUN = 8
"""Number of bytes moved per run, in multiples of the largest copy."""
_ADAM_NUMEL, _ADAM_S = 64 << 20, 1.0


class Copies:
    """Host and device memory of `nbytes` in each direction, with a stream for each direction."""

    def __init__(self, up_from: torch.Tensor, down_to: torch.Tensor) -> None:
        self.up_from, self.down_to = up_from, down_to
        self.up_to = torch.empty(up_from.numel(), dtype=torch.uint8, device=DEVICE)
        self.down_from = torch.zeros(down_to.numel(), dtype=torch.uint8, device=DEVICE)
        self.up, self.down = torch.cuda.Stream(), torch.cuda.Stream()

    def rate(self, size: int, *, up: bool = False, down: bool = False) -> float:
        """Return GB/s of sequential copies of `size` bytes, the median of three runs.

        With both directions, the copies run at the same time and the result is the sum.
        """
        count = max(1, min(_MOVED_PER_RUN * self.up_to.numel() // size, _COPIES_PER_RUN))
        ways = [stream for stream, asked in ((self.up, up), (self.down, down)) if asked]

        def work() -> None:
            for _ in range(count):
                if up:
                    with torch.cuda.stream(self.up):
                        self.up_to[:size].copy_(self.up_from[:size], non_blocking=True)
                if down:
                    with torch.cuda.stream(self.down):
                        self.down_to[:size].copy_(self.down_from[:size], non_blocking=True)

        work()
        took = statistics.median(milliseconds(work, *ways) for _ in range(3))
        return round(len(ways) * count * size / 1e6 / took, 2)


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `large`, bytes of the largest copy."""
    large = int(options.settings.get("large", _LARGE))
    arena = pinned_arena(2 * large)
    host = torch.frombuffer(arena.memory.view(0, 2 * large), dtype=torch.uint8)
    host.fill_(1)
    ours = Copies(host[:large], host[large:])
    record.measure("h2d by size", "noted: GB/s of one copy after the other", lambda: _by_size(ours, large, up=True))
    record.measure("d2h by size", "noted", lambda: _by_size(ours, large, down=True))
    for name, ways, low in (
        ("h2d", {"up": True}, 50.0),
        ("d2h", {"down": True}, 50.0),
        ("h2d and d2h at once", {"up": True, "down": True}, 80.0),
    ):
        record.measure(
            name,
            f"≥ {low:.0f} GB/s on PCIe Gen5 ×16",
            lambda ways=ways: ours.rate(large, **ways),
            good=lambda rate, low=low: rate >= low,
            speed=True,
        )
    record.measure("pcie while copying", "Gen5 ×16", lambda: _while_copying(ours, large))
    record.measure(
        "registered beside memory that torch pinned",
        "within 3 %, h2d and d2h",
        lambda: _beside_torch(ours, large),
        good=lambda found: all(ratio >= 0.97 for ratio in found["ratio"].values()),
        speed=True,
    )
    record.measure("pageable", "5-15 GB/s", lambda: _pageable(large))
    record.measure(
        "beside Adam on all cores",
        "noted: what copies and Adam take from each other",
        lambda: _beside_adam(ours, large),
    )


def _by_size(copies: Copies, large: int, **ways: bool) -> dict[str, float]:
    return {f"{size // _KIB} KiB": copies.rate(size, **ways) for size in _SIZES if size <= large}


def _while_copying(copies: Copies, large: int) -> dict[str, Any]:
    """Return nvidia-smi's report of the busy link, because an idle link may be in a power-saving state."""
    with repeated(lambda: copies.rate(large, up=True)):
        return pcie()


def _beside_torch(ours: Copies, large: int) -> dict[str, Any]:
    pinned = torch.ones(2 * large, dtype=torch.uint8).pin_memory()
    theirs = Copies(pinned[:large], pinned[large:])
    found: dict[str, Any] = {"ours": {}, "torch": {}, "ratio": {}}
    for name, ways in (("h2d", {"up": True}), ("d2h", {"down": True})):
        pairs = [(ours.rate(large, **ways), theirs.rate(large, **ways)) for _ in range(3)]
        found["ours"][name] = statistics.median(mine for mine, _ in pairs)
        found["torch"][name] = statistics.median(other for _, other in pairs)
        found["ratio"][name] = round(statistics.median(mine / other for mine, other in pairs), 3)
    return found


def _pageable(large: int) -> dict[str, float]:
    memory = torch.ones(2 * large, dtype=torch.uint8)
    copies = Copies(memory[:large], memory[large:])
    return {"h2d": copies.rate(large, up=True), "d2h": copies.rate(large, down=True)}


def _beside_adam(copies: Copies, large: int) -> dict[str, Any]:
    """Measure Adam's memory traffic (28 bytes per parameter) on all cores, and copies: each alone, then both
    together."""
    adam = AdamTraffic(_ADAM_NUMEL)
    found: dict[str, Any] = {"threads": usable_cores(), "adam_gb_per_s": {"alone": adam.rate(_ADAM_S)}}
    with repeated(adam.run):
        found["copies_gb_per_s"] = {
            "h2d": copies.rate(large, up=True),
            "d2h": copies.rate(large, down=True),
            "both": copies.rate(large, up=True, down=True),
        }
    with repeated(lambda: copies.rate(large, up=True, down=True)):
        found["adam_gb_per_s"]["beside copies"] = adam.rate(_ADAM_S)
    return found


class AdamTraffic:
    """Reads and writes of AdamW's fp32 states, with almost no arithmetic."""

    _BYTES_PER_PARAMETER = 28

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._pool = _native.ThreadPool(usable_cores())
        self._arenas = [_native.Arena(4 * numel) for _ in range(4)]
        self._views = [arena.view(0, arena.nbytes) for arena in self._arenas]
        for view in self._views:
            torch.frombuffer(view, dtype=torch.uint8).zero_()

    def run(self) -> None:
        a, b, c, d = self._views
        _native.read_modify_write(a, b, c, d, self._pool)

    def rate(self, seconds: float) -> float:
        """Return the traffic in GB/s, measured for this number of seconds."""
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.run()
            count += 1
        return round(count * self._numel * self._BYTES_PER_PARAMETER / 1e9 / (time.perf_counter() - began), 1)


if __name__ == "__main__":
    run(stage)
