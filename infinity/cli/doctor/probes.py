"""The probes of the doctor, and the rows of its report, which the probes produce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

_LIMIT_S = 20

State: TypeAlias = Literal["ok", "slower", "missing", "unknown"]


class ProbeFinding(NamedTuple):
    """One line of the report: the finding of a probe.

    Attributes:
        state: "missing": a run cannot work, or not as configured; "slower": a run works, but is slower now or soon;
            "unknown": the state could not be determined, and `finding` says why.
        mend: a shell command that repairs the problem; '' if there is no command or no problem.
        what, section: names of the row; '' if the row has the names of its probe.
    """

    state: State
    finding: str
    mend: str = ""
    what: str = ""
    section: str = ""


@dataclass(frozen=True)
class Probe:
    """A check of the machine. The function `look` may raise any exception, hang, or end its process."""

    section: str
    what: str
    look: Callable[[], ProbeFinding | Sequence[ProbeFinding]]

    def rows(self, found: ProbeFinding | Sequence[ProbeFinding]) -> list[ProbeFinding]:
        """Return the rows of a result. Rows without names get the names of the probe."""
        each = [found] if isinstance(found, ProbeFinding) else found
        return [row._replace(what=row.what or self.what, section=self.section) for row in each]


@dataclass(frozen=True)
class ProbeGroup:
    """Probes that one process runs in sequence.

    Attributes:
        limit_s: time limit for all probes of the group together, in seconds.
        leaves: a file that a probe creates and removes. If the process of the probe dies before it has removed the
            file, the parent process removes the file.
    """

    probes: Sequence[Probe]
    limit_s: float
    leaves: Path | None = None

    @classmethod
    def of(
        cls,
        section: str,
        looks: Mapping[str, Callable[[], ProbeFinding | Sequence[ProbeFinding]]],
        limit_s: float = _LIMIT_S,
        leaves: Path | None = None,
    ) -> ProbeGroup:
        """Return the probes of one section. `looks` has the function of each check, by the name of the check."""
        return cls([Probe(section, what, look) for what, look in looks.items()], limit_s, leaves)
