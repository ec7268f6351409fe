"""Checks of native threads that call the device's runtime.

The checks require that the runtime's functions are found, that weights are uploaded from the store in pieces, and that
gradients land with their sums of squares. All these operations must keep their order while a kernel sleeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu.cuda import DEVICE, Sleeper, accelerator
from gpu.seam import MIB, FileStore, Seam, group_of
from infinity import _native
from infinity.state.unit import ParameterSpec
from infinity.tiers.downloads import GradientLanding, GradientQueue


def runtime() -> dict[str, Any]:
    """Return the entry points of the device's runtime that native threads call."""
    table = accelerator().gate()
    return {name: hex(getattr(table, name)) for name in ("enter", "copy", "record", "wait", "synchronize")}


def stored_weights(work: Path, sleeper: Sleeper, *, nbytes: int = 32 * MIB, piece: int = MIB) -> dict[str, Any]:
    """Upload weights from a file twice into the same slot; the second time a sleeping kernel still reads the slot."""
    store = FileStore(work, nbytes)
    seam = Seam(slots=nbytes, piece=piece, store=store)
    expected = store.bytes.to(DEVICE)
    transfer, slot = seam.upload_stored(nbytes)
    transfer.result()
    slot.wait()
    right = bool((slot.tensor == expected).all())
    slot.tensor.fill_(3)
    sleeper.sleep(50)
    seen = slot.tensor.clone()
    slot.free()
    transfer, slot = seam.upload_stored(nbytes)
    transfer.result()
    slot.wait()
    again = bool((slot.tensor == expected).all()) and bool((seen == 3).all())
    counters = _counters(seam)
    slot.free()
    seam.close()
    store.close()
    return {"arrived": right, "behind the last use": again} | counters


def _counters(seam: Seam) -> dict[str, int]:
    native = seam.uploads._native
    if native is None:
        raise AssertionError("nothing came from the store")
    found = native.counters()
    return {"pieces": found["pieces"], "bytes": found["read_bytes"]}


def failed_read(work: Path) -> dict[str, Any]:
    """Damage a page: the upload must fail, no operation may stay in flight, and the next upload must succeed."""
    nbytes = 8 * MIB
    store = FileStore(work, nbytes)
    seam = Seam(slots=nbytes, store=store)
    with open(store.file.path, "r+b") as file:
        file.seek(5 * MIB)
        page = file.read(4096)
        file.seek(5 * MIB)
        file.write(bytes(byte ^ 1 for byte in page))
    transfer, slot = seam.upload_stored(nbytes)
    failure = _failure_of(transfer)
    slot.free()
    with open(store.file.path, "r+b") as file:
        file.seek(5 * MIB)
        file.write(page)
    transfer, slot = seam.upload_stored(nbytes)
    transfer.result()
    slot.wait()
    right = bool((slot.tensor.cpu() == store.bytes).all())
    slot.free()
    seam.close()
    store.close()
    return {"failed as": failure, "the next is right": right}


def _failure_of(transfer: Any) -> str:
    try:
        transfer.result()
    except OSError as error:
        return type(error).__name__
    return ""


def landings(sleeper: Sleeper, *, numel: int = 4 * MIB, parts: int = 4) -> dict[str, bool]:
    """Check gradients that kernels write late: they must land with the same bits and sums of squares as on the CPU.

    Some gradients land directly in their place; others are added in fp32 to earlier gradients, through the bounce
    buffer.
    """
    seam = Seam(slots=MIB, ring=2 * numel, host=numel * 6, piece=numel)
    group = group_of("a", numel, parts)
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(2)]
    direct, wide = seam.arena.lease(numel * 2, "gradients"), seam.arena.lease(numel * 4, "gradients")
    queue = seam.gradients

    def send(target: Any, dtype: torch.dtype, flat: torch.Tensor, *, add: bool) -> GradientLanding:
        packed = queue.begin(group, target.view(), dtype)
        gradient = torch.zeros_like(flat, device=DEVICE)
        sleeper.sleep(30)
        gradient.copy_(flat, non_blocking=True)
        for spec in group.specs:
            queue.pack(packed, spec, gradient[spec.offset : spec.offset + spec.numel], add=add)
        return queue.send(packed)

    found: dict[str, bool] = {}
    sums = send(direct, torch.bfloat16, values[0], add=False).sums()
    found["values"] = torch.equal(direct.tensor().view(torch.bfloat16), values[0])
    found["sums of squares"] = all(sums[spec.name] == _sums_of_squares(values[0], spec, seam) for spec in group.specs)
    first, second = (send(wide, torch.float32, flat, add=bool(turn)) for turn, flat in enumerate(values))
    first.sums(), second.sums()
    expected = values[0].float() + values[1].float()
    found["added"] = torch.equal(wide.tensor().view(torch.float32), expected)
    found["sums of what was added"] = all(
        second.sums()[spec.name] == _sums_of_squares(expected, spec, seam) for spec in group.specs
    )
    found["the ring is free again"] = _all_back(queue)
    seam.close()
    return found


def _sums_of_squares(flat: torch.Tensor, spec: ParameterSpec, seam: Seam) -> list[float]:
    name = "fp32" if flat.dtype == torch.float32 else "bf16"
    values = flat[spec.offset : spec.offset + spec.numel].contiguous().view(torch.uint8).numpy()
    return _native.sums_of_squares(values, name, seam.pool, first=spec.offset)


def _all_back(queue: GradientQueue) -> bool:
    return queue._ring.free_bytes == queue._ring.nbytes
