"""Several ranks train the bits that one process trains with all their micro-batches."""

from __future__ import annotations

import errno
import functools
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import _native
from infinity.coordinator import together
from infinity.errors import InfinityError, NotAvailableError, PeerError
from infinity.plan import planner
from tests.ranks.workers import run

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

WIDTH, DEPTH, TOKENS = 96, 3, 8


@pytest.fixture(autouse=True)
def several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inherited by the ranks."""
    monkeypatch.setenv("INFINITY_SEVERAL_RANKS", "1")


class Block(nn.Module):
    """A block of more than two slices of the smallest size that has whole partials."""

    def __init__(self, dtype: torch.dtype, *, recomputed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 8 * WIDTH, dtype=dtype)
        self.down = nn.Linear(8 * WIDTH, WIDTH, dtype=dtype)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._mix, x, use_reentrant=False) if self.recomputed else self._mix(x))

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks, an input of the first one's width, and a second head, which only some batches use.

    Args:
        frozen: the first block is.
    """

    def __init__(self, dtype: torch.dtype, *, recomputed: bool = False, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(dtype, recomputed=recomputed) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1, dtype=dtype)
        self.other = nn.Linear(WIDTH, 1, dtype=dtype)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, *, both: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y = self.head(x) + self.other(x) if both else self.head(x)
        return y.float().square().mean()


def batch(step: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(TOKENS, WIDTH, generator=made).to(dtype)


def digest(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def offloaded(folder: str, config: dict[str, Any], dtype: torch.dtype = torch.float32, **model: Any) -> nn.Module:
    memory = {"memory": {"host": "256MiB", "device": "64MiB"}}
    paths = {"nvme": {"paths": [folder]}} if "nvme" in config.values() else {}
    return infinity.offload(Blocks(dtype, **model), {"commit_every": 0, **memory, **config, **paths}, device="cpu")


def train(
    folder: str,
    config: dict[str, Any],
    micro: int,
    ranks: int,
    *,
    steps: int = 3,
    dtype: str = "float32",
    some: bool = False,
    disturbed: bool = False,
    cleared: bool = False,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], list[float], dict[str, str]]:
    """Losses of this process, norms, and the weights at the end. In one process: with the batches of all ranks.

    Args:
        some: the second head is used by some batches only, drawn at random, and in the second step by none.
        cleared: after each step there is a backward pass whose gradients are set to None by hand.
        disturbed: before each step there is an evaluation, and a backward pass whose gradients nobody wants.
    """
    several = dist.is_initialized()
    rank = dist.get_rank() if several else 0
    kind = getattr(torch, dtype)
    trained = offloaded(folder, config, kind, **(model or {}))
    optim = infinity.AdamW(trained.parameters(), lr=1e-2, **options)
    losses, norms = [], []
    for step in range(steps):
        if disturbed:
            with torch.no_grad():
                losses.append(trained(batch(step, 77, kind)).item())
            trained(batch(step, 78, kind)).backward()
            optim.zero_grad()
        for turn in range(micro):
            indices = [turn * ranks + rank] if several else range(turn * ranks, (turn + 1) * ranks)
            for index in indices:
                drawn = random.Random(100 * step + index).random() < 0.4
                loss = trained(batch(step, index, kind), both=some and drawn and step != 1)
                loss.backward()
                losses.append(loss.item())
        if not several:
            optim.grad_scale = torch.tensor(float(ranks))  # ranks average, micro-batches add up
        optim.step()
        vars(optim).pop("grad_scale", None)
        optim.zero_grad()
        norms.append(optim.last_grad_norm)
        if cleared:  # by hand, after a pass that the next step must know nothing of
            trained(batch(step, 79, kind), both=step % 2 == 0).backward()
            for parameter in trained.parameters():
                parameter.grad = None
    with infinity.gathered(trained, trained):
        weights = {name: digest(parameter) for name, parameter in trained.named_parameters()}
    infinity.close(trained)
    return losses, norms, weights


def on_rank(folder: str, config: dict[str, Any], micro: int, ranks: int, options: dict[str, Any]) -> Any:
    return train(folder, config, micro, ranks, **options)


def require_equal(tmp_path: Path, config: dict[str, Any], micro: int, ranks: int, **options: Any) -> None:
    losses, norms, weights = train(str(tmp_path / "one"), config, micro, ranks, **options)
    for rank, (mine, same, found) in enumerate(
        run(ranks, on_rank, str(tmp_path / "all"), config, micro, ranks, options)
    ):
        assert mine == losses[rank::ranks]
        assert same == norms
        assert found == weights


def alone(folder: str, config: dict[str, Any], micro: int, options: dict[str, Any]) -> Any:
    together.Ranks.of_world = functools.partial(together.Ranks.of_world, even_alone=True)  # type: ignore[method-assign]
    return train(folder, config, micro, 1, **options)


TIERS = [
    {"weights": "host", "optimizer": "host"},
    {"weights": "host", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "host"},
    {"weights": "nvme", "optimizer": "nvme"},
]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("overlap", ["off", "auto"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_train_the_bits_of_one_process(
    tmp_path: Path,
    tiers: dict[str, Any],
    ranks: int,
    micro: int,
    dtype: str,
    moments: str,
    overlap: str,
    max_grad_norm: float | None,
    recomputed: bool,
) -> None:
    config = tiers | {"moments": moments, "overlap": overlap}
    model = {"recomputed": recomputed}
    require_equal(tmp_path, config, micro, ranks, dtype=dtype, max_grad_norm=max_grad_norm, model=model)


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.01}, {"dtype": "bfloat16"}])
def test_one_rank_goes_the_way_of_several_to_the_same_bits(tmp_path: Path, tiers: Any, options: dict[str, Any]) -> None:
    expected = train(str(tmp_path / "one"), tiers, 2, 1, **options)
    assert run(1, alone, str(tmp_path / "all"), tiers, 2, options) == [expected]


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
def test_a_parameter_that_some_batches_use_is_trained_as_in_one_process(tmp_path: Path, tiers: Any) -> None:
    require_equal(tmp_path, tiers, 2, 3, some=True, max_grad_norm=0.05)


