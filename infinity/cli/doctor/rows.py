"""What the doctor reports: rows, and the probes that find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

_LIMIT_S = 20

State: TypeAlias = Literal["ok", "slower", "missing", "unknown"]


class Found(NamedTuple):
    """What a probe found.

    Attributes:
        state: missing: a run cannot work without it, or not as asked; slower: it works, and something costs speed, or
            soon will; unknown: it could not be found out, which `finding` explains.
        mend: a command for the shell that mends it; '' where there is none, or nothing to mend.
        name: of the row, where the probe has several; '': the probe's.
    """

    state: State
    finding: str
    mend: str = ""
    name: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the report: `what`, of the section, is so."""

    section: str
    what: str
    finding: str
    state: State
    mend: str = ""


@dataclass(frozen=True)
class Probe:
    """Something to look at. `look` may raise anything, hang, or end its process."""

    section: str
    what: str
    look: Callable[[], Found | Sequence[Found]]

    def rows(self, found: Found | Sequence[Found]) -> list[Row]:
        each = [found] if isinstance(found, Found) else found
        return [Row(self.section, one.name or self.what, one.finding, one.state, one.mend) for one in each]


@dataclass(frozen=True)
class Probes:
    """Probes that one process looks at, one after the other.

    Attributes:
        limit_s: for all of them.
        leaves: a file that a probe makes and removes, and that is removed for it if its process dies meanwhile.
    """

    probes: Sequence[Probe]
    limit_s: float
    leaves: Path | None = None

    @classmethod
    def of(
        cls,
        section: str,
        looks: Mapping[str, Callable[[], Found | Sequence[Found]]],
        limit_s: float = _LIMIT_S,
        leaves: Path | None = None,
    ) -> Probes:
        """Probes of one section. Args: looks: by what each looks at."""
        return cls([Probe(section, what, look) for what, look in looks.items()], limit_s, leaves)
