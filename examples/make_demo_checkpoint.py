"""Input of the demo: a checkpoint of Llama's architecture with random weights, a tokenizer, and text.

The text is the sources of the Python standard library, which are on every machine with Python. The tokenizer is trained
on the same text. Parts of the text become the data of examples/recipes and examples/unchanged: texts.jsonl,
chats.jsonl, preferences.jsonl and prompts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 8192
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else -%}
{{ message['content'] }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""
_RECORDS = 64
_RECORD_CHARACTERS = 400


def collect_text(target: Path, limit_bytes: int) -> None:
    """Copy sources of the standard library, in a fixed order, until `limit_bytes` are reached."""
    library = Path(sysconfig.get_path("stdlib"))
    target.mkdir(parents=True)
    taken = 0
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) < 200:
            continue
        (target / ("_".join(path.relative_to(library).parts) + ".txt")).write_text(text, encoding="utf-8")
        taken += len(text)
        if taken > limit_bytes:
            return


def train_tokenizer(text: Path, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(text.iterdir())], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def write_records(text: Path, target: Path) -> None:
    """Write texts, chats, preferences and prompts, all cut from the first sufficiently long file of `text`."""
    wanted = _RECORDS * _RECORD_CHARACTERS
    source = next(path.read_text() for path in sorted(text.iterdir()) if path.stat().st_size > 2 * wanted)
    pieces = [source[start : start + _RECORD_CHARACTERS] for start in range(0, wanted, _RECORD_CHARACTERS)]
    third = _RECORD_CHARACTERS // 3
    asked = [[{"role": "user", "content": piece[:third]}] for piece in pieces]
    answers = [[{"role": "assistant", "content": piece[third:]}] for piece in pieces]
    worse = [[{"role": "assistant", "content": piece[:third][::-1]}] for piece in pieces]
    records = {
        "texts": [{"text": piece} for piece in pieces],
        "chats": [{"messages": question + answer} for question, answer in zip(asked, answers, strict=True)],
        "preferences": [
            {"prompt": question, "chosen": chosen, "rejected": rejected}
            for question, chosen, rejected in zip(asked, answers, worse, strict=True)
        ],
        "prompts": [{"prompt": question} for question in asked[:2]],
    }
    for name, lines in records.items():
        (target / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_checkpoint(
    directory: Path, hidden: int, layers: int, vocabulary: int, dtype: torch.dtype, text_bytes: int
) -> None:
    """Write checkpoint/, text/ and the records into `directory`. `hidden` must be a multiple of 64."""
    text = directory / "text"
    collect_text(text, text_bytes)
    write_records(text, directory)
    tokenizer = train_tokenizer(text, vocabulary)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(directory / "checkpoint")
    tokenizer.save_pretrained(directory / "checkpoint")
    print(f"made a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters in {directory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--text-bytes", type=int, default=2 << 20)
    options = parser.parse_args()
    if options.hidden % 64 or options.hidden < 64:
        parser.error(f"--hidden {options.hidden}: use a multiple of 64, the width of an attention head")
    if options.directory.exists() and any(options.directory.iterdir()):
        parser.error(f"{options.directory} is not empty; name another directory, or remove this one first")
    make_checkpoint(
        options.directory,
        options.hidden,
        options.layers,
        options.vocabulary,
        getattr(torch, options.dtype),
        options.text_bytes,
    )


if __name__ == "__main__":
    main()
