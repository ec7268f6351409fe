"""`from_pretrained(path, quantization_config=infinity.InfinityConfig("swap.yaml"))`: transformers' own loading, with
infinity as a quantizer in transformers' sense.

[Note: loading through a quantizer]
transformers gives each parameter of the checkpoint to the quantizer, and assigns the quantizer's result to the model.
infinity's quantizer returns a parameter on the meta device, and records which file has the values of the parameter.
Tensors that transformers converts while it loads them (such as fused experts) are written to a scratch directory on the
swap disk. After loading, the quantizer is removed from the model and the model's config. The parameters are then
deferred parameters (runtime/deferred_parameters.py), as under `infinity run`. The model is offloaded when its optimizer
is made, or when it is first used.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import OffloadedWeightsLoader
from safetensors.torch import save_file
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from infinity.base.fork import in_this_process
from infinity.checkpoint.load_pretrained import CheckpointTensors, scratch_directory
from infinity.checkpoint.safetensors_reader import names_in
from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError, NotAvailableError, ResumeError
from infinity.integrations.checkpoint_folders import is_at
from infinity.integrations.script_run import ScriptRun
from infinity.io.generation_pins import folder_path, require_marker
from infinity.runtime.deferred_parameters import defer, is_deferred
from infinity.runtime.offload import move_buffers

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter
except ImportError:  # this is transformers 4, which InfinityConfig refuses
    ConversionOps, WeightConverter = object, None

logger = logging.getLogger(__name__)

_NAME = "infinity"
_runs: dict[str, ScriptRun] = {}
"""The run of each swap config.

The key is the swap config as JSON. Models with the same swap config share one run, and so share the memory that the
swap config names.
"""


@register_quantization_config(_NAME)
class InfinityConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A swap config for a model, as an argument `from_pretrained(quantization_config=...)`.

    Args:
        swap: the swap config, as for infinity.offload.
        resume: a checkpoint folder that infinity.hf.Checkpoints wrote. The trained model continues from the generation
            that this folder pins. `trainer.train(resume_from_checkpoint=...)` must name the same folder.

    Raises:
        ConfigError: the swap config cannot be used, or transformers is older than 5.
        NotAvailableError: the swap config has `vertical: true`.
        ResumeError: the folder pins no generation.
    """

    def __init__(
        self,
        swap: str | Path | Mapping[str, Any] | SwapConfig | None = None,
        *,
        resume: str | Path | None = None,
    ) -> None:
        if WeightConverter is None:
            raise ConfigError(
                f"InfinityConfig needs transformers 5, and {transformers.__version__} is installed: pip install "
                "--upgrade 'transformers>=5'"
            )
        self.quant_method = _NAME
        self.swap = load_config(swap)
        if self.swap.vertical:
            raise NotAvailableError(
                "InfinityConfig: vertical is for `infinity run` and for infinity.integrations.transformers.Trainer: "
                "another Trainer computes one micro-batch after the other. Leave vertical out of the swap config."
            )
        self.resume = None if resume is None else folder_path(Path(resume))
        if self.resume is not None:
            try:
                require_marker(self.resume)
            except ResumeError as error:
                raise ResumeError(f"{error} A Trainer pins with callbacks=[infinity.hf.Checkpoints()].") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON values."""
        resume = None if self.resume is None else str(self.resume)
        return {"quant_method": _NAME, "swap": self.swap.model_dump(mode="json"), "resume": resume}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the InfinityConfig of a dict that to_dict returned."""
        given = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(given, return_unused_kwargs, **kwargs)

    @property
    def run(self) -> ScriptRun:
        """The run that all models with this swap config share.

        Some of these models may be resumed from checkpoint folders.
        """
        key = self.swap.model_dump_json()
        if key not in _runs:
            _runs[key] = ScriptRun(self.swap, lambda folder: f"`InfinityConfig(..., resume={folder!r})`")
        return _runs[key]

    def close(self) -> None:
        """Close all models with this swap config, after the training.

        The stores of these models are removed, except stores that checkpoint folders need. If this method is not
        called, the stores remain after the end of the process.
        """
        run = _runs.pop(self.swap.model_dump_json(), None)
        if run is not None:
            run.close(failed=False)


def run_of(parameters: list[Any]) -> ScriptRun | None:
    """Return the run of a loaded model that has some of these parameters."""
    return next((run for run in _runs.values() if run.owner_of(parameters) is not None), None)


