"""Loading, preparing and saving of the model of `infinity finetune`.

By default all parameters are trained. With --freeze some parameters are not trained, and with --lora only adapters are
trained.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from infinity.checkpoint.from_portable import offload_from_checkpoint
from infinity.checkpoint.load_pretrained import load_pretrained, require_directory_or_id
from infinity.checkpoint.merged_adapters import require_mergeable, save_merged
from infinity.checkpoint.reshard import resume
from infinity.checkpoint.save_adapters import CONFIG_NAME as ADAPTERS_NAME
from infinity.checkpoint.save_adapters import is_peft_model
from infinity.checkpoint.save_pretrained import save_pretrained
from infinity.cli.adapter_targets import ALL_LINEAR, share_of_experts, targets
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.optimizers import DTYPES
from infinity.cli.reference_model import ReferenceModel
from infinity.config import SwapConfig
from infinity.errors import ConfigError, ModelError, NotAvailableError
from infinity.quoting import quoted, raised
from infinity.runtime.offload import close, offload
from infinity.runtime.statistics import statistics, trained_of
from infinity.state.training_step import BatchShape, StepFacts

NEEDS_PEFT = '--lora needs PEFT: pip install "infinity-offload[hf]"'
_NAMED_MAX = 5


def check(options: FinetuneOptions) -> None:
    """Check the options that choose which parts of the model are trained.

    Raises:
        ConfigError: options contradict each other, or PEFT is missing.
    """
    if options.frozen is not None and options.lora is None and not options.freeze:
        raise ConfigError(
            f"--frozen {options.frozen} is for weights that are not trained, and all weights are trained: train "
            "adapters (--lora 16), freeze a part (--freeze), or leave --frozen out"
        )
    if options.lora is None:
        return
    if options.freeze:
        raise ConfigError("--freeze does nothing with --lora, which trains the adapters only")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(NEEDS_PEFT)


def named(options: Any) -> dict[str, Any]:
    """Return the arguments of transformers' from_pretrained, apart from the model's name."""
    revision = {} if options.revision is None else {"revision": options.revision}
    # if the value is None, transformers asks the user
    return revision | {"trust_remote_code": bool(options.trust_remote_code)}


@contextmanager
def naming_the_option() -> Iterator[None]:
    """If the block raises an error about untrusted code, raise an error that names --trust-remote-code instead.

    Raises:
        ModelError: the block raised a ModelError.
    """
    try:
        yield
    except ModelError as error:
        text, sign, _ = str(error).partition("Please pass the argument `trust_remote_code=True`")
        if not sign:
            raise
        raise ModelError(f"{text}With --trust-remote-code these files are run.") from error


def require(name: str, say: Callable[[str], None], *, adapters: bool) -> None:
    """Check the name of a model before anything is loaded.

    Args:
        name: directory or hub id.
        say: function that prints a line. It is called before a request to the hub, because the request may take long.
        adapters: whether the directory may contain adapters instead of a model.

    Raises:
        ModelError: the name is neither a directory with a model nor a hub id.
    """
    directory = Path(name).expanduser()
    if not require_directory_or_id(name):
        near = difflib.get_close_matches(directory.name, _directories(directory.parent), n=1)
        hint = f" (there is {directory.parent / near[0]})" if near else ""
        say(f"--model {name}: there is no such directory{hint}; asking the Hugging Face hub for it")
        return
    if (directory / ADAPTERS_NAME).is_file() and not (directory / "config.json").is_file():
        if adapters:
            return
        base, _ = adapted(name)
        raise ModelError(
            f"{name} contains adapters of {base}: give --model {base}, or merge both into one model first, as "
            "infinity's documentation shows (LoRA, and merging)"
        )
    if not (directory / "config.json").is_file():
        inside = [each for each in _directories(directory) if (directory / each / "config.json").is_file()]
        hint = f"; {directory / inside[0]} has one" if inside else ""
        raise ModelError(f"{name} is not the directory of a model: it has no config.json{hint}")


def _directories(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def class_of(options: FinetuneOptions) -> tuple[Any, dict[str, Any]]:
    """Return the class of the model, and further arguments for its from_pretrained.

    A reward model has a head with one output. If the checkpoint has no such head, a new head is initialized at random.
    """
    if options.method != "reward":
        return transformers.AutoModelForCausalLM, {}
    return transformers.AutoModelForSequenceClassification, {"num_labels": 1}


def load(options: FinetuneOptions, config: SwapConfig, *, resuming: bool) -> tuple[Any, ReferenceModel | None]:
    """Load and offload the model, with the states of the run that is resumed.

    Returns:
        The model, and the reference model of --method dpo, which is offloaded without optimizer states. The reference
        is None for other methods. It is also None if the model has adapters, because the reference is then the model
        without its adapters.

    Raises:
        ConfigError: a pattern of --freeze or a name of --lora-targets matches nothing in the model.
        InfinityError: the model cannot be loaded or offloaded; the errors are the same as for load_pretrained.
    """
    passes = 1 if config.vertical else options.gradient_accumulation
    made: dict[str, Any] = {"optimizer": options.optimizer, "accumulation_steps": passes}
    made["tokens"] = _step_of(options, passes)
    how: dict[str, Any] = {"dtype": DTYPES[options.dtype], **named(options)}
    if options.method == "reward":
        kind, more = class_of(options)
        how |= {"model_class": kind, **more}
    copy = None if options.from_checkpoint is None else options.from_checkpoint.expanduser()
    refers = options.method == "dpo" and options.lora is None
    if options.lora is None and not options.freeze and not refers:
        if copy is not None:
            return load_pretrained(copy, config, from_checkpoint=True, **made, **how), None
        return load_pretrained(options.model, config, resume=resuming, **made, **how), None
    model = load_pretrained(options.model, config, defer=True, **how)
    if options.lora is not None:
        model = _with_adapters(model, options)
    elif options.freeze:
        _freeze(model, options.freeze)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trained: {trained_of(trained, sum(p.numel() for p in model.parameters()))}", flush=True)
    if options.merge:
        _require_mergeable(model)
    begin: Callable[..., Any] = resume if resuming else offload
    if copy is not None:
        begin = partial(_offload_from, copy)
    if refers:
        reference = ReferenceModel(load_pretrained(options.model, config, defer=True, **how))
        step = made.pop("tokens")
        reference.offload_beside(model, config, begin, made | {"step": step})
        return model, reference
    model = begin(model, config, **made)
    if options.merge:
        try:
            _require_mergeable(model)  # this is checked again, because offloading may have divided layers into tiles
        except NotAvailableError:
            close(model, discard=not resuming)
            raise
    return model, None


def _step_of(options: FinetuneOptions, passes: int) -> StepFacts:
    """Return the batch of a step, with the longest sequences that it may have. DPO and reward models get pairs."""
    sequences = options.batch_size * (1 if options.method == "sft" else 2)
    count = options.gradient_accumulation * options.micro_batches
    return StepFacts(BatchShape(sequences, options.sequence_length, count // passes, passes))


def _offload_from(copy: Path, model: Any, config: SwapConfig, **made: Any) -> Any:
    return offload_from_checkpoint(model, copy, config, **made)


def _with_adapters(model: Any, options: FinetuneOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    assert options.lora is not None
    chosen = targets(model, experts=options.lora_experts)
    of_attention = chosen["target_modules"]
    if options.lora_targets is not None:
        chosen["target_modules"] = ALL_LINEAR if options.lora_targets == [ALL_LINEAR] else options.lora_targets
    elif not options.lora_experts and (share := share_of_experts(model)):
        print(f"adapters: none for the experts, which are {share:.0%} of the parameters (--lora-experts)", flush=True)
    lora = LoraConfig(
        r=options.lora,
        lora_alpha=2 * options.lora if options.lora_alpha is None else options.lora_alpha,
        lora_dropout=options.lora_dropout or 0.0,
        **chosen,
        task_type="SEQ_CLS" if options.method == "reward" else "CAUSAL_LM",
        revision=options.revision,
    )
    linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that newer versions of transformers lack
            # The adapters have the dtype of the weights. Like the weights, they have an fp32 master.
            made = get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        if lora.lora_dropout and "lora_dropout" in str(error):
            fix = "leave out --lora-experts"
            if not options.lora_experts:
                fix = f"exclude the experts: --lora-targets {' '.join(of_attention)}"
            raise ConfigError(
                f"--lora-dropout {lora.lora_dropout:g}: PEFT has no dropout for adapters of experts. Leave it out, or "
                f"{fix}"
            ) from error
        has = f"its linear layers are called {', '.join(sorted(linear))}" if linear else "it has no linear layers"
        raise ConfigError(f"--lora: PEFT cannot adapt this model, {has} ({raised(error)})") from error
    _require_plain_head(made)
    return made


def _require_plain_head(model: Any) -> None:
    """Check that no adapters were put on the model's head.

    Raises:
        ConfigError: the head has adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        name = next(name for name, module in model.named_modules() if module is head).rpartition(".")[2]
        raise ConfigError(
            f"--lora-targets {name}: TRL's trainers train no adapters of a model's head. Leave {name} out"
        )


