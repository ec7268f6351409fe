"""Time of a fetch while bulk traffic is queued: `python bench/priority.py [--path DIR]`.

Fetches (class weights) are issued at even intervals while gigabytes of other traffic are queued in the same engine.
With `--traffic states` (the default) this is half reads and half writes, in the tiles that an update moves. With
`--traffic activations` it is what a forward keeps for its backward: writes alone. Two ratios are reported. The first is
the fetch's time divided by the time of the same fetch with an idle queue, measured before and after. The second is the
traffic's rate divided by the rate of the same traffic without fetches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

from infinity import _native
from infinity.cli.bench.scratch import ScratchFile

TILE_BYTES = 1 << 20


class Traffic:
    """Traffic of one class on one scratch file: tiles are read and written back, or activations are only written. All
    requests are submitted at once."""

    def __init__(
        self, engine: _native.IOEngine, scratch: ScratchFile, nbytes: int, io_class: _native.IOClassName
    ) -> None:
        self._engine = engine
        self._class: _native.IOClassName = io_class
        self._scratch = scratch
        self._nbytes = nbytes
        self._memory = _native.Arena(64 << 20).view(0, 64 << 20)
        engine.register_memory(self._memory)

    def start(self) -> list[_native.IOFuture]:
        futures = []
        half = self._scratch.nbytes // 2
        for at in range(0, self._nbytes // 2, TILE_BYTES):
            where = at % (32 << 20)
            read = self._memory[where : where + TILE_BYTES]
            write = self._memory[where + (32 << 20) : where + (32 << 20) + TILE_BYTES]
            if self._class == "activations":
                futures.append(self._engine.write(self._scratch.file, at % half, read, self._class))
            else:
                futures.append(self._engine.read(self._scratch.file, at % half, read, self._class))
            futures.append(self._engine.write(self._scratch.file, half + at % half, write, self._class))
        return futures


def wait(futures: list[_native.IOFuture]) -> None:
    for future in futures:
        future.wait()
        failure = future.failure()
        if failure is not None:
            raise SystemExit(failure.message)


def timed_fetch(engine: _native.IOEngine, scratch: ScratchFile, at: int, into: _native.Buffer) -> float:
    began = time.perf_counter()
    wait([engine.read(scratch.file, at, into, "weights")])
    return time.perf_counter() - began


def run_traffic(traffic: Traffic) -> float:
    """Return the seconds that the traffic takes without fetches."""
    began = time.perf_counter()
    wait(traffic.start())
    return time.perf_counter() - began


def measure(
    path: Path, fetch_bytes: int, traffic_bytes: int, fetches: int, io_class: _native.IOClassName
) -> dict[str, float]:
    with ScratchFile(path, 1 << 30) as scratch, ScratchFile(path, 16 * fetch_bytes) as weights:
        engine = _native.IOEngine()
        into = _native.Arena(fetch_bytes).view(0, fetch_bytes)
        engine.register_memory(into)
        for file, nbytes in ((scratch.file, 1 << 30), (weights.file, 16 * fetch_bytes)):
            wait([engine.write(file, at, into) for at in range(0, nbytes, fetch_bytes)])
        traffic = Traffic(engine, scratch, traffic_bytes, io_class)
        places = [number % 16 * fetch_bytes for number in range(fetches)]
        idle = [timed_fetch(engine, weights, at, into) for at in places]
        alone_s = run_traffic(traffic)
        loaded, shared_s = fetch_under_load(engine, weights, into, traffic, places, alone_s)
        alone_s = statistics.mean([alone_s, run_traffic(traffic)])
        idle += [timed_fetch(engine, weights, at, into) for at in places]
        engine.close()
    return {
        "fetch_idle_s": statistics.median(idle),
        "fetch_loaded_s": statistics.median(loaded),
        "fetch_ratio": statistics.median(loaded) / statistics.median(idle),
        "fetch_loaded_max_s": max(loaded),
        "traffic_alone_rate": traffic_bytes / alone_s,
        "traffic_shared_rate": traffic_bytes / shared_s,
        "traffic_ratio": alone_s / shared_s,
        "fetches": float(len(loaded)),
    }


def fetch_under_load(
    engine: _native.IOEngine,
    weights: ScratchFile,
    into: _native.Buffer,
    traffic: Traffic,
    places: list[int],
    alone_s: float,
) -> tuple[list[float], float]:
    """Return the seconds of the fetches, which are issued at even intervals while the traffic runs, and the seconds of
    the traffic."""
    took: list[float] = []
    began = time.perf_counter()
    futures = traffic.start()
    finished = threading.Event()

    def fetch() -> None:
        for number, at in enumerate(places):
            due = began + alone_s * (number + 0.5) / len(places)
            finished.wait(max(due - time.perf_counter(), 0))
            if finished.is_set():
                return
            took.append(timed_fetch(engine, weights, at, into))

    thread = threading.Thread(target=fetch)
    thread.start()
    wait(futures)
    seconds = time.perf_counter() - began
    finished.set()
    thread.join()
    return took, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("."))
    parser.add_argument("--fetch-mib", type=int, default=64)
    parser.add_argument("--traffic-gib", type=float, default=8.0)
    parser.add_argument("--traffic", choices=("states", "activations"), default="states")
    parser.add_argument("--fetches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        found = measure(
            options.path,
            options.fetch_mib << 20,
            int(options.traffic_gib * (1 << 30)),
            options.fetches,
            options.traffic,
        )
        rounds.append(found)
        print(
            f"fetch of {options.fetch_mib} MiB: idle {found['fetch_idle_s'] * 1e3:.1f} ms, under load "
            f"{found['fetch_loaded_s'] * 1e3:.1f} ms = {found['fetch_ratio']:.2f}×, worst "
            f"{found['fetch_loaded_max_s'] * 1e3:.1f} ms; {options.traffic} "
            f"{found['traffic_alone_rate'] / 1e9:.2f} GB/s alone, "
            f"{found['traffic_shared_rate'] / 1e9:.2f} GB/s beside {found['fetches']:.0f} fetches = "
            f"{found['traffic_ratio']:.2f}×",
            flush=True,
        )
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    print(
        f"median of {len(rounds)}: fetch {medians['fetch_ratio']:.2f}×, "
        f"{options.traffic} {medians['traffic_ratio']:.2f}×"
    )
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "median": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
