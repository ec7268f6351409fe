"""DeepSpeed configs that are odd, mutated or something else: each is a swap config that infinity reads, or an error of
one line."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.cli import main as infinity_main
from infinity.cli.deepspeed.keys import KEYS
from tests.cli.deepspeed.public import PUBLIC
from tests.hostile.limits import failures, printed
from tests.sampling import number, seed

CASES = number(16, 1000, "INFINITY_HOSTILE")
_PARTS = 2
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 1e400, -1e400, 1e-400, 0.1, 10**30, 2**63, "", " ", "auto", "none", "nvme", "cpu",
    "true", "3", "1e9", "0x10", "NaN", "x" * 5000, "\x00", "\x1b[2J", "\u202e", "\ud800", "/dev/null",
    "/proc/self/mem", "~nobody.here", "a\nb", "# x", "*a", "!x", [], [[]], ["auto"], [1] * 1000, {}, {"auto": "auto"},
    {"enabled": "auto"}, {"enabled": [1]}, {"": 0}, {"device": "nvme"}, {"device": {"device": "auto"}},
    {"params": {"lr": "auto"}}, {"\x1b[2J": 1},
]  # fmt: skip
TEXTS = [
    "", " ", "[]", "[{}]", "null", "3", '"x"', "{", "}", "{}", "{]", '{"a"}', '{"bf16": {"enabled": NaN}}',
    '{"gradient_clipping": Infinity}', '{"gradient_clipping": -Infinity}', '{"fp16": {}, "fp16": {"enabled": true}}',
    '{"zero_optimization": {"stage": 2, "stage": 3}}', '{"zero_optimization": "auto"}', '{"zero_optimization": [3]}',
    '{"train_batch_size": ' + "9" * 5000 + "}", '{"train_batch_size": ' + "9" * 400 + "}",
    '{"gradient_clipping": 1e999}', '{"zero_optimization": ' * 500 + "{}" + "}" * 500, "[" * 100_000,
    '{"a":' * 100_000, "\ufeff{}", "// x\n{}", "/* x */ {}", '{"bf16": {"enabled": true}} trailing', "{'bf16': {}}",
    '{"bf16": {"enabled": True}}', '{"\ud83d\ude00": 1, "bf16": {}}',
    json.dumps({f"key{each}": each for each in range(number(5_000, 50_000))} | {"bf16": {}}),
    json.dumps({"zero_optimization": {f"stage{each}": each for each in range(number(2_000, 20_000))}}),
    json.dumps({"bf16": {}, "n" * 500_000: "v" * 400_000}), "x" * (2 << 20), "\x00" * 1000,
]  # fmt: skip


def mutated(draw: random.Random) -> str:
    """Return a public config in which some values or keys are odd."""
    values = copy.deepcopy(draw.choice(PUBLIC).values)
    for _ in range(draw.randrange(1, 5)):
        place = values
        while draw.random() < 0.7 and (inner := [each for each in place.values() if isinstance(each, dict) and each]):
            place = draw.choice(inner)
        key = draw.choice([*place, draw.choice(list(KEYS)).rpartition(".")[2], "zzz"])
        place[key] = copy.deepcopy(draw.choice(ODD))
    return json.dumps(values)


def cases() -> list[tuple[str, str]]:
    """(name of a file, its text)."""
    draw = random.Random(seed("INFINITY_HOSTILE_SEED"))
    made = [(name, text) for text in TEXTS for name in ("ds.json", "ds.yaml")]
    return made + [(draw.choice(["ds.json", "ds.yaml"]), mutated(draw)) for _ in range(CASES)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_an_odd_config_ends_in_a_swap_config_or_one_line(part: int, tmp_path: Path) -> None:
    made = []
    for index, (name, text) in enumerate(cases()[part::_PARTS]):
        place = tmp_path / str(index)
        place.mkdir()
        (place / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        made.append((str(place), name))
    assert failures(check, made, tmp_path) == []


def check(case: tuple[str, str]) -> None:
    place, name = case
    os.chdir(place)
    with printed(Path(place)) as (out, errors):
        code = infinity_main.main(["convert", name])
    said, text = errors.read_text(errors="surrogateescape"), out.read_text()
    assert "Traceback" not in said, said
    assert "\x1b" not in said + text
    assert code in (0, 2), (code, said)
    if code:
        assert said.startswith("error: "), said
        assert said.count("\n") == 1, said
        assert len(said) < 1500, said
        assert text == ""
        return
    Path("swap.yaml").write_text(text)
    infinity.load_config("swap.yaml")
    assert "tart the same training with" in said
    assert len(said) < 100_000
