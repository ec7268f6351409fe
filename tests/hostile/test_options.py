"""Every option of every command with absurd values: a result, or one line that says what is wrong. The parsers are
walked, so a new option is tried as it comes."""

from __future__ import annotations

import argparse
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import infinity
from infinity.cli import main as infinity_main
from infinity.cli import run_report
from infinity.cli.bench import main as bench_main
from infinity.cli.bench import survey, sustained, sweep
from infinity.plan import local_rates
from tests.hostile.limits import failures, printed
from tests.models import VOCABULARY, llama
from tests.sampling import SHARE, number, seed

ABSURD = [
    "", " ", "0", "-1", "-0", "+0", "00", "9999999999999", "9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 400, "1e400",
    "1e-400", "1e-320", "nan", "-nan", "inf", "-inf", "0x10", "1_000", "٣", "½", "1e3", "1.5", "1,5", "true", "None",
    "--", "-", "-x", "@x", "0B", "1B", "1EiB", "9999999TiB", "0MiB", "-1MiB", "12KiB", "1:2", "0:0", "2:1",
    "1:" + "9" * 400, "a:b", ":", "/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "file", "folder", "fifo",
    "missing", "missing/below", "file/below", "../" * 2000, "n" * 300, "n" * 100_000, "~nobody.here/x", ".",
    "\udcff\udcfe", "\x1b[2J\x1b]0;x\x07", "[/]", "%s%n", "{}", "$(true)", "two\nlines", "💥" * 50, "\u202eexe.txt",
    "nope", "no/pe",
]  # fmt: skip
_PARTS = 8


