"""On which terms a model is offloaded: what a script says with it, from the public call to the plan and the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import _native
from infinity.base.accelerator import resolve
from infinity.base.fork import refuse_in_forked_child
from infinity.config import SwapConfig, load_config
from infinity.state.moments import OptimizerName
from infinity.state.request import require_accumulation_steps


@dataclass(frozen=True)
class Terms:
    """Attributes:
    device: where the model computes.
    optimizer: whose moments room is made for.
    accumulation_steps: backward passes before each step; None: not known.
    faults: transfers to fail, for tests.
    resumes: the run goes on from generations, whose store is there: it has room, and the run commits.
    replaces: the generation of other ranks that the run goes on from, in words. The stores take the place of theirs,
        which are still there.
    """

    config: SwapConfig
    device: torch.device
    optimizer: OptimizerName = "adamw"
    accumulation_steps: int | None = None
    faults: Sequence[_native.Fault] = ()
    resumes: bool = False
    replaces: str = ""

    @classmethod
    def of(
        cls,
        config: str | Path | Mapping[str, Any] | SwapConfig | None,
        device: torch.device | str | None,
        optimizer: OptimizerName,
        accumulation_steps: int | None = None,
        faults: Sequence[_native.Fault] = (),
    ) -> Terms:
        """As a script gives them. Raises ForkError, ConfigError, NotAvailableError."""
        refuse_in_forked_child()
        require_accumulation_steps(accumulation_steps)
        return cls(load_config(config), resolve(device), optimizer, accumulation_steps, faults)

    @property
    def goes_on_from(self) -> str:
        """In words that are the same on all ranks."""
        return self.replaces or ("the generations of these ranks" if self.resumes else "nothing")
