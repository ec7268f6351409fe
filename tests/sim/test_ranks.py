"""Several ranks, each with a simulated device, train to the bits of one process without a device.

The weights go up from one copy in RAM that the ranks share. Gradients come down into RAM and go to their owners there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.access.opening import pins_in_store
from infinity.config import load_config
from infinity.coordinator import registry
from infinity.errors import InfinityError
from infinity.sharded import rank_agreement
from infinity.sharded.shared_homes import SharedHomes
from infinity.state.offload_arguments import OffloadArguments
from infinity.tiers.operands import OperandQueue, Operands
from tests import sampling
from tests.ranks.workers import run
from tests.runtime.over_ranks import Blocks, batch, offloaded, train
from tests.runtime.test_rank_generations import batches_of, live, require_same
from tests.sim import gate
from tests.sim.accelerator import SimAccelerator
from tests.sim.fixtures import Simulation
from tests.sim.queues import EAGER, LAZY, Copy, Policy, random_policy
from tests.sim.test_resident import references, slabs_made

TIERS = [
    {"weights": "host", "optimizer": "host"},
    {"weights": "host", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "host"},
    {"weights": "host", "optimizer": "device"},
    {"weights": "auto", "optimizer": "auto"},  # of rank 0, some states are on the device, of the others all
]

DEVICE_BYTES = {"device": "48MiB", "auto": "32MiB"}
"""Device memory of all ranks with which states are on the device, by the config's `optimizer`."""
IN_RAM = {"weights": "host", "optimizer": "host"}
"""Tiers of the process without a device."""


def on_device(
    policy: Policy, folder: str, config: dict[str, Any], micro: int, ranks: int, options: dict[str, Any]
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        simulation = simulated(patch, policy)
        result = train(folder, config, micro, ranks, **options)
        simulation.finish()
        return result, dict(simulation.sim.counts)


def simulated(patch: pytest.MonkeyPatch, policy: Policy) -> Simulation:
    """Give this rank a simulated device."""
    limits_of = rank_agreement.limits_of
    patch.setattr(rank_agreement, "limits_of", lambda *given: replace(limits_of(*given), in_place=False))
    return Simulation(patch, policy)


@pytest.mark.covering(strength=1, most=6)
@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(sampling.SEED)], ids=str)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", ["off", "during_backward", "auto"])
@pytest.mark.parametrize("norm", [None, 0.01])
@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        ({}, "auto"),
        ({"frozen": True}, "nf4"),
        ({"frozen": True}, "int8"),
        ({"frozen": True}, "bf16"),
        ({"twice": True, "recomputed": True}, "auto"),
    ],
)
def test_ranks_with_devices_train_to_the_bits_of_one_process(
    tmp_path: Path,
    policy: Policy,
    tiers: dict[str, Any],
    ranks: int,
    micro: int,
    dtype: str,
    frozen: str,
    overlap: str,
    norm: float | None,
    model: dict[str, Any],
) -> None:
    config = tiers | {"overlap": overlap, "frozen": frozen}
    options: dict[str, Any] = {"steps": 2, "dtype": dtype, "max_grad_norm": norm, "model": model}
    memory = {"memory": {"host": f"{128 * ranks}MiB", "device": DEVICE_BYTES.get(config["optimizer"], "8MiB")}}
    losses, norms, weights = train(str(tmp_path / "one"), config | IN_RAM, micro, ranks, **options)
    found = run(ranks, on_device, policy, str(tmp_path / "all"), config | memory, micro, ranks, options)
    for rank, (result, counts) in enumerate(found):
        assert result == (losses[rank::ranks], norms, weights)
        assert counts["copies up"]
        assert counts["copies down"]


