"""One mutant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one file that a test must notice.

    Attributes:
        name: the guard that is removed.
        path: the file; `old` occurs in it once and becomes `new`.
        tests: arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def native(self) -> bool:
        return self.path.startswith("csrc/")
