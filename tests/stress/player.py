"""Player of a script on an offloaded model. The player runs the loop with the disturbances, and survives the
disturbances.
"""

from __future__ import annotations

import errno
import hashlib
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity import _native
from infinity.config import load_config
from infinity.coordinator import registry
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests.conftest import residuals_of, states_of, weights_of
from tests.models import loss_of
from tests.stress.interrupts import CtrlC
from tests.stress.scripts import Disturbance, Iteration, Script, Where
from tests.stress.subjects import make, variant

_ATTEMPT_S = 0.05  # duration of an attempt; timers fire within this time
_RETRIES_MAX = 3  # attempts after an attempt that failed because of the device


class UserError(Exception):
    """Exception of the user's own code."""


class Closed(Exception):  # noqa: N818  not an error
    """The script closed the model before the end."""


@dataclass
class Outcome:
    """Results of a run.

    Attributes:
        digests: digests of weights and states by step, for the requested steps.
        counts: counts of events during the run.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def digest_of(model: Any) -> str:
    """Return a digest of all weights, residuals and moments."""
    digest = hashlib.sha256()
    for values in (weights_of(model), states_of(model)):
        for name, value in values.items():
            digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, residual in residuals_of(model):
        digest.update(name.encode() + residual)
    return digest.hexdigest()


def sized(script: Script, model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with budgets. These are the smallest budgets that fit and are at least the budgets of the
    script.
    """
    found, cpu = discover(model, config["moments"]), torch.device("cpu")
    accumulates = any(iteration.micro_batches > 1 for iteration in script.iterations)
    host, device = (64 << 10) + script.sizes[0] * (24 << 20), (48 << 10) + script.sizes[1] * (4 << 20)
    for _ in range(40):
        memory = {"host": int(host), "device": int(device)}
        try:
            given = load_config(config | {"memory": memory})
            plan = make_plan(found.units, OffloadArguments(given, cpu), can_recompute=False, sites=found.sites)
        except infinity.PlanError as error:
            host, device = (host, device * 1.3) if "of memory.device" in str(error) else (host * 1.3, device)
            continue
        if plan.placement.accumulates or not accumulates:
            return config | {"memory": memory}
        host *= 1.3
    raise AssertionError("no budget fits")