@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_set_to_none_by_hand_are_gone(tmp_path: Path, micro: int) -> None:
    require_equal(tmp_path, TIERS[3], micro, 2, cleared=True, some=True, steps=4)


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
def test_evaluations_and_gradients_that_are_dropped_change_nothing(tmp_path: Path, tiers: Any) -> None:
    expected = train(str(tmp_path / "one"), tiers, 1, 2, disturbed=True)
    for found in run(2, on_rank, str(tmp_path / "all"), tiers, 1, 2, {"disturbed": True}):
        assert found[1:] == expected[1:]


@pytest.mark.parametrize("micro", [1, 2])
def test_gradients_that_spill_are_added_in_the_store_of_their_owner(tmp_path: Path, micro: int) -> None:
    require_equal(tmp_path, TIERS[3] | {"gradients": "nvme"}, micro, 3)


def test_a_frozen_block_is_gathered_and_not_exchanged(tmp_path: Path) -> None:
    require_equal(tmp_path, TIERS[3], 1, 2, model={"frozen": True})


@pytest.mark.parametrize("host", ["24MiB", "256MiB"])
def test_slots_of_two_blocks_do(tmp_path: Path, host: str) -> None:
    require_equal(tmp_path, TIERS[3] | {"memory": {"host": host, "device": "4MiB"}}, 1, 2, steps=4)


# What is not the same on all ranks


