"""A model that comes with Python files of its own: they run where the user says so, and go with the output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from infinity.cli.main import main
from tests import processes
from tests.cli.test_finetune import run
from tests.cli.test_resume import _job
from tests.cli.test_resume import job as job

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .part_of_it import SCALE


class OursConfig(LlamaConfig):
    model_type = "ours"


class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * SCALE
        return out
"""


@pytest.fixture
def ours(job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # of another test, whose files are gone
    directory = tmp_path / "model"
    (directory / "modeling_ours.py").write_text(CODE)
    (directory / "part_of_it.py").write_text("SCALE = 2\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "ours", "architectures": ["OursForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_ours.OursConfig",
        "AutoModelForCausalLM": "modeling_ours.OursForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return job | {"--steps": 2}


def test_code_of_the_model_is_not_run_by_itself(ours: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "model" / "modeling_ours.py").write_text("raise SystemExit('it ran')\n")
    assert run(ours) == 2
    error = capsys.readouterr().err
    assert "it ran" not in error
    assert "--trust-remote-code" in error


def test_code_that_is_trusted_is_run_and_goes_with_the_output(
    ours: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(ours, "--trust-remote-code", "--verify-output") == 0
    assert "bit for bit" in capsys.readouterr().out
    assert (tmp_path / "out-a" / "part_of_it.py").read_text() == "SCALE = 2\n"
    again = (
        "import sys, transformers\n"
        "transformers.dynamic_module_utils.HF_MODULES_CACHE = sys.argv[2]\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(type(model).__name__)\n"
    )
    made = processes.run_script(again, str(tmp_path / "out-a"), str(tmp_path / "others"))
    assert (made.returncode, made.stdout) == (0, "OursForCausalLM\n"), made.stderr


def test_each_process_is_told_anew_to_trust_code(ours: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(ours, "--trust-remote-code", "--keep-store") == 0
    more = ["finetune", "--resume", str(tmp_path / "swap-a"), "--steps", "3", "--output", str(tmp_path / "more")]
    assert main(more) == 2
    assert "With --trust-remote-code these files are run." in capsys.readouterr().err
    assert main([*more, "--trust-remote-code"]) == 0
    assert "trust" not in (tmp_path / "more" / "run.yaml").read_text()


def test_a_revision_is_asked_for_everywhere(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    asked: list[tuple[str, Any]] = []
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        original = kind.from_pretrained

        def note(*args: Any, kind: Any = kind, original: Any = original, **kwargs: Any) -> Any:
            asked.append((kind.__name__, kwargs.get("revision")))
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", note)
    assert run(_job(tmp_path, "b") | {"--steps": 1}, "--revision", "v2.1") == 0
    assert {name for name, revision in asked if revision == "v2.1"} == {
        "AutoConfig",
        "AutoTokenizer",
        "AutoModelForCausalLM",
    }