class Player:
    """One run of a script. With `plain`, the run has only the iterations, in RAM, one phase after the other."""

    def __init__(self, script: Script, directory: Path, interrupts: CtrlC, *, plain: bool) -> None:
        self.script = script
        self.plain = plain
        self.outcome = Outcome()
        self._interrupts = interrupts
        self._directory = directory
        self._rng = random.Random(script.seed)
        self._total = 0.0
        self._ended = False
        self.model, self.batch = make(script.subject, torch.bfloat16 if script.bfloat16 else torch.float32)
        self._sites = [m for m in self.model.modules() if next(m.parameters(recurse=False), None) is not None]
        self.config = self._config()
        self.model = infinity.offload(self.model, self.config, faults=self._faults())
        self.coordinator = registry.coordinator_of(self.model)
        self.optim: Any = infinity.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=script.clip, **self._accumulation()
        )

    def _accumulation(self) -> dict[str, Any]:
        return {} if self.plain else {"accumulation_steps": self.script.accumulation_steps}

    def _config(self) -> dict[str, Any]:
        if self.plain:
            tiers = {"weights": "host", "optimizer": "host", "gradients": "host", "activations": "keep"}
            return tiers | self.script.same | {"overlap": "off", "update": {"threads": 1}, "memory": {"host": "512MiB"}}
        nvme = self.script.config["nvme"] | {"paths": [str(self._directory / "swap")], "deadline_s": 30.0}
        return sized(self.script, self.model, self.script.config | {"nvme": nvme})

    def _faults(self) -> list[_native.Fault]:
        faults = []
        if not self.plain and self.script.error_at is not None:
            faults.append(_native.Fault(self.script.error_at, "error", errno.EIO))
        if not self.plain and self.script.shuffled:
            faults.append(_native.Fault(0, "shuffle", repeat=2**62, seed=self.script.seed))
        return faults

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all iterations.

        Raises:
            Closed: the script closed the model before the end of the loop.
            InfinityError: the device failed, so that the model cannot continue.
        """
        for index, iteration in enumerate(self.script.iterations):
            self._ends_in = self.script.closed[1] if self.script.closed and self.script.closed[0] == index else None
            if self.plain:
                self._ends_in = None
                self._attempt(iteration, None)
            else:
                for disturbance in iteration.disturbances:
                    if self._disturbed(iteration, disturbance):
                        break
                else:
                    self._surviving(iteration)
            self.outcome.losses.append(self._total)
            self.outcome.norms.append(self.optim.last_grad_norm)
            if self.plain:
                self.outcome.digests[self.coordinator.steps] = digest_of(self.model)

    def _disturbed(self, iteration: Iteration, disturbance: Disturbance) -> bool:
        """Make an attempt that may end early. Return whether the attempt completed its step."""
        before = self.coordinator.steps
        try:
            with self._signals(disturbance) if not disturbance.forward_only else nullcontext():
                self._attempt(iteration, disturbance)
        except KeyboardInterrupt:
            self.outcome.counts["interrupts"] += 1
        except UserError:
            self.outcome.counts["exceptions"] += 1
        except infinity.InfinityError as error:
            self._survive(error)
        torch.set_grad_enabled(True)  # Ctrl-C inside torch's own no_grad leaves gradients disabled
        self.optim.zero_grad()
        return self.coordinator.steps > before

    def _surviving(self, iteration: Iteration) -> None:
        """Make an undisturbed attempt, and repeat it if the device fails: only a failure of the device may end the
        attempt early.
        """
        before = self.coordinator.steps
        for _ in range(_RETRIES_MAX):
            try:
                self._attempt(iteration, None)
                return
            except infinity.InfinityError as error:
                self._survive(error)
            self.optim.zero_grad()
            if self.coordinator.steps > before:
                return

    def _survive(self, error: infinity.InfinityError) -> None:
        """Raise the error again unless the device was made to fail and the model can continue."""
        if (
            self.script.error_at is None
            or self.coordinator.health.failure is not None
            or isinstance(error, infinity.PlanError)
        ):
            raise error
        self.outcome.counts["survived errors"] += 1

    def _signals(self, disturbance: Disturbance) -> Any:
        if disturbance.kind == "line":
            return self._interrupts.at_line(disturbance.nth)
        if disturbance.kind == "timer":
            return self._interrupts.after(_ATTEMPT_S * disturbance.nth / 10_000)
        return self._interrupts.armed()

    # -- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self, iteration: Iteration, disturbance: Disturbance | None) -> None:
        self._total = 0.0
        self._lr(iteration, "forward")
        for index in range(iteration.micro_batches):
            here = disturbance if disturbance is not None and disturbance.micro_batch == index else None
            self._asides(iteration, "forward" if index == 0 else "between")
            announced = iteration.told and index < iteration.micro_batches - 1
            with self.coordinator.accumulating() if announced else nullcontext(), self._broken(here, "backward"):
                loss = self._forward(iteration, index, here) / iteration.micro_batches
                self._total += loss.item()
                if iteration.nan and index == iteration.micro_batches - 1:
                    loss = loss * float("nan")
                loss.backward()
            if index == 0:
                self._break(here, "between")
                self._close_at("between")
        self._asides(iteration, "before step")
        self._lr(iteration, "before step")
        self._break(disturbance, "before step")
        self._close_at("before step")
        if disturbance is not None and disturbance.kind == "abandon":
            self.outcome.counts["abandoned"] += 1
            return
        self.optim.step()
        self._lr(iteration, "after step")
        self._asides(iteration, "after step")
        self.optim.zero_grad()
        self._close_at("after step")

    def _forward(self, iteration: Iteration, index: int, disturbance: Disturbance | None) -> torch.Tensor:
        """Run a forward. If only a forward is disturbed, repeat this forward, because no gradient was changed."""
        options = {"gated": iteration.gated} if self.script.subject == "odd" else {}
        batch = variant(self.batch, index) | options
        if disturbance is not None and disturbance.forward_only:
            try:
                with self._signals(disturbance), self._broken(disturbance, "forward"):
                    loss_of(self.model, batch)
            except (KeyboardInterrupt, UserError):
                self.outcome.counts["repeated forwards"] += 1
            torch.set_grad_enabled(True)
        elif disturbance is not None:
            with self._broken(disturbance, "forward"):
                return loss_of(self.model, batch)
        if self._ends_in == "forward":
            with self._hooked(self._end, backward=False):
                return loss_of(self.model, batch)
        return loss_of(self.model, batch)

    def _lr(self, iteration: Iteration, where: Where) -> None:
        """Set the learning rate. At the step, the learning rate is that of the iteration; before the step, another
        learning rate may be set.
        """
        if where == iteration.lr_when or where == "before step":
            for group in self.optim.param_groups:
                group["lr"] = iteration.lr

    @contextmanager
    def _broken(self, disturbance: Disturbance | None, where: Where) -> Iterator[None]:
        """If the script says so, make the forward or backward (`where`) of a module fail within the context, or send
        Ctrl-C during it.
        """
        if where == "backward" and self._ends_in == "backward":
            with self._hooked(self._end, backward=True):
                yield
        elif disturbance is None or disturbance.where != where or disturbance.kind not in ("raise", "SIGINT"):
            yield
        else:
            chosen = self._sites[disturbance.nth % len(self._sites)]
            with self._hooked(lambda: self._raise(disturbance), backward=where == "backward", module=chosen):
                yield

    @contextmanager
    def _hooked(self, what: Callable[[], None], *, backward: bool, module: Any = None) -> Iterator[None]:
        """Call `what` once, at the end of a module's forward or at the start of its backward. The default is the module
        in the middle.

        A full backward hook of the module would be a node of the graph, and would change the order in which torch sums
        the gradients of the module's input. A hook of the module's output is not a node.
        """
        module = module or self._sites[len(self._sites) // 2]
        left = [what]

        def do(*_: Any) -> None:
            if left:
                left.pop()()

        def on_backward(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(do)

        handle = module.register_forward_hook(on_backward if backward else do)
        try:
            yield
        finally:
            handle.remove()

    def _break(self, disturbance: Disturbance | None, where: Where) -> None:
        if disturbance is not None and disturbance.where == where and not disturbance.forward_only:
            self._raise(disturbance)

    def _raise(self, disturbance: Disturbance) -> None:
        if disturbance.kind == "raise":
            raise UserError
        if disturbance.kind == "SIGINT":
            signal.raise_signal(signal.SIGINT)

    def _close_at(self, where: Where) -> None:
        if self._ends_in == where:
            self._end()

    def _end(self) -> None:
        self._ended = True
        infinity.close(self.model)
        raise Closed

    # -- beside the loop ----------------------------------------------------------------------------------------------

    def _asides(self, iteration: Iteration, where: Where) -> None:
        for at, what in iteration.asides:
            if at == where and not self.plain:
                self._aside(what)
                self.outcome.counts["asides"] += 1

    def _aside(self, what: str) -> None:
        if what == "evaluate":
            with torch.no_grad():
                loss_of(self.model, variant(self.batch, 5))
        elif what == "commit" and self.script.config["commit_every"]:
            infinity.commit(self.model)
        elif what == "save" and hasattr(self.model, "config"):
            infinity.save_pretrained(self.model, self._directory / "saved")
        elif what == "statistics":
            infinity.statistics(self.model)
        elif what == "state_dict":
            self.optim.state_dict()
        elif what == "read":
            weights_of(self.model)
        else:
            infinity.synchronize(self.model)
