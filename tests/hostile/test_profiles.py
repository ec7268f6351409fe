"""Profiles of disks with absurd content are ignored, or believed as far as a run with them is planned and trains."""

from __future__ import annotations

import math
import os
import random
import shutil
from pathlib import Path

import pytest

import infinity
from infinity.io.disk_profile import DiskProfile, load_profiles, profile_path, save_profile
from tests.hostile.limits import failures
from tests.hostile.mutations import mutate_json
from tests.hostile.stores import config, loss_of, plain, typed
from tests.sampling import number, seed

CASES = number(8, 1000, "INFINITY_HOSTILE")
_PARTS = 2

Case = tuple[str, int]


def check(case: Case) -> None:
    work, number_of = Path(case[0]), case[1]
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} profiles {number_of}")
    work.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(work)
    profile = DiskProfile(
        read_rate=3e9, overwrite_rate=2e9, mixed_rate=2.5e9, block_bytes=1 << 20, in_flight_bytes=8 << 20,
        engine="threads", path=str(work), measured="2026-01-01",
    )  # fmt: skip
    save_profile(work, profile)
    mutate_json(profile_path(), draw)
    for found in load_profiles().values():
        rates = found.read_rate, found.overwrite_rate, found.mixed_rate
        assert all(math.isfinite(rate) and rate > 0 for rate in rates)

    def train() -> None:
        model = plain()
        infinity.offload(model, config(work / "a", work / "b"))
        optim = infinity.AdamW(model.parameters())
        loss_of("plain", model).backward()
        optim.step()
        infinity.close(model, discard=True)

    result = typed(train)
    assert result is None, "a profile is never in the way"
    save_profile(work, profile)
    assert profile in load_profiles().values()
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_profile_of_nobody_is_never_in_the_way(part: int, tmp_path: Path) -> None:
    cases = [(str(tmp_path / str(each)), each) for each in range(part, CASES, _PARTS)]
    assert failures(check, cases, tmp_path) == []