def test_a_rank_that_has_no_slice_of_any_unit_gets_the_weights_of_the_others(tmp_path: Path) -> None:
    """A slice has at least 65,536 elements, so the fourth rank has none."""
    options: dict[str, Any] = {"steps": 2, "dtype": "bfloat16"}
    memory = {"memory": {"host": "512MiB", "device": "8MiB"}}
    losses, norms, weights = train(str(tmp_path / "one"), TIERS[2], 1, 4, **options)
    found = run(4, on_device, LAZY, str(tmp_path / "all"), TIERS[2] | memory, 1, 4, options)
    assert [result for result, _ in found] == [(losses[rank::4], norms, weights) for rank in range(4)]


@pytest.mark.parametrize("policy", [LAZY, random_policy(sampling.SEED)], ids=str)
@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_rank_fetches_the_experts_of_its_own_tokens_to_its_device(
    tmp_path: Path, policy: Policy, micro: int
) -> None:
    options = {"steps": 2, "dtype": "bfloat16", "max_grad_norm": 0.01, "model": {"experts": 6}}
    memory = {"memory": {"host": "256MiB", "device": "8MiB"}}
    losses, norms, weights = train(str(tmp_path / "one"), TIERS[0], micro, 2, **options)
    found = run(2, on_device, policy, str(tmp_path / "all"), TIERS[0] | memory, micro, 2, options)
    assert [result for result, _ in found] == [(losses[rank::2], norms, weights) for rank in range(2)]


SLOW_S = 2.0
"""Seconds that the slow upload takes at most."""
LAST = 2
"""Index of the block whose upload is slow."""


class SlowUpload:
    """The next upload of a block to the device of rank 0. It ends when rank 1 has published new weights of the block,
    or after SLOW_S.

    Attributes:
        overtaken: whether rank 1 published new weights before the upload ended; None: the upload has not run.
        torn: whether rank 1's slice of the block was changed after the upload was queued and before it ended.
    """

    def __init__(self, model: torch.nn.Module, sim: SimAccelerator) -> None:
        coordinator = registry.coordinator_of(model)
        weights, unit = coordinator.resources.weights, coordinator.units[LAST]
        assert isinstance(weights, SharedHomes)
        lease = weights.complete[LAST].lease
        assert lease is not None
        self.overtaken: bool | None = None
        self.torn = False
        self._weights, self._next, self._home = weights, unit.weights.version + 1, lease.tensor()
        begin, end = coordinator.shards[LAST].weight_range(0, 1)
        self._slice = self._home[begin:end]
        self._queued = self._slice.clone()
        self._move = sim._queues._move
        sim._queues._move = self._moved

    def _moved(self, copy: Copy) -> None:
        slow = self.overtaken is None and copy.source == self._home.data_ptr()
        if slow:
            self.overtaken = self.rank_1_has_written(SLOW_S)
            self.torn = not torch.equal(self._slice, self._queued)
        self._move(copy)

    def rank_1_has_written(self, within_s: float) -> bool:
        return self._weights.wait(LAST, self._next, 1, within_s)


def with_slow_upload(overlap: str) -> tuple[bool | None, bool] | None:
    """Take a step. When rank 1 begins the step, an upload of rank 0 is queued, for an evaluation that only rank 0 made.

    Returns:
        Of rank 0, whether rank 1's update overtook the upload, and whether it changed what the upload read.
    """
    config = {"weights": "host", "optimizer": "host", "overlap": overlap}
    with pytest.MonkeyPatch.context() as patch:
        simulation = simulated(patch, LAZY)
        # The clocks would find rank 0's own write to its own slice first; they know nothing of rank 1.
        patch.setattr(simulation.sim, "use", lambda *_, **__: None)
        room_for_two_blocks = {"memory": {"host": "256MiB", "device": "4MiB"}}
        model = offloaded("", config | room_for_two_blocks)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        model(batch(0, dist.get_rank(), torch.float32)).backward()
        found = None
        if dist.get_rank() == 1:
            optim.step()
        else:
            slow = SlowUpload(model, simulation.sim)
            model.skips = LAST  # the block is prefetched and not used, so no kernel waits for its upload
            with torch.no_grad():
                model(batch(0, 0, torch.float32))
            model.skips = -1
            assert simulation.sim.pending_copies()
            assert slow.overtaken is None
            optim.step()
            assert slow.rank_1_has_written(60.0)  # rank 1 does take the step
            simulation.sim.synchronize_all()  # an upload that nobody has waited for runs now
            found = slow.overtaken, slow.torn
        optim.zero_grad()
        dist.barrier()
        infinity.close(model)
        simulation.finish()
        return found


