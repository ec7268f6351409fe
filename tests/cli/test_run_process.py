"""A script under `infinity run` finds its process as `python` gives it, but for what is written here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from infinity.integrations.patches import Patches
from tests import processes

LOOK = """
import faulthandler, gc, json, locale, logging, os, random, signal, sys, threading, warnings
import numpy, torch
from torch.nn.modules import module

LIBRARIES = "transformers", "peft", "trl", "accelerate", "lightning", "datasets", "deepspeed"
root = logging.getLogger()
found = {
    "argv": sys.argv, "path": sys.path, "directory": os.getcwd(), "environment": dict(os.environ), "file": __file__,
    "name": __name__, "umask": os.umask(0o22), "flags": str(sys.flags), "recursion": sys.getrecursionlimit(),
    "handlers": [str(each) for each in root.handlers], "level": root.level, "filters": [str(f) for f in root.filters],
    "disabled": logging.root.manager.disable, "logger class": logging.getLoggerClass().__name__,
    "levels": {n: g.level for n, g in root.manager.loggerDict.items() if isinstance(g, logging.Logger) and g.level},
    "warnings": [str(each) for each in warnings.filters], "showwarning": warnings.showwarning.__module__,
    "excepthook": sys.excepthook.__name__, "threading": threading.excepthook.__name__,
    "displayhook": str(sys.displayhook),
    "stdout": type(sys.stdout).__name__, "stderr": type(sys.stderr).__name__, "errors": sys.stderr.errors,
    "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
    "timer": signal.getitimer(signal.ITIMER_REAL), "threads": sorted(t.name for t in threading.enumerate()),
    "random": str(hash(random.getstate())), "numpy": str(numpy.random.get_state()[1][:4].tolist()),
    "torch": torch.initial_seed(), "torch's": torch.get_rng_state()[:16].tolist(),
    "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
    "threads of torch": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "matmul": torch.get_float32_matmul_precision(),
    "global hooks": [n for n, hooks in sorted(vars(module).items()) if n.startswith("_global_") and hooks],
    "collector": gc.get_threshold(), "collects": gc.isenabled(), "locale": locale.setlocale(locale.LC_ALL),
    "faulthandler": faulthandler.is_enabled(),
    "audit of imports": [type(each).__name__ for each in sys.meta_path],
    "libraries": [n for n in LIBRARIES if n in sys.modules],
}
json.dump(found, open(sys.argv[1], "w"))
"""
WRITTEN = {
    "environment": "CUDA_VISIBLE_DEVICES: one device, as Trainer would wrap the model for several",
    "global hooks": "infinity follows which module is in which",
    "audit of imports": "infinity waits for the imports of the libraries that it changes",
    "levels": "infinity's own logger",
    **dict.fromkeys(("random", "numpy", "torch", "torch's"), "each process has seeds of its own"),
    "path": "the directory of the command, behind the script's",
}


def look(script: Path, into: Path, *, under: bool, forked: bool) -> dict[str, Any]:
    into.with_suffix(".yaml").write_text("{}")
    given = [str(script), str(into)]
    if not forked:
        module = ["-m", "infinity.run", str(into.with_suffix(".yaml"))] if under else []
        subprocess.run([sys.executable, *module, *given], check=True)
    else:
        ended = processes.run(_under_infinity if under else _plainly, str(into.with_suffix(".yaml")), *given)
        assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(into.read_text())
    return found


def _plainly(swap: str, script: str, into: str) -> None:
    """Run the script as `python script into` does."""
    _forget_libraries()
    sys.argv = [script, into]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _under_infinity(swap: str, script: str, into: str) -> int:
    _forget_libraries()
    return main(["run", swap, script, into])


def _forget_libraries() -> None:
    """Forget the imported libraries, which a forked process inherits."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("transformers", "peft", "trl", "accelerate", "lightning", "datasets", "deepspeed"):
            del sys.modules[name]


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_script_finds_its_process_as_python_gives_it(forked: bool, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    plain = look(tmp_path / "look.py", tmp_path / "plain", under=False, forked=forked)
    under = look(tmp_path / "look.py", tmp_path / "under", under=True, forked=forked)
    for found in (plain, under):
        found["argv"] = found["argv"][:1]
    differs = {name for name, value in plain.items() if under[name] != value}
    assert differs <= set(WRITTEN), {name: (plain[name], under[name]) for name in differs - set(WRITTEN)}
    environment = plain["environment"].items() ^ under["environment"].items()
    assert {name for name, _ in environment} <= {"CUDA_VISIBLE_DEVICES"}
    assert under["levels"] == plain["levels"] | {"infinity": 30}


OWN_LOG = """
import logging, sys
logging.basicConfig(filename=sys.argv[1], level=logging.INFO, format="%(levelname)s %(message)s")
logging.getLogger(__name__).info("loss 3.5")
logging.getLogger("infinity").warning("a word of infinity")
"""


def test_what_a_script_logs_goes_where_it_says_and_what_infinity_says_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_LOG)
    (tmp_path / "swap.yaml").write_text("{}")
    line = ["run", str(tmp_path / "swap.yaml"), str(tmp_path / "script.py"), str(tmp_path / "log")]
    ended = processes.run(main, line)
    assert (tmp_path / "log").read_text() == "INFO loss 3.5\n"
    assert ended.stderr.splitlines()[0] == "infinity: a word of infinity"
    assert ended.stdout == ""


def test_in_this_process_the_logger_is_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("infinity")
    before = ours.level, ours.propagate, list(ours.handlers)
    (tmp_path / "script.py").write_text("pass")
    (tmp_path / "swap.yaml").write_text("{}")
    assert main(["run", str(tmp_path / "swap.yaml"), str(tmp_path / "script.py")]) == 0
    assert (ours.level, ours.propagate, list(ours.handlers)) == before
    assert "NOTHING WAS OFFLOADED" in capfd.readouterr().err
    assert os.environ.pop("CUDA_VISIBLE_DEVICES", "0") == "0"


LATE = """
from transformers import Trainer  # looks whether peft is there
from transformers.utils import is_peft_available
assert is_peft_available()
import peft
print(peft.PeftModel.save_pretrained.__module__, peft.prepare_model_for_kbit_training.__wrapped__ is not None)
from infinity.integrations.from_pretrained import _save_pretrained
import inspect
assert _save_pretrained in [cell.cell_contents for cell in peft.PeftModel.save_pretrained.__closure__]
"""


@pytest.mark.long
def test_a_library_that_another_has_looked_for_is_changed_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LATE)
    (tmp_path / "swap.yaml").write_text("{}")
    command = [sys.executable, "-m", "infinity.run", str(tmp_path / "swap.yaml"), str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_module_that_was_looked_for_is_still_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    changed: list[int] = []
    with Patches() as patches:
        for number in (1, 2):  # two wait for the same one
            patches.when_imported("looked_for", lambda module, number=number: changed.append(number + module.value))
        assert importlib.util.find_spec("looked_for") is not None
        assert importlib.util.find_spec("looked_for_and_missing") is None
        assert changed == []
        importlib.import_module("looked_for")
        assert sorted(changed) == [2, 3]
    assert not any(type(each).__name__ == "_WhenImported" for each in sys.meta_path)
    del sys.modules["looked_for"]
