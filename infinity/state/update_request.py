"""An optimizer's request: the update of one group in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity import _native
from infinity.errors import ConfigError
from infinity.state.moments import Moment


class SegmentRequest(NamedTuple):
    """Elements [begin, end) of a group, and the optimizer's rule that updates them.

    Attributes:
        begin, end: range of elements.
        step, model_index, fresh, grad_scale: arguments of _native.Segment; `model_index` is the segment's `index`.
        options: all other arguments of _native.Segment; one dict is shared by all parameters of a param group.
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
    """Update of a group that an optimizer requests for one step. Two equal requests give the same bits.

    Attributes:
        segments: segments in the order of their elements. Elements outside of all segments are not changed.
        moments: moments that the rules of the segments use, by name. Only these moments are read and written. None: all
            moments of the group.
        arithmetic: whether new values are computed; False: the states are read and written back unchanged.
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
    """Return whether any gradient is multiplied by another factor than `scale`."""
    groups = (group for request in requests.values() for group in request.values())
    return any(segment.grad_scale != scale for group in groups for segment in group.segments)


def require_accumulation_steps(passes: int | None) -> None:
    """Raise ConfigError if `passes` is not a valid number of backward passes per step."""
    if passes is not None and not (isinstance(passes, int) and passes >= 1):
        raise ConfigError(f"accumulation_steps must be a whole number of at least 1, or None, not {passes!r}")
