"""Which units' weights and optimizer states rest in RAM.

A step visits every unit once per pass, so a cache that evicts what was used longest ago would hold nothing when it is
asked. What fits is therefore chosen once: whole units, the first of the forward first, because it is their update that
the next forward waits for first. Weights before states: a byte of weights in RAM saves four of traffic, one of states
two. Gradients come before both: what is cached never takes the room to add up micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import SwapConfig
from infinity.plan.totals import Totals, as_far_as

WEIGHT_SHARE_OF_DEVICE = 0.5  # the rest is for activations and the gradients of the running unit


@dataclass(frozen=True)
class Budgets:
    """Bytes of the device and of host memory. Without a GPU (`on_cpu`) both are RAM."""

    device: int
    host: int
    on_cpu: bool


@dataclass(frozen=True)
class Placement:
    """Where weights and states rest.

    Attributes:
        weights, optimizer: tier (device | host | nvme) of what is not in RAM, or of all.
        weights_in_ram, states_in_ram: indices of the units whose weights, or optimizer states, are in host memory.
        upload_bytes: host memory that reads of weights land in before they are copied to a GPU.
        host_bytes: what all this takes of host memory, checksums included.
    """

    weights: str
    optimizer: str
    weights_in_ram: frozenset[int]
    states_in_ram: frozenset[int]
    upload_bytes: int
    host_bytes: int


def place(config: SwapConfig, totals: Totals, budgets: Budgets, room: int) -> Placement:
    """Place weights and states. What the config leaves open takes no more than `room` bytes of host memory, with
    whatever the config fixes; without nvme.paths everything that is open goes to RAM."""
    given_states = totals.trained if config.optimizer == "host" else frozenset[int]()
    weights, in_ram = _place_weights(config, totals, budgets, room, given_states)
    upload = _upload_bytes(totals, budgets, in_ram)
    optimizer: str = config.optimizer
    states = given_states
    if config.optimizer == "auto":
        rest = room - _host_bytes(totals, weights, in_ram, states, budgets) - upload
        optimizer, states = _place_states(config, totals, rest)
    host_bytes = upload + _host_bytes(totals, weights, in_ram, states, budgets)
    return Placement(weights, optimizer, in_ram, states, upload, host_bytes)


def _place_weights(
    config: SwapConfig, totals: Totals, budgets: Budgets, room: int, states: frozenset[int]
) -> tuple[str, frozenset[int]]:
    if config.weights != "auto":
        return config.weights, frozenset() if config.weights == "nvme" else totals.every
    room -= _host_bytes(totals, "nvme", frozenset(), states, budgets)
    if totals.cost(totals.weight) <= room or not config.nvme.paths:
        on_device = not budgets.on_cpu and totals.weight <= budgets.device * WEIGHT_SHARE_OF_DEVICE
        return "device" if on_device else "host", totals.every
    room -= _upload_bytes(totals, budgets, frozenset())
    return "nvme", as_far_as(((unit.index, totals.cost(unit.weight)) for unit in totals.of_units), room)


def _place_states(config: SwapConfig, totals: Totals, room: int) -> tuple[str, frozenset[int]]:
    if totals.cost(totals.state) <= room or not config.nvme.paths:
        return "host", totals.trained
    trained = (unit for unit in totals.of_units if unit.state)
    return "nvme", as_far_as(((unit.index, totals.cost(unit.state)) for unit in trained), room)


def _upload_bytes(totals: Totals, budgets: Budgets, weights_in_ram: frozenset[int]) -> int:
    """Two reads at once of the largest unit on NVMe."""
    if budgets.on_cpu:
        return 0
    return 2 * max((unit.weight for unit in totals.of_units if unit.index not in weights_in_ram), default=0)


def _host_bytes(
    totals: Totals, weights: str, weights_in_ram: frozenset[int], states_in_ram: frozenset[int], budgets: Budgets
) -> int:
    on_device = weights == "device" and budgets.on_cpu  # that is RAM too, of the other budget
    held = 0 if on_device else totals.weight_of(weights_in_ram)
    swap = totals.swap_bytes(weights_in_ram, states_in_ram)
    return held + totals.state_of(states_in_ram) + totals.checksum_bytes(swap)
