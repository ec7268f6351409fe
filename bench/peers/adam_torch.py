"""Worker of adam_vs_peers that runs torch.optim.AdamW(fused=True), or DeepSpeedCPUAdam if the third argument is
"deepspeed".

One row measures the optimizer's step alone. The other rows measure the complete pass, which also computes the norm and
casts the gradients and weights; each row writes the pass in another way. The driver uses the fastest of these ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from peers.adam_protocol import (
    BETAS,
    EPS,
    LOSS_SCALE,
    LR,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    fill,
    huge_tensor,
    peers_environment,
    serve,
)


class _States:
    def __init__(self, numel: int, threads: int, deepspeed: bool) -> None:
        torch.set_num_threads(threads)
        self.master = torch.nn.Parameter(huge_tensor(numel, torch.float32))
        self.weight16 = huge_tensor(numel, torch.bfloat16)
        self.grad = huge_tensor(numel, torch.float32)
        self.grad16 = huge_tensor(numel, torch.bfloat16)
        fill(self.grad, 1e-2)
        fill(self.grad16, 1e-2 * LOSS_SCALE)
        self.optim = self._deepspeed() if deepspeed else self._torch()
        # The states are given to the optimizer, so that they are in huge pages, too.
        state = self.optim.state[self.master]
        state["step"] = 0 if deepspeed else torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = huge_tensor(numel, torch.float32)
        state["exp_avg_sq"] = huge_tensor(numel, torch.float32)

    def _torch(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([self.master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def _deepspeed(self) -> Any:
        peers_environment()
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam([self.master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)

    def step(self) -> None:
        self.master.grad = self.grad
        self.optim.step()

    @torch.no_grad()
    def whole(self, *, norm_of_bf16: bool, scale_in_step: bool) -> None:
        self.grad.copy_(self.grad16)
        source = self.grad16 if norm_of_bf16 else self.grad
        norm = torch.linalg.vector_norm(source, dtype=torch.float32).item() / LOSS_SCALE
        factor = min(1.0, MAX_GRAD_NORM / (norm + 1e-6)) / LOSS_SCALE
        self.master.grad = self.grad
        if scale_in_step:  # the way of torch's GradScaler with fused optimizers
            self.optim.grad_scale = torch.tensor(1 / factor)
            self.optim.found_inf = torch.tensor(0.0)
            self.optim.step()
            del self.optim.grad_scale, self.optim.found_inf
        else:
            self.grad.mul_(factor)
            self.optim.step()
        self.weight16.copy_(self.master)


_states: list[_States] = []


def _make(numel: int, threads: int) -> dict[str, Callable[[], None]]:
    deepspeed = sys.argv[3] == "deepspeed"
    states = _States(numel, threads, deepspeed)
    _states.append(states)
    rows: dict[str, Callable[[], None]] = {"step": states.step}
    for norm_of_bf16 in (False, True):
        for scale_in_step in (False,) if deepspeed else (False, True):
            name = f"pass, norm of {'bf16' if norm_of_bf16 else 'fp32'}{', scaled in the step' * scale_in_step}"
            options = {"norm_of_bf16": norm_of_bf16, "scale_in_step": scale_in_step}
            rows[name] = lambda options=options: states.whole(**options)
    return rows


if __name__ == "__main__":
    serve(_make, lambda: _states[0].master.detach())
