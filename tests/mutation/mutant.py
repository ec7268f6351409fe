"""One mutant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one file that a test must notice.

    Attributes:
        name: name of the guard that the mutant removes.
        path: the file that is changed; `old` occurs once in the file and is replaced by `new`.
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
