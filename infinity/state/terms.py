"""Terms of an offload: the arguments of a script, as the plan and the store need them."""

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
    """Arguments with which a model is offloaded.

    Attributes:
        config: the config.
        device: device that the model computes on.
        optimizer: optimizer for whose moments the plan reserves space.
        accumulation_steps: backward passes before each step; None if not known.
        faults: transfers that fail, for tests.
        resumes: whether the run resumes from generations in an existing store. The existing store has the necessary
            space, and a resumed run commits.
        replaces: description of the other ranks' generation that the run resumes from; "" if the run resumes from no
            such generation. The new stores replace the stores of the other ranks, which still exist.
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
        """Return the terms for the arguments of a script. Raises ForkError, ConfigError, NotAvailableError."""
        refuse_in_forked_child()
        require_accumulation_steps(accumulation_steps)
        return cls(load_config(config), resolve(device), optimizer, accumulation_steps, faults)

    @property
    def goes_on_from(self) -> str:
        """Description of the source that the run resumes from, equal on all ranks."""
        return self.replaces or ("the generations of these ranks" if self.resumes else "nothing")
