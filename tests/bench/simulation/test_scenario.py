"""Whole steps in simulated time: the house's rooms run over imitated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation.machine import SimulatedMachine
from simulation.policies import POLICIES, policy
from simulation.scenario import Outcome, bounds, simulate, summary
from simulation.shapes import Task, task_of

from tests.bench.simulation.machines import CPU, GPU, SMALL


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(SMALL, "fp32")


def step(machine: SimulatedMachine, task: Task, *, clipped: bool = False, **config: Any) -> Outcome:
    given = {"weights": "host", "optimizer": "nvme", "gradients": "host"} | config
    outcome = simulate(machine, task, clipped=clipped, **given)
    assert outcome.figures is not None, outcome.refused
    return outcome


def seconds(machine: SimulatedMachine, task: Task, **config: Any) -> float:
    figures = step(machine, task, **config).figures
    assert figures is not None
    return figures.seconds


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("weights", ["host", "nvme"])
@pytest.mark.parametrize("clipped", [False, True])
def test_no_step_is_faster_than_a_resource(machine: SimulatedMachine, task: Task, weights: str, clipped: bool) -> None:
    figures = step(machine, task, weights=weights, clipped=clipped).figures
    assert figures is not None
    # Work of the steps before comes in at one end of what is measured, as much goes out at the other, up to a unit's.
    assert figures.seconds >= 0.97 * max(bounds(machine, figures).values())


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("machine", [CPU, replace(GPU, flops=4e12)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_overlap_saves_time(machine: SimulatedMachine, task: Task, weights: str) -> None:
    assert seconds(machine, task, weights=weights) < 0.95 * seconds(machine, task, weights=weights, overlap="off")


def test_a_step_with_states_on_disk_moves_20_bytes_per_parameter(task: Task) -> None:
    figures = step(CPU, task, overlap="off").figures
    assert figures is not None
    assert figures.read_bytes / task.numel == pytest.approx(10, rel=0.01)
    assert figures.written_bytes / task.numel == pytest.approx(10, rel=0.01)


def test_a_gpus_update_takes_weights_from_their_slot_as_far_as_there_is_memory(task: Task) -> None:
    """Each unit's weights come from the disk for the forward, and for its update from the slot or the disk."""
    outcome = step(GPU, task, weights="nvme", overlap="before_forward")
    figures = outcome.figures
    assert figures is not None
    assert outcome.plan is not None
    copied = figures.used["down"] - 2 * task.numel  # beside gradients
    assert 0.9 * outcome.plan.budgets.copies_bytes < copied <= outcome.plan.budgets.copies_bytes
    assert figures.read_bytes + copied == pytest.approx((2 + 2 + 10) * task.numel, rel=0.01)
    assert figures.written_bytes / task.numel == pytest.approx(2 + 10, rel=0.01)


def test_every_unit_goes_up_once_where_all_fit_the_device(task: Task) -> None:
    figures = step(GPU, task).figures
    assert figures is not None
    assert figures.used["up"] / task.numel == pytest.approx(2, rel=0.01)


def test_faster_disks_make_a_step_faster(task: Task) -> None:
    faster = replace(CPU, disk_read=4 * CPU.disk_read, disk_write=4 * CPU.disk_write)
    assert seconds(faster, task, overlap="off") < seconds(CPU, task, overlap="off")


def test_others_work_makes_a_step_slower(task: Task) -> None:
    assert seconds(replace(CPU, busy_cores=2.0), task) > 1.5 * seconds(CPU, task)


def test_two_simulations_give_the_same_figures(task: Task) -> None:
    assert step(GPU, task, weights="nvme").figures == step(GPU, task, weights="nvme").figures


def test_weights_in_ram_and_on_disk_side_by_side_never_stop_a_gpu(task: Task) -> None:
    """Uploads of both kinds wait in one stream for the last uses of their slots: there are slots for a few units."""
    room = task.activation_bytes + 6 * max(unit.weight_bytes for unit in task.units)
    outcome = step(replace(GPU, device_bytes=int(room / 0.9)), task, weights="auto", host=180_000_000)
    assert outcome.plan is not None
    assert 0 < len(outcome.plan.placement.weights.in_ram) < len(task.units)
    assert outcome.plan.budgets.slot_bytes < outcome.plan.layout.weight_bytes


def test_a_machine_that_is_too_small_is_refused_in_words(task: Task) -> None:
    outcome = simulate(replace(GPU, device_bytes=8 << 20), task, clipped=False)
    assert "memory.device" in outcome.refused
    assert summary(GPU, task, outcome) == {"refused": outcome.refused}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_and_leaves_no_trace(name: str, task: Task) -> None:
    before = seconds(GPU, task, optimizer="auto")
    with policy(name):
        assert seconds(GPU, task, optimizer="auto") > 0
    assert seconds(GPU, task, optimizer="auto") == before


def test_without_shadows_the_planner_keeps_more_states_in_ram(task: Task) -> None:
    def in_ram() -> int:
        """Units, of several budgets: what tiles take of them is as the processor's caches are."""
        plans = [
            step(GPU, task, optimizer="auto", host=host).plan for host in range(300_000_000, 400_000_000, 16 << 20)
        ]
        return sum(len(plan.placement.optimizer.in_ram) for plan in plans if plan is not None)

    with_shadows = in_ram()
    with policy("no shadows"):
        assert in_ram() > with_shadows


def test_updates_in_ram_that_begin_during_backward_save_time(task: Task) -> None:
    """Where a GPU computes for about as long as the update takes."""
    slow = replace(GPU, flops=4e12)
    late = seconds(slow, task, optimizer="host", overlap="before_forward")
    assert seconds(slow, task, optimizer="host") < 0.95 * late


def test_updates_in_ram_come_late_where_the_plan_leaves_nothing_for_new_values(task: Task) -> None:
    slow = replace(GPU, flops=4e12)
    plan = step(slow, task, optimizer="host", overlap="before_forward").plan
    assert plan is not None
    late = seconds(slow, task, optimizer="host", overlap="before_forward")
    assert seconds(slow, task, optimizer="host", host=plan.host_bytes) == pytest.approx(late, rel=0.01)
