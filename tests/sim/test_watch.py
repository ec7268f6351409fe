"""Memory that compute touches is logged, on every thread; accesses that are not logged are found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.processes import run_script
from tests.sim.accelerator import Misuse, SimAccelerator
from tests.sim.clocks import Actor, Unordered
from tests.sim.queues import LAZY
from tests.sim.test_accelerator import Bench
from tests.sim.watch import watch_every_thread, watched

Uses = list[tuple[bool, str]]


@pytest.fixture
def bench() -> Bench:
    return Bench(LAZY)


def uses_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Uses:
    """Return a list to which every use of device memory is added from now on: whether it writes, and its name."""
    seen: Uses = []
    use = bench.sim.use

    def noted(actor: Actor, begin: int, end: int, *, write: bool, text: str) -> None:
        seen.append((write, text.split(".")[1]))
        use(actor, begin, end, write=write, text=text)

    monkeypatch.setattr(bench.sim, "use", noted)
    return seen


OPERATIONS: dict[str, tuple[Callable[[torch.Tensor], object], Uses]] = {
    "a read": (lambda x: x + 1, [(False, "add")]),
    "a write in place": (lambda x: x.add_(1), [(True, "add_")]),
    "out=": (lambda x: torch.add(torch.ones(8), 1, out=x), [(True, "add")]),
    "a copy into it": (lambda x: x.copy_(torch.ones(8)), [(True, "copy_")]),
    "a view": (lambda x: x.view(2, 4).t()[0], []),
    "its shape": (lambda x: torch.empty_like(x), []),
    "a list": (lambda x: torch.cat([x, x]), [(False, "cat"), (False, "cat")]),
    "many at once": (lambda x: torch._foreach_add_([x], 1), [(True, "_foreach_add_")]),
    "a copy, perhaps": (lambda x: x.view(2, 4).t().reshape(8), [(False, "clone")]),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_reads_and_writes_are_told_apart(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    operation, expected = OPERATIONS[what]
    seen = uses_of(bench, monkeypatch)
    with watched(bench.sim):
        operation(bench.device[:32].view(torch.float32))
    assert seen == expected


def test_memory_that_was_shared_by_dlpack_is_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = uses_of(bench, monkeypatch)
    shared = torch.from_dlpack(torch.utils.dlpack.to_dlpack(bench.device[:32]))  # type: ignore[attr-defined]
    with watched(bench.sim):
        shared.view(torch.float32).sum()
    assert seen == [(False, "sum")]


def test_only_the_bytes_of_a_view_are_used(bench: Bench) -> None:
    copied = bench.sim.copy(bench.device[:8], bench.host[:8], on=bench.sim.stream())
    with watched(bench.sim):
        bench.device[8:16].sum()
        with pytest.raises(Unordered):
            bench.device[7:16].sum()
    bench.sim.synchronize(copied)


def test_pinned_memory_is_used_by_the_host(bench: Bench) -> None:
    bench.sim.copy(bench.host[:8], bench.device[:8], on=bench.sim.stream("down"))
    with watched(bench.sim), pytest.raises(Unordered, match=r"read \(aten.sum.default\) by the host"):
        bench.host[:8].sum()


def test_an_operation_that_is_not_logged_is_found(bench: Bench) -> None:
    with watched(bench.sim):
        bench.device[:4].fill_(1)
    bench.device[4:8].fill_(1)
    with pytest.raises(Misuse, match="4 bytes into its slab"):
        bench.sim.check()


def test_watching_changes_no_bit() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).bfloat16()
        layer(torch.randn(2, 4, 16).bfloat16()).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])

    plain = run()
    with watched(SimAccelerator()):
        assert torch.equal(run(), plain)


# -- threads -----------------------------------------------------------------------------------------------------------


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class InAThreadOfItsOwn(threading.Thread):
    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._function = function

    def run(self) -> None:
        self._function()


def test_threads_that_start_are_watched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_every_thread(monkeypatch, bench.sim)
    seen = uses_of(bench, monkeypatch)
    in_a_thread(lambda: bench.device.sum())
    thread = InAThreadOfItsOwn(lambda: bench.device.sum())
    thread.start()
    thread.join()
    assert seen == [(False, "sum"), (False, "sum")]


def test_a_module_and_a_backward_pass_are_watched_on_a_thread_that_ran_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        watch_every_thread(monkeypatch, bench.sim)
        module = Weighted(bench)
        seen = uses_of(bench, monkeypatch)
        output = pool.submit(lambda: module(torch.ones(8, requires_grad=True))).result()
        assert seen == [(False, "mul")]
        pool.submit(lambda: output.sum().backward()).result()
        assert seen == [(False, "mul"), (False, "mul")]


class Weighted(nn.Module):
    """Module with a weight in device memory that autograd reads again in backward."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.weight = bench.device[:32].view(torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_watched(bench: Bench, monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    watch_every_thread(monkeypatch, bench.sim)
    module = Weighted(bench)
    seen = uses_of(bench, monkeypatch)
    output = checkpoint(module, torch.ones(8, requires_grad=True), use_reentrant=reentrant)
    in_a_thread(lambda: output.sum().backward())
    # Forward, forward again, backward. Without reentrance, the second forward stops when it has all saved tensors.
    assert seen == [(False, "mul")] * (3 if reentrant else 2)


def test_deep_reentrant_checkpointing_is_watched_on_autograds_own_threads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine continues on threads of its pool beyond 60 passes within passes."""
    watch_every_thread(monkeypatch, bench.sim)
    module = Weighted(bench)
    threads: list[int] = []

    def nested(depth: int, x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.get_ident())
        x = module(x)
        return checkpoint(nested, depth - 1, x, use_reentrant=True) if depth else x

    output = nested(70, torch.ones(8, requires_grad=True))
    threads.clear()
    seen = uses_of(bench, monkeypatch)
    output.sum().backward()
    assert len(set(threads)) > 1
    assert len(seen) == len(threads) + 71  # each forward again, and each backward once


# -- a slab that is shut -----------------------------------------------------------------------------------------------

ALONE = """
import sys
import torch
from tests.sim.queues import LAZY
from tests.sim.test_accelerator import Bench
from tests.sim.watch import watched

bench = Bench(LAZY, shut=True)
with watched(bench.sim):
    bench.device[:4].fill_(1)
    print(bench.device.sum().item(), flush=True)
if sys.argv[1] == "watched":
    sys.exit(0)
bench.device.sum()
print("read without a watch")
"""


@pytest.mark.parametrize("how", ["watched", "unwatched"])
def test_a_read_of_a_shut_slab_that_nobody_logs_ends_the_process(how: str) -> None:
    done = run_script(ALONE, how)
    assert done.stdout.splitlines() == [str(4 + 4092 * 255)]
    assert (done.returncode == 0) == (how == "watched")
