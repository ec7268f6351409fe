"""The swap config is strict, and says what is wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import infinity
from infinity.cli.main import main
from infinity.sizes import format_bytes, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 64 << 20), ("2.5GB", 2_500_000_000), ("1 KiB", 1024), ("7", 7), (12, 12), ("1gib", 1 << 30)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "1XB", "-3MiB", True, [1]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_written_and_rounded() -> None:
    assert format_bytes(3 << 29) == "1.50 GiB"
    assert format_bytes(100) == "100 B"
    assert round_up(4097, 4096) == 8192


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("weights: nvme\nmemory: {device: 1GiB}\nnvme: {paths: /tmp/x, block: 2MiB}\n")
    values = {"weights": "nvme", "memory": {"device": "1GiB"}, "nvme": {"paths": ["/tmp/x"], "block": "2MiB"}}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert infinity.load_config(tmp_path / "a.yaml") == infinity.load_config(tmp_path / "a.json")
    assert infinity.load_config(tmp_path / "a.yaml") == infinity.load_config(values)


@pytest.mark.parametrize("text", ["off", "'off'", "false"])
def test_a_bare_off_is_a_word(text: str, tmp_path: Path) -> None:
    """YAML takes it for false."""
    (tmp_path / "swap.yaml").write_text(f"overlap: {text}\n")
    assert infinity.load_config(tmp_path / "swap.yaml").overlap == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvme: {queue_dept: 3}", "unknown key 'nvme.queue_dept'; did you mean 'nvme.queue_depth'"),
        ("zzz: 3", "unknown key 'zzz'; known keys: weights"),
        ("weights: disk", "weights: Input should be 'device', 'host', 'nvme' or 'auto'"),
        ("optimizer: ssd", "swap.yaml: optimizer: Input should be 'device', 'host', 'nvme' or 'auto' (given: 'ssd')"),
        (
            "activations: recomputed",
            "Input should be 'auto', 'keep', 'recompute', 'host' or 'nvme' (given: 'recomputed'); did you mean",
        ),
        ("gradients: device", "swap.yaml: gradients: device is not available yet; use gradients: host, nvme or auto"),
        ("overlap: before_foward", "(given: 'before_foward'); did you mean 'before_forward'?"),
        ("overlap: on", "overlap: Input should be 'auto'"),
        ("memory: {host: lots}", "memory.host: 'lots' is not a size"),
        ("nvme: {queue_depth: 0}", "nvme.queue_depth"),
        ("[1, 2]", "expected keys and values, found list"),
        ("a: [", "not valid YAML"),
        ("memory: {host: 12:30:00}", "'12:30:00' is not a size"),
        ("memory: {host: 010}", "'010' is not a size"),
        ("memory: {host: 0x10}", "'0x10' is not a size"),
        ("memory: {host: 1e9}", "1000000000.0 is not a size"),
        ("memory: {host: 2026-11-22}", "'2026-11-22' is not a size"),
        (f"memory: {{host: {'9' * 400}}}", "(400 characters) is not a size"),
        (f"memory: {{host: {'9' * 400}GiB}}", "(403 characters) is not a size"),
        ("memory: {host: 2000000TiB}", "'2000000TiB' is more than 1 EiB"),
        ("memory: 3", "memory: write keys and values here: device, host (given: 3)"),
        ("weights: no", "(given: 'no')"),
        ("nvme: {deadline_s: .inf}", "nvme.deadline_s"),
        ("nvme: {deadline_s: nan}", "nvme.deadline_s"),
        ("nvme: {deadline_s: true}", "nvme.deadline_s: write a number"),
        ("nvme: {queue_depth: true}", "nvme.queue_depth: write a whole number"),
        ("commit_every: yes", "commit_every: write auto, or a whole number, such as 32 (given: 'yes')"),
        ("commit_every: -1", "commit_every: the number of steps must be 0 or more"),
        ("commit_every: 10000000000000", "commit_every: the number of steps must be 0 or more"),
        ("keep: 1.0", "keep: write a whole number"),
        ("update: {threads: 100000}", "update.threads: Input should be less than or equal to 1024"),
        ("nvme: {paths: ''}", "nvme.paths.0: '' is not a valid name of a file or directory"),
        ("nvme: {paths: [/tmp/a, /tmp/./a]}", "'/tmp/a' and '/tmp/a' are the same directory"),
        ('nvme: {paths: "a\\0b"}', "'a\\x00b' cannot be the name of a file or directory"),
        ('nvme: {paths: "\\ud800"}', "is not UTF-8"),
        ("nvme: {paths: ~nobody.here/swap}", "~nobody.here/swap"),
        (f"nvme: {{paths: {'a' * 300}}}", "cannot be the name of a file or directory"),
        ("weights: host\nmemory: {}\nweights: nvme", "'weights' is given twice, in lines 1 and 3"),
        ("nvme: {block: 1MiB, block: 2MiB}", "'block' is given twice"),
        ("weights: &a host\noptimizer: *a", "anchors (&) and aliases (*) are not supported"),
        ("weights: !!python/name:os.system", "tags (!) are not supported"),
        ("weights: !!str host", "tags (!) are not supported"),
        ("<<: {weights: host}", "unknown key '<<'"),
        ("[" * 5000, "nested more than 16 deep"),
        ("? [a]\n: b", "a key must be one word"),
        ("1: 2", "unknown key '1'; known keys: weights"),
        ('weights: "\\e[31mred"', "(given: '\\x1b[31mred')"),
        ('"\\e[31mred": 1', "unknown key '\\x1b[31mred'"),
        ("\n".join(f"k{number}: 1" for number in range(500)), "and 490 more"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(text)
    with pytest.raises(infinity.ConfigError) as caught:
        infinity.load_config(tmp_path / "swap.yaml")
    assert message in str(caught.value)
    assert "swap.yaml" in str(caught.value)


def test_a_long_value_is_shown_in_short(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(f"weights: {'x' * 60_000}\n")
    with pytest.raises(infinity.ConfigError, match="(60000 characters)") as caught:
        infinity.load_config(tmp_path / "swap.yaml")
    assert len(str(caught.value)) < 1000
    with pytest.raises(infinity.ConfigError) as caught:
        infinity.load_config({"weights": ["y" * 10_000_000] * 1000})
    assert len(str(caught.value)) < 1000


def test_few_aliases_that_stand_for_gigabytes_are_refused(tmp_path: Path) -> None:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    (tmp_path / "swap.yaml").write_text("\n".join(lines))
    with pytest.raises(infinity.ConfigError, match="line 1.*") as caught:
        infinity.load_config(tmp_path / "swap.yaml")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"weights: \xff\xfe", "not UTF-8 text"),
        ("weights: host\n".encode("utf-16"), "not UTF-8 text"),
        (bytes(range(256)) * 100, "not UTF-8 text"),
        (b"weights: \x00", "not valid YAML"),
        (b"#" * 70_000, "at most 64.00 KiB can be read"),
    ],
)
def test_what_is_no_text_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_bytes(data)
    with pytest.raises(infinity.ConfigError, match=message):
        infinity.load_config(tmp_path / "swap.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text("weights: host\n", encoding="utf-8-sig")
    assert infinity.load_config(tmp_path / "swap.yaml").weights == "host"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weights": "host", "weights": "nvme"}', "the key 'weights' is given twice"),
        ('{"nvme": {"deadline_s": NaN}}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"memory": {{"host": {"9" * 400}}}}}', "an integer of 1329 bits is more than 1 EiB"),
        (f'{{"memory": {{"host": {"9" * 5000}}}}}', "not valid JSON"),
    ],
)
def test_json_is_as_strict(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "swap.json").write_text(text[:60_000])
    with pytest.raises(infinity.ConfigError, match=re.escape(message)):
        infinity.load_config(tmp_path / "swap.json")


@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "", "folder", "missing", "a\0b", "n" * 300])
def test_only_regular_files_are_read(path: str, tmp_path: Path) -> None:
    """A FIFO would be waited for, and /dev/zero read, for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with pytest.raises(infinity.ConfigError, match="cannot read the swap config"):
        infinity.load_config(tmp_path / path)


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_swap_directory_that_is_a_file_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(infinity.ConfigError, match="file is not a directory"):
        infinity.load_config({"nvme": {"paths": [str(tmp_path / path)]}})


