"""Contenders of a step, by name: each contender's settings, approximate memory, and options of its worker.

torch, deepspeed, deepspeed-nvme          the peers
processor[-int8]                          a bound: computing and Adam with all states in memory, nothing overlapped
infinity-WEIGHTS[-int8][-cached|-lean][-OVERLAP]  infinity, with the optimizer states on NVMe

WEIGHTS   home of the weights: host or nvme
-int8     the moments are in int8; without -int8, they are in fp32
-cached   RAM caches as many optimizer states as fit; without -cached, RAM caches none of them
-lean     memory.host is the size of the gradients, and of weights in RAM, plus 512 MiB
OVERLAP   during_backward, before_forward or off; without OVERLAP, the setting is auto
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from peers.workload import Workload

PEERS = ("torch", "deepspeed", "deepspeed-nvme")
OVERLAPS = ("auto", "during_backward", "before_forward", "off")
DEFAULT = (
    "torch,deepspeed,processor,processor-int8,"
    "infinity-host,infinity-host-during_backward,infinity-host-before_forward,infinity-host-off,"
    "infinity-nvme,infinity-nvme-during_backward,infinity-nvme-before_forward,infinity-nvme-off,"
    "infinity-host-cached,infinity-nvme-cached,"
    "infinity-host-int8,infinity-host-int8-off,infinity-nvme-int8,infinity-nvme-int8-off"
)

# Approximate resident bytes per parameter at the peak; they only determine how many contenders run at once.
_RESIDENT = {"torch": 9, "deepspeed": 32, "deepspeed-nvme": 36, "host": 6, "nvme": 5}
_RESIDENT |= {"memory, fp32": 17, "memory, int8": 10}
_LEAN_BYTES = 512 << 20
_AHEAD = 5
"""Bytes per parameter for reading half of the states ahead."""
_LOGITS_BYTES = 10
"""Bytes of the logits in bf16 and fp32 and of their gradients, per token and word of the vocabulary."""
_PROCESS_BYTES = 300 << 20
_CACHED_RSS_OF_DEEPSPEED = 1.05


@dataclass(frozen=True)
class Setting:
    """Settings of infinity in a contender.

    Attributes:
        weights: host or nvme.
        optimizer: nvme: no state is cached; auto: as many states are cached as the budget allows; host: all states are
            in RAM.
        moments: fp32 or int8.
        overlap: one of OVERLAPS.
        lean: whether the contender has little host memory beyond the minimum.
    """

    weights: str
    optimizer: str = "nvme"
    moments: str = "fp32"
    overlap: str = "auto"
    lean: bool = False

    @property
    def name(self) -> str:
        parts = ["processor"] if self.in_memory else ["infinity", self.weights]
        parts += ["int8"] * (self.moments == "int8") + ["cached"] * self.cached + ["lean"] * self.lean
        parts += [self.overlap] * (self.overlap != "auto" and not self.in_memory)
        return "-".join(parts)

    @property
    def cached(self) -> bool:
        return self.optimizer == "auto"

    @property
    def in_memory(self) -> bool:
        """Whether all states are in memory, so that a step consists only of compute and Adam."""
        return self.optimizer == "host"

    @property
    def uncached(self) -> Setting:
        """These settings with every state on NVMe."""
        return replace(self, optimizer="nvme")

    @property
    def serial(self) -> Setting:
        """These settings without overlap."""
        return replace(self, overlap="off")

    @property
    def processor(self) -> Setting:
        """Settings with the same arithmetic and all states in memory."""
        return Setting("host", "host", self.moments, "off")

    def options(self, workload: Workload, host_budget: int | None, beside_bytes: int = _LEAN_BYTES) -> dict[str, Any]:
        """Return the options of peers.worker_infinity, which are keys of the swap config.

        Args:
            workload: the model and its batches.
            host_budget: memory.host in bytes; None: the default.
            beside_bytes: bytes of memory.host beside gradients and weights, if `lean`.
        """
        memory: dict[str, int] = {} if host_budget is None else {"host": host_budget}
        if self.lean:
            # memory for gradients in fp32 (one micro-batch uses half of it), and for the weights if their home is RAM
            memory["host"] = workload.numel * (6 if self.weights == "host" else 4) + beside_bytes
        if self.weights == "nvme":
            # Memory for a few blocks, so that weights are read from NVMe. Without a limit all weights would stay on the
            # device.
            memory["device"] = 10 * 2 * workload.numel // workload.layers
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "moments": self.moments,
            "overlap": self.overlap,
            "memory": memory,
        }


_SETTINGS = {
    setting.name: setting
    for setting in [
        *(Setting("host", "host", moments, "off") for moments in ("fp32", "int8")),
        *(
            Setting(weights, optimizer, moments, overlap)
            for weights in ("host", "nvme")
            for optimizer in ("nvme", "auto")
            for moments in ("fp32", "int8")
            for overlap in OVERLAPS
        ),
        *(Setting(weights, "nvme", moments, lean=True) for weights in ("host", "nvme") for moments in ("fp32", "int8")),
    ]
}


def setting_of(name: str) -> Setting | None:
    """Return a contender's settings of infinity; None for a peer."""
    if name not in PEERS and name not in _SETTINGS:
        ours = f"infinity-{{host,nvme}}[-int8][-cached|-lean][-{{{','.join(OVERLAPS[1:])}}}]"
        raise ValueError(f"no contender '{name}'; there are {', '.join(PEERS)}, processor[-int8] and {ours}")
    return _SETTINGS.get(name)


