"""A store that a run cannot use is refused before the run imports its libraries and reads its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.config_checks import require_new_store, require_whole_store
from infinity.config import load_config
from infinity.errors import ResumeError, StoreLockedError, StoreNotEmptyError
from infinity.io.directory import HEADER_NAME, SwapDirectory
from infinity.io.manifest import SwapFileHeader, write_header
from infinity.io.rank_paths import rank_name


def _store(*paths: Path) -> None:
    for member, path in enumerate(paths):
        path.mkdir()
        header = SwapFileHeader(
            created="2026-11-27T00:00:00+00:00",
            members=list(map(str, paths)),
            shares=[1] * len(paths),
            stripe_bytes=4096,
            nbytes=8192,
            run="a" * 32,
            mode="generations",
            member=member,
        )
        (path / HEADER_NAME).write_bytes(b"".join(write_header(header)))


def test_directories_of_a_resumed_run_are_those_of_its_store_in_their_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    _store(one, other)
    require_whole_store(load_config({"nvme": {"paths": [str(one), str(other)]}}))
    with pytest.raises(ResumeError, match="is part 2 of 2 of its store, and nvme.paths names it as part 1 of 2"):
        require_whole_store(load_config({"nvme": {"paths": [str(other), str(one)]}}))


def test_a_store_in_use_is_not_resumed(tmp_path: Path) -> None:
    _store(tmp_path / "swap")
    held = SwapDirectory(tmp_path / "swap")
    with pytest.raises(StoreLockedError, match="is in use by a run"):
        require_whole_store(load_config({"nvme": {"paths": [str(tmp_path / "swap")]}}))
    held.close(keep=True)
    require_whole_store(load_config({"nvme": {"paths": [str(tmp_path / "swap")]}}))


def test_generations_are_in_the_way_only_of_a_run_that_makes_a_store(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    (tmp_path / "swap" / "generation-000000000002.infinity").touch()
    config = load_config({"nvme": {"paths": [str(tmp_path / "swap")]}})
    for changes in ({}, {"commit_every": 0, "weights": "nvme"}, {"commit_every": 0, "optimizer": "nvme"}):
        with pytest.raises(StoreNotEmptyError):
            require_new_store(config.model_copy(update=changes))
    require_new_store(config.model_copy(update={"commit_every": 0, "weights": "host", "optimizer": "host"}))


def test_generations_of_several_ranks_are_in_the_way_of_one_process(tmp_path: Path) -> None:
    rank = tmp_path / "swap" / rank_name(0, 2)
    rank.mkdir(parents=True)
    for name in (HEADER_NAME, "generation-000000000002.infinity"):
        (rank / name).touch()
    with pytest.raises(StoreNotEmptyError, match="holds the checkpoint of an earlier run of 2 ranks"):
        require_new_store(load_config({"nvme": {"paths": [str(tmp_path / "swap")]}}))
