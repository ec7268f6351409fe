"""load_pretrained: a Hugging Face checkpoint, streamed to the store tensor by tensor."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.base.accelerator import resolve
from infinity.base.fork import in_this_process
from infinity.checkpoint.carry_on import carry_on
from infinity.checkpoint.initialized import Kept, keeping, of_another_size, put_back, reporting_later
from infinity.checkpoint.other_ranks import resume_on
from infinity.checkpoint.portable import Portable
from infinity.checkpoint.quantized import (
    QuantizedFiles,
    decoding,
    floating,
    require_unmerged,
    unquantized,
)
from infinity.checkpoint.tensor_files import is_readable, tensor_of
from infinity.config import SwapConfig, load_config
from infinity.durable import rng
from infinity.durable.description import names_of
from infinity.errors import ConfigError, ModelError
from infinity.files import nearest
from infinity.io.directory import generations_in
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.runtime.anew import remember_readers
from infinity.runtime.deferred import defer as defer_values
from infinity.runtime.offload import move_buffers, offload_on
from infinity.runtime.pins import generation_of
from infinity.runtime.tiles import readers
from infinity.sharded.stores import counts_in, steps_of
from infinity.sharded.together import meeting
from infinity.state.frozen import remember
from infinity.state.moments import OptimizerName
from infinity.state.terms import Terms
from infinity.state.values import Source

logger = logging.getLogger(__name__)

_ALL_ON_DISK = {"": "disk", "no parameter": "cpu"}
"""A device_map of transformers. accelerate before 1.15 refuses one in which nothing but the disk is named."""


def load_pretrained(
    path: str | Path,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    model_class: Any = None,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    resume: bool | str | Path = False,
    from_checkpoint: bool = False,
    defer: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model that may be larger than memory and offload it.

    The model is built on the meta device; each tensor goes from its safetensors file straight to its home. Where the
    file is finer than `dtype` (fp32 weights loaded as bf16) the rest is kept in the master, so nothing is lost.

    Args:
        path: a directory, or a hub id.
        config: as infinity.offload.
        dtype: of the weights.
        model_class: a class with `from_pretrained`; default AutoModelForCausalLM. Parameters that the checkpoint lacks
            because it is of another class, as a new head, have the values that transformers initializes them to.
        device, optimizer, accumulation_steps: as infinity.offload.
        resume: go on with the run whose generations are in the swap directory: the model is built from `path`, its
            weights and states are the run's (infinity.resume). "auto": if there are any, else begin anew. A checkpoint
            folder that pins a generation, or holds a portable copy: go on from that.
        from_checkpoint: `path` is what `infinity checkpoint export` wrote: go on with that run
            (infinity.offload_from_checkpoint), unless `resume` finds a later one.
        defer: do not offload the model yet. Attach adapters, freeze parameters, resize the embeddings; then call
            infinity.offload(model, config), or infinity.resume. Until then weights are read from the files where they
            are needed (runtime/deferred.py).
        kwargs: passed to `from_pretrained`.

    Returns:
        The offloaded model, in training mode.

    Raises:
        ModelError: there is no such model, it is not a causal language model (with the default class), or its files
        are damaged, incomplete, or not those of its config.
        others: as infinity.offload, infinity.resume and infinity.offload_from_checkpoint.
    """
    resolved = load_config(config)
    place = _Place.of(path, resolved, resume, from_checkpoint=from_checkpoint)
    if defer:
        if place.is_copy:
            Portable.verified(place.path)
        model_class = _class_for(place.path, model_class, kwargs)
        return _deferred(model_class, place.path, dtype, resolved, device, kwargs)
    with ExitStack() as held:
        with meeting(resolved.nvme.deadline_s) as tell:
            copy = Portable.verified(place.path) if place.is_copy else None
            model_class = _class_for(place.path, model_class, kwargs)
            scratch = held.enter_context(scratch_directory(resolved))
            model, source, _ = on_meta(model_class, place.path, dtype, scratch, kwargs)
            tell("loading the model", None)
        terms = Terms.of(resolved, device, optimizer, accumulation_steps)
        if place.resumes:
            resume_on(model, terms, folder=place.folder)
        elif copy is not None:
            carry_on(model, copy, terms, files=source)
        else:
            _offload(model, source, terms)
    model.train()
    return model


def _offload(model: Any, source: Source, terms: Terms) -> None:
    """Offload what on_meta gave."""
    if all(parameter.is_meta for parameter in model.parameters()):
        offload_on(model, terms, source)
        remember_readers(model, readers(model, source))
    else:  # of what is in memory, ranks take the values of rank 0
        defer_values(model, source, terms.device)
        offload_on(model, terms)


