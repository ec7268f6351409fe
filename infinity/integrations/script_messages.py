"""Log lines about models that are offloaded, and about models that are not offloaded."""

from __future__ import annotations

import logging

import torch
from torch import nn

from infinity.base.machine_facts import processor, slow_dtype
from infinity.coordinator import registry
from infinity.errors import printable
from infinity.integrations.module_of_optimizer import WORTH_NUMEL
from infinity.ranks.ranks import rank_and_world
from infinity.runtime.statistics import counts_of_all_ranks, trained_of
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def say(model: nn.Module, *, trained: bool) -> None:
    """Log that a model was offloaded."""
    coordinator = registry.coordinator_of(model)
    plan = coordinator.plan
    if not coordinator.world.leads:
        return
    part, numel = counts_of_all_ranks(plan)
    states = f", optimizer states on {plan.placement.optimizer.tier}" if trained else ", and it has no optimizer states"
    logger.warning(
        "infinity: %s, %s%s: weights on %s%s; it takes %s",
        printable(type(model).__name__),
        f"trained: {trained_of(part, numel)}" if trained else f"only evaluated: {numel:,} parameters",
        "" if plan.peers.cut.whole else f", sharded over {plan.peers.cut.count} ranks",
        plan.placement.weights.tier,
        states,
        f"{format_bytes(plan.device_bytes + plan.host_bytes)} of RAM"
        if plan.budgets.limits.in_place
        else f"{format_bytes(plan.device_bytes)} of device memory and {format_bytes(plan.host_bytes)} of RAM",
    )
    dtypes = {group.dtype for unit in plan.layout.units for group in unit.full.groups}
    if trained and plan.budgets.limits.in_place:  # the model computes on the CPU
        for name in (name for dtype, name in _NAMES.items() if dtype in dtypes):
            if slow := slow_dtype(name, processor().flags):
                logger.warning("infinity: %s", slow)


def log_nothing_offloaded() -> None:
    """Log that the script has ended and no model was offloaded."""
    if rank_and_world()[0] == 0:
        logger.warning(
            "infinity: NOTHING WAS OFFLOADED, the script ran as without infinity. infinity offloads a model that "
            "from_pretrained loads when the model is used, and a module of %s parameters or more when torch.optim's "
            "AdamW, Adam, SGD or Adagrad is made for its parameters. For another loop, call infinity.offload(model, "
            "config) in the script",
            f"{WORTH_NUMEL:,}",
        )


def log_kept_optimizer(optimizer: object, model: nn.Module) -> None:
    """Log that a module of the script stays in memory.

    The module is large enough to be offloaded, but infinity does not have the optimizer that was made for the module.
    """
    if rank_and_world()[0] == 0:
        logger.warning(
            "infinity: %s.%s and the %s for which it was made are not offloaded: both stay in memory. "
            "infinity offloads the states of "
            "torch.optim's AdamW, Adam, SGD and Adagrad, and of infinity.Lion",
            type(optimizer).__module__,
            type(optimizer).__name__,
            printable(type(model).__name__),
        )