@register_quantizer(_NAME)
class InfinityQuantizer(HfQuantizer):  # type: ignore[misc]
    """A quantizer of transformers that leaves the weights in their files while transformers loads a model."""

    def __init__(self, quantization_config: InfinityConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._run, self._resume = quantization_config.run, quantization_config.resume
        self._keep: _KeepInFiles | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise NotAvailableError(
                "InfinityConfig: several ranks are not available yet, because libraries wrap the model for each rank. "
                "Remove the quantization_config and the Trainer's arguments from infinity.hf, and start the script "
                "with `torchrun --nproc-per-node N -m infinity.run swap.yaml SCRIPT`."
            )

    def update_device_map(self, device_map: Any) -> None:
        """Return no device_map, because the swap config says where weights are kept."""

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        converted = (each for each in weight_conversions if isinstance(each, WeightConverter))
        self._kept.converted = {pattern for each in converted for pattern in each.source_patterns}
        return weight_conversions

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        if self._keep is None:  # transformers may load adapters into the model after the model itself
            return False
        module, _, name = param_name.rpartition(".")
        return name in model.get_submodule(module)._parameters and param_name not in self._kept.misfits

    def get_quantize_ops(self) -> ConversionOps:
        return self._kept

    @property
    def _kept(self) -> _KeepInFiles:
        assert self._keep is not None, "transformers has not made the model"
        return self._keep

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = checkpoint_files or []
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise NotAvailableError(
                f"InfinityConfig: {Path(files[0]).name if files else 'a state_dict'}: weights stay in their files "
                "until they are offloaded, which works with safetensors files only. Load the model without "
                "quantization_config, and save it with save_pretrained once."
            )
        self._keep = _KeepInFiles(files, self._run.config)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.remove_quantization_config(model)
        for module in model.modules():
            vars(module).pop("is_quantized", None)
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        self._kept.require_fitting(model)
        source = self._kept.source(model)
        self._keep = None
        defer(model, source, self._run.device)
        move_buffers(model, self._run.device)
        self._run.loaded(model)
        if self._resume is not None:
            self._run.remember_folder(model, self._resume)
            _take_weights_from(self._run, self._resume, model)

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


def _take_weights_from(run: ScriptRun, folder: Path, model: Any) -> None:
    """Make load_state_dict of a resumed model do nothing.

    A Trainer would load the folder's weights into the model, but the model already has the same weights from the
    folder's generation, with their more precise masters.
    """

    # the marker is read now, because a Trainer removes the folder when newer folders exist
    marker = require_marker(folder)

    def resumes(model: nn.Module) -> bool:
        """Return whether the model has, or will have when it is offloaded, the states of the folder's generation."""
        if is_deferred(model):
            return run.began_from(model) is not None
        whole = run.outermost(model)
        return registry.is_offloaded(whole) and is_at(whole, marker)

    def load_nothing(model: nn.Module, state_dict: dict[str, Any], *others: Any) -> None:
        if resumes(model):
            logger.warning("infinity: load_state_dict changes nothing: the weights are those of %s", folder)
            state_dict.clear()

    def miss_nothing(model: nn.Module, keys: Any) -> None:
        if resumes(model):
            keys.missing_keys.clear()

    model.register_load_state_dict_pre_hook(load_nothing)
    model.register_load_state_dict_post_hook(miss_nothing)


class _KeepInFiles(ConversionOps):  # type: ignore[misc]
    """A conversion that replaces each parameter of a checkpoint by a parameter on the meta device.

    If no file has a tensor in the form that the model needs, the tensor is written to a scratch directory. The scratch
    directory is removed when the object that reads the tensors is garbage-collected.

    Args:
        files: the checkpoint's files.
        config: the swap config.

    Attributes:
        converted: name patterns of the tensors that transformers converts.
        misfits: parameters for which model and checkpoint have different shapes, each with its shape in the model.
            transformers initializes such a parameter or raises an error.
    """

    def __init__(self, files: list[str], config: SwapConfig) -> None:
        self._files = {name: file for file in files for name in names_in(file)}
        held = ExitStack()
        self._scratch = Path(held.enter_context(scratch_directory(config)))
        self._remove = in_this_process(held.close)
        self._unread = weakref.finalize(self, self._remove)  # this removes the directory if loading fails
        self._index: dict[str, dict[str, str]] = {}
        self.converted: set[str] = set()
        self.misfits: dict[str, torch.Size] = {}

    def convert(
        self, input_dict: dict[str, Any], *, source_patterns: list[str], model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Replace the tensors of one conversion. The keys of `input_dict` are the names of the parameters."""
        kept = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        for name, tensor in kept.items():
            wanted = model.get_parameter(name).shape
            if tensor.shape != wanted:
                self.misfits[name] = wanted
                continue
            file, named = self._files.get(source_patterns[0]), source_patterns[0]
            if file is None or not self.converted.isdisjoint(source_patterns):
                file, named = str(self._scratch / f"{name}.safetensors"), name
                save_file({name: tensor.contiguous()}, file)
            self._index[name] = {"safetensors_file": file, "weight_name": named, "dtype": str(tensor.dtype)[6:]}
            kept[name] = nn.Parameter(tensor.to("meta"), requires_grad=tensor.is_floating_point())
        return kept

    def require_fitting(self, model: nn.Module) -> None:
        """Raise ModelError if a tensor in the checkpoint does not have the shape of its parameter. Older versions of
        transformers do not check the shapes.
        """
        for name, wanted in self.misfits.items():
            found = model.get_parameter(name).shape
            if found != wanted:
                raise ModelError(
                    f"InfinityConfig: '{name}' is {tuple(found)} in the checkpoint and {tuple(wanted)} in the model, "
                    f"which transformers {transformers.__version__} does not check under a quantization_config. "
                    "Install transformers 5.23 or later."
                )

    def source(self, model: Any) -> CheckpointTensors:
        """Return the reader of the model's parameters. All parameters must be recorded already."""
        with suppress(OSError):  # if there are converted tensors, an error must not remove their directory
            self._scratch.rmdir()  # the directory is removed from the disk now, because a killed process would leave it
        loader = OffloadedWeightsLoader(index=self._index, save_folder=str(self._scratch))
        source = CheckpointTensors(model, loader, str(model.config.name_or_path))
        weakref.finalize(source, self._remove)  # a copy or a part of the model may live longer than the model
        self._unread.detach()
        return source
