"""A command that a message names starts what the message means, from wherever it is typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch.distributed.run

from infinity.cli.main import main
from infinity.cli.suggested_command import command
from tests.io.test_headers import config, trained


def be_one_of_two_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("WORLD_SIZE", "2")
    patch.setenv("LOCAL_WORLD_SIZE", "2")


def test_a_rank_names_the_launcher_for_what_ranks_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    be_one_of_two_ranks(monkeypatch)
    for each in "finetune", "run":
        program, *arguments = shlex.split(command(each, "--resume", "a b"))
        started = torch.distributed.run.get_args_parser().parse_args(arguments)
        assert (program, started.nproc_per_node, started.module) == ("torchrun", "2", True)
        assert [started.training_script, *started.training_script_args] == ["infinity", each, "--resume", "a b"]


def test_a_rank_names_one_process_for_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When several ranks remove a store or write a copy, all but one fail."""
    trained(config(tmp_path / "swap"))
    be_one_of_two_ranks(monkeypatch)
    line = command("checkpoint", "remove", tmp_path / "swap")
    assert "torchrun" not in line
    assert main(shlex.split(line.partition("infinity ")[2])) == 0
