"""Bringing moments home that come from elsewhere, in whatever form the config asks for, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ModelError
from infinity.io.store import wait_all
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.int8 import blocks_of, put_scales_back
from infinity.state.moments import Moment
from infinity.state.unit import Group, ParameterSpec
from infinity.tiers.home import Home

_CHUNK_NUMEL = 4 * _native.CHUNK_NUMEL


@dataclass(frozen=True)
class GivenMoment:
    """A moment of one parameter.

    Attributes:
        values: fp32, of the parameter's shape.
        scales: fp32, one for each block, where it was int8.
    """

    values: torch.Tensor
    scales: torch.Tensor | None


MomentSource = Callable[[str, Moment], GivenMoment | None]
"""Gives a moment of a parameter by its name; None where it has not begun."""


def fill_moments(coordinator: Coordinator, source: MomentSource) -> None:
    """Write moments to their homes, before the first step.

    Raises:
        ModelError: the model was offloaded for an optimizer that keeps less.
        SwapIOError: the device failed.
    """
    states: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")
    for unit in coordinator.units:
        for index, homes in unit.homes.states.items():
            group = unit.unit.groups[index]
            for state, home in zip(states, (homes.exp_avg, homes.exp_avg_sq), strict=True):
                named = {spec: source(spec.name, state) for spec in group.specs if spec.numel}
                given = {spec: moment for spec, moment in named.items() if moment is not None}
                if given and home is None:
                    raise ModelError(
                        f"there is {state} of '{next(iter(given)).name}', and this model was offloaded without room "
                        "for it. Give the optimizer of the run as optimizer=."
                    )
                if given and home is not None:
                    _fill(coordinator, group, state, home, given)


def _fill(
    coordinator: Coordinator, group: Group, state: Moment, home: Home, given: Mapping[ParameterSpec, GivenMoment]
) -> None:
    nbytes = round_up(_native.moment_bytes(group.moments, min(_CHUNK_NUMEL, group.numel)), PAGE_BYTES)
    memory = None if home.in_memory else _native.Arena(nbytes, huge_pages=False)
    for begin in range(0, group.numel, _CHUNK_NUMEL):
        numel = min(_CHUNK_NUMEL, group.numel - begin)
        values = _assemble(given, begin, numel, with_scales=group.moments == "int8")
        at, end = (_native.moment_bytes(group.moments, count) for count in (begin, begin + numel))
        if memory is None:
            target = home.view()[at:end]
            home.changed()
        else:
            target = memory.view(0, round_up(end - at, PAGE_BYTES))[: end - at]
        _native.encode_moments(values.numpy(), group.moments, is_signed=state == "exp_avg", data=target)
        if memory is not None:
            whole = memory.view(0, round_up(end - at, PAGE_BYTES))
            wait_all([coordinator.resources.require_store().write(home.stored(), whole, at=at, io_class="states")])


def _assemble(given: Mapping[ParameterSpec, GivenMoment], begin: int, numel: int, *, with_scales: bool) -> torch.Tensor:
    """Elements [begin, begin + numel) of a group, fp32; zeros where nothing was given."""
    values = torch.zeros(numel)
    for spec, moment in given.items():
        first, last = max(begin, spec.offset), min(begin + numel, spec.offset + spec.numel)
        if first >= last:
            continue
        values[first - begin : last - begin] = moment.values.reshape(-1)[first - spec.offset : last - spec.offset]
        if with_scales and moment.scales is not None:
            start, count = blocks_of(first - spec.offset), blocks_of(last - first)
            of_blocks = values[first - begin : first - begin + count * _native.BLOCK_NUMEL]
            put_scales_back(of_blocks, moment.scales[start : start + count])
    return values
