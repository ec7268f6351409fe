"""What an optimizer asks for: the update of one group in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity import _native
from infinity.errors import ConfigError
from infinity.state.moments import Moment


class SegmentRequest(NamedTuple):
    """Elements [begin, end) of a group, and the rule they are updated by.

    Attributes:
        step, model_index, fresh, grad_scale: as _native.Segment takes them; the second one as its `index`.
        options: what else it takes; one object for every parameter of a param group.
    """

    begin: int
    end: int
    step: int
    model_index: int
    fresh: bool
    grad_scale: float
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class GroupUpdate:
    """What an optimizer wants of a group in one step. Two that are equal give the same bits.

    Attributes:
        segments: sorted by element; what is in none is not touched.
        moments: those the segments' rules use, which are moved; None: all there are.
        arithmetic: False moves the states to and fro and leaves them as they are.
    """

    segments: tuple[SegmentRequest, ...]
    moments: frozenset[Moment] | None
    arithmetic: bool = True

    def native_segments(self) -> Sequence[_native.Segment]:
        every = {id(each.options): each.options for each in self.segments}
        rules = {key: _native.Segment(0, 0, step=1, **dict(options)) for key, options in every.items()}
        return [
            rules[id(options)].at(begin, end, step=step, index=index, fresh=fresh, grad_scale=scale)
            for begin, end, step, index, fresh, scale, options in self.segments
        ]


def is_clipped(requests: Mapping[int, Mapping[int, GroupUpdate]], scale: float) -> bool:
    """Whether gradients are multiplied by anything but `scale`."""
    groups = (group for request in requests.values() for group in request.values())
    return any(segment.grad_scale != scale for group in groups for segment in group.segments)


def require_accumulation_steps(passes: int | None) -> None:
    """Raises ConfigError for what is no number of backward passes before a step."""
    if passes is not None and not (isinstance(passes, int) and passes >= 1):
        raise ConfigError(f"accumulation_steps must be a whole number from 1 on, or None, not {passes!r}")
