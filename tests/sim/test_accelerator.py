"""The simulated device: when operations run, which operations it counts, and which uses it refuses."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable

import pytest
import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from tests.sampling import number
from tests.sim.accelerator import Misuse, SimAccelerator
from tests.sim.clocks import Unordered
from tests.sim.queues import EAGER, LAZY, Policy, random_policy

POLICIES = [LAZY, EAGER, *(random_policy(seed) for seed in range(number(1, 4)))]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


class Bench:
    """A device with a slab, and pinned host memory of the same size."""

    def __init__(self, policy: Policy, *, nbytes: int = 4096, **options: object) -> None:
        self.sim = SimAccelerator(policy, **options)  # type: ignore[arg-type]
        self._arena = _native.Arena(nbytes, huge_pages=False)
        self.host = torch.frombuffer(self._arena.view(0, nbytes), dtype=torch.uint8)
        assert bool(self.sim.pin(self._arena.address, nbytes)) == bool(options.get("refuse"))
        self.device = self.sim.slab(nbytes)


def test_it_is_an_accelerator() -> None:
    accelerator: Accelerator = SimAccelerator()
    assert accelerator.device == torch.device("cpu")


def test_a_lazy_copy_runs_when_somebody_waits_for_it() -> None:
    bench = Bench(LAZY)
    bench.host.fill_(7)
    copied = bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    assert bench.device[0] == 0xFF
    assert not bench.sim.reached(copied)
    bench.sim.synchronize(copied)
    assert bench.device[0] == 7
    assert bench.sim.reached(copied)


def test_an_eager_copy_runs_at_once() -> None:
    bench = Bench(EAGER)
    bench.host.fill_(7)
    copied = bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    assert bench.device[0] == 7
    assert bench.sim.reached(copied)


@every_policy
def test_kernels_behind_a_wait_see_what_was_copied(policy: Policy) -> None:
    bench = Bench(policy)
    bench.host.fill_(7)
    copied = bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    bench.sim.wait(bench.sim.current(), copied)
    assert (bench.device == 7).all()


@every_policy
def test_a_copy_runs_behind_the_events_it_is_given(policy: Policy) -> None:
    bench = Bench(policy)
    up, down = bench.sim.stream(), bench.sim.stream()
    bench.host[:8].fill_(7)
    there = bench.sim.copy(bench.device[:8], bench.host[:8], on=up)
    back = bench.sim.copy(bench.host[8:16], bench.device[:8], on=down, after=[there])
    bench.sim.synchronize(back)
    assert bench.host[8:16].tolist() == [7] * 8
    bench.sim.check()


@every_policy
def test_what_waits_for_an_event_waits_for_its_last_recording_then(policy: Policy) -> None:
    bench = Bench(policy)
    gate, event = bench.sim.gate(), bench.sim.event()
    up, down = bench.sim.stream(), bench.sim.stream()
    record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(gate.record)
    bench.host[:8].fill_(1)
    bench.sim.copy(bench.device[:8], bench.host[:8], on=up)
    assert record(event.handle, up.handle) == 0
    bench.sim.wait(down, event)
    bench.sim.copy(bench.device[8:16], bench.host[:8], on=up)
    assert record(event.handle, up.handle) == 0
    bench.sim.copy(bench.host[16:24], bench.device[:8], on=down)
    with pytest.raises(Unordered):
        bench.sim.copy(bench.host[24:32], bench.device[8:16], on=down)


def test_the_host_knows_what_was_before_an_event_that_it_waited_for() -> None:
    bench = Bench(LAZY)
    up = bench.sim.stream()
    first = bench.sim.copy(bench.device[:8], bench.host[:8], on=up)
    bench.sim.synchronize(bench.sim.copy(bench.device[8:16], bench.host[:8], on=up))
    assert bench.sim.reached(first)


def test_who_polls_a_lazy_event_is_not_kept_for_ever() -> None:
    bench = Bench(LAZY)
    copied = bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    assert any(bench.sim.reached(copied) for _ in range(100))


@pytest.mark.parametrize("seed", range(8))
def test_a_random_event_that_was_reached_stays_reached(seed: int) -> None:
    bench = Bench(random_policy(seed))
    copied = bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    answers = [bench.sim.reached(copied) for _ in range(64)]
    assert answers == sorted(answers)
    assert answers[-1]


def test_the_same_seed_runs_the_same() -> None:
    def run() -> list[bool]:
        bench = Bench(random_policy(3))
        stream = bench.sim.stream()
        events = [bench.sim.copy(bench.device[:8], bench.host[:8], on=stream) for _ in range(8)]
        return [bench.sim.reached(event) for event in events for _ in range(3)]

    assert run() == run()


def test_it_counts_copies_waits_and_events() -> None:
    bench = Bench(LAZY)
    stream = bench.sim.stream()
    copied = bench.sim.copy(bench.device[:8], bench.host[:8], on=stream)
    bench.sim.synchronize(bench.sim.copy(bench.host[8:24], bench.device[:16], on=stream))
    bench.sim.synchronize(copied)
    assert bench.sim.counts == {
        "copies up": 1,
        "bytes up": 8,
        "copies down": 1,
        "bytes down": 16,
        "synchronize": 2,
        "synchronize that waited": 1,
    }
    del copied
    gc.collect()
    assert bench.sim.events_alive == 0


def test_timed_events_tell_the_time_between_them() -> None:
    bench = Bench(LAZY)
    stream = bench.sim.stream()
    began = bench.sim.record(stream, timed=True)
    bench.sim.copy(bench.device, bench.host, on=stream)
    ended = bench.sim.record(stream, timed=True)
    with pytest.raises(Misuse, match="not known to be reached"):
        bench.sim.seconds(began, ended)
    bench.sim.synchronize(ended)
    assert bench.sim.seconds(began, ended) > 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_memory_runs_out_when_the_test_wants(at: int) -> None:
    sim = SimAccelerator(out_of_memory_at=at)
    for _ in range(at):
        sim.slab(64)
    with pytest.raises(torch.OutOfMemoryError):
        sim.slab(64)
    sim.slab(64)


def test_a_copy_of_unpinned_host_memory_is_an_error() -> None:
    bench = Bench(LAZY)
    with pytest.raises(Misuse, match="not pinned"):
        bench.sim.copy(bench.device[:8], torch.zeros(8, dtype=torch.uint8), on=bench.sim.stream())


def test_where_pinning_was_refused_copies_keep_the_host() -> None:
    bench = Bench(LAZY, refuse="no room")
    bench.host.fill_(7)
    bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    assert bench.device[0] == 7


def test_memory_is_poisoned_when_it_is_made_and_when_it_is_given_back() -> None:
    bench = Bench(LAZY)
    assert bench.device.view(torch.bfloat16).isnan().all()
    assert bench.device.view(torch.float32).isnan().all()
    bench.host.fill_(7)
    bench.sim.synchronize(bench.sim.copy(bench.device, bench.host, on=bench.sim.stream()))
    bench.sim.poison(bench.device.data_ptr(), 8)
    bench.sim.poison(bench.host.data_ptr(), 8)
    assert bench.device[:9].tolist() == [0xFF] * 8 + [7]
    assert bench.host[:9].tolist() == [0xFF] * 8 + [7]


def test_unpinning_what_a_copy_uses_is_an_error() -> None:
    bench = Bench(LAZY)
    bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())
    with pytest.raises(Misuse, match="copy of it is under way"):
        bench.sim.unpin(bench.host.data_ptr())


def test_a_copy_that_nobody_waits_for_is_found_at_the_end() -> None:
    bench = Bench(LAZY)
    bench.sim.copy(bench.device, bench.host, on=bench.sim.stream("up"))
    with pytest.raises(Misuse, match="nobody waited for 1 copies: copy up of 4096 bytes on up"):
        bench.sim.check()


def test_an_error_that_was_swallowed_is_found_at_the_end() -> None:
    bench = Bench(LAZY)
    with pytest.raises(Misuse):
        bench.sim.wait(bench.sim.current(), bench.sim.event())
    with pytest.raises(Misuse, match="nobody recorded"):
        bench.sim.check()


def test_a_change_of_device_memory_that_nobody_told_of_is_found() -> None:
    bench = Bench(LAZY)
    bench.device[5] = 1
    with pytest.raises(Misuse, match="5 bytes into its slab"):
        bench.sim.copy(bench.device, bench.host, on=bench.sim.stream())


# -- native threads ----------------------------------------------------------------------------------------------------


def on_a_native_thread(function: Callable[[], None]) -> None:
    """Run code as on a native thread: no Python function has called it."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@every_policy
