"""Arguments of infinity.offload, in the form that the plan and the store need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import _native
from infinity.base.accelerator import resolve
from infinity.base.fork import refuse_in_forked_child
from infinity.config import SwapConfig, load_config
from infinity.state.moments import OptimizerName
from infinity.state.training_step import StepFacts, TrainingStep, facts_of
from infinity.state.update_request import require_accumulation_steps


@dataclass(frozen=True)
class OffloadArguments:
    """Arguments with which a model is offloaded.

    Attributes:
        config: the config.
        device: device on which the model computes.
        optimizer: name of the optimizer for whose moments the plan reserves space.
        accumulation_steps: number of backward passes before each step; None if it is not known.
        faults: transfers that must fail, for tests.
        resumes: whether the run resumes from generations in an existing store. The store then already has its space on
            the disk, and the run makes commits.
        replaces: description of a generation that another number of ranks has made, if the run resumes from it;
            otherwise "". The new stores replace the old stores, which still exist when the run begins.
        refusal: function that returns why the device cannot update states, or "" if it can; called only if that
            matters.
        facts: the batch of a step and the rates of the machine; None: not known.
        step: the same facts together with the sizes of the model; None: not known. The plan uses `step` only.
    """

    config: SwapConfig
    device: torch.device
    optimizer: OptimizerName = "adamw"
    accumulation_steps: int | None = None
    faults: Sequence[_native.Fault] = ()
    resumes: bool = False
    replaces: str = ""
    refusal: Callable[[], str] = str
    facts: StepFacts | None = None
    step: TrainingStep | None = None

    @classmethod
    def of(
        cls,
        config: str | Path | Mapping[str, Any] | SwapConfig | None,
        device: torch.device | str | None,
        optimizer: OptimizerName,
        accumulation_steps: int | None = None,
        faults: Sequence[_native.Fault] = (),
        tokens: int | StepFacts | None = None,
    ) -> OffloadArguments:
        """Return the value for the arguments of a script. Raises ForkError, ConfigError, NotAvailableError."""
        refuse_in_forked_child()
        require_accumulation_steps(accumulation_steps)
        resolved, facts = load_config(config), facts_of(tokens, accumulation_steps or 1)
        return cls(resolved, resolve(device), optimizer, accumulation_steps, faults, facts=facts)

    @property
    def goes_on_from(self) -> str:
        """Description of the source from which the run resumes, the same on all ranks."""
        return self.replaces or ("the generations of these ranks" if self.resumes else "nothing")