def odd_one(folder: str, how: str) -> Any:
    rank = dist.get_rank()
    odd = rank == 1
    try:
        memory = {"memory": {"host": "256MiB", "device": "4MiB"}}  # of both ranks: slots for two blocks
        model = offloaded(folder, TIERS[3] | memory, seed=int(odd and how == "seed"))
        optim = infinity.AdamW(model.parameters(), lr=2e-3 if odd and how == "lr" else 1e-3)
        for step in range(2):
            model(batch(step, rank, torch.float32)).backward()
            if odd and how == "extra visit":
                with torch.no_grad():
                    model.blocks[2](batch(step, rank, torch.float32))
            if not (odd and how == "no step" and step):
                optim.step()
            optim.zero_grad()
        infinity.close(model)
    except PeerError as error:
        return error.ranks, error.cause
    return None


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("seed", "has other values on rank"),
        ("lr", "the rule of param group 0 differs between the ranks"),
        ("extra visit", "while rank 0"),
        ("no step", "rank 1 closed the model"),
    ],
)
def test_every_rank_is_told_what_one_does_otherwise(tmp_path: Path, how: str, says: str) -> None:
    told = run(2, odd_one, str(tmp_path), how)
    assert told[0] is not None
    assert told[0][0] == (1,)
    assert says in told[0][1]


def skipping(folder: str, how: str) -> Any:
    rank, bad = dist.get_rank(), how if dist.get_rank() == 1 else ""
    model = offloaded(folder, TIERS[3])
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss = model(batch(step, rank, torch.float32))
        (loss * float("nan") if bad == "nan" and step == 1 else loss).backward()
        if bad == "asked" and step == 1:
            optim.skip_next_step("the loss is nan")
        optim.step()
        optim.zero_grad()
    with infinity.gathered(model, model):
        weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    infinity.close(model)
    return optim.skipped_steps, weights


@pytest.mark.parametrize("how", ["nan", "asked"])
def test_a_step_that_one_rank_cannot_take_is_skipped_by_all(tmp_path: Path, how: str) -> None:
    (skipped, weights), other = run(2, skipping, str(tmp_path), how)
    assert skipped == 1
    assert other == (skipped, weights)


# What several ranks can do besides


def clipped(folder: str, by_torch: bool) -> Any:
    """Norms, and weights that are rounded: torch clips by a factor in fp32."""
    rank = dist.get_rank()
    model = offloaded(folder, TIERS[3])
    optim = infinity.SGD(model.parameters(), lr=1.0, max_grad_norm=None if by_torch else 0.01)
    norms = []
    for step in range(2):
        model(batch(step, rank, torch.float32), both=rank == 1).backward()
        if by_torch:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optim.step()
        if not by_torch:
            norms.append(optim.last_grad_norm)
        optim.zero_grad()
    with infinity.gathered(model, model):
        weights = {name: parameter.detach().flatten()[:50].tolist() for name, parameter in model.named_parameters()}
    infinity.close(model)
    return norms, weights


def test_torch_clips_as_the_optimizer_does_also_what_one_rank_alone_uses(tmp_path: Path) -> None:
    (norms, weights), other = run(2, clipped, str(tmp_path / "torch"), True)
    (expected, clipped_weights), _ = run(2, clipped, str(tmp_path / "own"), False)
    assert other == (norms, weights)
    assert norms == pytest.approx(expected, rel=1e-5)
    for name, values in clipped_weights.items():
        assert weights[name] == pytest.approx(values, rel=1e-5, abs=1e-7), name


def scaled(folder: str) -> Any:
    """The second head overflows on rank 1, which alone uses it, in the first step."""
    rank = dist.get_rank()
    model = offloaded(folder, TIERS[3])
    optim = infinity.SGD(model.parameters(), lr=0.1)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(3):
        x = batch(step, rank, torch.float32) * (1e20 if step == 0 and rank else 1.0)
        scaler.scale(model(x, both=rank == 1)).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        scales.append(scaler.get_scale())
    infinity.close(model)
    return scales, optim.last_grad_norm, optim.skipped_steps


def test_the_loss_scale_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    one, other = run(2, scaled, str(tmp_path))
    assert one == other
    assert one[0] == [512.0] * 3
    assert one[2] == 1


