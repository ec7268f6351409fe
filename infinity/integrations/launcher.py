"""`infinity run CONFIG SCRIPT ARGS…`: a script that knows nothing of infinity, with its model offloaded."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.integrations.patches import Patches
from infinity.integrations.run import Run
from infinity.runtime.hooks import ScopeEnter, ScopeLeave, SiteEnter, SiteLeave


def launch(config: SwapConfig, script: Path, arguments: Sequence[str], resume: Path | None = None) -> None:
    """Run a script as `python script arguments` does, with infinity beneath the libraries that it uses.

    Args:
        resume: a checkpoint folder: the model that is trained is offloaded from the generation that it names.

    Raises:
        whatever the script raises.
    """
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    with installed(config, resume):
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def installed(config: SwapConfig, resume: Path | None = None) -> Iterator[Run]:
    """In this context the models that libraries load are offloaded when they are used, and their optimizers are
    infinity's. At its end the models are closed. Args: resume: as launch."""
    run = Run(config)
    run.wish(folder=None if resume is None else resume.expanduser().absolute())
    failed, stopped = True, False
    try:
        from infinity.integrations import (
            accelerate,
            deepspeed,
            folders,
            models,
            optimizers,
            ranks,
            strategy,
            transformers,
        )

        _require_transformers_5()
        _one_device()
        with Patches() as patches:
            optimizers.replace_optimizers(run, patches)
            models.replace_loading(run, patches)
            ranks.replace_ddp(patches)
            ranks.replace_generating(patches)
            deepspeed.refuse_deepspeed(patches)
            accelerate.replace_preparing(run, patches)
            transformers.replace_training(run, patches)
            strategy.replace_strategies(run, patches)
            patches.wrap(shutil, "rmtree", folders.removing(run.alive))
            patches.when_imported("torch._dynamo", lambda _: _leave_hooks_out(patches))
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


def _leave_hooks_out(patches: Patches) -> None:
    """torch.compile breaks its graph at a hook that fetches units, and compiles nothing of it."""
    for kind in (ScopeEnter, ScopeLeave, SiteEnter, SiteLeave):
        patches.put(kind, "__call__", torch.compiler.disable(kind.__call__))


def _require_transformers_5() -> None:
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"infinity run needs transformers 5, and {transformers.__version__} is installed: "
            "pip install --upgrade 'infinity-offload[hf]'"
        )


def _one_device() -> None:
    """Trainer would wrap the model in DataParallel where several GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or "," in visible:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)
