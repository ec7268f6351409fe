"""All ranks learn of anything that one rank does differently, cannot do or keeps for itself."""

from __future__ import annotations

import atexit
import contextlib
import errno
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import infinity
from infinity import _native
from infinity.cli.main import main
from infinity.coordinator import registry
from infinity.errors import ConfigError, InfinityError, NotAvailableError, PeerError, PlanError, ResumeError
from infinity.plan import planner
from infinity.sharded.rank_stores import steps_of
from tests.ranks.workers import run
from tests.runtime.over_ranks import (
    TIERS,
    Blocks,
    batch,
    digest,
    offloaded,
    require_equal,
)

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")


def odd_one(folder: str, how: str) -> Any:
    rank = dist.get_rank()
    odd = rank == 1
    try:
        memory = {"memory": {"host": "256MiB", "device": "4MiB"}}  # of both ranks: slots for two blocks
        model = offloaded(folder, TIERS[3] | memory)
        optim = infinity.AdamW(model.parameters(), lr=2e-3 if odd and how == "lr" else 1e-3)
        for step in range(2):
            if odd and how == "skipped block":
                model.skips = 1
            model(batch(step, rank, torch.float32)).backward()
            if odd and how == "extra visit":
                with torch.no_grad():
                    model.blocks[2](batch(step, rank, torch.float32))
            if odd and how == "a gradient":
                model.blocks[1].zero_grad()
            if odd and how == "asks":
                model.blocks[1].norm.weight.grad.norm()
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
        ("a gradient", "'blocks.1.norm.weight' has a gradient on some ranks and none on rank 1"),
        ("asks", "rank 1 is at the norm of the gradients"),
        ("lr", "the rule of param group 0 differs between the ranks"),
        ("extra visit", "while rank 0"),
        ("skipped block", "while rank 0 exchanges the gradients of unit 'blocks.1'"),
        ("no step", "rank 1 closed the model"),
    ],
)
def test_every_rank_is_told_what_one_does_otherwise(tmp_path: Path, how: str, says: str) -> None:
    told = run(2, odd_one, str(tmp_path), how)
    assert told[0] is not None
    assert told[0][0] == (1,)
    assert says in told[0][1]


def left_by_an_exception(folder: str) -> Any:
    """Train; on rank 1, end as a process does whose loop raised an exception that nobody caught."""
    rank = dist.get_rank()
    model = offloaded(folder, TIERS[3])
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    if rank == 1:
        sys.last_value = KeyError("of the loop")
        atexit._run_exitfuncs()
        return None
    try:
        model(batch(0, rank, torch.float32)).backward()
        optim.step()
    except PeerError as error:
        return error.ranks, error.cause


def test_an_exception_that_ends_the_process_of_a_rank_is_told_to_the_others(tmp_path: Path) -> None:
    assert run(2, left_by_an_exception, str(tmp_path))[0] == ((1,), "rank 1 failed: KeyError: 'of the loop'")


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
    """Train with loss scaling. Rank 1 alone uses the second head, which overflows in the first step."""
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


def values_of_gradients(folder: str) -> None:
    """Check that reads of a gradient's values are refused, and that the operations that the message names work."""
    model = offloaded(folder, TIERS[3])
    optim, own = infinity.AdamW(model.parameters()), []
    parameter = model.head.weight
    parameter.register_hook(own.append)
    for step in range(2):
        model(batch(step, dist.get_rank(), torch.float32)).backward()
        refused = pytest.raises(NotAvailableError, match=r"'blocks.*' is split over .*register_hook, before the backw")
        with refused, infinity.gathered(model, grads=True):
            pass
        with pytest.raises(NotAvailableError, match=r"What works is p\.grad\.norm\(\)"):
            parameter.grad.abs().max()
        assert parameter.grad.data.norm() > 0
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2) > 0
        parameter.grad.mul_(0.5)
        optim.step()
        optim.zero_grad()
    assert [each.shape for each in own] == [parameter.shape] * 2
    infinity.close(model)


def test_values_of_gradients_are_refused_by_name(tmp_path: Path) -> None:
    run(2, values_of_gradients, str(tmp_path))


def values_of_moments(folder: str) -> None:
    model = offloaded(folder, TIERS[3] | {"commit_every": 1})
    optim = infinity.AdamW(model.parameters())
    model(batch(0, dist.get_rank(), torch.float32)).backward()
    optim.step()
    with pytest.raises(NotAvailableError, match="split over several ranks. `infinity checkpoint export` writes the wh"):
        optim.read_state(model.head.weight, "exp_avg")
    infinity.close(model)


def test_moments_of_several_ranks_are_refused_by_name_and_written_whole_as_the_error_says(tmp_path: Path) -> None:
    run(2, values_of_moments, str(tmp_path / "swap"))
    assert main(["checkpoint", "export", str(tmp_path / "swap"), "--output", str(tmp_path / "out")]) == 0
    (states,) = (tmp_path / "out" / "optimizer").glob("*.safetensors")
    assert load_file(states)["head.weight.exp_avg"].shape == Blocks(torch.float32).head.weight.shape


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
        with contextlib.suppress(InfinityError):
            infinity.close(model)  # says so of an update whose read failed, too
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


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
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


