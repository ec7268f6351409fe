"""What the doctor reports: rows, and the probes that find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

_LIMIT_S = 20

State: TypeAlias = Literal["ok", "slower", "missing", "unknown"]


class Row(NamedTuple):
    """One line of the report: what a probe found.

    Attributes:
        state: missing: a run cannot work without it, or not as asked; slower: it works, and something costs speed, or
            soon will; unknown: it could not be found out, which `finding` explains.
        mend: a command for the shell that mends it; '' where there is none, or nothing to mend.
        what, section: '' where they are those of the probe.
    """

    state: State
    finding: str
    mend: str = ""
    what: str = ""
    section: str = ""


@dataclass(frozen=True)
class Probe:
    """Something to look at. `look` may raise anything, hang, or end its process."""

    section: str
    what: str
    look: Callable[[], Row | Sequence[Row]]

    def rows(self, found: Row | Sequence[Row]) -> list[Row]:
        """What it found, with its names."""
        each = [found] if isinstance(found, Row) else found
        return [row._replace(what=row.what or self.what, section=self.section) for row in each]


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
        looks: Mapping[str, Callable[[], Row | Sequence[Row]]],
        limit_s: float = _LIMIT_S,
        leaves: Path | None = None,
    ) -> Probes:
        """Probes of one section. Args: looks: by what each looks at."""
        return cls([Probe(section, what, look) for what, look in looks.items()], limit_s, leaves)