def text_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>"])
    bpe.train_from_iterator(["the quick brown fox"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<unk>", unk_token="<unk>")


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the commands need: a model, text, a swap config."""
    place = tmp_path_factory.mktemp("things")
    llama(1)[0].bfloat16().save_pretrained(place / "model")
    text_tokenizer().save_pretrained(place / "model")
    (place / "script.py").write_text("print('a script')")
    (place / "text.txt").write_text("the quick brown fox " * 100)
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(place)}}
    (place / "ds_config.json").write_text(json.dumps({"zero_optimization": zero}))
    return place


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(command line, its parser) of all that take options."""

    def walk(line: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            yield line, parser
        for action in inner:
            for name, each in action.choices.items():
                yield from walk(f"{line} {name}", each)

    yield from walk("infinity", infinity_main.build_parser())
    yield "infinity-bench", bench_main.build_parser()


NEEDED = {
    "infinity finetune": "--model {}/model --data {}/text.txt --config swap.yaml --output out --steps 1 "
    "--sequence-length 8",
    "infinity generate": "--model {}/model --config swap.yaml --prompt fox --max-tokens 2",
    "infinity run": "swap.yaml {}/script.py",
    "infinity checkpoint list": "swap",
    "infinity checkpoint verify": "swap",
    "infinity checkpoint export": "swap --output out",
    "infinity checkpoint unpin": "swap --all-gone",
    "infinity checkpoint remove": "swap",
    "infinity plan": "--model {}/model --config swap.yaml --cpu",
    "infinity doctor": "swap.yaml --swap-dir folder",
    "infinity convert": "{}/ds_config.json",
    "infinity-bench": "--path folder --size 16MiB",
}
"""A command line that works; `{}` is where the things are."""
WRITTEN = ("--trace", "--json")
"""Options that name a file to write."""
REPORTS = ("infinity doctor", "infinity plan")
"""Commands that end with 1 where what they report, on stdout, is not well."""
BESIDE = {"--eval-steps": ["--eval-split", "0.5"], "--save-best": ["--eval-split", "0.5", "--eval-steps", "1"]}
BESIDE |= {"--save-limit": ["--save-every", "1"], "--sample": ["--eval-split", "0.5"]}
BESIDE |= {"--sample-tokens": ["--eval-split", "0.5", "--sample", "fox"]}
BESIDE |= {
    name: ["--lora", "2"] for name in ("--lora-alpha", "--lora-dropout", "--lora-targets", "--merge", "--frozen")
}
BESIDE |= {"--force": ["--output", "new.yaml"]}
BESIDE |= {"--trace-steps": ["--trace", "trace.json"]}
"""What else an option needs so that it does something."""
LONG = ("--sustained",)
"""Minutes; with a value of its option that is refused, nothing."""


def all_cases() -> list[tuple[str, str, str]]:
    """(command, option or place of a positional, value)."""
    found = []
    for command, parser in parsers():
        for action in parser._actions:
            names = [name for name in action.option_strings if name.startswith("--")] or [action.dest]
            takes_value = action.nargs != 0
            found += [(command, names[0], value) for value in (ABSURD if takes_value else [""])]
    return [case for case in found if case[1] not in LONG]


def chosen() -> list[tuple[str, str, str]]:
    """One value for each name of an option and for each command, and of the rest as many as INFINITY_TESTS says."""
    draw, cases = random.Random(seed("INFINITY_HOSTILE_SEED")), all_cases()
    draw.shuffle(cases)
    if SHARE == 1:
        return cases
    first = list(dict.fromkeys({key: case for case in cases for key in case[:2]}.values()))
    return first + [case for case in cases if case not in first][: number(0, len(cases), "INFINITY_HOSTILE")]


def test_every_command_has_a_line_that_works() -> None:
    assert {command for command, _ in parsers()} == set(NEEDED)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_absurd_values_end_in_a_result_or_one_line(part: int, things: Path, tmp_path: Path) -> None:
    cases = []
    for number_of, case in enumerate(chosen()[part::_PARTS]):
        place = tmp_path / str(number_of)
        place.mkdir()
        cases.append((str(things), str(place), *case))
    assert failures(check, cases, tmp_path) == []


def prepared(place: Path) -> None:
    """Prepare an empty directory in which each command works."""
    os.chdir(place)
    Path("file").write_text("mine")
    Path("folder").mkdir()
    os.mkfifo("fifo")
    config = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "8MiB", "host": "64MiB"}}
    config |= {"commit_every": 1, "nvme": {"paths": [str(place / "swap")]}}
    Path("swap.yaml").write_text(yaml.safe_dump(config))


def check(case: tuple[str, str, str, str, str]) -> None:
    things, place, command, option, value = case
    prepared(Path(place))
    survey._MEMORY_BYTES = 16 << 20
    sustained._MINUTE_S = 0.05
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    sweep.DEPTHS, sweep.BLOCKS, sweep._REPEATS = (1, 4), (256 << 10, 1 << 20), 1
    local_rates._WIDTH_MAX = local_rates._INNER_MAX = local_rates._TOKENS_MAX = 128
    local_rates._UPDATE_NUMEL = local_rates._UPDATE_NUMEL_MAX = 1 << 20
    run_report._plot = no_picture
    if command.startswith("infinity checkpoint"):
        make_store(Path("swap"))
    arguments = command.split()[1:]
    needed = [word.replace("{}", things) for word in NEEDED[command].split()]
    if option.startswith("--"):
        if option in needed:
            del needed[needed.index(option) : needed.index(option) + 2]
        given = [f"{option}={value}"] if value.startswith("-") else [option, value]
        if takes_nothing(command, option):
            given = [option]
        line = [*arguments, *needed, *BESIDE.get(option, []), *given]
    else:
        line = [*arguments, value, *needed[1:]]
    program: Callable[[list[str]], int] = (
        bench_main.main if command.startswith("infinity-bench") else infinity_main.main
    )
    with printed(Path(place)) as (_, errors):
        try:
            code = program(line)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    said = errors.read_text(errors="surrogateescape")
    assert code in (0, 1, 2), (code, said)
    assert "Traceback" not in said, said
    assert "\x1b" not in said
    assert option in WRITTEN or Path("file").read_text() == "mine"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    if code and not (code == 1 and command in REPORTS and not said):
        last = said.splitlines()[-1]
        assert last.startswith("error: "), said
        assert len(last) < 1500, last
    if code == 0 and command == "infinity finetune" and option != "--help":
        assert any(Path(place).rglob("report.json")) or option == "--output", "a success that made nothing"


def no_picture(facts: object, evaluations: object, path: Path) -> None:
    path.touch()


def takes_nothing(command: str, option: str) -> bool:
    parser = dict(parsers())[command]
    return any(action.nargs == 0 for action in parser._actions if option in action.option_strings)


def make_store(place: Path) -> None:
    """With a generation."""
    model, batch = llama(1)
    config = {"weights": "nvme", "optimizer": "nvme", "commit_every": 1, "nvme": {"paths": [str(place)]}}
    model = infinity.offload(model, config | {"memory": {"device": "8MiB", "host": "64MiB"}})
    optim: Any = infinity.AdamW(model.parameters(), lr=1e-3)
    model(**batch).loss.backward()
    optim.step()
    infinity.close(model)
