"""`infinity generate`: a model continues a prompt. The weights of the model are kept where the swap config says."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from infinity.base.accelerator import current_device
from infinity.checkpoint.load_pretrained import load_config_of, load_pretrained
from infinity.cli import finetuned_model
from infinity.cli.config_checks import require_ready
from infinity.cli.default_dtype import default_dtype, dtype_line
from infinity.cli.model_limits import positions_of
from infinity.cli.optimizers import DTYPES
from infinity.cli.options import require_needed
from infinity.cli.rerun_command import form_of
from infinity.cli.streams import OutputStream
from infinity.cli.subcommands import GenerateOptions
from infinity.cli.text_generation import SamplingSettings, prompt_ids, write
from infinity.cli.tokenizer import has_tokenizer, load_tokenizer
from infinity.config import SwapConfig, load_config
from infinity.errors import ConfigError, printable
from infinity.runtime.offload import close, offload
from infinity.runtime.statistics import statistics
from infinity.sizes import format_bytes

_DIRECTORY = "generate"
"""Name of the directory for the model's store in each of nvme.paths. A run's own store in nvme.paths is not touched."""
_PROMPT_BYTES_MAX = 16 << 20


def generate(options: argparse.Namespace, out: OutputStream) -> int:
    """Print the model's text to stdout and all other lines to stderr. Return the exit code.

    Args:
        options: options of the command line.
        out: stdout.

    Raises:
        InfinityError: the options cannot be used, or the model failed. The model's store is removed in any case.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("infinity generate runs in one process: start it without torchrun")
    for name in ("model", "config"):
        if getattr(options, name) is None:
            hint = ", a file such as `weights: nvme` and `nvme: {paths: [/mnt/fast-disk/swap]}`"
            raise ConfigError(f"the following arguments are required: --{name}{hint if name == 'config' else ''}")
    require_needed(options, GenerateOptions)
    config = load_config(options.config)
    require_ready(config)
    _choose_dtype(options)
    with finetuned_model.naming_the_option():
        return _generate(options, config, out)


def _generate(options: argparse.Namespace, config: SwapConfig, out: OutputStream) -> int:
    if Path(options.model).expanduser().is_dir():
        options.model = str(Path(options.model).expanduser())
    finetuned_model.require(options.model, _say, adapters=True)
    base, revision = finetuned_model.adapted(options.model)
    how = finetuned_model.named(options)
    if base != options.model and revision is not None and options.revision is None:
        how |= {"revision": revision}
    of_adapters = base != options.model and has_tokenizer(Path(options.model).expanduser())
    tokenizer = load_tokenizer(options.model if of_adapters else base, **how)
    ids = _prompt(options, tokenizer)
    most = _most(base, ids.shape[1], options.max_tokens, how)
    drawing = SamplingSettings(options.temperature, options.seed or 0) if options.temperature else None
    began = time.monotonic()
    with _offloaded(base, options, config, how) as model:
        _say(f"the weights were loaded after {time.monotonic() - began:.1f} s")
        began, before = time.monotonic(), statistics(model).read_bytes
        written = write(model, ids, tokenizer, most, drawing, streamer=_streamer(tokenizer), stop=lambda: _lost(out))
        ends = tokenizer.all_special_ids
        took, read = max(time.monotonic() - began, 1e-9), statistics(model).read_bytes - before
        _say(
            f"{len(written)} tokens after {ids.shape[1]} of the prompt in {took:.1f} s, {len(written) / took:.2f} "
            f"tokens/s; {format_bytes(read)} read from the disks"
            + ("" if any(token not in ends for token in written) else "; the model ended the text at once")
        )
    out.flush()
    return int(_lost(out) and not isinstance(out.failure, BrokenPipeError))


def _choose_dtype(options: argparse.Namespace) -> None:
    """Set the default dtype if the user gave no dtype, and print a line about the dtype."""
    device, given = current_device().type, options.dtype is not None
    options.dtype = options.dtype or default_dtype(device).name
    line = dtype_line(options.dtype, "option" if given else "default", device)
    if line is not None:
        _say(line)