def resident_bytes(name: str, workload: Workload) -> int:
    """Return the approximate memory of a contender."""
    setting = setting_of(name)
    if setting is None:
        per_parameter = _RESIDENT[name]
    elif setting.cached:
        per_parameter = int(_RESIDENT["deepspeed"] * _CACHED_RSS_OF_DEEPSPEED)
    elif setting.in_memory:
        per_parameter = _RESIDENT[f"memory, {setting.moments}"]
    else:
        per_parameter = _RESIDENT[setting.weights] + _AHEAD * (setting.overlap != "off" and not setting.lean)
    logits = _LOGITS_BYTES * workload.batch * workload.tokens * workload.vocabulary
    return per_parameter * workload.numel + logits + _PROCESS_BYTES


def groups_that_fit(names: Sequence[str], workload: Workload, available: int) -> list[list[str]] | None:
    """Return groups of contenders that take turns with each other; None if memory is too small for groups.

    The contenders of a group run in the same rounds, so that ratios compare steps of the same round. Every group
    contains the references of infinity: the peers, and the processor bound of infinity. Contenders that differ only in
    their overlap stay in the same group if possible, because they are compared with each other, too.
    """
    settings = {name: setting_of(name) for name in names}
    peers = [name for name, setting in settings.items() if setting is None]
    bounds = [name for name, setting in settings.items() if setting is not None and setting.in_memory]
    ours = [setting for setting in settings.values() if setting is not None and not setting.in_memory]
    if not ours:
        return [list(names)] if sum(resident_bytes(name, workload) for name in names) <= available else None
    groups = []
    for moments in dict.fromkeys(setting.moments for setting in ours):
        references = [*peers, *(name for name in bounds if settings[name].moments == moments)]
        room = available - sum(resident_bytes(name, workload) for name in references)
        families: dict[Setting, list[str]] = {}
        for setting in ours:
            if setting.moments == moments:
                families.setdefault(setting.serial, []).append(setting.name)
        packed = pack(
            [[(name, resident_bytes(name, workload)) for name in family] for family in families.values()], room
        )
        if packed is None:
            return None
        groups += [references + group for group in packed]
    return groups


def pack(families: Sequence[Sequence[tuple[str, int]]], room: int) -> list[list[str]] | None:
    """Pack (name, bytes) in their order into groups of at most `room` bytes; None if a single item is too large.

    A family is split only if it does not fit into one group.
    """
    groups: list[list[str]] = []
    left = 0
    for family in families:
        whole = sum(needed for _, needed in family)
        if left < whole <= room:
            groups, left = [*groups, []], room
        for name, needed in family:
            if needed > room:
                return None
            if needed > left:
                groups, left = [*groups, []], room
            groups[-1].append(name)
            left -= needed
    return [group for group in groups if group]
