"""A strategy of Lightning for one device, which offloads the model of a LightningModule.

[Note: a Lightning checkpoint]
`name.ckpt` is Lightning's own file, with weights, loops, schedulers, and the names of the optimizer's states. The
folder `name.ckpt.infinity` beside this file pins the generation with the states themselves. The folder is written after
the file, and removed before the file. `fit(ckpt_path="name.ckpt")` offloads the model from the pinned generation and
reads everything else from the file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError, PlanError, ResumeError
from infinity.integrations.checkpoint_folders import CheckpointFolderSave, is_at, keeps_generations, pins_for
from infinity.integrations.optimizers import replace_optimizers
from infinity.integrations.patches import Patches
from infinity.integrations.script_run import ScriptRun
from infinity.ranks.ranks import require_one_process
from infinity.runtime.deferred_parameters import defer_in_memory
from infinity.runtime.memory_fit import fits_memory, host_bytes_of, nbytes_of
from infinity.runtime.pins import generation_of, unpin
from infinity.sizes import format_bytes
from infinity.state.frozen_codecs import encoded_form
from infinity.state.layer_tiles import tile_of

logger = logging.getLogger(__name__)

_BESIDE = ".infinity"
"""Ending of the folder that pins the generation of a checkpoint file, after the file's name."""