def by_hand(folder: str) -> None:
    model = offloaded(folder, TIERS[3])
    optim = infinity.AdamW(model.parameters())
    model(batch(0, 0, torch.float32)).backward()
    parameter = next(model.parameters())
    parameter.grad = torch.zeros(parameter.shape)
    with pytest.raises(NotAvailableError, match="set by hand"):
        optim.step()
    infinity.close(model)


def test_a_gradient_set_by_hand_is_refused(tmp_path: Path) -> None:
    run(2, by_hand, str(tmp_path))


def saved(folder: str) -> Any:
    model = offloaded(folder, TIERS[3])
    infinity.save_pretrained(model, f"{folder}/out")
    state = {name: digest(value) for name, value in model.state_dict().items()}
    infinity.close(model)
    return state


def test_all_ranks_save_and_rank_0_writes(tmp_path: Path) -> None:
    expected = {name: digest(value) for name, value in Blocks(torch.float32).state_dict().items()}
    assert run(2, saved, str(tmp_path)) == [expected] * 2
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: digest(value) for name, value in written.items()} == expected


def refused(folder: str) -> None:
    for config in ({"commit_every": 1}, {"commit_every": 5}):
        with pytest.raises(NotAvailableError, match="commit_every: 0"):
            offloaded(folder, TIERS[3] | config)
    with pytest.raises(NotAvailableError, match=r"infinity\.resume"):
        infinity.resume(Blocks(torch.float32), {"nvme": {"paths": [folder]}}, device="cpu")
    model = offloaded(folder, TIERS[3])
    with (
        pytest.raises(NotAvailableError, match=r"before infinity\.offload"),
        infinity.gathered(model, model, write=True),
    ):
        pass
    infinity.close(model)


def test_what_is_not_there_yet_is_refused(tmp_path: Path) -> None:
    run(2, refused, str(tmp_path))


def not_yet(folder: str) -> None:
    with pytest.raises(NotAvailableError, match="started without torchrun"):
        offloaded(folder, TIERS[3])


def test_several_ranks_are_refused_until_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_SEVERAL_RANKS")
    run(2, not_yet, str(tmp_path))


def failing(folder: str) -> Any:
    rank = dist.get_rank()
    memory = {"memory": {"host": "256MiB", "device": "4MiB"}}
    faults = [_native.Fault(40, "error", errno.EIO, repeat=1000, operation="read")] if rank == 1 else []
    model = infinity.offload(
        Blocks(torch.float32),
        {"commit_every": 0, "nvme": {"paths": [folder]}, **TIERS[3], **memory},
        device="cpu",
        faults=faults,
    )
    optim = infinity.AdamW(model.parameters())
    try:
        for step in range(20):
            model(batch(step, rank, torch.float32)).backward()
            optim.step()
            optim.zero_grad()
    except InfinityError as error:
        infinity.close(model)
        return type(error).__name__, str(error)
    return None


def test_a_disk_that_fails_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    other, own = run(2, failing, str(tmp_path))
    assert own is not None
    assert "Input/output error" in own[1]
    assert other is not None
    assert other[0] == "PeerError"
    assert "rank 1" in other[1]


# Bytes


