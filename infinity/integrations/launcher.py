"""`infinity run CONFIG SCRIPT ARGS…`: a script that knows nothing of infinity, with its model offloaded."""

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
from infinity.errors import ConfigError, cause_of
from infinity.integrations import accelerate, deepspeed, folders, models, optimizers, ranks, strategy
from infinity.integrations.ending import to_the_end
from infinity.integrations.patches import Patches
from infinity.integrations.run import Run


def launch(config: SwapConfig, script: Path, arguments: Sequence[str], resume: Path | None = None) -> None:
    """Run a script as `python script arguments` does, with infinity beneath the libraries that it uses. The models are
    closed when its threads have ended and its atexit functions have run.

    Args:
        resume: a checkpoint folder: the model that is trained is offloaded from the generation that it names.

    Raises:
        whatever the script raises.
    """
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    with installed(config, resume), to_the_end():
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def installed(config: SwapConfig, resume: Path | None = None) -> Iterator[Run]:
    """In this context the models that libraries load are offloaded when they are used, and their optimizers are
    infinity's. At its end the models are closed. Args: resume: as launch."""
    run = Run(config)
    run.wish(folder=None if resume is None else resume.expanduser().absolute())
    failed, stopped, refused = True, False, False
    try:
        _one_device()
        with Patches() as patches:
            optimizers.replace_optimizers(run, patches)
            models.replace_loading(run, patches)
            ranks.replace_ddp(patches)
            strategy.replace_strategies(run, patches)
            strategy.replace_fabric(run, patches)
            patches.wrap(shutil, "rmtree", folders.removing(run.alive))
            _patch_what_is_imported(run, patches)
            yield run
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    except KeyboardInterrupt:
        stopped = True
        raise
    except Exception as error:
        refused = cause_of(error) is not None
        raise
    finally:
        run.close(failed=failed, stopped=stopped, refused=refused)


def _patch_what_is_imported(run: Run, patches: Patches) -> None:
    """A script that does without a library does not wait for its import."""

    def replace_training(trainer: ModuleType) -> None:
        from infinity.integrations import transformers

        transformers.replace_training(run, patches)
        accelerate.replace_beginning(run, patches, trainer)

    acts: dict[str, Callable[[ModuleType], None]] = {
        "transformers": _require_transformers_5,
        "transformers.generation.utils": partial(ranks.replace_generating, patches),
        "transformers.training_args": partial(deepspeed.refuse_arguments, patches),
        "transformers.trainer": replace_training,
        "accelerate.utils.dataclasses": partial(deepspeed.refuse_plugin, patches),
        "accelerate.accelerator": partial(accelerate.replace_preparing, run, patches),
    }
    for name, act in acts.items():
        patches.when_imported(name, act)


def _require_transformers_5(transformers: ModuleType) -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"infinity run needs transformers 5, and {transformers.__version__} is installed: "
            "pip install --upgrade 'transformers>=5'"
        )


def _one_device() -> None:
    """Trainer would wrap the model in DataParallel where several GPUs are visible; not so where torchrun started it,
    and there the script takes the GPU of its LOCAL_RANK by itself."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "LOCAL_RANK" not in os.environ and (visible is None or "," in visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0" if visible is None else visible.split(",")[0]