@pytest.mark.parametrize("overlap", ["off", "during_backward"])
def test_no_rank_writes_weights_that_a_slow_upload_of_another_rank_still_reads(overlap: str) -> None:
    assert run(2, with_slow_upload, overlap) == [(False, False), None]


def with_slow_device(folder: str, config: dict[str, Any], options: dict[str, Any]) -> Any:
    """Train. What rank 1 waits for from its device comes late."""
    with pytest.MonkeyPatch.context() as patch:
        simulation = simulated(patch, LAZY)
        if dist.get_rank() == 1:
            patch.setattr(gate, "PARK_S", 0.25)
        found = train(folder, config, 1, 2, **options)
        simulation.finish()
        return found


def test_no_rank_fetches_new_weights_that_another_ranks_device_has_not_sent() -> None:
    options: dict[str, Any] = {"steps": 2, "dtype": "bfloat16"}
    losses, norms, weights = train("", IN_RAM, 1, 2, **options)
    config = {"weights": "host"} | with_device_bytes("device")
    found = run(2, with_slow_device, "", config, options)
    assert found == [(losses[rank::2], norms, weights) for rank in range(2)]


def states_on_device(model: torch.nn.Module) -> list[int]:
    """Return the units whose states are on the device, all of whose weights rest in RAM."""
    units = registry.coordinator_of(model).units
    there = [unit for unit in units if unit.homes.are_updated_on_device]
    assert all(unit.homes.weights.lease is not None for unit in there)
    assert all(home.in_memory and home.lease is None for unit in there for home in unit.homes.all_states())
    return [unit.index for unit in there]


def opened(configs: list[dict[str, Any]]) -> Any:
    """For each config, return the units whose states are on the device."""
    with pytest.MonkeyPatch.context() as patch:
        simulated(patch, LAZY)
        found = []
        for config in configs:
            model = offloaded("", {"weights": "host"} | config)
            found.append(states_on_device(model))
            infinity.close(model)
        return tuple(found)


def with_device_bytes(optimizer: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "memory": {"host": "256MiB", "device": DEVICE_BYTES[optimizer]}}


def test_auto_puts_as_many_states_of_each_rank_on_its_device_as_fit() -> None:
    """Rank 0 has the longest slices."""
    found = run(2, opened, [with_device_bytes("auto"), with_device_bytes("device")])
    assert found == [([3], [0, 1, 2, 3]), ([0, 1, 2], [0, 1, 2])]


