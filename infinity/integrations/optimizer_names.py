"""Names of optimizers for `optim=` of TrainingArguments, and infinity's optimizer for each name."""

from __future__ import annotations

import logging
from typing import Any

import torch

from infinity.integrations.script_run import ScriptRun
from infinity.optim.lion import Lion
from infinity.state.moments import OptimizerName

logger = logging.getLogger(__name__)

_RULES: dict[str, OptimizerName] = {"sgd": "sgd", "adagrad": "adagrad"}
_ADAMW = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw")
_LION = ("lion_8bit", "lion", "lion_32bit", "paged_lion", "paged_lion_8bit", "paged_lion_32bit")
"""Names of optimizers of bitsandbytes and torchao. These libraries keep the states on the GPU and page the states;
infinity places the states by its plan.
"""


def facts_for(args: Any, run: ScriptRun) -> None:
    """Record which optimizer the Trainer will make, so that the plan has room for the optimizer's states.

    If it is an 8-bit optimizer, infinity uses int8 moments, and logs this.
    """
    name = _name(args)
    run.add_facts(optimizer="lion" if name in _LION else _RULES.get(name, "adamw"))
    small = name in (*_ADAMW, *_LION) and name.endswith("8bit") and run.config.moments == "fp32"
    if small and run.facts.moments != "int8":
        logger.warning("infinity: optim=%s: infinity keeps the moments in int8 (`moments: int8`)", name)
    run.add_facts(moments="int8" if small else None)


def class_and_options(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return infinity's class and options for an optimizer for which transformers would need another library.

    Return None for all other optimizers. The result replaces the result of Trainer.get_optimizer_cls_and_kwargs.
    """
    name, betas = _name(args), (args.adam_beta1, args.adam_beta2)
    if name in _ADAMW:
        return torch.optim.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if name in _LION:
        return Lion, {"lr": args.learning_rate, "betas": betas}
    return None


def _name(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))