@dataclass(frozen=True)
class _Place:
    """Where a model and its states come from.

    Attributes:
        path: of the model.
        resumes: the states are those of a run in the swap directory.
        folder: the checkpoint folder that pins them, where one was named.
        is_copy: `path` is a portable copy, whose states are taken.
    """

    path: str
    resumes: bool
    folder: str | Path | None
    is_copy: bool

    @classmethod
    def of(cls, path: str | Path, config: SwapConfig, resume: bool | str | Path, *, from_checkpoint: bool) -> _Place:
        """All ranks call. Arguments and errors as of load_pretrained."""
        if resume == "auto":
            resume = bool(config.nvme.paths) and _has_generations(config)
        if isinstance(resume, bool):
            return cls(str(path), resume, None, from_checkpoint and not resume)
        copied = generation_of(resume, config).portable
        if copied is None:
            return cls(str(path), True, resume, False)
        return cls(str(Path(resume).expanduser() / copied), False, resume, True)


def _has_generations(config: SwapConfig) -> bool:
    """Whether all ranks have one of the same step, or those of another run had. All ranks call. Raises PeerError."""
    path, (rank, world) = config.nvme.paths[0].expanduser(), rank_and_world()
    with meeting(config.nvme.deadline_s) as tell:
        mine = sorted(generations_in(rank_path(path, rank, world)))
        others = any(steps_of(path, count) for count in counts_in(path) if count != world)
        told = tell("looking for generations to go on from", [mine, others])
    return any(others for _, others in told) or bool(set.intersection(*(set(steps) for steps, _ in told)))


def _class_for(path: str, model_class: Any, kwargs: Mapping[str, Any]) -> Any:
    """`model_class`, or AutoModelForCausalLM for a causal language model. Raises ModelError."""
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
    """A model whose weights stay in their files. Its scratch directory goes with what reads them: a copy of the model,
    or a part, may outlive it."""
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
    """Whether a model is in a directory; otherwise it may be one of the hub's.

    Raises:
        ModelError: there is no such directory, and the hub has no such names.
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
        raise ModelError(f"there is no directory '{path}', and the Hugging Face hub has no such names") from None
    return False


def _cannot_load(path: str, error: Exception) -> ModelError:
    """The ModelError for an exception of the libraries that read models, which raise exceptions of every kind."""
    directory = Path(path).expanduser()
    where = "" if directory.is_dir() else "there is no such directory, and from the Hugging Face hub: "
    damaged = next((f"{file}: " for file in sorted(directory.glob("*.safetensors")) if not is_readable(file)), "")
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    said = kind + " ".join(str(error).split())
    return ModelError(f"cannot load a model from '{path}': {where}{damaged}{said}")


def load_config_of(path: str, **options: Any) -> Any:
    """The config of a model, as transformers makes it. Raises ModelError."""
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
            f"'{path}' is a {'/'.join(architectures) or config.model_type}, not a causal language model. Give a "
            f"causal one (such as "
            "LlamaForCausalLM), or pass model_class= to infinity.load_pretrained and train it with your own loop."
        )


@contextlib.contextmanager
def scratch_directory(config: SwapConfig) -> Iterator[str]:
    """A directory for the tensors that transformers converts on loading. It is on the swap disk, which has room for
    them.

    Raises:
        ConfigError: nothing can be written where nvme.paths would be.
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
        shutil.rmtree(directory, ignore_errors=True)  # ours, made above


def on_meta(
    model_class: Any,
    path: str,
    dtype: torch.dtype | str,
    scratch: str,
    kwargs: Mapping[str, Any],
    *,
    as_plain: bool = False,
) -> tuple[Any, Source, dict[str, Any]]:
    """The model with real buffers, the place of each parameter's values, and transformers' loading info, which is empty
    unless `kwargs` ask for it. Parameters are on the meta device, but for those that transformers initialized
    (checkpoint/initialized.py).

    Args:
        scratch: an empty directory; removed if it stays empty.
        as_plain: let transformers initialize what the checkpoint lacks, also where its config.json says that it is of
            this very model, and so incomplete.
    """
    from accelerate.hooks import remove_hook_from_submodules

    how = unquantized(model_class, path, kwargs)
    attempt = partial(_attempt, model_class, path, {**how, "offload_folder": scratch, "dtype": dtype})
    before, found, other = rng.snapshot(), attempt(_ALL_ON_DISK), []
    if how.get("ignore_mismatched_sizes"):
        other = of_another_size(found.model, names_of(found.model).values(), found.loader.index)
    if other:
        rng.restore(before)
        found = attempt(_ALL_ON_DISK | dict.fromkeys(other, "cpu"))
    model, loader = found.model, found.loader
    model.tie_weights()
    lacking = [
        same for same in names_of(model).values() if not any(name in loader.index or name in loader for name in same)
    ]
    allowed = as_plain or _is_of_another(model)
    missing = [same[0] for same in lacking if not ((allowed or same[0] in other) and put_back(model, same, found.kept))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"'{path}' has no tensor for parameter '{missing[0]}'{more}; is the checkpoint complete, and is the "
            "config.json its own?"
        )
    remove_hook_from_submodules(model)  # which looks for what is missing in the files
    for name in ("to", "cuda", "npu", "xpu", "hf_device_map"):
        model.__dict__.pop(name, None)  # attributes that accelerate's dispatching set
    model.tie_weights()
    if how is kwargs:
        found.report()
    elif lacking:  # the report has all tensors beside the quantized ones, which nobody but us reads
        logger.warning("'%s' has no tensors for %s: they are initialized", path, ", ".join(same[0] for same in lacking))
    with contextlib.suppress(OSError):  # not empty: tensors were converted
        os.rmdir(scratch)  # now, as a process that is killed leaves it
    return model, Files(model, loader, path), found.info


