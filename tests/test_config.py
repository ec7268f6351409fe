"""The swap config is strict, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import infinity
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
        ("overlap: before_foward", "(given: 'before_foward'); did you mean 'before_forward'?"),
        ("overlap: on", "overlap: Input should be 'auto'"),
        ("memory: {host: lots}", "memory.host: 'lots' is not a size"),
        ("nvme: {queue_depth: 0}", "nvme.queue_depth"),
        ("[1, 2]", "expected keys and values, found list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "swap.yaml").write_text(text)
    with pytest.raises(infinity.ConfigError) as caught:
        infinity.load_config(tmp_path / "swap.yaml")
    assert message in str(caught.value)
    assert "swap.yaml" in str(caught.value)
