"""load_pretrained: stream a Hugging Face checkpoint to the store, tensor by tensor."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.base.accelerator import resolve
from infinity.base.fork import in_this_process
from infinity.checkpoint.bitsandbytes_files import BitsandbytesWeights
from infinity.checkpoint.from_portable import offload_from_copy
from infinity.checkpoint.merged_experts import JoinedRows, files_of, joining_later
from infinity.checkpoint.missing_tensors import Kept, keeping, of_another_size, put_back, reporting_later
from infinity.checkpoint.portable import PortableCopy
from infinity.checkpoint.quantization_config import forget_renaming, unquantized
from infinity.checkpoint.quantized_files import EncodedValues, QuantizationMethod, floating, require_unmerged
from infinity.checkpoint.reshard import resume_on
from infinity.checkpoint.safetensors_reader import is_readable, rows_in
from infinity.config import SwapConfig, load_config
from infinity.durable import rng
from infinity.durable.model_description import names_of
from infinity.errors import ConfigError, ModelError
from infinity.files import nearest
from infinity.io.directory import generations_in
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.runtime.deferred_parameters import defer as defer_values
from infinity.runtime.offload import move_buffers, offload_on
from infinity.runtime.pins import generation_of
from infinity.runtime.reoffload import remember_readers
from infinity.runtime.tiles import readers
from infinity.sharded.rank_agreement import meeting
from infinity.sharded.rank_stores import counts_in, steps_of
from infinity.state.frozen_codecs import remember
from infinity.state.moments import OptimizerName
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.training_step import StepFacts
from infinity.state.values import Source

logger = logging.getLogger(__name__)

_ALL_ON_DISK = {"": "disk", "no parameter": "cpu"}
"""A device_map for transformers that leaves all parameters on disk. The second entry matches no parameter: accelerate
before 1.15 refuses a device_map that names only the disk.
"""


def load_pretrained(
    path: str | Path,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    model_class: Any = None,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    tokens: int | StepFacts | None = None,
    resume: bool | str | Path = False,
    from_checkpoint: bool = False,
    defer: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model that may be larger than memory and offload it.

    Each tensor goes from its safetensors file directly to its home. If the file is more precise than `dtype` (fp32
    weights loaded as bf16), the master keeps the full precision, so nothing is lost.

    Args:
        path: a directory, or a hub id.
        config: as for infinity.offload.
        dtype: dtype of the weights.
        model_class: a class with `from_pretrained`; default AutoModelForCausalLM. If the checkpoint is of another class
            and lacks parameters, such as those of a new head, transformers initializes these parameters.
        device: as for infinity.offload.
        optimizer: as for infinity.offload.
        accumulation_steps: as for infinity.offload.
        tokens: as for infinity.offload.
        resume: True: continue the run whose generations are in the swap directory. The model is built from `path`;
            weights and states are the run's (infinity.resume). "auto": like True if the swap directory has generations;
            otherwise start from the weights of `path`. Path of a checkpoint folder: continue from the generation that
            the folder pins, or from the folder's portable copy.
        from_checkpoint: `path` is the directory of `infinity checkpoint export`: continue that run, unless `resume`
            finds a later generation.
        defer: whether to return the model before it is offloaded. The caller can then attach adapters, freeze
            parameters or resize the embeddings, and must call infinity.offload(model, config) or infinity.resume.
            Before this call, weights are read from the files when they are needed (runtime/deferred_parameters.py).
        kwargs: passed to `from_pretrained`.

    Returns:
        The offloaded model, in training mode.

    Raises:
        ModelError: there is no such model, its class is another one, or its files are damaged or incomplete.
        others: as for infinity.offload, infinity.resume and infinity.offload_from_checkpoint.
    """
    resolved = load_config(config)
    place = _ModelSources.of(path, resolved, resume, from_checkpoint=from_checkpoint)
    if defer:
        if place.is_copy:
            PortableCopy.verified(place.path)
        model_class = _class_for(place.path, model_class, kwargs)
        return _deferred(model_class, place.path, dtype, resolved, device, kwargs)
    with ExitStack() as held:
        with meeting(resolved.ranks_deadline_s) as tell:
            copy = PortableCopy.verified(place.path) if place.is_copy else None
            model_class = _class_for(place.path, model_class, kwargs)
            scratch = held.enter_context(scratch_directory(resolved))
            model, source, _ = on_meta(model_class, place.path, dtype, scratch, kwargs)
            tell("loading the model", None)
        terms = OffloadArguments.of(resolved, device, optimizer, accumulation_steps, tokens=tokens)
        if place.resumes:
            resume_on(model, terms, folder=place.folder)
        elif copy is not None:
            offload_from_copy(model, copy, terms, files=source)
        else:
            _offload(model, source, terms)
    model.train()
    return model