@dataclass(frozen=True)
class _Attempt:
    """What transformers loaded.

    Attributes:
        info: its loading info, if that was asked for.
        loader: accelerate's index of the tensors' places.
        kept: the parameters in memory.
        report: logs which tensors were missing or left over.
    """

    model: Any
    info: dict[str, Any]
    loader: Any
    kept: Kept
    report: Callable[[], None]


def _attempt(model_class: Any, path: str, how: Mapping[str, Any], places: Mapping[str, str]) -> _Attempt:
    """Args: places: transformers' device_map."""
    try:
        with _quiet(), reporting_later() as report, keeping() as kept:
            loaded = model_class.from_pretrained(path, device_map=places, **how)
    except Exception as error:
        raise _cannot_load(path, error) from error
    model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
    return _Attempt(model, info, _weights_loader(model), kept, report)


def _is_of_another(model: Any) -> bool:
    """Whether the config.json of the checkpoint names another model than this one: it has another head."""
    named = getattr(getattr(model, "config", None), "architectures", None) or []
    return len(named) > 0 and type(model).__name__ not in named


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In the block accelerate does not warn of parameters on the meta device, which are meant to be there, nor of a
    device_map that names parameters; and without a terminal there are no progress bars."""
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
    """accelerate's index of the tensors' places, taken from any module's hook."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            weights_map = getattr(part, "weights_map", None)
            if weights_map is not None:
                return getattr(weights_map, "dataset", weights_map)
    raise ModelError("transformers did not leave the weights on disk; is the checkpoint in safetensors format?")


class Files:
    """The tensors of a checkpoint. Of quantized ones the encoded form is remembered (state/frozen.py).

    Args:
        loader: accelerate's index of their places: safetensors files, and what transformers converted.

    Raises:
        ModelError: a tensor is quantized in a way that cannot be read.
    """

    def __init__(self, model: nn.Module, loader: Any, path: str) -> None:
        self._aliases = {name: same for same in names_of(model).values() for name in same}
        self._loader = loader
        self._path = path
        self._facts = self._facts_now()
        self._encoded = self._find_encoded(model)

    def _find_encoded(self, model: nn.Module) -> dict[str, Callable[[], torch.Tensor]]:
        """What reads the values of the quantized parameters, by each of their names."""
        index: dict[str, dict[str, Any]] = self._loader.index
        quantized = QuantizedFiles({entry["safetensors_file"] for entry in index.values() if _is_in_file(entry)})
        found: dict[str, Callable[[], torch.Tensor]] = {}
        left = set(quantized.weights)
        for name, parameter in model.named_parameters():
            for alias in self._aliases[name]:
                entry = index.get(alias)
                if entry is None or not _is_in_file(entry):
                    continue
                weight = entry.get("weight_name", alias)
                if (known := quantized.given(weight, parameter.shape)) is not None:
                    left.discard(weight)
                    remember(parameter, *known)
                    found |= dict.fromkeys(self._aliases[name], decoding(known, parameter.shape, parameter.dtype))
                    break
        require_unmerged(sorted(left), any(self._is_converted(entry) for entry in index.values()), self._path)
        return found

    def _is_converted(self, entry: Mapping[str, Any]) -> bool:
        """Whether transformers wrote another tensor than the checkpoint has."""
        if not _is_in_file(entry):
            return True
        return Path(entry["safetensors_file"]).parent == Path(self._loader.save_folder or "")

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._encoded:
            return self._encoded[name]()
        for alias in [name, *self._aliases.get(name, [])]:
            entry = self._loader.index.get(alias)
            if entry is not None and entry.get("safetensors_file"):
                tensor = tensor_of(entry["safetensors_file"], entry.get("weight_name", alias))
                return floating(tensor, name, self._path)
            if alias in self._loader:
                return floating(self._loader[alias], name, self._path)
        raise ModelError(f"'{self._path}' has no tensor for parameter '{name}'; is the checkpoint complete?")

    def unchanged(self) -> bool:
        """Whether all files are there and as they were: those of the checkpoint, and those that were converted, which
        may be in a directory that goes."""
        return self._facts is not None and self._facts == self._facts_now()

    def _facts_now(self) -> dict[Path, tuple[int, ...]] | None:
        converted = Path(self._loader.save_folder or "")
        index: dict[str, dict[str, Any]] = self._loader.index
        files = {Path(of.get("safetensors_file") or converted / f"{name}.dat") for name, of in index.items()}
        try:
            found = {file: file.stat() for file in files}
        except OSError:
            return None
        return {file: (of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns) for file, of in found.items()}


def _is_in_file(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("safetensors_file"))