def _lost(out: OutputStream) -> bool:
    """Return whether writing to stdout has failed, so that nobody can read further text."""
    return out.failure is not None


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _prompt(options: argparse.Namespace, tokenizer: Any) -> torch.Tensor:
    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("give a --prompt, or the prompt on stdin")
        given = sys.stdin.buffer.read(_PROMPT_BYTES_MAX + 1)
        if len(given) > _PROMPT_BYTES_MAX:
            raise ConfigError(f"the prompt on stdin is larger than {format_bytes(_PROMPT_BYTES_MAX)}")
        try:
            prompt = given.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"the prompt on stdin is not UTF-8 text ({error.reason})") from error
        if not prompt.strip():
            raise ConfigError("the prompt on stdin is empty")
    chat = bool(getattr(tokenizer, "chat_template", None)) and not options.raw
    if options.system is not None and not chat:
        why = "--raw passes the prompt unchanged" if options.raw else "the tokenizer has no chat template"
        raise ConfigError(f"--system: there is no place for a system message, because {why}")
    if chat:
        _say("the prompt is sent as a user message in the model's chat template (--raw passes it unchanged)")
    return prompt_ids(tokenizer, prompt, chat=chat, system=options.system)


def _most(model: str, prompt: int, wanted: int, how: dict[str, Any]) -> int:
    """Return the maximum number of tokens to write. This is `wanted`, or less if the model has too few positions.

    Args:
        model: directory or hub id of the model.
        prompt: number of the prompt's tokens.
        wanted: number of tokens that the user wants.
        how: further arguments for transformers' from_pretrained.

    Raises:
        ConfigError: the prompt alone is too long.
    """
    positions = positions_of(load_config_of(model, **how))
    if positions is None or prompt + wanted <= positions:
        return wanted
    if prompt >= positions:
        raise ConfigError(f"the prompt has {prompt} tokens, and the model {positions} positions: shorten it")
    _say(f"at most {positions - prompt} tokens: the model has {positions} positions, and the prompt {prompt} tokens")
    return positions - prompt


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _form_of_adapters(base: str, name: str, config: SwapConfig) -> str | None:
    """Return the form that the frozen weights had when the adapters were trained. Print a line if this form is used.

    Args:
        base: the model.
        name: directory of the adapters, or the model itself.
        config: the swap config.

    Returns:
        None if there are no adapters, if no file of their directory names a form, or if the swap config already has
        this form.
    """
    found = None if base == name else form_of(Path(name).expanduser())
    if found is None or found[0] == config.frozen:
        return None
    form, file = found
    _say(
        f"the adapters were trained with weights in {form} ({file}), so the weights are stored in {form} here; "
        "--frozen chooses another form"
    )
    return form


@contextlib.contextmanager
def _offloaded(base: str, options: argparse.Namespace, config: SwapConfig, how: dict[str, Any]) -> Iterator[Any]:
    """Offload the model for the duration of the `with` block.

    The model is not trained, and so has no optimizer states. At the end of the block the model's store is removed.
    """
    below = [path.expanduser() / _DIRECTORY for path in config.nvme.paths]
    made = [path.parent for path in below if not path.parent.exists()]
    nvme = config.nvme.model_copy(update={"paths": below})
    frozen = options.frozen or _form_of_adapters(base, options.model, config) or config.frozen
    mine = config.model_copy(update={"commit_every": 0, "pins": 0, "nvme": nvme, "frozen": frozen})
    model = load_pretrained(base, mine, dtype=DTYPES[options.dtype], defer=True, **how)
    if base != options.model:
        model = finetuned_model.with_saved_adapters(model, options.model)
    model.requires_grad_(False)
    try:
        for path in made:
            path.mkdir(mode=0o700, exist_ok=True)
        offload(model, mine)
        try:
            model.eval()
            yield model
        finally:
            close(model, discard=True)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # another process may have put files into the directory
                path.rmdir()
