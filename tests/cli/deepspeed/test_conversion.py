"""Configs that public projects ship: each becomes a swap config that trains, and what it loses is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import infinity
from infinity.cli.deepspeed.conversion import HINTS_MAX, Conversion, convert
from infinity.cli.deepspeed.keys import Effect, Fate
from infinity.cli.deepspeed.reading import read
from infinity.cli.deepspeed.report import swap_text, values_of
from infinity.errors import ConfigError
from tests.cli.deepspeed.public import NVME, PUBLIC, Public
from tests.models import llama

MEMORY = {"device": "64MiB", "host": "256MiB"}


def written(values: Any, directory: Path, name: str = "ds_config.json") -> Path:
    path = directory / name
    path.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return path


def converted(values: Any, directory: Path, name: str = "ds_config.json") -> Conversion:
    return convert(read(written(values, directory, name)))


def fates(conversion: Conversion) -> dict[str, Fate]:
    return {finding.shown: finding.fate for finding in conversion.findings}


def leaves(values: Any, conversion: Conversion, prefix: str = "") -> list[str]:
    """The keys of a config, down to those that were found as a whole."""
    found = {finding.shown for finding in conversion.findings}
    keys: list[str] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        keys += [name] if name in found or not isinstance(value, dict) else leaves(value, conversion, f"{name}.")
    return keys


def by_source(public: Public) -> str:
    return public.source.rpartition("/")[2]


def file_of(public: Public, directory: Path) -> Path:
    """The config as a file, with a directory that is there for its NVMe."""
    text = json.dumps(public.values).replace(NVME, str(directory / "swap"))
    return written(json.loads(text), directory, "config.yaml" if public.source.endswith(".yaml") else "ds_config.json")


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_each_key_of_a_public_config_has_one_fate_and_what_is_lost_is_exactly_this(
    public: Public, tmp_path: Path
) -> None:
    conversion = convert(read(file_of(public, tmp_path)))
    assert sorted(finding.shown for finding in conversion.findings) == sorted(leaves(public.values, conversion))
    assert tuple(finding.shown for finding in conversion.of(Fate.NONE)) == public.lost
    assert tuple(finding.shown for finding in conversion.of(Fate.UNKNOWN)) == public.unknown
    lines = {line.key: line.value for line in conversion.lines}
    paths = {"nvme.paths": [str(tmp_path / "swap")]} if "nvme" in (public.weights, public.optimizer) else {}
    assert lines == {"weights": public.weights, "optimizer": public.optimizer} | paths | dict(public.also)


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_a_public_config_trains_two_steps_as_plain_torch_does(public: Public, tmp_path: Path) -> None:
    source = read(file_of(public, tmp_path))
    swap = tmp_path / "swap.yaml"
    swap.write_text(swap_text(convert(source), source) + f"memory: {json.dumps(MEMORY)}\n")
    torch.manual_seed(0)
    plain, batch = llama(layers=2)
    torch.manual_seed(0)
    ours, _ = llama(layers=2)
    model = infinity.offload(ours, swap)
    tiers = infinity.statistics(model).plan.placement
    for told, got in ((public.weights, tiers.weights.tier), (public.optimizer, tiers.optimizer.tier)):
        assert got == told or told == "auto"
    losses = []
    for trained, optim in (
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
        (model, infinity.AdamW(model.parameters(), lr=1e-2)),
    ):
        for _ in range(2):
            loss = trained(**batch).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        losses.append(trained(**batch).loss.item())
    infinity.close(model, discard=True)
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)
    assert losses[2] < losses[0]


# -- fates -------------------------------------------------------------------------------------------------------------


def test_findings_come_in_the_order_of_their_importance(tmp_path: Path) -> None:
    values = {
        "bf16": {"enabled": True},
        "flops_profiler": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "zero_quantized_weights": True, "zenflow": {"a": 1}},
        "nonsense": 1,
    }
    conversion = converted(values, tmp_path)
    assert [finding.shown for finding in conversion.findings] == [
        "zero_optimization.zenflow",
        "zero_optimization.zero_quantized_weights",
        "flops_profiler",
        "nonsense",
        "bf16.enabled",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage",
    ]
    assert [finding.effect for finding in conversion.of(Fate.NONE)] == list(Effect)


@pytest.mark.parametrize(
    ("values", "key", "fate"),
    [
        ({"flops_profiler": {"enabled": False}}, "flops_profiler", Fate.NOT_NEEDED),
        ({"flops_profiler": {}}, "flops_profiler", Fate.NOT_NEEDED),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", Fate.NONE),
        ({"data_efficiency": {"enabled": True, "seed": 1}}, "data_efficiency", Fate.NONE),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention", Fate.NONE),
        ({"tensorboard": {"enabled": True}}, "tensorboard", Fate.SCRIPT),
        ({"tensorboard": {"enabled": False}}, "tensorboard", Fate.NOT_NEEDED),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale", Fate.NOT_NEEDED),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "fp16.loss_scale", Fate.SCRIPT),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads",
            Fate.NONE,
        ),
        ({"gradient_clipping": 0}, "gradient_clipping", Fate.SCRIPT),
        ({"gradient_clipping": "auto"}, "gradient_clipping", Fate.SCRIPT),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", Fate.NONE),
        ({"optimizer": {"type": "Adam"}}, "optimizer.type", Fate.SCRIPT),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 1}}}, "optimizer.params.muon_lr", Fate.UNKNOWN),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type", Fate.NONE),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}},
            "scheduler.params.warmup_min_lr",
            Fate.NONE,
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}}},
            "scheduler.params.warmup_min_lr",
            Fate.NOT_NEEDED,
        ),
        ({"zero_optimization": {"mics_shard_size": -1}}, "zero_optimization.mics_shard_size", Fate.NOT_NEEDED),
        ({"zero_optimization": {"mics_shard_size": 4}}, "zero_optimization.mics_shard_size", Fate.NONE),
        ({"zero_optimization": {}}, "zero_optimization", Fate.NOT_NEEDED),
        ({"zero_optimization": None}, "zero_optimization", Fate.NOT_NEEDED),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", Fate.MAPPED),
        ({"zero_optimization": True}, "zero_optimization", Fate.MAPPED),
        ({"zero_optimization": {"offload_param": None}}, "zero_optimization.offload_param", Fate.NOT_NEEDED),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown", Fate.SCRIPT),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal", Fate.NONE),
        ({"steps_per_print": 1, "_note": "mine"}, "_note", Fate.NOT_NEEDED),
    ],
)
def test_a_key_that_is_off_is_not_lost(values: Any, key: str, fate: Fate, tmp_path: Path) -> None:
    assert fates(converted(values, tmp_path))[key] is fate


def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1},
        "gradient_cliping": 1,
        "zzz": 1,
    }
    said = {finding.shown: finding.says for finding in converted(values, tmp_path).of(Fate.UNKNOWN)}
    assert said == {
        "zero_optimization.stage3_param_persitance_threshold": (
            "did you mean zero_optimization.stage3_param_persistence_threshold?"
        ),
        "gradient_cliping": "did you mean gradient_clipping?",
        "zzz": "infinity knows no such key of DeepSpeed or FSDP",
    }


@pytest.mark.parametrize(
    ("values", "key", "near"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"offload_params": {"device": "cpu"}}},
            "zero_optimization.offload_params",
            "zero_optimization.offload_param",
        ),
        (
            {"zero_optimization": {"offload_optimiser": {"device": "cpu"}}},
            "zero_optimization.offload_optimiser",
            "zero_optimization.offload_optimizer",
        ),
        ({"optimiser": {"type": "Adam"}}, "optimiser", "optimizer"),
        (
            {"zero_optimization": {"cpu_offload_parms": True}},
            "zero_optimization.cpu_offload_parms",
            "zero_optimization.cpu_offload_params",
        ),
    ],
)
def test_a_misspelled_section_is_named_with_the_section(values: Any, key: str, near: str, tmp_path: Path) -> None:
    (finding,) = converted({"steps_per_print": 1} | values, tmp_path).of(Fate.UNKNOWN)
    assert finding.shown == key
    assert finding.says == f"did you mean {near}?"


def test_a_file_with_nothing_but_a_misspelled_section_is_told_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Found: 'zero_optimisation' \(did you mean zero_optimization\?\)"):
        converted({"zero_optimisation": {"stage": 3}}, tmp_path)


def test_of_very_many_unknown_keys_only_the_first_have_a_hint(tmp_path: Path) -> None:
    values = {"steps_per_print": 1} | {f"train_batch_siz{number}": 1 for number in range(HINTS_MAX + 10)}
    unknown = converted(values, tmp_path).of(Fate.UNKNOWN)
    assert [bool(finding.says) for finding in unknown] == [True] * HINTS_MAX + [False] * 10


def test_the_swap_config_is_one_that_infinity_reads(tmp_path: Path) -> None:
    paths = ["/mnt/with space", "/mnt/010", "/mnt/é: #x", "/mnt/'q'", "~/swap", "1e9", "yes", "/mnt/\u2028x"]
    for path in paths:
        offload = {"device": "nvme", "nvme_path": path}
        file = written({"zero_optimization": {"stage": 3, "offload_param": offload}}, tmp_path)
        source = read(file)
        conversion = convert(source)
        swap = tmp_path / "swap.yaml"
        swap.write_text(swap_text(conversion, source))
        assert infinity.load_config(swap) == infinity.load_config(values_of(conversion.lines))
        assert list(map(str, infinity.load_config(swap).nvme.paths)) == [path]