@pytest.mark.parametrize("word", ["on", "yes", "true", "'true'"])
def test_words_for_true_stay_true(word: str, tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(f"nvme: {{checksums: {word}, deadline_s: 1e3}}\n")
    nvme = infinity.load_config(tmp_path / "swap.yaml").nvme
    assert (nvme.checksums, nvme.deadline_s) == (True, 1000.0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 330.0),
        ({"nvme": {"deadline_s": 60}}, 90.0),
        ({"ranks": {"deadline_s": 7200}}, 7200.0),
        ({"ranks": {"deadline_s": None}}, 330.0),
    ],
)
def test_ranks_wait_longer_than_a_disk_may_take(given: dict[str, dict[str, float]], seconds: float) -> None:
    assert infinity.load_config(given).ranks_deadline_s == seconds


def test_a_config_of_deepspeed_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys are not named one by one: the message names the command that makes a swap config of it."""
    theirs, ours = tmp_path / "ds.json", tmp_path / "swap.yaml"
    theirs.write_text('{"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto"}}')
    with pytest.raises(
        infinity.ConfigError, match=f"`infinity convert {theirs} -o swap.yaml` makes a swap config of it"
    ):
        infinity.load_config(theirs)
    assert main(["convert", str(theirs), "-o", str(ours)]) == 0
    capsys.readouterr()
    infinity.load_config(ours)
