"""The reference model of `--method dpo`."""

from __future__ import annotations

from pathlib import Path

import infinity
from infinity.cli.reference_model import ReferenceModel
from infinity.config import SwapConfig
from tests.models import llama


def test_no_directory_of_a_reference_stays_even_one_that_ranks_made(tmp_path: Path) -> None:
    (tmp_path / "reference-2").mkdir()  # parent of the directories of ranks, which a killed run has left
    config = SwapConfig.model_validate(
        {"weights": "nvme", "nvme": {"paths": [str(tmp_path)]}, "memory": {"device": "8MiB", "host": "64MiB"}}
    )
    (trained, _), (model, _) = llama(), llama()
    reference = ReferenceModel(model)
    reference.offload_beside(trained, config, infinity.offload, {})
    assert list((tmp_path / "reference-2").iterdir()) != []
    reference.close()
    infinity.close(trained, discard=True)
    assert list(tmp_path.iterdir()) == []
