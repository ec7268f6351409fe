"""Every byte that a plan takes is an extent or a lease of its layout, each of them once."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, PlanError
from infinity.plan.layout import StateLayout, StorageLayout
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests.sampling import number

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
Shape = tuple[int, torch.dtype, bool]
"""Pages of a matrix in fp32, its dtype, and whether it is trained."""


def plan(blocks: list[list[Shape]], config: dict[str, Any], device: str = "cpu", **options: Any) -> Plan:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Sequential(*map(linear, shapes)) for shapes in blocks)
    loaded = load_config(config)
    units = discover(model, loaded.moments).units
    return make_plan(units, OffloadArguments(loaded, torch.device(device), **options), can_recompute=False)


def linear(shape: Shape) -> nn.Module:
    pages, dtype, trained = shape
    return nn.Linear(32 * pages, 32, bias=False, dtype=dtype).requires_grad_(trained)


configs = st.fixed_dictionaries(
    {
        "weights": st.sampled_from(["auto", "device", "host", "nvme"]),
        "optimizer": st.sampled_from(["auto", "host", "nvme", "nvme"]),
        "gradients": st.sampled_from(["auto", "host", "nvme"]),
        "overlap": st.sampled_from(["auto", "during_backward", "before_forward", "off"]),
        "commit_every": st.sampled_from([0, 1, 3]),
        "keep": st.integers(1, 3),
        "pins": st.integers(0, 2),
        "master": st.sampled_from(["split16", "fp32", "none"]),
        "moments": st.sampled_from(["fp32", "bf16", "int8"]),
        "update": st.fixed_dictionaries({"tile": st.sampled_from(["4KiB", "64KiB"]), "threads": st.just(2)}),
        "nvme": st.fixed_dictionaries({"paths": st.just(["/tmp/never-made"]), "checksums": st.booleans()}),
        "memory": st.fixed_dictionaries(
            {
                "device": st.sampled_from([1 << 18, 1 << 20, 1 << 22]),
                "host": st.sampled_from([1 << 19, 1 << 20, 3 << 19, 1 << 21, 3 << 20, 1 << 22, 1 << 23, 1 << 25]),
            }
        ),
    }
)
options = st.fixed_dictionaries(
    {
        "device": st.sampled_from(["cpu", "cuda"]),
        "optimizer": st.sampled_from(["adamw", "lion", "adagrad"]),
        "accumulation_steps": st.sampled_from([None, 1, 2, 4]),
    }
)
shapes = st.tuples(st.integers(1, 40), st.sampled_from(DTYPES), st.sampled_from([True, True, True, False]))
blocks = st.lists(st.lists(shapes, min_size=1, max_size=3), min_size=1, max_size=5)


def kept(layout: StorageLayout) -> list[StateLayout]:
    """In the order of the swap file."""
    states = []
    for unit in layout.units:
        states += [group.weight for group in unit.groups]
        states += [state for group in unit.groups for state in group.states.values()]
    return states


@settings(max_examples=number(40, 3000), deadline=None)
@given(blocks, configs, options)
def test_extents_fill_the_swap_file_and_leases_the_arena(
    blocks: list[list[Shape]], config: dict[str, Any], options: dict[str, Any]
) -> None:
    try:
        made = plan(blocks, config, **options)
    except (PlanError, ConfigError):
        return
    layout, budgets = made.layout, made.budgets
    gradients = [gradient for unit in layout.units for gradient in unit.gradients]
    copies = [(offset, state.nbytes) for state in kept(layout) + gradients for offset in state.offsets]
    end = 0
    for offset, nbytes in copies:
        assert (offset, nbytes % PAGE_BYTES) == (end, 0)
        end += nbytes
    assert layout.swap.nbytes == end
    assert layout.swap.scratch == sum(state.nbytes for state in gradients if state.offsets)
    leases = [state.lease_bytes for state in kept(layout) + gradients]
    moving = budgets.shadow_bytes + budgets.landing_bytes + budgets.staging.nbytes + budgets.staging.ahead_bytes
    arena = layout.arena
    rings = arena.transfers + arena.bounce + arena.copies + arena.commits + arena.activations
    assert arena.nbytes == sum(leases) + moving + rings
    assert layout.checksum_bytes == (end // PAGE_BYTES * 4 if config["nvme"]["checksums"] else 0)
    assert made.host_bytes <= budgets.limits.host
    assert made.device_bytes <= budgets.limits.device
    in_place = options["device"] == "cpu" and made.placement.weights.tier == "nvme"
    assert layout.arena.transfers == (budgets.slot_bytes if in_place else budgets.upload_bytes)


@settings(max_examples=number(25, 1000), deadline=None)
@given(blocks, configs, options)
def test_every_state_has_an_extent_or_a_lease_and_the_copies_that_its_config_asks_for(
    blocks: list[list[Shape]], config: dict[str, Any], options: dict[str, Any]
) -> None:
    try:
        made = plan(blocks, config, **options)
    except (PlanError, ConfigError):
        return
    placement, every = made.placement, config["commit_every"]
    for unit in made.layout.units:
        index, spare = unit.local.index, unit.local.index in placement.updates.spare_units
        if index in placement.optimizer.resident:
            continue  # its states are on the device
        for group, gradient in zip(unit.groups, unit.gradients, strict=True):
            trained = group.group.trainable
            held = (index in placement.weights.in_ram, index in placement.optimizer.in_ram)
            for state, in_ram in [(group.weight, held[0])] + [(state, held[1]) for state in group.states.values()]:
                assert state.lease_bytes == (state.nbytes if in_ram else 0)
                in_place = 0 if in_ram else 1 + (spare and trained)
                durable = config["keep"] + config["pins"] + 1 if trained else 1
                assert len(state.offsets) == (durable if every else in_place)
            if trained:
                assert gradient.offsets or gradient.lease_bytes
                assert bool(gradient.lease_bytes) == (index in placement.gradients.in_ram)
            else:
                assert (group.states, gradient.nbytes) == ({}, 0)


def test_the_order_in_the_swap_file_is_the_one_that_stores_were_written_in() -> None:
    """In pages. Of each unit the weights, trained groups first; then the states of each trained group, all copies side
    by side. Gradients come behind all units."""
    config = {"weights": "nvme", "optimizer": "nvme", "gradients": "nvme", "commit_every": 1}
    config |= {"nvme": {"paths": ["/tmp/never-made"]}, "memory": {"device": "1MiB", "host": "16MiB"}}
    unit = [(4, torch.bfloat16, True), (2, torch.float32, False), (6, torch.float32, True)]
    layout = plan([unit, unit], config).layout
    found = {
        (each.local.index, index, name): [offset // PAGE_BYTES for offset in state.offsets]
        for each in layout.units
        for index, (group, gradient) in enumerate(zip(each.groups, each.gradients, strict=True))
        for name, state in {"weight": group.weight, **group.states, "grad": gradient}.items()
        if state.offsets
    }
    first = {
        (0, 0, "weight"): [0, 2],
        (0, 1, "weight"): [4, 10],
        (0, 2, "weight"): [16],
        (0, 0, "residual"): [18, 20],
        (0, 0, "exp_avg"): [22, 26],
        (0, 0, "exp_avg_sq"): [30, 34],
        (0, 1, "exp_avg"): [38, 44],
        (0, 1, "exp_avg_sq"): [50, 56],
    }
    second = {(1, group, state): [62 + page for page in pages] for (_, group, state), pages in first.items()}
    gradients = {(0, 0, "grad"): [124], (0, 1, "grad"): [128], (1, 0, "grad"): [134], (1, 1, "grad"): [138]}
    assert found == first | second | gradients
