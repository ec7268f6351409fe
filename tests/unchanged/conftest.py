"""A small Llama with a tokenizer and data, made once per test process, and the plain runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.make_demo_checkpoint import make_checkpoint
from tests.unchanged.scripts import ALL_SPAWNED, Job, Script

MakeJob = Callable[..., Job]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 1.4 M parameters in fp32: 5.6 MB."""
    directory = tmp_path_factory.mktemp("inputs")
    make_checkpoint(directory, hidden=128, layers=6, vocabulary=1024, dtype=torch.float32, text_bytes=300_000)
    return directory


@pytest.fixture(scope="session")
def plain(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script, str], Job]:
    """Return a function that provides plain runs. Each plain run is made only once."""
    made: dict[tuple[Script, str, int, int], Job] = {}

    def run(script: Script, dtype: str, ranks: int = 1, batch: int = 2) -> Job:
        which = script, dtype, ranks, batch
        if which not in made:
            output = tmp_path_factory.mktemp("plain") / script.name
            job = Job(script, inputs, dtype, output, ranks=ranks, batch=batch, spawned=ALL_SPAWNED)
            job.run()
            made[which] = job
        return made[which]

    return run
