"""Make the input of the demo: a checkpoint of Llama's architecture with random weights, a tokenizer, and text.

The text, on which the tokenizer is trained as well, is the sources of the Python standard library: every machine that
can run this has them.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 8192


def collect_text(target: Path, limit_bytes: int) -> None:
    """Copy sources of the standard library, in a fixed order, until there is enough."""
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


def train_tokenizer(text: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(text.iterdir())], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    if options.hidden % 64 or options.hidden < 64:
        parser.error(f"--hidden {options.hidden}: use a multiple of 64, the width of an attention head")
    if options.directory.exists() and any(options.directory.iterdir()):
        parser.error(f"{options.directory} is not empty; name another directory, or remove this one first")
    text = options.directory / "text"
    collect_text(text, 6 << 20)
    tokenizer = train_tokenizer(text)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.directory / "checkpoint")
    tokenizer.save_pretrained(options.directory / "checkpoint")
    print(f"made a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in {options.directory}")


if __name__ == "__main__":
    main()
