"""The default of `--dtype` follows from the processor's flags, and a run keeps the dtype that it began with."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from infinity.base.machine_facts import ProcessorFacts
from infinity.cli import default_dtype as defaults
from infinity.cli.default_dtype import default_dtype, dtype_line
from infinity.cli.main import main
from infinity.cli.optimizers import DTYPES
from tests.cli.test_finetune import run
from tests.io.test_disks import write

AVX512 = "avx2 avx512f avx512bw"
NOTHING_ON_X86 = "none of avx512_bf16, amx_bf16, avx512_fp16, amx_fp16"
PROCESSORS = [
    ("flags\t\t: fpu avx2 f16c", "fp32", NOTHING_ON_X86),
    (f"flags\t\t: {AVX512} avx512_vnni", "fp32", NOTHING_ON_X86),
    (f"flags\t\t: {AVX512} avx512_bf16", "bf16", "avx512_bf16"),
    ("flags\t\t: avx2 amx_bf16 amx_tile", "bf16", "amx_bf16"),
    (f"flags\t\t: {AVX512} avx512_bf16 amx_bf16 avx512_fp16", "bf16", "avx512_bf16"),
    (f"flags\t\t: {AVX512} avx512_fp16", "fp16", "avx512_fp16, but neither avx512_bf16 nor amx_bf16"),
    ("flags\t\t: avx2 amx_fp16", "fp16", "amx_fp16, but neither avx512_bf16 nor amx_bf16"),
    ("Features\t: fp asimd asimdhp bf16", "bf16", "bf16"),
    ("Features\t: fp asimd asimdhp", "fp32", "no bf16"),
    ("Features\t: fp asimd", "fp32", "no bf16"),
    ("flags\t\t: avx2 bf16 xavx512_bf16 avx512_bf16x", "fp32", NOTHING_ON_X86),
    ("", "fp32", NOTHING_ON_X86),
]
SLOW, FAST = frozenset({"avx2"}), frozenset({"avx2", "avx512_bf16"})


def cpuinfo(root: Path, line: str) -> Path:
    write(root, {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some CPU\n{line}\n\nprocessor\t: 1\n{line}"})
    return root


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this machine's processor other flags, and take its GPU away."""

    def set_to(found: frozenset[str]) -> None:
        monkeypatch.setattr(defaults, "processor", lambda root: ProcessorFacts("Some CPU", found))

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return set_to


@pytest.mark.parametrize(("line", "name", "why"), PROCESSORS)
def test_the_first_dtype_that_the_processor_has_instructions_for(
    line: str, name: str, why: str, tmp_path: Path
) -> None:
    assert default_dtype("cpu", cpuinfo(tmp_path, line)) == (name, f"this processor has {why}")


@pytest.mark.parametrize("line", [line for line, *_ in PROCESSORS])
def test_on_a_gpu_the_default_is_bf16_whatever_the_processor_has(line: str, tmp_path: Path) -> None:
    root = cpuinfo(tmp_path, line)
    assert default_dtype("cuda", root).name == "bf16"
    assert dtype_line("fp16", "option", "cuda", root) is None


@pytest.mark.parametrize(("line", "name", "why"), PROCESSORS)
def test_the_line_says_why_the_default_is_the_one_and_what_changes_it(
    line: str, name: str, why: str, tmp_path: Path
) -> None:
    said = dtype_line(name, "default", "cpu", cpuinfo(tmp_path, line))
    assert said is not None
    assert said.startswith(f"dtype {name}: this processor has {why}")
    assert "(--dtype " in said


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("flags: avx2", {"bf16", "fp16"}),
        ("flags: avx512_bf16", {"fp16"}),
        ("flags: avx512_fp16", {"bf16"}),
        ("flags: amx_bf16 amx_fp16", set()),
        ("Features: asimd asimdhp", {"bf16", "fp16"}),
        ("Features: asimd bf16", {"fp16"}),
    ],
)
def test_a_chosen_dtype_has_a_line_only_where_the_processor_is_slow_in_it(
    line: str, slow: set[str], tmp_path: Path
) -> None:
    root = cpuinfo(tmp_path, line)
    lines = {name: dtype_line(name, "option", "cpu", root) for name in DTYPES}
    assert {name for name, said in lines.items() if said is not None} == slow
    assert all(f"--dtype {default_dtype('cpu', root).name} is faster" in str(lines[name]) for name in slow)


@pytest.mark.parametrize(
    ("found", "given", "name", "said"),
    [
        (FAST, None, "bf16", "dtype bf16: this processor has avx512_bf16 (--dtype chooses another)"),
        (frozenset({"avx512_fp16"}), None, "fp16", "dtype fp16: this processor has avx512_fp16, but neither"),
        (SLOW, None, "fp32", f"dtype fp32: this processor has {NOTHING_ON_X86}"),
        (SLOW, "bf16", "bf16", "dtype bf16: this processor has neither avx512_bf16 nor amx_bf16"),
        (SLOW, "fp32", "fp32", None),
        (FAST, "bf16", "bf16", None),
        (FAST, "fp32", "fp32", None),
    ],
)
def test_a_run_trains_in_the_default_and_one_line_says_so(
    found: frozenset[str],
    given: str | None,
    name: str,
    said: str | None,
    job: dict[str, Any],
    tmp_path: Path,
    flags: Any,
    capsys: Any,
) -> None:
    flags(found)
    del job["--dtype"]
    assert run(job | {"--steps": 1} | ({} if given is None else {"--dtype": given}), "--verify-output") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype ")]
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {DTYPES[name]}
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text())["dtype"] == name


def test_a_loss_is_scaled_where_the_default_is_fp16(job: dict[str, Any], flags: Any, capsys: Any) -> None:
    flags(frozenset({"avx512_fp16"}))
    del job["--dtype"]
    assert run(job | {"--steps": 1}) == 0
    assert "fp16 weights: the loss is scaled" in capsys.readouterr().out


@pytest.mark.parametrize(("began", "then", "name", "told"), [(FAST, SLOW, "bf16", 1), (SLOW, FAST, "fp32", 0)])
def test_a_run_keeps_its_dtype_under_other_flags(
    began: frozenset[str],
    then: frozenset[str],
    name: str,
    told: int,
    job: dict[str, Any],
    tmp_path: Path,
    flags: Any,
    capsys: Any,
) -> None:
    flags(began)
    del job["--dtype"]
    config = yaml.safe_load(job["--config"].read_text()) | {"commit_every": 1}
    job["--config"].write_text(yaml.safe_dump(config))
    assert run(job | {"--steps": 1}, "--keep-store") == 0
    capsys.readouterr()
    flags(then)
    more = ["finetune", "--resume", str(tmp_path / "swap"), "--steps", "2", "--output", str(tmp_path / "more")]
    assert main(more) == 0
    lines = re.findall("^dtype .*", capsys.readouterr().out, re.MULTILINE)
    assert len(lines) == told
    assert all(line.startswith("dtype bf16: this processor has neither") for line in lines)
    assert all(line.endswith("; the run began with it") for line in lines)
    assert not any("--dtype" in line for line in lines), "a run cannot change its dtype"
    with (tmp_path / "more/loss.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert {weight.dtype for weight in load_file(tmp_path / "more/model.safetensors").values()} == {DTYPES[name]}
