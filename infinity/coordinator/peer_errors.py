"""Errors of collectives that do not pass through a CollectiveQueue, such as those of a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.coordinator import registry
from infinity.errors import PeerError
from infinity.quoting import raised
from infinity.ranks.collective_queue import is_peer_error


@contextmanager
def peer_errors() -> Iterator[None]:
    """In this context, turn errors of torch.distributed that another rank has caused into PeerError.

    If a model of several ranks is offloaded, the PeerError has the error of the other rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        raise _explained(error) from error


def _explained(error: RuntimeError) -> PeerError:
    worlds = [coordinator.world for coordinator in registry.coordinators() if not coordinator.closed]
    return worlds[0].explain(error) if worlds else PeerError(raised(error))
