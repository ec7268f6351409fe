"""Several ranks that are about to train one model: what they must agree on before anything is planned, and how all hear
of an error of one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.config import NvmeConfig, SwapConfig
from infinity.errors import NotAvailableError
from infinity.plan.planner import limits_of
from infinity.plan.problem import ALONE, Peers
from infinity.ranks.exchange import Exchange
from infinity.ranks.ranks import Ranks
from infinity.state.moments import OptimizerName
from infinity.state.shard import Cut
from infinity.state.unit import Unit
from infinity.tiers.resources import make_directory
from infinity.units.shared import require_same

_SEVERAL_RANKS = "INFINITY_SEVERAL_RANKS"
"""Set by the tests of several ranks, which nobody else can train with yet: generations and GPUs are missing."""
_MARGIN_S = 30.0  # a rank whose disk does not answer is told of before the others give that rank up


@dataclass(frozen=True)
class Together:
    """This process, among others or alone.

    Attributes:
        exchange: None where it is alone.
    """

    exchange: Exchange | None
    peers: Peers

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error that leaves this context is told to the other ranks, who wait for this one."""
        try:
            yield
        except BaseException as error:
            if self.exchange is not None:
                self.exchange.fail(error)
                self.exchange.close()
            raise

    def nvme(self, config: NvmeConfig) -> NvmeConfig:
        """Each rank has a store of its own, in a directory of its own in each of nvme.paths. Raises ConfigError."""
        if self.exchange is None:
            return config
        for path in config.paths:
            make_directory(path)
        name = f"rank-{self.peers.cut.index:05}-of-{self.peers.cut.count:05}"
        return config.model_copy(update={"paths": [path / name for path in config.paths]})


def come_together(
    config: SwapConfig, device: torch.device, optimizer: OptimizerName, units: Sequence[Unit], *, resume: bool
) -> Together:
    """Find the other ranks, if there are any, and agree on what all plans have in common: the form of the states, and
    the memory that each rank may take, which is that of the rank that has the least. All ranks call.

    Raises:
        NotAvailableError: several ranks cannot do this yet.
        PeerError: a rank has another model or config, or failed; names it.
    """
    ranks = Ranks.of_world(deadline_s=config.nvme.deadline_s + _MARGIN_S)
    if ranks is None:
        return Together(None, ALONE)
    together = Together(Exchange(ranks), Peers(Cut(ranks.world, ranks.rank), ranks.local_world))
    with together.telling():
        _require_available(config, device, resume=resume)
        return _agreed(together, config, device, optimizer, units)


def _require_available(config: SwapConfig, device: torch.device, *, resume: bool) -> None:
    refused = {
        "training": (_SEVERAL_RANKS not in os.environ, "one process, started without torchrun"),
        "a model on a GPU": (device.type != "cpu", "device='cpu', or one process"),
        "infinity.resume": (resume, "one process"),
        f"commit_every: {config.commit_every}": (config.commit_every not in (0, "auto"), "commit_every: 0"),
    }
    for what, (asked, instead) in refused.items():
        if asked:
            raise NotAvailableError(f"{what} with several ranks is not available yet; use {instead}")


def _agreed(
    together: Together, config: SwapConfig, device: torch.device, optimizer: OptimizerName, units: Sequence[Unit]
) -> Together:
    exchange, peers = together.exchange, together.peers
    if exchange is None:
        return together
    facts = {
        "the model": _digest(units),
        "the optimizer to make room for": optimizer,
        **{key: getattr(config, key) for key in ("master", "moments", "weights", "optimizer", "gradients", "overlap")},
    }
    limits = limits_of(config, device, peers)
    payload = json.dumps([facts, limits.device, limits.host], sort_keys=True).encode()
    least = [limits.device, limits.host]
    for rank, heard in enumerate(exchange.all_gather(0, "offloading the model", payload)):
        theirs, *memory = json.loads(heard)
        require_same(theirs, facts, rank, "Give all ranks the same model and swap config.")
        least = list(map(min, least, memory))
    return Together(exchange, Peers(peers.cut, peers.on_machine, memory=(least[0], least[1])))


def _digest(units: Sequence[Unit]) -> str:
    """Of the names, shapes and dtypes of all parameters, and how they are put into units."""
    told = [
        (unit.name, str(group.dtype), group.trainable, group.moments, spec.name, list(spec.shape))
        for unit in units
        for group in unit.groups
        for spec in group.specs
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