_AVERAGE = (
    "it copies the model, and writes to weights in memory. Average the weights in a callback of your own: "
    "infinity.state_dict(model) reads them one by one, after any step"
)
_REFUSED = {
    "LearningRateFinder": "Tuner.lr_find restores the earlier weights. Make a separate run whose learning rate "
    "grows with each step, lr=1e-8 and torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 ** (0.08 * step)) "
    "for 100 steps, and take the learning rate at which the loss falls fastest",
    "BatchSizeFinder": "Tuner.scale_batch_size restores the earlier weights. Try each batch size in a separate "
    "run, after `infinity plan --batch-size N` says that it fits",
    "StochasticWeightAveraging": f"StochasticWeightAveraging: {_AVERAGE}",
    "WeightAveraging": f"WeightAveraging: {_AVERAGE}",
    "ModelPruning": "ModelPruning replaces weights in memory. Prune the saved model after training",
}
"""Callbacks that need all weights in memory, each with the reason and an alternative."""
_COMPUTED_IN = {
    "32-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def folder_beside(checkpoint: str | Path) -> Path:
    """Return the folder that pins the generation of a checkpoint file.

    Symbolic links are followed, because Lightning makes links for `save_last="link"`.
    """
    return Path(os.path.realpath(Path(checkpoint).expanduser()) + _BESIDE)


class OffloadingStrategyMixin:
    """A mixin that offloads the model of a LightningModule and trains it with infinity's optimizers.

    Among the bases of a class, the mixin comes before a SingleDeviceStrategy. If a child of the LightningModule has all
    parameters of the LightningModule, and a method `save_pretrained` (as in transformers and PEFT), this child is
    offloaded. Otherwise the LightningModule itself is offloaded. When the Trainer has finished, the model is still
    offloaded.

    Args:
        config: swap config, as for infinity.offload. Leave `config` out under `infinity run`, which has a swap config
            already.
        options: as for SingleDeviceStrategy.
    """

    strategy_name: ClassVar[str] = "infinity"
    launched: ClassVar[ScriptRun | None] = None
    """The run of `infinity run`; None if the script was started without `infinity run`."""

    accelerator: Any
    checkpoint_io: Any
    lightning_module: Any
    precision_plugin: Any
    _forward_redirection: Any
    _root_device: torch.device

    def __init__(self, config: str | Path | Mapping[str, Any] | SwapConfig | None = None, **options: Any) -> None:
        super().__init__(**options)
        require_one_process("a Lightning Trainer")
        if self.launched is not None and config is not None:
            raise ConfigError(
                "`infinity run` has a swap config, and InfinityStrategy(config=...) names another: leave one out"
            )
        self._run = self.launched or ScriptRun(load_config(config))
        self._run.resumes_by(lambda folder: f"`trainer.fit(..., ckpt_path={folder.removesuffix(_BESIDE)!r})`")
        self._roots: list[nn.Module] = []
        self._resumes_from: Path | None = None

    # -- devices -------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return self._root_device

    @property
    def parallel_devices(self) -> list[torch.device]:
        """An empty list. Lightning sets this property to the devices that accelerator= and devices= name."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is None:
            return
        kinds = {device.type for device in devices}
        if len(devices) != 1 or not kinds <= {"cpu", "cuda"}:
            raise ConfigError(
                f"strategy='infinity' trains on one CPU or CUDA device, not on {', '.join(map(str, devices))}: give "
                "Trainer(devices=1), and accelerator='cpu' or 'cuda'"
            )
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise ConfigError(f"strategy='infinity' trains on one machine: leave num_nodes={number} out")

    # -- offloading ---------------------------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        theirs: Any = super()
        theirs.connect(model)
        self._roots, self._resumes_from = [], None

    def setup(self, trainer: Any) -> None:
        """Offload the models that are not offloaded yet.

        If the Trainer makes an optimizer, the optimizer's constructor has already offloaded the model.
        """
        module, fits = self.lightning_module, _fits(trainer)
        self.accelerator.setup(trainer)
        _require_possible(trainer, self.precision_plugin.precision)
        if fits and self._run.facts.folder != self._resumes_from:
            raise ConfigError(
                f"--resume {self._run.facts.folder}: a Lightning script names its checkpoint itself: leave --resume "
                "out, and call trainer.fit(..., ckpt_path=...) with the checkpoint file"
            )
        self._expect(trainer)
        roots = self._enter()
        if not any(registry.is_offloaded(root) for root in roots):
            self.precision_plugin.convert_module(module)
        if fits:
            if any(_is_a(callback, "BaseFinetuning") for callback in trainer.callbacks):
                self._offload_with_room(roots)
            self.setup_optimizers(trainer)
        for root in roots:
            self._run.ensure_offloaded(root)
        self._run.add_facts(folder=None)
        module.to(self.root_device)
        theirs: Any = super()
        theirs.setup_precision_plugin()

    def _offload_with_room(self, roots: list[nn.Module]) -> None:
        """Offload the models, with room for the states of all parameters that a callback may unfreeze during fit.

        For this, frozen parameters are treated as trained parameters, except those that a checkpoint has in 4 or 8
        bits.
        """
        for root in roots:
            frozen = [name for name, parameter in root.named_parameters() if not parameter.requires_grad]
            for parameter in root.parameters():
                parameter.requires_grad_(parameter.requires_grad or encoded_form(parameter) is None)
            try:
                self._run.ensure_offloaded(root)
            finally:
                for name, parameter in root.named_parameters():
                    whole, _ = tile_of(name) or (name, 0)
                    parameter.requires_grad_(parameter.requires_grad and whole not in frozen)
            registry.coordinator_of(root).keep_room()

    def setup_optimizers(self, trainer: Any) -> None:
        theirs: Any = super()
        with Patches() as patches:
            if self.launched is None:
                replace_optimizers(self._run, patches)
            theirs.setup_optimizers(trainer)
        if self.precision_plugin.precision != "16-mixed":
            for (
                optimizer
                # Lightning refuses to clip gradients for optimizers that can unscale, even if there is no scaler
            ) in theirs.optimizers:
                optimizer._step_supports_amp_scaling = False

    def _expect(self, trainer: Any) -> None:
        """Record the facts about the training that are known before the model is offloaded.

        If a module uses manual optimization, the number of backward passes before a step is unknown.
        """
        automatic = self.lightning_module.automatic_optimization
        self._run.add_facts(
            accumulation_steps=trainer.accumulate_grad_batches if automatic else None,
            dtype=_COMPUTED_IN[self.precision_plugin.precision],
            device=self.root_device,
        )
        if _fits(trainer):
            self._run.add_facts(pins=sum(map(_pins_of, trainer.checkpoint_callbacks)))

    def _enter(self) -> list[nn.Module]:
        """Return the parts of the LightningModule that are offloaded, each as one model."""
        if self._roots:
            return self._roots
        module, known = self.lightning_module, self._run.models_in(self.lightning_module)
        trained = [model for model in known if any(parameter.requires_grad for parameter in model.parameters())]
        if known and len(trained) <= 1 and all(_holds_all(module, known)):
            self._roots = known
            return known
        by_hand = not module.automatic_optimization
        parts = [child for child in module.children() if by_hand or hasattr(child, "save_pretrained")]
        root = next((child for child in parts if all(_holds_all(module, [child]))), module)
        if by_hand and root is module:
            raise ConfigError(
                f"{type(module).__name__} uses manual optimization, so its training_step contains forward and backward "
                "passes: put all layers into one module that training_step calls (self.net = Net(), whose forward is "
                "self.net(...)), or use automatic optimization"
            )
        for model in known:
            self._run.wrapped(model, root)
        if not known and not registry.is_offloaded(root):
            if next(root.parameters(), None) is None:
                raise ModelError(f"{type(module).__name__} has no parameters to offload")
            self._run.loaded(root)
        if not registry.is_offloaded(root):
            defer_in_memory(root)
        self._roots = [root]
        return self._roots

    @property
    def _trained(self) -> nn.Module | None:
        """The offloaded model that has optimizer states; None if there is no such model."""
        for root in self._roots:
            if registry.is_offloaded(root) and any(parameter.requires_grad for parameter in root.parameters()):
                return root
        return None

    def teardown(self) -> None:
        """Tear down the plugins. The model stays offloaded."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", *args, **kwargs)

    def _call(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step of the LightningModule.

        If the LightningModule itself is offloaded, its step is called as its forward, so that hooks fetch the weights.
        """
        module = self.lightning_module
        if module not in self._roots:
            return getattr(module, step)(*args, **kwargs)
        return self._forward_redirection(module, module, step, *args, **kwargs)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return all weights, if memory.host has room for them.

        Otherwise return only tensors that are not offloaded.
        """
        module = self.lightning_module
        if all(fits_memory(root) for root in self._roots):
            state: dict[str, Any] = module.state_dict()
            return state
        return self._outside(_tensors(module))

    def _outside(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state_dict that do not belong to an offloaded model."""
        modules = dict(self.lightning_module.named_modules())
        inside = tuple(f"{name}." if name else "" for name, module in modules.items() if module in self._enter())
        return {name: value for name, value in state.items() if not name.startswith(inside)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        theirs: Any = super()
        trained, states = self._trained, "optimizer_states" in checkpoint
        if not all(fits_memory(root) for root in self._roots):
            self._say_too_large(filepath, resumable=trained is not None and states and keeps_generations(trained))
        if trained is None or not states:
            theirs.save_checkpoint(checkpoint, filepath, storage_options)
            return
        with CheckpointFolderSave(trained, folder_beside(filepath)) as saving:
            theirs.save_checkpoint(checkpoint, filepath, storage_options)
            saving.finish()

    def _say_too_large(self, filepath: Any, *, resumable: bool) -> None:
        """Warn that a checkpoint file has no weights.

        If no generation with the weights is pinned, raise PlanError instead.
        """
        model = next(root for root in self._roots if not fits_memory(root))
        nbytes, limit = format_bytes(nbytes_of(model)), format_bytes(host_bytes_of(model))
        why = f"{nbytes} of weights do not fit memory.host, {limit}"
        if not resumable:
            raise PlanError(
                f"{filepath}: {why}, so the file cannot contain the weights. Use save_pretrained or "
                "infinity.save_pretrained, which keep one unit in memory at a time, or set commit_every: 1 and save "
                "the states, too."
            )
        logger.warning(
            "infinity: %s has no weights: %s. The weights are in the generation that %s pins",
            filepath,
            why,
            folder_beside(filepath),
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        theirs: Any = super()
        folder, trained = folder_beside(filepath), self._trained
        if not os.path.islink(filepath) and trained is not None and folder.is_dir():
            if keeps_generations(trained):
                unpin(trained, folder)
            shutil.rmtree(folder)
        theirs.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint file.

        If training is resumed, record that the model will be offloaded from the generation that the folder beside the
        file pins.

        Raises:
            ResumeError: the folder's generation does not exist; the message says what to do.
            ModelError: the model is offloaded already, and does not have the states of the folder's generation.
        """
        if _fits(self.lightning_module.trainer):
            folder = folder_beside(checkpoint_path)
            marker = generation_of(folder, self._run.config)
            if any(registry.is_offloaded(root) and not is_at(root, marker) for root in self._enter()):
                raise ModelError(
                    f"ckpt_path={checkpoint_path}: the model was used already in this process, so it is offloaded and "
                    "cannot get the states of a checkpoint. Resume in a new process, before any other use of the model."
                )
            self._run.add_facts(folder=folder)
            self._resumes_from = folder
        theirs: Any = super()
        loaded: dict[str, Any] = theirs.load_checkpoint(checkpoint_path, weights_only=weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state, module = checkpoint["state_dict"], self.lightning_module
        if self._resumes_from is not None:  # the generation has the weights
            module.load_state_dict(self._outside(state), strict=False)
            return
        if strict and not state.keys() >= _tensors(module).keys() and self._outside(state) == dict(state):
            raise ResumeError(
                "this checkpoint has no weights, because they did not fit in memory.host when it was written. Resume "
                "from it with fit(ckpt_path=...), or load a model that save_pretrained wrote."
            )
        module.load_state_dict(state, strict=strict)


def replace_strategies(run: ScriptRun, patches: Patches) -> None:
    """Make Lightning's Trainers use infinity's strategy if the script names no strategy.

    Other strategies are refused.
    """
    patches.put(OffloadingStrategyMixin, "launched", run)

    def of_lightning(connector: ModuleType) -> None:
        from infinity.integrations import lightning  # the import registers the strategy

        _choose(lightning.InfinityStrategy, connector, patches)

    def of_pytorch_lightning(connector: ModuleType) -> None:
        from infinity.integrations import pytorch_lightning

        _choose(pytorch_lightning.InfinityStrategy, connector, patches)

    module = "trainer.connectors.accelerator_connector"
    patches.when_imported(f"lightning.pytorch.{module}", of_lightning)
    patches.when_imported(f"pytorch_lightning.{module}", of_pytorch_lightning)


def replace_fabric(run: ScriptRun, patches: Patches) -> None:
    """Make each Fabric tell infinity in which dtype its models compute."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run.add_facts(dtype=_COMPUTED_IN.get(self._precision.precision))

    for module in ("lightning.fabric.fabric", "lightning_fabric.fabric"):
        patches.when_imported(module, lambda fabric: patches.wrap(fabric.Fabric, "__init__", init))


def _choose(kind: type[OffloadingStrategyMixin], connector: ModuleType, patches: Patches) -> None:
    def choose(original: Any, self: Any) -> Any:
        return kind()

    def init(original: Any, self: Any) -> None:
        original(self)
        if not isinstance(self.strategy, kind):
            raise ConfigError(
                "under `infinity run` a Lightning Trainer needs strategy='infinity', not "
                f"{type(self.strategy).__name__}: leave strategy= out, and set devices=1"
            )

    patches.wrap(connector._AcceleratorConnector, "_choose_strategy", choose)
    patches.wrap(connector._AcceleratorConnector, "_init_strategy", init)


def _require_possible(trainer: Any, precision: str) -> None:
    """Raise ConfigError if the Trainer has a callback or an option that needs all weights or gradients in memory."""
    for callback, (name, why) in product(trainer.callbacks, _REFUSED.items()):
        if _fits(trainer) and _is_a(callback, name):
            raise ConfigError(f"the weights of this model are offloaded, and {why}.")
    if precision not in _COMPUTED_IN:
        raise ConfigError(
            f"precision={precision!r} works on weights in memory, and the weights of this model are offloaded. Use one "
            f"of {', '.join(_COMPUTED_IN)}."
        )
    clips, how = bool(trainer.gradient_clip_val), str(getattr(trainer.gradient_clip_algorithm, "value", "norm"))
    if clips and how == "value":
        raise ConfigError(
            "gradient_clip_algorithm='value' needs every gradient in memory, but the gradients of an offloaded model "
            "are in the tier that the swap config names. Use gradient_clip_algorithm='norm', which clips by the exact "
            "global norm. Or leave both options out, and call from the module's configure_gradient_clipping "
            "torch.nn.utils.clip_grad_value_ in `with infinity.gathered(self.model, grads=True):`."
        )
    if clips and precision == "16-mixed":
        raise ConfigError(
            "gradient_clip_val with precision='16-mixed': Lightning clips after unscaling, which infinity does as a "
            "part of the update. Use precision='bf16-mixed', or infinity.AdamW(..., max_grad_norm=...)."
        )


def _fits(trainer: Any) -> bool:
    return str(getattr(trainer.state.fn, "value", trainer.state.fn)) == "fit"


def _is_a(callback: Any, name: str) -> bool:
    """Return whether a callback is an instance of the class `name` of lightning or pytorch_lightning."""
    return any(each.__name__ == name and "lightning" in each.__module__ for each in type(callback).__mro__)


def _pins_of(callback: Any) -> int:
    """Return the maximum number of files of a ModelCheckpoint that exist at the same time."""
    kept = int(getattr(callback, "save_top_k", 1))
    if getattr(callback, "save_weights_only", False):
        return 0
    pins = pins_for(None if kept < 0 else kept) if kept else 0
    last = getattr(callback, "save_last", None)  # if files are kept, a "link" points to one of them
    return pins + (last is True or (last == "link" and not kept))


def _holds_all(module: nn.Module, models: list[nn.Module]) -> list[bool]:
    """Return whether all parameters of a module belong to the models."""
    held = {id(parameter) for model in models for parameter in model.parameters()}
    return [id(parameter) in held for parameter in module.parameters()]


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state_dict, without extra state.

    Weights that are not in memory are placeholders.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
