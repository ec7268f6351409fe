"""The pump: what completes in the background is carried on here, and nowhere else. It has no thread: each forward,
backward and step of a unit comes by and carries on with what has completed since.

An update whose writes are complete is finished; after the last one of a step, its commit goes on: what is in RAM is
written, the swap file is synced, and once that is done and the loop was at its top the manifest is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.base.timeline import Timeline
from infinity.durable.commits import Commits
from infinity.errors import InfinityError, SwapIOError
from infinity.tiers.resources import Resources
from infinity.units.health import Health
from infinity.units.updates import Updates


class Progress:
    """Called under the coordinator's lock. After a commit that failed the model refuses to go on: what was said to be
    durable is not."""

    def __init__(
        self, resources: Resources, updates: Updates, commits: Commits, health: Health, timeline: Timeline
    ) -> None:
        self._resources = resources
        self._updates = updates
        self._commits = commits
        self._health = health
        self._timeline = timeline

    def carry_on(self) -> None:
        """Carry on with what is done, as far as possible without waiting."""
        self._updates.finish_written()
        self._advance_commit()

    def finish_updates(self) -> None:
        """Wait until every decided update is finished. Raises SwapIOError: one failed."""
        self._updates.finish_all()
        self._advance_commit()

    def finish_commit(self) -> None:
        """Finish the commit under way, if there is one. Raises as Commits.finish."""
        if self._commits.under_way:
            self.finish_updates()
            with self.committing():
                self._commits.finish()

    def begin_commit(self, step: int) -> None:
        """Begin the commit of `step`, which was decided, if it is due."""
        if self._commits.due(step):
            with self.committing():
                self._commits.begin(step)
            self._advance_commit()
        else:
            self._commits.pass_by()

    def make_way(self) -> bool:
        """Something will be written: a commit that was frozen is finished, another one gives way. All updates are
        finished. Returns whether one gave way. Raises as Commits.step_begins."""
        gave_way = self._commits.under_way and not self._commits.frozen
        with self.committing():
            self._commits.step_begins()
            self.settle()
        return gave_way

    def settle(self) -> None:
        """Something is about to be written: the generations that were given up for the one resumed go."""
        if self._resources.generations is not None:
            with self.committing():
                self._resources.generations.settle()

    def drop_speculation(self) -> int:
        """Undo every speculative update. Returns how many there were. Raises SwapIOError: the device failed."""
        units = self._updates.speculative
        with self._health.failing(SwapIOError):
            self._updates.undo(units)
        return len(units)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """A failure in this context is one of a commit."""
        with self._health.failing(InfinityError), self._timeline.stall("commit"):
            yield

    def _advance_commit(self) -> None:
        if self._commits.under_way and self._updates.oldest_decided is None:
            with self.committing():
                self._commits.write_rest()
                if self._commits.ready:
                    self._commits.finish()
