"""Losses of training with bf16 and int8 moments, compared with fp32 moments.

A Llama of 20.5 M parameters is trained from scratch on the sources of the Python standard library, with each form of
the moments and several seeds. A seed fixes the initial weights and the order of the data, so runs with the same seed
differ only in their moments. The script writes every loss, the held-out loss at the end, and a plot of the curves.

    bench/moments_quality.py --output bench/results/2026-11-21-moments-quality.json

Runs that are already in the output are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from examples.make_demo_checkpoint import VOCABULARY, collect_text, train_tokenizer
from infinity.cli.data import PackedDataset
from infinity.cli.order import SequenceSampler

MOMENTS = ("fp32", "bf16", "int8")
_TEXT_BYTES = 6 << 20
_HELD_OUT_SEQUENCES = 64
_LAST_STEPS = 50


def build_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train(
    moments: str, seed: int, data: PackedDataset, held_out: PackedDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one training with all states in RAM; the place of the states does not change any bit of the result."""
    config = {"weights": "host", "optimizer": "host", "activations": "keep", "moments": moments}
    model = infinity.offload(build_model(seed), config, device="cpu")
    model.train()
    model.config.use_cache = False
    optim = infinity.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, max_grad_norm=1.0, seed=seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, options.lr, total_steps=options.steps, cycle_momentum=False)
    losses = []
    began = time.perf_counter()
    for index in SequenceSampler(data.sequences, options.steps, seed):
        loss = loss_of(model, data, index)
        loss.backward()
        optim.step()
        optim.zero_grad()
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    final = evaluate(model, held_out)
    numel = sum(parameter.numel() for parameter in model.parameters())
    infinity.close(model)
    return {
        "moments": moments,
        "seed": seed,
        "parameters": numel,
        "losses": losses,
        "last": statistics.fmean(losses[-_LAST_STEPS:]),
        "held_out": final,
        "seconds_per_step": seconds / options.steps,
    }


def loss_of(model: Any, data: PackedDataset, index: int) -> torch.Tensor:
    """Return the mean loss over the tokens of one sequence."""
    loss: torch.Tensor = model(**data.rows([index]).of_trainer()).loss
    return loss


@torch.no_grad()
def evaluate(model: Any, data: PackedDataset) -> float:
    model.eval()
    order = SequenceSampler(data.sequences, min(data.sequences, _HELD_OUT_SEQUENCES), 0)
    losses = [loss_of(model, data, index).item() for index in order]
    return statistics.fmean(losses)


def prepare(directory: Path, tokens: int) -> tuple[PackedDataset, PackedDataset]:
    """Return the training text, and held-out text from other files, both in sequences of `tokens`."""
    text = directory / "text"
    collect_text(text, _TEXT_BYTES)
    tokenizer = train_tokenizer(text)
    files = sorted(text.iterdir())
    apart = directory / "held_out"
    apart.mkdir()
    for file in files[::20]:
        file.rename(apart / file.name)
    data = PackedDataset([text], tokenizer, tokens, directory)
    return data, PackedDataset([apart], tokenizer, tokens, directory)


def summarise(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["moments    held-out loss per seed            mean     less fp32, per seed"]
    of = {
        moments: sorted((run for run in runs if run["moments"] == moments), key=lambda run: run["seed"])
        for moments in MOMENTS
    }
    exact = {run["seed"]: run["held_out"] for run in of["fp32"]}
    for moments, found in of.items():
        if not found:
            continue
        ends = [run["held_out"] for run in found]
        apart = [run["held_out"] - exact[run["seed"]] for run in found if run["seed"] in exact]
        lines.append(
            f"{moments:<10} {' '.join(f'{end:8.4f}' for end in ends):<33} {statistics.fmean(ends):.4f}   "
            f"{' '.join(f'{difference:+.4f}' for difference in apart)}"
        )
    if len(exact) > 1:
        lines.append(f"noise: fp32 over seeds, standard deviation {statistics.stdev(exact.values()):.4f}")
    return lines


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colours = {"fp32": "black", "bf16": "tab:blue", "int8": "tab:orange"}
    for run in runs:
        smooth = [statistics.fmean(run["losses"][max(0, at - 20) : at + 1]) for at in range(len(run["losses"]))]
        label = run["moments"] if run["seed"] == min(other["seed"] for other in runs) else None
        axes.plot(smooth, color=colours[run["moments"]], linewidth=0.9, alpha=0.8, label=label)
    axes.set(xlabel="step", ylabel="training loss, mean of 20 steps", ylim=(None, 8))
    axes.legend(title="moments")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the plot is written to the same folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    runs = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    done = {(run["moments"], run["seed"]) for run in runs}
    with tempfile.TemporaryDirectory() as directory:
        data, held_out = prepare(Path(directory), options.tokens)
        print(f"{data.sequences} sequences to train on, {held_out.sequences} held out", flush=True)
        for seed in options.seeds:
            for moments in options.moments:
                if (moments, seed) in done:
                    continue
                run = train(moments, seed, data, held_out, options)
                runs.append(run)
                settings = {"steps": options.steps, "tokens": options.tokens, "lr": options.lr}
                options.output.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1))
                print(
                    f"{moments} seed {seed}: {run['last']:.4f} at the end, {run['held_out']:.4f} held out, "
                    f"{run['seconds_per_step']:.2f} s per step",
                    flush=True,
                )
    plot(runs, options.output.with_suffix(".png"))
    print("\n".join(summarise(runs)))


if __name__ == "__main__":
    main()