def test_native_code_copies_and_waits_through_the_gate(policy: Policy) -> None:
    bench = Bench(policy)
    table, event, stream = bench.sim.gate(), bench.sim.event(), bench.sim.stream()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    copy = ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_size_t, number, pointer)(table.copy)
    record = ctypes.CFUNCTYPE(number, pointer, pointer)(table.record)
    wait = ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_uint)(table.wait)
    synchronize = ctypes.CFUNCTYPE(number, pointer)(table.synchronize)
    assert ctypes.CFUNCTYPE(number, number)(table.enter)(0) == 0
    bench.host.fill_(7)

    def work() -> None:
        before = bench.sim.record(bench.sim.current())
        assert wait(stream.handle, bench.sim.handle(before), 0) == 0
        assert copy(bench.device.data_ptr(), bench.host.data_ptr(), 4096, 4, bench.sim.handle(stream)) == 0
        assert record(bench.sim.handle(event), bench.sim.handle(stream)) == 0
        assert synchronize(bench.sim.handle(event)) == 0

    on_a_native_thread(work)
    assert (bench.device == 7).all()
    bench.sim.check()


def test_a_handle_that_is_gone_is_an_error_of_the_gate_and_of_the_test() -> None:
    bench = Bench(LAZY)
    table = bench.sim.gate()
    synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(table.synchronize)
    handle = bench.sim.event().handle
    gc.collect()
    assert synchronize(handle) != 0
    with pytest.raises(LookupError, match="dropped while native code used it"):
        bench.sim.check()
