"""`infinity run CONFIG SCRIPT ARGS…`: run a script that does not mention infinity, with its models offloaded."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from infinity.config import SwapConfig
from infinity.coordinator.peer_errors import peer_errors
from infinity.errors import ConfigError
from infinity.integrations import (
    accelerate,
    checkpoint_folders,
    deepspeed_errors,
    distributed_data_parallel,
    from_pretrained,
    optimizers,
    strategy,
)
from infinity.integrations.patches import Patches
from infinity.integrations.resume_hint import Resuming, by_trainer
from infinity.integrations.script_end import script_end
from infinity.integrations.script_run import ScriptRun


def launch(config: SwapConfig, script: Path, arguments: Sequence[str], resume: Path | None, resuming: Resuming) -> None:
    """Run a script as `python script arguments` does, and make the script's libraries use infinity.

    The models are closed after the script's threads have ended and its atexit functions have run.

    Args:
        config: the swap config.
        script: path of the script.
        arguments: arguments of the script.
        resume: checkpoint folder; the trained model is offloaded from the generation that this folder names.
        resuming: function that returns how the script resumes from a checkpoint folder.

    Raises:
        all exceptions of the script.
        PeerError: in place of an error of torch.distributed that another rank has caused.
    """
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    with installed(config, resume, resuming), script_end(), peer_errors():
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def installed(config: SwapConfig, resume: Path | None = None, resuming: Resuming = by_trainer) -> Iterator[ScriptRun]:
    """During the `with` block, offload the models that libraries load, each at its first use, and use infinity's
    optimizers for these models. At the end of the block, the models are closed. `resume` and `resuming` are
    as for launch().
    """
    run = ScriptRun(config, resuming)
    run.add_facts(folder=None if resume is None else resume.expanduser().absolute())
    failed, stopped = True, False
    try:
        _one_device()
        with Patches() as patches:
            optimizers.replace_optimizers(run, patches)
            from_pretrained.replace_loading(run, patches)
            distributed_data_parallel.replace_ddp(patches)
            strategy.replace_strategies(run, patches)
            strategy.replace_fabric(run, patches)
            patches.wrap(shutil, "rmtree", checkpoint_folders.removing(run.alive))
            _patch_imports(run, patches)
            yield run
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    except KeyboardInterrupt:
        stopped = True
        raise
    finally:
        run.close(failed=failed, stopped=stopped)


def _patch_imports(run: ScriptRun, patches: Patches) -> None:
    """Register replacements that are made when the script imports a library.

    infinity then imports no library that the script does not use.
    """

    def replace_training(trainer: ModuleType) -> None:
        from infinity.integrations import transformers

        transformers.replace_training(run, patches)
        accelerate.replace_beginning(run, patches, trainer)

    acts: dict[str, Callable[[ModuleType], None]] = {
        "transformers": _require_transformers_5,
        "transformers.generation.utils": partial(distributed_data_parallel.replace_generating, patches),
        "transformers.training_args": partial(deepspeed_errors.refuse_arguments, patches),
        "transformers.trainer": replace_training,
        "accelerate.utils.dataclasses": partial(deepspeed_errors.refuse_plugin, patches),
        "accelerate.accelerator": partial(accelerate.replace_preparing, run, patches),
    }
    for name, act in acts.items():
        patches.when_imported(name, act)


def _require_transformers_5(transformers: ModuleType) -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"infinity run needs transformers 5, and {transformers.__version__} is installed: pip install --upgrade "
            "'transformers>=5'"
        )


def _one_device() -> None:
    """Make only one GPU visible. If several GPUs are visible, Trainer wraps the model in DataParallel.

    Under torchrun the visible GPUs are not changed, because a Trainer does not use DataParallel, and the script uses
    the GPU of its LOCAL_RANK.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "LOCAL_RANK" not in os.environ and (visible is None or "," in visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0" if visible is None else visible.split(",")[0]
