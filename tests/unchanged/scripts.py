"""Scripts of examples/recipes and examples/unchanged, run in separate processes: plain or under `infinity run`.

The scripts run to their end or are killed. In `make test`, one script is started as a user starts it, and the processes
of the other scripts are forked. In the long forms, all scripts are started as a user starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import sampling
from tests.unchanged.forked import ForkedScript

ROOT = Path(__file__).parents[2]
STEPS = 12
SAVED = 4
"""Number of steps between the scripts' saves; recipes get this number as an option."""
_WITHIN_S = 240.0
ALL_SPAWNED = sampling.SHARE > 0


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        data: name of the script's data file, which make_demo_checkpoint writes.
        folder: folder in examples.
        checkpoint: name of a checkpoint, by its step.
        adapters: whether the script's result is LoRA adapters instead of a model.
        model_class: class of transformers that loads the script's result.
        rate, length: sizes of a recipe's test: the learning rate, and the tokens of a sequence.
        reference: whether the script has a second model, which is not trained.
        resumed_by_launcher: whether the script names its checkpoint only after the model was offloaded. For such a
            script, `infinity run` gets the checkpoint, too.
    """

    name: str
    data: str
    folder: str = "recipes"
    checkpoint: str = "checkpoint-{}"
    model_class: str = "AutoModelForCausalLM"
    rate: str = "1e-4"
    length: int = 128
    adapters: bool = False
    reference: bool = False
    resumed_by_launcher: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return ROOT / "examples" / self.folder / f"{self.name}.py"


SCRIPTS = {
    script.name: script
    for script in (
        Script("full", "texts"),
        Script("lora", "chats", rate="1e-3", adapters=True),
        Script("dpo", "preferences", length=192, reference=True),
        Script("reward", "preferences", length=256, model_class="AutoModelForSequenceClassification"),
        Script("grpo", "prompts", "unchanged"),
        Script("accelerate_loop", "texts", "unchanged", resumed_by_launcher=True),
        Script("lightning_module", "texts", "unchanged", checkpoint="checkpoint-step={}.ckpt"),
    )
}


@dataclass(frozen=True)
class Job:
    """One script with its inputs and outputs.

    Attributes:
        inputs: directory that make_demo_checkpoint wrote.
        dtype: dtype of the weights.
        output: the directory that the script fills; its output text is in `log` beside it.
        config: path of a swap config; None: the run is plain.
        ranks: number of processes that torchrun starts; 1: no torchrun.
        batch: sequences per batch and rank, for the script that has this option.
        spawned: whether the script is started as a user starts it. False: its process is forked from a process that has
            imported the libraries.
    """

    script: Script
    inputs: Path
    dtype: str
    output: Path
    config: Path | None = None
    ranks: int = 1
    batch: int = 2
    spawned: bool = True

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def checkpoint(self, step: int) -> Path:
        return self.output / self.script.checkpoint.format(step)

    def run(self) -> None:
        """Run the script to its end."""
        self._end(self._started(None))

    def resume(self) -> None:
        """Run the script from the first checkpoint to its end."""
        before = self._first_checkpoint()
        assert self.checkpoint(SAVED).exists()
        self._end(self._started(SAVED))
        again = {str(path) for path, _ in self._first_checkpoint().items() ^ before.items()}
        assert not again, f"{self.script} began anew, and did not resume: it wrote {sorted(again)}"

    def _first_checkpoint(self) -> dict[Path, int]:
        """Return the times at which the files of the first checkpoint's weights were written. A run that starts over,
        instead of resuming, writes these files again.

        Lightning also writes these files when it resumes; for Lightning, the metrics show at which step the run began.
        """
        return {path: path.stat().st_mtime_ns for path in self.checkpoint(SAVED).glob("*.safetensors")}

    def _end(self, process: subprocess.Popen[bytes] | ForkedScript) -> None:
        try:
            process.wait(_WITHIN_S)
        finally:
            process.kill()
        assert process.returncode == 0, f"{self.script} ended with {process.returncode}:\n{self._tail()}"

    def run_until_killed(self) -> None:
        """Run the script, and kill it while it writes the second checkpoint or in the steps after this checkpoint."""
        process = self._started(None)
        deadline = time.monotonic() + _WITHIN_S
        try:
            while not self.checkpoint(2 * SAVED).exists():
                assert process.poll() is None, f"{self.script} ended with {process.returncode}:\n{self._tail()}"
                assert time.monotonic() < deadline, f"{self.script} hangs:\n{self._tail()}"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.002)
            for pid in self._victims(process):
                os.kill(pid, signal.SIGKILL)
            process.wait(_WITHIN_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode not in (0, None), f"{self.script} ended before it was killed"

    def _victims(self, process: subprocess.Popen[bytes] | ForkedScript) -> list[int]:
        """Return the processes to kill. If there are several ranks, this is only one process, because torchrun ends the
        other ranks.
        """
        if isinstance(process, ForkedScript):
            return [process.victim]
        if self.ranks == 1:
            return [process.pid]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [int(children.split()[-1])]

    def _started(self, resume: int | None) -> subprocess.Popen[bytes] | ForkedScript:
        script = str(self.script.path)
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command = [sys.executable, *(several if self.ranks > 1 else []), *self._launcher(resume), script]
        environment = os.environ | {
            "MODEL": str(self.inputs / "checkpoint"),
            "DATA": str(self.inputs / f"{self.script.data}.jsonl"),
            "OUTPUT": str(self.output),
            "STEPS": str(STEPS),
            "EVERY": str(SAVED),
            "BATCH": str(self.batch),
            "LENGTH": str(self.script.length),
            "RATE": self.script.rate,
            "DTYPE": self.dtype,
            "HF_HOME": str(self.inputs / "hf"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if resume is not None:
            environment["RESUME"] = str(self.checkpoint(resume))
        if not self.spawned:
            return ForkedScript(
                [*self._launcher(resume), script], environment, self.output.parent, self.log, self.ranks
            )
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, cwd=self.output.parent, stdout=log, stderr=log)

    def _launcher(self, resume: int | None) -> list[str]:
        if self.config is None:
            return []
        told = resume is not None and self.script.resumed_by_launcher
        folder = ["--resume", str(self.checkpoint(resume))] if told and resume is not None else []
        return ["-m", "infinity.run", *folder, str(self.config)]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]