def counted(folder: str, config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Elements and bytes that this rank keeps, and bytes that one step moves, as planned and as counted."""
    rank, kind, steps = (dist.get_rank() if dist.is_initialized() else 0), torch.bfloat16, 4
    model = offloaded(folder, config, kind)
    optim = infinity.AdamW(model.parameters())
    moved = []
    for step in range(steps):
        model(batch(step, rank, kind)).backward()
        optim.step()
        optim.zero_grad()
        infinity.synchronize(model)
        now = infinity.statistics(model)
        moved.append(now.read_bytes + now.written_bytes)
    plan = infinity.statistics(model).plan
    infinity.close(model)
    return plan.layout.numel, plan.layout.swap.nbytes, plan.forecast.step_bytes, (moved[-1] - moved[0]) // (steps - 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_keeps_and_moves_its_share(tmp_path: Path, ranks: int) -> None:
    memory = {"memory": {"host": "256MiB", "device": f"{2 * ranks}MiB"}, "overlap": "off"}
    args = str(tmp_path), TIERS[3] | memory
    found = [counted(*args)] if ranks == 1 else run(ranks, counted, *args)
    numel = sum(each[0] for each in found)
    assert numel == sum(parameter.numel() for parameter in Blocks(torch.bfloat16).parameters())
    padding = 1.01  # to whole blocks of 256 elements, and to pages
    assert 12 * numel <= sum(each[1] for each in found) <= 12 * numel * padding
    assert sum(each[2] for each in found) <= 28 * numel * padding
    for _, _, planned, moved in found:
        assert moved <= planned
    assert sum(each[3] for each in found) >= 20 * numel  # 28, less what stays in the slots between its uses


# Before the first step


def opened(folder: str, how: str) -> Any:
    """What each rank was told while the model was offloaded, or where its slots are."""
    rank, config = dist.get_rank(), dict[str, Any](TIERS[3])
    if how == "free memory":
        free = (1 << 30) + rank * (1 << 28)
        planner.available_host_bytes = planner.available_device_bytes = lambda *_: free
        config["memory"] = {}
    if how == "memory of one":
        config["memory"] = {"host": "256MiB", "device": "64MiB" if rank else "1MiB"}
    if how == "moments" and rank:
        config["moments"] = "bf16"
    if how == "no directory" and rank:
        folder = f"{folder}/not/there"
    try:
        model = offloaded(folder, config)
    except InfinityError as error:
        return type(error).__name__, str(error)
    limits = infinity.statistics(model).plan.budgets.limits
    model(batch(0, rank, torch.float32)).backward()
    infinity.close(model)
    return limits.host, limits.device


def test_all_plan_with_the_memory_of_the_rank_that_has_least(tmp_path: Path) -> None:
    one, other = run(2, opened, str(tmp_path), "free memory")
    assert one == other
    assert one == (int((1 << 30) * planner.HOST_SHARE) // 2, int((1 << 30) * 0.4) // 2)


def test_a_plan_that_fits_no_rank_fails_on_all(tmp_path: Path) -> None:
    for kind, text in run(2, opened, str(tmp_path), "memory of one"):
        assert kind == "PlanError"
        assert "memory.device" in text


@pytest.mark.parametrize(
    ("how", "own", "other"),
    [
        (
            "moments",
            "moments differs between the ranks: fp32 on rank 0",
            "moments differs between the ranks: bf16 on rank 1",
        ),
        ("no directory", "there is no directory", "rank 1 failed: ConfigError"),
    ],
)
def test_all_hear_of_what_keeps_one_from_opening(tmp_path: Path, how: str, own: str, other: str) -> None:
    told = run(2, opened, str(tmp_path), how)
    assert own in told[1][1]
    assert other in told[0][1]


def unsaved(folder: str) -> Any:
    model = offloaded(folder, TIERS[3])
    Path(folder, "file").write_text("in the way")
    with pytest.raises(InfinityError) as caught:
        infinity.save_pretrained(model, f"{folder}/file/out")
    model(batch(0, dist.get_rank(), torch.float32)).backward()  # all can go on
    infinity.close(model)
    return str(caught.value)


def test_all_hear_why_nothing_was_saved_and_can_go_on(tmp_path: Path) -> None:
    one, other = run(2, unsaved, str(tmp_path))
    assert one == other
    assert "cannot write to" in one


def test_the_gradients_of_several_ranks_add_up_in_fp32_where_the_plan_counts_them(tmp_path: Path) -> None:
    memory = {"memory": {"host": "15MiB", "device": "16MiB"}}  # of two ranks
    require_equal(tmp_path, TIERS[3] | memory, 1, 2, dtype="bfloat16")