def small(folder: str, device: str) -> tuple[str, str]:
    """Return the error that refuses a model of a few KiB. A larger model would first get thousands of tiles."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    memory, paths = {"host": "256MiB", "device": device}, {"paths": [folder]}
    try:
        infinity.offload(model, {**TIERS[3], "commit_every": 0, "memory": memory, "nvme": paths}, device="cpu")
    except PlanError as error:
        return type(error).__name__, str(error)
    return "", ""


def opened(folder: str, how: str) -> Any:
    """Return the error of each rank while the model was offloaded, or the memory limits of its plan."""
    rank, config = dist.get_rank(), dict[str, Any](TIERS[3])
    if how == "free memory":
        free = (1 << 30) + rank * (1 << 28)
        planner.available_host_bytes = planner.available_device_bytes = lambda *_: free
        config["memory"] = {}
    if how == "memory of one":
        return small(folder, "64MiB" if rank else "4KiB")
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
    assert other == f"rank 0: {one}"
    assert "cannot write to" in one


def test_the_gradients_of_several_ranks_add_up_in_fp32_where_the_plan_counts_them(tmp_path: Path) -> None:
    memory = {"memory": {"host": "16MiB", "device": "16MiB"}}  # of two ranks
    require_equal(tmp_path, TIERS[3] | memory, 1, 2, dtype="bfloat16")


def raising(folder: str) -> str:
    rank = dist.get_rank()
    model = offloaded(folder, TIERS[3])
    optim = infinity.AdamW(model.parameters())
    try:
        for step in range(20):
            if rank == 1 and step == 2:
                raise RuntimeError("the loader broke")
            model(batch(step, rank, torch.float32)).backward()
            optim.step()
            optim.zero_grad()
        return ""
    except PeerError as error:
        with pytest.raises(PeerError, match="the loader broke"):
            model(batch(0, rank, torch.float32))
        return str(error)
    except RuntimeError as error:
        infinity.close(model)
        return str(error)


def test_an_exception_of_the_script_is_told_to_the_others(tmp_path: Path) -> None:
    told, own = run(2, raising, str(tmp_path))
    assert own == "the loader broke"
    assert "rank 1" in told
    assert "RuntimeError: the loader broke" in told


def too_small(folder: str) -> int:
    """Return the memory.device that the error asks for, in KiB. Layers in tiles do not fit, either."""
    _, told = small(folder, "4KiB")
    found = re.search(r"Raise memory\.device to (\d+)KiB", told)
    assert found
    return int(found[1])


def test_the_memory_to_raise_is_that_of_all_ranks_of_the_machine(tmp_path: Path) -> None:
    assert max(run(2, first_to_say, str(tmp_path / "all"))) == 2 * too_small(str(tmp_path / "one"))


def first_to_say(folder: str) -> int:
    """0 on a rank that heard of the other's error before it had its own."""
    try:
        return too_small(folder)
    except PeerError:
        return 0


def discarding(folder: str, every: bool) -> str:
    """Rank 1 removes its generations at the end; rank 0 as well, or it gathers, alone."""
    memory = {"host": "256MiB", "device": "4MiB"}  # of both ranks: slots for two blocks
    model = offloaded(folder, {**TIERS[3], "commit_every": 1, "memory": memory})
    optim = infinity.AdamW(model.parameters())
    for step in range(2):
        model(batch(step, dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
    infinity.synchronize(model)
    infinity.commit(model)
    try:
        if dist.get_rank() == 0 and not every:
            with infinity.gathered(model, model):
                pass
        infinity.close(model, discard=True)
    except PeerError as error:
        return str(error)
    return ""


def test_processes_that_have_not_met_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes run this script, but torch.distributed is not initialized"):
        offloaded(str(tmp_path), TIERS[0])


@pytest.mark.parametrize("every", [False, True])
def test_generations_are_removed_by_all_ranks_or_none(tmp_path: Path, every: bool) -> None:
    told = run(2, discarding, str(tmp_path), every)
    assert all(bool(each) != every for each in told)
    assert steps_of(tmp_path, 2) == (set() if every else {2})


def one_cannot(folder: str) -> list[str]:
    """Return the errors of all ranks when rank 1 alone raises one."""
    model, told = offloaded(folder, TIERS[0]), []
    coordinator = registry.coordinator_of(model)
    for kind in (PlanError, ResumeError, OSError):

        def act(kind: type[Exception] = kind) -> None:
            if dist.get_rank() == 1:
                raise kind("there is none")

        try:
            coordinator.world.each("looking for it", act)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    infinity.close(model)
    return told


def test_an_error_of_one_rank_is_of_its_class_on_all(tmp_path: Path) -> None:
    other, own = run(2, one_cannot, str(tmp_path))
    what = "there is none"
    assert own == [f"PlanError: {what}", f"ResumeError: {what}", f"OSError: {what}"]
    assert other == [
        f"PlanError: rank 1: {what}",
        f"ResumeError: rank 1: {what}",
        f"InfinityError: rank 1: {what}",
    ]
