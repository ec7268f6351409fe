"""The output of `infinity plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from infinity.cli.planning.scenario import AlternativeConfig, PlanOutcome, PlanScenario, as_yaml, compute_tokens
from infinity.sizes import format_bytes
from infinity.state.machine_rates import MachineRates
from infinity.state.model_shape import active_share

LINKS = {
    "compute": "compute",
    "disk": "disk",
    "processor": "processor",
    "memory": "RAM",
    "up": "to the device",
    "down": "from the device",
    "between": "between devices",
}
_DAY_S = 86400
_DAYS_SHOWN = 10 * 365
_ALL_EXPERTS = 0.99
"""Share of the experts from which a micro-batch is said to use all of them."""


def report(scenario: PlanScenario, outcome: PlanOutcome, alternatives: list[AlternativeConfig]) -> str:
    """Return the report. Lines that a user needs first, such as whether the model fits, come first."""
    return "\n".join(_lines(scenario, outcome, alternatives))


def verdict(scenario: PlanScenario, outcome: PlanOutcome) -> str:
    """Return one line that says whether the model fits, how fast it trains, and how much it wears the drives."""
    prediction, machine = outcome.prediction, scenario.machine
    tokens = outcome.work.tokens * scenario.ranks
    if not outcome.activations_fit:
        short = format_bytes(outcome.work.peak_bytes - outcome.activation_room)
        return f"does not fit: activations need {short} more of {_memory(scenario)} than the plan leaves for them"
    count = len(scenario.warnings)
    warned = f", with {count} warning{'s' if count > 1 else ''}" if count else ""
    line = (
        f"fits{warned}: {duration(prediction.seconds)} per step of {tokens:,} tokens "
        f"({_rate(tokens / prediction.seconds)} tokens/s), bound by {_bound(outcome)}"
    )
    written = scenario.ranks * outcome.written_bytes
    if not written:
        return f"{line}; nothing is written to the drives"
    wear = f"; {written * 1000 / 1e12:,.2f} TB written per 1,000 steps"
    if machine.endurance_bytes:
        days = machine.endurance_bytes / (written / prediction.seconds) / _DAY_S
        share = written * 1000 / machine.endurance_bytes
        worn = f" (worn out after {days:,.0f} days of training)" if days < _DAYS_SHOWN else ""
        wear += f", {share:.2%} of the drives' rated endurance{worn}"
    return line + wear


def _memory(scenario: PlanScenario) -> str:
    """Return the name of the memory that activations take."""
    return "RAM" if scenario.device.type == "cpu" else "memory.device"


def _with_what(scenario: PlanScenario, outcome: PlanOutcome) -> str:
    """Return the changes with which the activations fit."""
    ways = [f"{as_yaml(changes)} in the swap config" for changes in scenario.roomier(outcome)]
    if tokens := scenario.most_tokens(outcome):
        many = f" of {scenario.batch.micro_batches}" if scenario.batch.micro_batches > 1 else ""
        ways.append(f"at most {tokens:,} tokens in a micro-batch{many}")
    return f"it fits with {', or with '.join(ways)}" if ways else "it fits with a smaller model, or a larger device"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _bound(outcome: PlanOutcome) -> str:
    name = outcome.prediction.bound
    return "the processor" if name == "processor" else f"the {LINKS[name]}" if name == "disk" else LINKS[name]


def _lines(scenario: PlanScenario, outcome: PlanOutcome, alternatives: list[AlternativeConfig]) -> Iterator[str]:
    yield verdict(scenario, outcome)
    if not outcome.activations_fit:
        yield _with_what(scenario, outcome)
        if why := scenario.why_too_large(outcome):
            yield why
    for line in scenario.warnings:
        yield f"warning: {line}"
    yield ""
    yield from _times(scenario, outcome)
    yield ""
    yield outcome.plan.describe()
    for name, count in scenario.tiled.items():
        yield f"  tiles         '{name}' runs in {count} tiles: memory.device has no room for its weights at once"
    if (count := outcome.work.token_tiles) > 1:
        yield f"  tiles         norms and MLPs run in {count} tiles of tokens: a block has no room for all tokens"
    yield from _experts(scenario, outcome)
    yield from _bytes(scenario, outcome)
    yield ""
    yield from _activations(scenario, outcome)
    yield ""
    yield from _alternatives(outcome, alternatives)
    yield ""
    yield from _sources(scenario.machine, outcome)


def _times(scenario: PlanScenario, outcome: PlanOutcome) -> Iterator[str]:
    prediction, batch = outcome.prediction, scenario.batch
    overlapped = outcome.plan.placement.updates.overlap != "off"
    many = f" × {batch.count} micro-batches" * (batch.count > 1) + f" × {scenario.ranks} ranks" * (scenario.ranks > 1)
    yield (
        f"one step of {outcome.work.tokens * scenario.ranks:,} tokens (--batch-size {batch.sequences} × "
        f"--sequence-length {batch.length}{many}), predicted: {duration(prediction.seconds)}"
        f"{', with these in parallel' if overlapped else ''}"
    )
    for name, seconds in sorted(prediction.busy.items(), key=lambda each: -each[1]):
        yield f"  {LINKS[name]:<18}{duration(seconds):>10}{_of_compute(name, outcome)}"
    needed = compute_tokens(outcome)
    if needed is not None and needed >= 1:
        yield f"  computing is the bound from {needed:,.0f} tokens per step; this step has {outcome.work.tokens:,}"


def _of_compute(name: str, outcome: PlanOutcome) -> str:
    if name != "processor" or "compute" in outcome.prediction.busy or not outcome.prediction.compute_s:
        return ""
    return f"  ({duration(outcome.prediction.compute_s)} of it forward and backward)"


def _experts(scenario: PlanScenario, outcome: PlanOutcome) -> Iterator[str]:
    """Yield a line about the experts that a micro-batch uses, if experts are units."""
    if not any(unit.local.routed for unit in outcome.plan.layout.units):
        return
    tokens = scenario.batch.tokens
    used = 1.0 - (1.0 - active_share(scenario.model)) ** tokens
    which = "all experts"
    if used < _ALL_EXPERTS:
        which = f"about {used:.0%} of the experts, if all are chosen equally often. The figures here are those of all"
    yield f"  routing       the {tokens:,} tokens of a micro-batch use {which}"


def _bytes(scenario: PlanScenario, outcome: PlanOutcome) -> Iterator[str]:
    moved, numel = outcome.prediction.moved, max(outcome.plan.layout.numel, 1)
    parts = {
        "weights for forward and backward read": moved.weights,
        "read by updates": moved.states,
        "written": moved.written,
        "gradients, each way": moved.gradients,
        "of commits": moved.commit_share,
    }
    said = ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
    per_parameter = (moved.read_bytes + moved.written_bytes) / numel
    rank = " and rank" if scenario.ranks > 1 else ""
    yield f"  one step      {said or 'nothing to or from NVMe'}: {per_parameter:.2f} B per parameter{rank}"
    if moved.up:
        commits = f", states for commits {format_bytes(moved.resident)}" if moved.resident else ""
        updates = (
            f", for updates there {format_bytes(moved.operands)} and back {format_bytes(moved.results)}"
            if moved.operands
            else ""
        )
        up, down = format_bytes(moved.up), format_bytes(moved.down)
        yield f"  to the device {up}, gradients from it {down}{updates}{commits}"


def _activations(scenario: PlanScenario, outcome: PlanOutcome) -> Iterator[str]:
    batch, work = scenario.batch, outcome.work
    many = f" × {batch.micro_batches}" if batch.micro_batches > 1 else ""
    fits = scenario.largest_batch(outcome)
    most = f"at most {fits} sequences" if fits else "not one sequence"
    yield (
        f"activations: about {format_bytes(work.peak_bytes)} for {batch.sequences} × {batch.length} tokens{many}, "
        f"{format_bytes(max(outcome.activation_room, 0))} of {_memory(scenario)} is left for activations: {most} "
        f"of {batch.length} tokens in a micro-batch"
    )
    if other := scenario.other_recomputation(outcome):
        seconds, peak = other.outcome.prediction.seconds, other.outcome.work.peak_bytes
        fitting = "" if other.outcome.activations_fit else ", which do not fit"
        yield (
            f"  with {as_yaml(other.changes)}: {duration(seconds)} per step, and activations need about "
            f"{format_bytes(peak)}{fitting}"
        )


def _alternatives(outcome: PlanOutcome, alternatives: list[AlternativeConfig]) -> Iterator[str]:
    if not alternatives:
        yield "no change of the swap config makes a step much shorter"
        return
    yield "faster with these changes of the swap config:"
    for each in alternatives:
        seconds = each.outcome.prediction.seconds
        yield f"  {duration(seconds):>9} ({seconds / outcome.prediction.seconds:.2f}×)  {as_yaml(each.changes)}"


def _sources(machine: MachineRates, outcome: PlanOutcome) -> Iterator[str]:
    moments = outcome.plan.placement.form.moments
    adam = machine.adam.get(moments, machine.adam["fp32"])
    yield f"predicted for {machine.name}, with these rates:"
    rates = {
        "disk": f"{machine.disk_read / 1e9:.2f} GB/s read, {machine.disk_write / 1e9:.2f} GB/s written",
        "adam": f"{adam / 1e9:.2f} Gparam/s with {moments} moments",
        "dram": f"{machine.dram / 1e9:.0f} GB/s",
        "flops": f"{machine.flops / 1e12:.3g} TFLOP/s",
    }
    if machine.is_gpu:
        rates["up, down"] = f"{machine.up / 1e9:.0f} GB/s up, {machine.down / 1e9:.0f} GB/s down"
    if outcome.plan.placement.optimizer.resident:
        rates["hbm"] = f"{machine.hbm / 1e9:.0f} GB/s of the device's own memory"
    if machine.decode:
        rates["decode"] = f"{machine.decode / 1e9:.2f} Gparam/s"
    if outcome.config.nvme.checksums:
        rates["checksums"] = f"{machine.checksums / 1e9:.0f} GB/s"
    rates["land"] = f"{machine.land / 1e9:.0f} Gparam/s of gradients that arrive"
    if "between" in outcome.prediction.busy:
        rates["between"] = f"{machine.between / 1e9:.0f} GB/s from the other devices"
    for name, rate in rates.items():
        yield f"  {name:<10}{rate}: {_source(machine, name)}"


def _source(machine: MachineRates, name: str) -> str:
    source = machine.sources[name]
    return source if source.startswith(("measured", "profiled", "assumed")) else f"assumed: {source}"


def duration(seconds: float) -> str:
    """Return a duration as short text."""
    if seconds < 1e-3:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * _DAY_S else f"{seconds / _DAY_S:.1f} days"


def as_json(scenario: PlanScenario, outcome: PlanOutcome, alternatives: list[AlternativeConfig]) -> dict[str, Any]:
    """Return all contents of the report as JSON values. Sizes are in bytes, times in seconds."""
    prediction, plan = outcome.prediction, outcome.plan
    moved = prediction.moved

    def figures(of: PlanOutcome) -> dict[str, Any]:
        return {"seconds": of.prediction.seconds, "busy_s": dict(of.prediction.busy)}

    return {
        "fits": outcome.activations_fit,
        "verdict": verdict(scenario, outcome),
        "warnings": list(scenario.warnings),
        **figures(outcome),
        "bound": prediction.bound,
        "compute_s": prediction.compute_s,
        "tokens": outcome.work.tokens * scenario.ranks,
        "compute_bound_tokens": compute_tokens(outcome),
        "largest_batch": scenario.largest_batch(outcome),
        "parameters": plan.layout.numel,
        "trained_parameters": plan.layout.trainable_numel,
        "step_bytes": asdict(replace(moved, loads=())) | {"read": moved.read_bytes, "written": moved.written_bytes},
        "memory": {
            "device": plan.device_bytes,
            "host": plan.host_bytes,
            "pinned": plan.layout.arena.nbytes,
            "swap_file": plan.layout.swap.nbytes,
            "activations": outcome.work.peak_bytes,
            "activation_room": outcome.activation_room,
        },
        "endurance_bytes": scenario.machine.endurance_bytes,
        "ranks": scenario.ranks,
        "alternatives": [{"changes": dict(each.changes)} | figures(each.outcome) for each in alternatives],
        "machine": {"name": scenario.machine.name, "sources": dict(scenario.machine.sources)},
        "plan": plan.describe(),
    }