def _offload(model: Any, source: Source, terms: OffloadArguments) -> None:
    """Offload a model that on_meta returned."""
    if all(parameter.is_meta for parameter in model.parameters()):
        offload_on(model, terms, source)
        remember_readers(model, readers(model, source))
    else:  # if some values are in memory, all ranks use the values of rank 0
        defer_values(model, source, terms.device)
        offload_on(model, terms)


@dataclass(frozen=True)
class _ModelSources:
    """The sources of a model and its states.

    Attributes:
        path: directory or hub id of the model.
        resumes: whether the states are those of a run in the swap directory.
        folder: the checkpoint folder that pins the states; None: no folder was named.
        is_copy: whether `path` is a portable copy whose states are used.
    """

    path: str
    resumes: bool
    folder: str | Path | None
    is_copy: bool

    @classmethod
    def of(
        cls, path: str | Path, config: SwapConfig, resume: bool | str | Path, *, from_checkpoint: bool
    ) -> _ModelSources:
        """Return the sources for the arguments of load_pretrained.

        The errors are the same as for load_pretrained. All ranks call this.
        """
        if resume == "auto":
            resume = bool(config.nvme.paths) and _has_generations(config)
        if isinstance(resume, bool):
            return cls(str(path), resume, None, from_checkpoint and not resume)
        copied = generation_of(resume, config).portable
        if copied is None:
            return cls(str(path), True, resume, False)
        return cls(str(Path(resume).expanduser() / copied), False, resume, True)


def _has_generations(config: SwapConfig) -> bool:
    """Return whether there are generations to resume.

    A run can be resumed if all ranks have a generation of the same step, or if a run with another number of ranks left
    generations. All ranks call this. Raises PeerError.
    """
    path, (rank, world) = config.nvme.paths[0].expanduser(), rank_and_world()
    with meeting(config.ranks_deadline_s) as tell:
        mine = sorted(generations_in(rank_path(path, rank, world)))
        others = any(steps_of(path, count) for count in counts_in(path) if count != world)
        told = tell("looking for generations to resume from", [mine, others])
    return any(others for _, others in told) or bool(set.intersection(*(set(steps) for steps, _ in told)))


