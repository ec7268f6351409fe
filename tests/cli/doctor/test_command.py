"""`infinity doctor` as the shell runs it: on this machine, and with wrong arguments."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinity.cli import main
from infinity.cli.doctor import command
from infinity.cli.doctor.command import doctor, groups
from infinity.cli.doctor.probes import Probe, ProbeFinding, ProbeGroup
from infinity.config import SwapConfig
from infinity.errors import InfinityError
from tests.cli.test_main import ended

SECTIONS = ["versions", "native core", "memory", "container", "GPU", "NUMA"]


def whats(rows: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(row["section"], row["what"]) for row in rows}


@pytest.mark.long(kept="only here the command is a process as a shell starts it, which has imported nothing before")
def test_this_machine_is_reported_with_all_rows_and_nothing_is_left(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump({"nvme": {"paths": [str(tmp_path / "a")]}}))
    line = ("doctor", str(tmp_path / "swap.yaml"), "--swap-dir", str(tmp_path / "b"))
    done = ended("infinity", *line, "--json")
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (0 if found["ready"] else 1)
    config = SwapConfig.model_validate({})
    probed = groups(config, [tmp_path / "a", tmp_path / "b"], given=True)
    expected = {(probe.section, probe.what) for group in probed for probe in group.probes}
    of_a_gpu = {("GPU", name) for name in ("GPU", "runtime", "copies")}
    assert whats(found["rows"]) >= expected - of_a_gpu
    assert {row["state"] for row in found["rows"]} <= {"ok", "slower", "missing", "unknown"}
    assert not [row for row in found["rows"] if "Error" in row["finding"]]
    assert [row["section"] for row in found["rows"] if row["what"] == "free space"] == [
        f"disk {tmp_path / 'a'}",
        f"disk {tmp_path / 'b'}",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "swap.yaml"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the probes in this process (tests/cli/doctor/test_subprocess_probes.py runs some in processes)."""

    def look(groups: Sequence[ProbeGroup]) -> list[ProbeFinding]:
        return [row for group in groups for probe in group.probes for row in probe.rows(probe.look())]

    monkeypatch.setattr(command, "look", look)
    monkeypatch.setattr(command, "ends", lambda act, within_s: True)


@pytest.mark.usefixtures("in_this_process")
def test_the_table_begins_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main.main(["doctor"])
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith(("ready: ", "not ready: "))
    assert set(SECTIONS) | {"disk ."} <= set(lines)
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.yaml"], "cannot read the swap config missing.yaml"),
        (["wrong.yaml"], "unknown key 'weigths'; did you mean 'weights'?"),
        (["--swap-dir"], "expected at least one argument"),
        (["--swap-dir", ".", "."], "are the same directory"),
        (["a", "b"], "unknown argument"),
        (["--swap-dir", ""], "is not a valid name of a file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text("weigths: nvme")
    monkeypatch.chdir(tmp_path)
    assert main.main(["doctor", *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert len(errors.splitlines()) == 1
    assert said in errors


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the machine found like this."""

    def give(*each: ProbeFinding) -> None:
        probes = [Probe("section", "what", lambda: list(each))]
        monkeypatch.setattr(command, "groups", lambda config, paths, given: [ProbeGroup(probes, 60)])

    return give


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("states", "code"), [(["ok"], 0), (["slower", "unknown"], 0), (["ok", "missing"], 1)], ids=str)
def test_only_what_is_missing_is_a_failure(
    states: list[Any], code: int, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found(*(ProbeFinding(state, "so") for state in states))
    assert main.main(["doctor"]) == code


def test_a_directory_that_does_not_answer_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ends", lambda act, within_s: False)
    with pytest.raises(InfinityError, match="does not respond within"):
        doctor(argparse.Namespace(config=None, swap_dir=[], json=False, report=False))


@pytest.mark.parametrize(
    ("config", "state"),
    [({"weights": "host", "optimizer": "host"}, "ok"), ({"optimizer": "nvme"}, "missing")],
)
def test_a_config_without_paths_may_need_some(config: dict[str, str], state: str) -> None:
    made = groups(SwapConfig.model_validate(config), [], given=True)
    (probe,) = [probe for group in made for probe in group.probes if probe.section == "disk"]
    (row,) = probe.rows(probe.look())
    assert row.state == state


def test_sections_are_in_one_order_whatever_is_slow(found: Any, tmp_path: Path) -> None:
    made = groups(SwapConfig(), [tmp_path], given=False)
    sections = list(dict.fromkeys(probe.section for group in made for probe in group.probes))
    assert sections == [*SECTIONS[:5], f"disk {tmp_path}", "NUMA"]


def test_the_report_for_an_issue_has_what_the_machine_is_and_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home" / "anna"
    home.mkdir(parents=True)
    for name, value in (("HOME", home), ("USER", "anna")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(platform, "node", lambda: "box7.lab.example")
    main.main(["doctor", "--report", "--swap-dir", str(home / "my swap"), str(tmp_path / "other" / "gone")])
    said = capsys.readouterr().out
    assert said.startswith("<details><summary>infinity ")
    assert said.endswith("\n```\n\n</details>\n")
    for section in (*SECTIONS, "disk SWAP_DIR_1", "disk SWAP_DIR_2"):
        assert f"\n{section}\n" in said
    assert f"system                Linux {platform.release()}" in said
    for name in ("anna", "box7", "my swap", "/tmp", str(tmp_path), "→"):
        assert name not in said


def test_a_report_has_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--report", "--json"]) == 2
    assert "not allowed with" in capsys.readouterr().err
