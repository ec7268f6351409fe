"""A script's models are open for its threads and its atexit functions, and closed after them, however it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infinity.cli.main import main
from tests import processes

SCRIPT = """
import atexit, concurrent.futures, signal, sys, threading, torch
from torch import nn
from infinity.integrations import module_of_optimizer

module_of_optimizer.WORTH_NUMEL = 1000

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    model(torch.ones(2, 32)).backward()
    optim.step()
    optim.zero_grad()

lock = threading.Lock()

def save(name):
    with lock:
        torch.save(model.state_dict(), sys.argv[1] + "/" + name)

def late():
    while sys.modules["__main__"].__dict__ is globals():  # until the last line has run
        pass
    save("thread")

def fail():
    raise ArithmeticError("amid the others")

threading.Thread(target=late).start()
concurrent.futures.ThreadPoolExecutor(1).submit(save, "pool")
atexit.register(save, "atexit")
atexit.register(fail)
atexit.register(print, "the last is the first")
atexit.unregister(print)
LAST
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        pytest.param("sys.exit()", 0, marks=pytest.mark.long),
        ("raise ValueError", 1),
        ("signal.raise_signal(signal.SIGINT)", 130),
    ],
)
def test_a_model_is_open_until_a_scripts_threads_and_atexit_functions_are_done(
    last: str, code: int, tmp_path: Path
) -> None:
    swap = {"weights": "nvme", "optimizer": "nvme", "commit_every": 1, "nvme": {"paths": [str(tmp_path / "swap")]}}
    (tmp_path / "swap.yaml").write_text(json.dumps(swap | {"memory": {"device": "64MiB", "host": "64MiB"}}))
    (tmp_path / "script.py").write_text(SCRIPT.replace("LAST", last))
    arguments = [str(tmp_path / name) for name in ("swap.yaml", "script.py", "")]
    ended = processes.run(main, ["run", *arguments])
    assert ended.returncode == code, ended.stderr
    assert "ArithmeticError: amid the others" in ended.stderr
    assert "the last is the first" not in ended.stdout
    waits = "infinity: the script failed (ValueError), and the process waits for the script's threads: Thread-"
    assert (waits in ended.stderr) == (last == "raise ValueError")
    saved = [torch.load(tmp_path / name) for name in ("thread", "pool", "atexit")]
    assert all(torch.equal(each["blocks.0.weight"], saved[0]["blocks.0.weight"]) for each in saved)
    generations = sorted(path.name for path in tmp_path.glob("swap/generation-*"))
    assert bool(generations) == (code != 0), "the store goes where a script ended well, and is whole where not"