def gone_on(folder: str, config: dict[str, Any], until: int, micro: int, options: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        simulation = simulated(patch, LAZY)
        found = live(folder, config, until, micro, **options)
        simulation.finish()
        return found


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("bfloat16", marks=pytest.mark.long(kept="only here states on devices go on with other ranks")),
    ],
)
def test_a_run_with_states_on_devices_goes_on_with_other_ranks_and_without_devices(tmp_path: Path, dtype: str) -> None:
    one = live(str(tmp_path / "one"), {"weights": "host", "optimizer": "nvme"}, 3, 6, dtype=dtype)
    folder = str(tmp_path / "all")
    there = {"weights": "host", "nvme": {"paths": [folder]}} | with_device_bytes("device")
    for done, ranks in enumerate((2, 3)):
        lives = run(ranks, gone_on, folder, there, done + 1, 6 // ranks, {"dtype": dtype})
        assert [life.losses[done] for life in lives] == [batches_of(one, rank, ranks)[done] for rank in range(ranks)]
    require_same([live(folder, {"weights": "host", "optimizer": "nvme"}, 3, 6, dtype=dtype)], one, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "micro", "options"),
    [
        (2, 1, {"model": {"experts": 6}, "max_grad_norm": 0.01}),
        (2, 2, {"some": True}),
        (2, 2, {"vertical": True}),
        (2, 1, {"cleared": True}),
        (4, 1, {}),  # the fourth rank has no slice
        (2, 1, {"model": {"norms": True}}),
    ],
    ids=["experts apart", "a head that only some batches use", "vertical", "cleared", "no slice", "norms"],
)
def test_whatever_is_trained_the_devices_of_ranks_update_to_the_bits_of_one_process(
    tmp_path: Path, ranks: int, micro: int, options: dict[str, Any]
) -> None:
    options = {"steps": 2, "dtype": "bfloat16"} | options
    config = {"weights": "host", "optimizer": "device", "memory": {"host": f"{128 * ranks}MiB", "device": "96MiB"}}
    losses, norms, weights = train(str(tmp_path / "one"), IN_RAM, micro, ranks, **options)
    found = run(ranks, on_device, random_policy(sampling.SEED), str(tmp_path / "all"), config, micro, ranks, options)
    assert [result for result, _ in found] == [(losses[rank::ranks], norms, weights) for rank in range(ranks)]


def closed(folder: str) -> tuple[int, int]:
    """Take a step, make a generation and close the model.

    Returns:
        The references to the device's memory that the closed model keeps, and the pins that its store has room for.
    """
    config = {
        "weights": "host", "nvme": {"paths": [folder]}, "commit_every": 1, "pins": 2,
    } | with_device_bytes("device")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        slabs = slabs_made(patch)
        simulation = simulated(patch, LAZY)
        model = offloaded("", config)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        model(batch(0, dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
        infinity.commit(model)
        infinity.close(model)
        simulation.finish()
        ((slab, others),) = slabs
        pins = pins_in_store(Blocks(torch.float32), OffloadArguments.of(load_config(config), "cpu", "adamw"))
        return references(slab) - others, pins


def test_a_closed_model_keeps_no_device_memory_and_its_folders_can_be_gone_on_from(tmp_path: Path) -> None:
    """The optimizer, which the script keeps, keeps the coordinator."""
    assert run(2, closed, str(tmp_path)) == [(0, 2), (0, 2)]


_LAUNCH_FAILURE = 719  # cudart's error number


def with_failing_copies() -> str:
    """Take steps. What rank 1's device sends after the first update fails. Return the error."""
    with pytest.MonkeyPatch.context() as patch:
        simulated(patch, LAZY)
        fails, call, send = list[bool](), gate._Gate._call, OperandQueue.send

        def sent(queue: OperandQueue, operands: Operands) -> Any:
            fails.append(True)
            return send(queue, operands)

        def called(of: Any, what: Callable[[], int]) -> int:
            return _LAUNCH_FAILURE if fails and what.__name__ == "synchronize" else call(of, what)

        if dist.get_rank() == 1:
            patch.setattr(OperandQueue, "send", sent)
            patch.setattr(gate._Gate, "_call", called)
        model = offloaded("", {"weights": "host"} | with_device_bytes("device"))
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        said = ""
        try:
            for step in range(2):
                model(batch(step, dist.get_rank(), torch.float32)).backward()
                optim.step()
                optim.zero_grad()
        except InfinityError as error:
            said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(InfinityError):
            infinity.close(model)
        return said


def test_new_weights_that_are_lost_on_their_way_from_a_device_are_an_error_on_all_ranks() -> None:
    first, second = run(2, with_failing_copies)
    assert first.startswith("PeerError: rank 1 failed: DeviceCopyError")
    assert second.startswith("DeviceCopyError")
    assert "weight" in second