def _require_mergeable(model: Any) -> None:
    try:
        require_mergeable(model)
    except NotAvailableError as error:
        raise NotAvailableError(f"--merge: {error}") from None


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters that match a pattern.

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            near = max(parameters, key=lambda name: len(os.path.commonprefix([name, pattern])))  # noqa: RUF071 (text)
            raise ConfigError(
                f"--freeze {quoted(pattern)}: the model has no such parameter; a similar name is {near}, and "
                f"'{near.rpartition('.')[0]}.*' names all parameters of its module"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"--freeze {' '.join(map(quoted, patterns[:_NAMED_MAX]))}: no parameter is left to train")


def save_model(
    model: Any, directory: str | Path, options: FinetuneOptions, config: dict[str, Any] | None = None
) -> None:
    """Write the trained model, its adapters, or the model with the adapters merged into it. All ranks call this.

    Args:
        model: the model.
        directory: directory for the files.
        options: options of the run.
        config: values of the model's config to write, or None for the current values.

    Raises:
        InfinityError: the model cannot be saved; the errors are the same as for infinity.save_pretrained.
    """
    with nullcontext() if config is None else _configured(model, config):
        (save_merged if options.merge else save_pretrained)(model, directory)


@contextmanager
def _configured(model: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set these values in the model's config, and restore the earlier values at the end of the block."""
    held = vars(model.config)
    now = dict(held)
    held.clear()
    held.update(copy.deepcopy(values))
    try:
        yield
    finally:
        held.clear()
        held.update(now)


def output_bytes(model: nn.Module, options: FinetuneOptions) -> int:
    """Return the bytes of the weights in the output. With several ranks, count only the slices of this rank."""
    layout = statistics(model).plan.layout
    if options.merge or not is_peft_model(model):
        return layout.weight_bytes
    return layout.trainable_numel * max(p.element_size() for p in model.parameters() if p.requires_grad)


def with_saved_adapters(base: Any, directory: str | Path) -> Any:
    """Return the model with the adapters of a directory. The adapters get the dtype of the model's weights."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # for the reason given in _with_adapters
        return PeftModel.from_pretrained(base, str(Path(directory).expanduser()), autocast_adapter_dtype=False)


def adapted(directory: str) -> tuple[str, str | None]:
    """Return the model for which a directory's adapters were trained, and its revision.

    If there are no adapters, return the name of the directory.

    Raises:
        ModelError: the directory does not name the adapters' model, this model does not exist, or PEFT is missing.
    """
    if not (Path(directory).expanduser() / ADAPTERS_NAME).is_file():
        return directory, None
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f'{directory} contains adapters, which need PEFT: pip install "infinity-offload[hf]"')
    from peft import PeftConfig

    found = PeftConfig.from_pretrained(str(Path(directory).expanduser()))
    if not found.base_model_name_or_path:
        raise ModelError(f"{directory}/{ADAPTERS_NAME} does not name the model of the adapters")
    base = str(found.base_model_name_or_path)
    if base.startswith((os.sep, ".", "~")) and not Path(base).expanduser().is_dir():
        raise ModelError(
            f"{directory} contains adapters of {base} (base_model_name_or_path in its {ADAPTERS_NAME}), and this "
            "directory does not exist: write the model's current directory into this file"
        )
    return base, found.revision
