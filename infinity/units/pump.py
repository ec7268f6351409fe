"""The pump: the only code that continues updates and commits after their background part is complete.

The pump has no thread. Each forward and backward of a unit, and each step, calls the pump. Each call continues all work
whose background part has completed since the last call.

An update is finished when its writes are complete. After the last update of a step, the commit of the step continues:
states in RAM are written, and then the swap file is synced. The manifest is written after the sync, when the training
loop has reached the beginning of its next iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.base.timeline import Timeline
from infinity.durable.commits import Commits
from infinity.errors import InfinityError, SwapIOError
from infinity.tiers.resources import ModelResources
from infinity.units.health import ModelHealth
from infinity.units.update_queue import UpdateQueue


class UpdatePump:
    """The pump of one model. Its methods are called under the coordinator's lock.

    After a failed commit the model refuses every call, because states that were reported durable are not durable.
    """

    def __init__(
        self, resources: ModelResources, updates: UpdateQueue, commits: Commits, health: ModelHealth, timeline: Timeline
    ) -> None:
        self._resources = resources
        self._updates = updates
        self._commits = commits
        self._health = health
        self._timeline = timeline

    def advance(self) -> None:
        """Continue with all completed work, without waiting."""
        self._updates.finish_written()
        self._advance_commit()

    def finish_updates(self) -> None:
        """Wait until every decided update is finished.

        Raises:
            SwapIOError: an update failed.
        """
        self._updates.finish_all()
        self._advance_commit()

    def finish_commit(self) -> None:
        """Finish the commit in progress, if there is one. Raises the errors of Commits.finish."""
        if self._commits.under_way:
            self.finish_updates()
            with self.committing():
                self._commits.finish()

    def begin_commit(self, step: int) -> None:
        """Begin the commit of the decided step `step`, if a commit is due."""
        if self._commits.due(step):
            with self.committing():
                self._commits.begin(step)
            self._advance_commit()
        else:
            self._commits.skip_commit()

    def make_way(self) -> bool:
        """Prepare for a write to the store, after all updates are finished.

        Finish the commit in progress if its body is frozen (durable/commits.py); otherwise withdraw the commit. Delete
        the generations that the run has given up.

        Raises the errors of Commits.step_begins.

        Returns:
            Whether a commit was withdrawn.
        """
        gave_way = self._commits.under_way and not self._commits.frozen
        with self.committing():
            self._commits.step_begins()
            self.finish_recovery()
        return gave_way

    def finish_recovery(self) -> None:
        """Prepare for a write to the store: delete the generations that were given up when the run was resumed."""
        if self._resources.generations is not None:
            with self.committing():
                self._resources.generations.finish_recovery()

    def drop_speculation(self) -> int:
        """Undo every speculative update.

        Returns:
            The number of undone updates.

        Raises:
            SwapIOError: the device failed.
        """
        units = self._updates.speculative
        with self._health.failing(SwapIOError):
            self._updates.undo(units)
        return len(units)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Return a context. An error that ends the context is a failure of the model, and the time in the context
        counts as waiting for commits."""
        with self._health.failing(InfinityError), self._timeline.stall("commit"):
            yield

    def _advance_commit(self) -> None:
        if self._commits.under_way and self._updates.oldest_decided is None:
            with self.committing():
                self._commits.write_remaining()
                if self._commits.ready:
                    self._commits.finish()
