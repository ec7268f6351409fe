"""Whatever --data names ends in a dataset or in one line that says what is wrong: soon, in bounded memory, never with a
traceback and never as a success that did nothing. 24 cases; 1,000 with INFINITY_TESTS=all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests import sampling
from tests.hostile.data_files import make
from tests.processes import run

CASES = sampling.number(24, 1000)
CASES_OF_A_PROCESS = 125
MEMORY_BYTES = 500 << 20
DEADLINE_S = 60


def test_hostile_data_ends_in_a_dataset_or_one_line(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for first in range(0, CASES, CASES_OF_A_PROCESS):
        numbers = list(range(first, min(first + CASES_OF_A_PROCESS, CASES)))
        ended = run(_try, numbers, sampling.SEED, tmp_path)
        found += [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        assert len(found) == numbers[-1] + 1, f"case {len(found)} of seed {sampling.SEED}: {ended}"
    assert [case for case in found if case["problem"]] == []
    ends = Counter(case["end"] for case in found)
    print(dict(ends))
    assert min(ends["data"], ends["error"]) >= CASES // 100, "cases of both kinds, or the test says little"


def _try(numbers: list[int], seed: int, directory: Path) -> None:
    """Print what each case ended in, as JSON."""
    from infinity.cli.data import PackedDataset
    from tests.cli.test_data import CHAT
    from tests.cli.test_finetune import tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    by = tokenizer()
    by.chat_template = CHAT
    by("the fox")
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _too_late)
    for number in numbers:
        place = directory / f"{number}"
        place.mkdir()
        kind, paths = make(number, seed, place)
        signal.alarm(DEADLINE_S)
        try:
            data = PackedDataset(paths, by, 4, directory, loss_on="all")
            end, problem = "data", _problem_of_data(data, by)
            data.close()
        except BaseException as error:
            end, problem = "error", _problem_of_error(error)
        finally:
            signal.alarm(0)
        print(json.dumps({"case": number, "kind": kind, "end": end, "problem": problem}), flush=True)
        shutil.rmtree(place)


class TooLate(BaseException):
    """No OSError, as TimeoutError is one: that would pass for a file that cannot be read."""


def _too_late(*_: Any) -> None:
    raise TooLate


def _problem_of_data(data: Any, by: Any) -> str:
    """Why a dataset should not have been made of it; '' where it should."""
    words: set[int] = set()
    for first in range(0, data.sequences, 10_000):
        words.update(data.rows(range(first, min(first + 10_000, data.sequences))).ids.unique().tolist())
    if words <= {by.eos_token_id, by.unk_token_id}:
        return "there is nothing to learn in it"
    if data.largest_token >= len(by) or max(words) > data.largest_token:
        return "tokens that there are not"
    if not all(note.isprintable() for note in data.notes()):
        return "notes that command a terminal"
    return ""


def _problem_of_error(error: BaseException) -> str:
    """Why it is no error that a user can use; '' where it is."""
    from infinity.errors import ConfigError

    text = str(error)
    if not isinstance(error, ConfigError):
        return f"{type(error).__name__}: {text[:300]}"
    if not text.startswith("--data ") or not text.isprintable() or len(text) > 2000:
        return f"not one line about --data: {text[:300]!r}"
    return ""