def _class_for(path: str, model_class: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return `model_class`; if it is None, AutoModelForCausalLM for a causal language model. Raises ModelError."""
    require_directory_or_id(path)
    if model_class is not None:
        return model_class
    from transformers import AutoModelForCausalLM

    _require_causal(path, kwargs)
    return AutoModelForCausalLM


def _deferred(
    model_class: Any,
    path: str,
    dtype: torch.dtype,
    config: SwapConfig,
    device: torch.device | str | None,
    kwargs: Mapping[str, Any],
) -> Any:
    """Return a model whose weights stay in their files.

    The scratch directory exists as long as the object that reads the files, because a copy or a part of the model may
    outlive the model.
    """
    scratch = ExitStack()
    directory = scratch.enter_context(scratch_directory(config))
    model, source, _ = on_meta(model_class, path, dtype, directory, kwargs)
    weakref.finalize(source, in_this_process(scratch.close))
    target = resolve(device)
    defer_values(model, source, target)
    move_buffers(model, target)
    model.train()
    return model


def require_directory_or_id(path: str) -> bool:
    """Return whether the model is in a directory; otherwise `path` may be a hub id.

    Raises:
        ModelError: there is no such directory, and `path` is not a valid hub id.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if Path(path).expanduser().is_dir():
        return True
    if Path(path).expanduser().exists():
        raise ModelError(f"'{path}' is a file: name the directory of the model, with its config.json and its weights")
    try:
        validate_repo_id(path)
    except HFValidationError:
        raise ModelError(
            f"there is no directory '{path}', and a model on the Hugging Face hub cannot have such a name"
        ) from None
    return False


def _cannot_load(path: str, error: Exception) -> ModelError:
    """Return the ModelError for an exception of the libraries that read models. These libraries raise exceptions of any
    type.
    """
    directory = Path(path).expanduser()
    where = "" if directory.is_dir() else "there is no such directory, and from the Hugging Face hub: "
    damaged = next((f"{file}: " for file in sorted(directory.glob("*.safetensors")) if not is_readable(file)), "")
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    said = kind + " ".join(str(error).split())
    return ModelError(f"cannot load a model from '{path}': {where}{damaged}{said}")


def load_config_of(path: str, **options: Any) -> Any:
    """Return the config of a model, as transformers reads it. Raises ModelError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, **options)
    except Exception as error:
        raise _cannot_load(path, error) from error


def _require_causal(path: str, kwargs: Mapping[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    options = {key: kwargs[key] for key in ("revision", "token", "trust_remote_code", "subfolder") if key in kwargs}
    config = load_config_of(path, **options)
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = [str(name) for name in config.architectures or []]
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or (architectures and not remote and not known.intersection(architectures)):
        raise ModelError(
            f"'{path}' is a {'/'.join(architectures) or config.model_type}, not a causal language model. Give a causal "
            "one (such as LlamaForCausalLM), or pass model_class= to infinity.load_pretrained and train it with your "
            "own loop."
        )


@contextlib.contextmanager
def scratch_directory(config: SwapConfig) -> Iterator[str]:
    """Yield a directory for the tensors that transformers converts on loading.

    The directory is on the swap disk, because that disk has room for the tensors.

    Raises:
        ConfigError: no directory can be created where nvme.paths are.
    """
    parent = nearest(config.nvme.paths[0]) if config.nvme.paths else None
    if parent is not None and not os.access(parent, os.W_OK):
        parent = None
    try:
        directory = tempfile.mkdtemp(prefix="infinity-load-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"nvme.paths: {config.nvme.paths[0] if config.nvme.paths else 'none'}: nothing can be written in {parent}: "
            f"{error.strerror}. Name a directory on a disk that you may write to."
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # created above


def on_meta(
    model_class: Any,
    path: str,
    dtype: torch.dtype | str,
    scratch: str,
    kwargs: Mapping[str, Any],
    *,
    as_plain: bool = False,
) -> tuple[Any, Source, dict[str, Any]]:
    """Return the model, the source of each parameter's values, and transformers' loading info.

    The model's buffers have their values. Parameters are on the meta device, except those that transformers initialized
    (checkpoint/missing_tensors.py). The loading info is empty unless `kwargs` ask for it.

    Args:
        model_class: a class with `from_pretrained`.
        path: a directory, or a hub id.
        dtype: dtype of the weights.
        scratch: an empty directory. It is removed if no file is written to it.
        kwargs: passed to `from_pretrained`.
        as_plain: whether transformers initializes parameters that the checkpoint lacks, even if the checkpoint's
            config.json names this model class. Without `as_plain`, such a checkpoint is incomplete.
    """
    from accelerate.hooks import remove_hook_from_submodules

    how, method = unquantized(model_class, path, kwargs)
    unread = () if method is None else tuple(method.renamed)
    attempt = partial(_attempt, model_class, path, {**how, "offload_folder": scratch, "dtype": dtype}, unread)
    before, found, other = rng.snapshot(), attempt(_ALL_ON_DISK), []
    if how.get("ignore_mismatched_sizes"):
        other = of_another_size(found.model, names_of(found.model).values(), found.loader.index)
    if other:
        rng.restore(before)
        found = attempt(_ALL_ON_DISK | dict.fromkeys(other, "cpu"))
    model, loader = found.model, found.loader
    model.tie_weights()
    there = found.joined.keys() | loader.index.keys()
    lacking = [same for same in names_of(model).values() if not any(name in there or name in loader for name in same)]
    allowed = as_plain or _is_of_another(model)
    missing = [same[0] for same in lacking if not ((allowed or same[0] in other) and put_back(model, same, found.kept))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"'{path}' has no tensor for parameter '{missing[0]}'{more}; is the checkpoint complete, and does the "
            "config.json belong to it?"
        )
    if method is not None:
        forget_renaming(model, method)
    remove_hook_from_submodules(model)  # accelerate's hook would look for missing parameters in the files
    for name in ("to", "cuda", "npu", "xpu", "hf_device_map"):
        model.__dict__.pop(name, None)  # attributes set by accelerate's dispatching
    model.tie_weights()
    if method is None:
        found.report()
    elif lacking:  # transformers would report the tensors of quantized weights: only infinity reads them
        logger.warning("'%s' has no tensors for %s: they are initialized", path, ", ".join(same[0] for same in lacking))
    with contextlib.suppress(OSError):  # an error: the directory has converted tensors
        os.rmdir(scratch)  # removed now, because a killed process would leave the directory
    return model, CheckpointTensors(model, loader, path, method, found.joined), found.info


@dataclass(frozen=True)
class _LoadAttempt:
    """The result of one call of transformers' from_pretrained.

    Attributes:
        info: transformers' loading info; empty if the caller did not ask for loading info.
        loader: accelerate's index of the tensors' places.
        kept: the parameters in memory.
        joined: the parameters that are joined from several tensors.
        report: function that logs which tensors were missing or unexpected.
    """

    model: Any
    info: dict[str, Any]
    loader: Any
    kept: Kept
    joined: Mapping[str, JoinedRows]
    report: Callable[[], None]


def _attempt(
    model_class: Any, path: str, how: Mapping[str, Any], unread: Collection[str], places: Mapping[str, str]
) -> _LoadAttempt:
    """Load the model with `places` as transformers' device_map. Tensors whose names match one of the patterns in
    `unread` are not read. Raises ModelError."""
    try:
        with _quiet(), reporting_later() as report, keeping() as kept, joining_later(unread) as joined:
            loaded = model_class.from_pretrained(path, device_map=places, **how)
    except Exception as error:
        raise _cannot_load(path, error) from error
    model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
    return _LoadAttempt(model, info, _weights_loader(model), kept, joined, report)


def _is_of_another(model: Any) -> bool:
    """Return whether the checkpoint's config.json names another class than the model's. Such a checkpoint has another
    head.
    """
    named = getattr(getattr(model, "config", None), "architectures", None) or []
    return len(named) > 0 and type(model).__name__ not in named


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence expected messages in the `with` block: accelerate's warnings of parameters on the meta device, which are
    intended, and of a device_map that names parameters. Without a terminal, progress bars are off, too.
    """
    from transformers.utils import logging as hf_logging

    noise = logging.getLogger("accelerate.big_modeling")
    level = noise.level
    bars = hf_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    noise.setLevel(logging.ERROR)
    if bars:
        hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
            yield
    finally:
        noise.setLevel(level)
        if bars:
            hf_logging.enable_progress_bar()


def _weights_loader(model: nn.Module) -> Any:
    """Return accelerate's index of the tensors' places, from the hook of any module."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            weights_map = getattr(part, "weights_map", None)
            if weights_map is not None:
                return getattr(weights_map, "dataset", weights_map)
    raise ModelError("transformers did not leave the weights on disk; is the checkpoint in safetensors format?")


class CheckpointTensors:
    """The tensors of a checkpoint. The encoded form of quantized tensors is remembered (state/frozen_codecs.py).

    Args:
        model: the model whose parameters are read.
        loader: accelerate's index of the tensors' places: safetensors files, and tensors that transformers converted.
        path: path of the checkpoint, for messages.
        method: the method of quantization in the config; None: the config has none, and tensors are recognized by
            their names.
        joined: the parameters that are joined from several tensors, by name.

    Raises:
        ModelError: a tensor is quantized in a way that cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        path: str,
        method: QuantizationMethod | None = None,
        joined: Mapping[str, JoinedRows] | None = None,
    ) -> None:
        self._joined = joined or {}
        self._joined_files = files_of(loader.index, [*self._joined.values()])
        self._aliases = {name: same for same in names_of(model).values() for name in same}
        self._loader = loader
        self._path = path
        self._facts = self._facts_now()
        self._encoded = self._find_encoded(model, method)

    def _find_encoded(self, model: nn.Module, method: QuantizationMethod | None) -> dict[str, EncodedValues]:
        """Return the values of each quantized parameter. The keys are all names of the parameters."""
        index: dict[str, dict[str, Any]] = self._loader.index
        files = {entry["safetensors_file"] for entry in index.values() if _is_in_file(entry)}
        files |= {*self._joined_files.values()}
        quantized = BitsandbytesWeights(files) if method is None else method.weights(files)
        found: dict[str, EncodedValues] = {}
        left = set(quantized.names)
        for name, parameter in model.named_parameters():
            for alias in self._aliases[name]:
                entry = index.get(alias)
                if alias in self._joined:
                    known = quantized.joined_form(self._joined[alias], parameter.shape)
                    weights = [each for part in self._joined[alias].names for each in part]
                elif entry is not None and _is_in_file(entry):
                    weights = [entry.get("weight_name", alias)]
                    known = quantized.encoded_form(weights[0], parameter.shape)
                else:
                    continue
                if known is not None:
                    left.difference_update(weights)
                    remember(parameter, known)
                    values = EncodedValues(known, parameter.shape, parameter.dtype)
                    found |= dict.fromkeys(self._aliases[name], values)
                    break
        if not any(self._is_converted(entry) for entry in index.values()):  # the model may not use some weights
            used = [each for name, each in self._joined.items() if name in self._aliases]
            left &= {name for each in used for part in each.names for name in part}
        require_unmerged(sorted(left), self._path)
        return found

    def _is_converted(self, entry: Mapping[str, Any]) -> bool:
        """Return whether transformers converted a tensor of the checkpoint and wrote the result to the scratch
        directory.
        """
        if not _is_in_file(entry):
            return True
        return Path(entry["safetensors_file"]).parent == Path(self._loader.save_folder or "")

    def __call__(self, name: str) -> torch.Tensor:
        return self.rows(name, 0, None)

    def rows(self, name: str, begin: int, end: int | None) -> torch.Tensor:
        """Return rows [begin, end) of a parameter; with end=None, all rows from `begin` on. Only these rows are read,
        unless the parameter is encoded."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if end is None and not begin else tensor[begin:end]

        if name in self._encoded:
            return self._encoded[name].rows(begin, end)
        for alias in [name, *self._aliases.get(name, [])]:
            entry = self._loader.index.get(alias)
            if alias in self._joined:
                tensor = self._joined[alias].read(self._joined_files, begin, end)
            elif entry is not None and entry.get("safetensors_file"):
                tensor = rows_in(entry["safetensors_file"], entry.get("weight_name", alias), begin, end)
            elif alias in self._loader:
                tensor = cut(self._loader[alias])
            else:
                continue
            return floating(tensor, name, self._path)
        raise ModelError(f"'{self._path}' has no tensor for parameter '{name}'; is the checkpoint complete?")

    def unchanged(self) -> bool:
        """Return whether all files still exist and are unchanged since this object was created.

        The checked files are the files of the checkpoint and the files of converted tensors. The directory of converted
        tensors may have been removed.
        """
        return self._facts is not None and self._facts == self._facts_now()

    def _facts_now(self) -> dict[Path, tuple[int, ...]] | None:
        converted = Path(self._loader.save_folder or "")
        index: dict[str, dict[str, Any]] = self._loader.index
        files = {Path(of.get("safetensors_file") or converted / f"{name}.dat") for name, of in index.items()}
        files.update(map(Path, self._joined_files.values()))
        try:
            found = {file: file.stat() for file in files}
        except OSError:
            return None
        return {file: (of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns) for file, of in found.items()}


def _is_in_file(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("safetensors_file"))
