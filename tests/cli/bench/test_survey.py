"""infinity-bench as a user calls it: what it prints, writes and leaves behind, and how it says no."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity import _native
from infinity.cli.bench import main as entry
from infinity.cli.bench import scratch as scratch_module
from infinity.cli.bench.main import main
from infinity.cli.bench.scratch import ScratchFile
from infinity.cli.bench.workload import Workload, WorkloadRunner, verify
from infinity.config import load_config
from infinity.errors import BenchError
from infinity.io.disk_profile import profile_of
from infinity.sizes import parse_bytes
from tests.processes import Forked

SMALL = ["--size", "32MiB"]


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory and few settings: these tests are about what is done, not about rates."""
    from infinity.cli.bench import survey, sweep

    monkeypatch.setattr(survey, "_MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(survey, "_SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(sweep, "DEPTHS", (1, 4))
    monkeypatch.setattr(sweep, "BLOCKS", (256 << 10, 1 << 20))
    monkeypatch.setattr(sweep, "_REPEATS", 2)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("engine", ["auto", pytest.param("threads", marks=pytest.mark.long)])
def test_a_survey_prints_a_config_that_infinity_accepts(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = ["--path", str(disk), "--engine", engine, "--json", str(report), *SMALL]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "verified: all 32 MiB were read back as they were written" in out
    text = out[out.index("# measured") :]
    (tmp_path / "swap.yaml").write_text(text)
    config = load_config(tmp_path / "swap.yaml")
    assert config.nvme.paths == [disk / "infinity-swap"]
    assert left_in(disk) == []
    profile = profile_of(disk)
    assert profile is not None
    assert (profile.block_bytes, profile.in_flight_bytes) == (config.nvme.block, config.nvme.in_flight)
    check_json(json.loads(report.read_text()), engine)


def check_json(survey: dict[str, Any], engine: str) -> None:
    assert (survey["schema"], survey["version"]) == ("infinity-bench", 3)
    assert engine in ("auto", survey["engine"])
    (path,) = survey["paths"]
    points = path["points"]
    assert {point["kind"] for point in points} == {"read", "overwrite", "mixed"}
    assert all(point["rate"] > 0 <= point["spread"] for point in points)
    choice = path["choice"]
    assert choice["mixed_rate"] in [point["rate"] for point in points if point["kind"] == "mixed"]
    assert choice["path"] == path["path"]
    assert path["written_bytes"] > 2 * (32 << 20)


def test_several_paths_are_all_measured_and_all_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = [tmp_path / name for name in "ab"]
    for disk in disks:
        disk.mkdir()
    assert main(["--path", *map(str, disks), *SMALL]) == 0
    out = capsys.readouterr().out
    assert f'paths: ["{disks[0]}/infinity-swap", "{disks[1]}/infinity-swap"]' in out


def test_sustained_writing_goes_on_until_the_rate_settles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.cli.bench import survey, sustained

    monkeypatch.setattr(sustained, "_MINUTE_S", 0.05)
    monkeypatch.setattr(survey, "_LIMIT_S", 3.0)
    assert main(["--path", str(tmp_path), "--sustained", *SMALL]) == 0
    assert re.search(r"overwriting, in one minute: \d+\.\d\d GB/s, [\d.]+ [KMG]iB written", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, 1.0], False),
        ([3.0, 1.0, 1.01, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0, 1.04, 1.08], True),
    ],
)
def test_settled_means_three_minutes_within_five_percent(rates: list[float], outcome: bool) -> None:
    from infinity.cli.bench.sustained import settled

    assert settled(rates) is outcome


# ----------------------------------------------------------------------------------------------------------- wrong data


@pytest.mark.parametrize("kind", ["flip", "stale", "misdirect"])
def test_data_that_come_back_changed_are_an_error(kind: str, tmp_path: Path) -> None:
    with ScratchFile(tmp_path, 16 << 20) as scratch:
        fault = _native.Fault(3, kind)  # type: ignore[arg-type]
        with pytest.raises(BenchError, match="WRONG DATA.*differ from the data written"):
            verify(scratch, [fault])


def test_a_timed_read_of_wrong_data_is_an_error_too(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, 16 << 20) as scratch:
        rig = WorkloadRunner(scratch, 16 << 20)
        rig.fill()
        with open(scratch.open_path, "r+b") as raw:
            raw.seek(5 * 4096 + 17)
            raw.write(b"x")
        with pytest.raises(BenchError, match="WRONG DATA: page 5"):
            rig.run(Workload("read", 1 << 20, 4, 16 << 20))


def test_wrong_data_end_the_command_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infinity.cli.bench import survey

    monkeypatch.setattr(survey, "verify", lambda scratch: verify(scratch, [_native.Fault(0, "flip")]))
    assert main(["--path", str(tmp_path), *SMALL]) == 1
    assert "WRONG DATA" in capsys.readouterr().err
    assert left_in(tmp_path) == []
    assert profile_of(tmp_path) is None  # nothing is recommended for such a disk


# ----------------------------------------------------------------------------------------------------------- saying no


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "/nonexistent/place"], "not a directory"),
        (["--path", "{}", "--size", "1000TiB"], "of the disk free"),
        (["--path", "{}", "--path", "{}", "{}/."], "are the same directory"),
        (["--path", "{}", "--size", "0"], "--size: must be between 16.00 MiB and"),
        (["--path", "{}", "--size", "1"], "--size: must be between 16.00 MiB and"),
        (["--path", "{}", "--size", "9" * 400], "is not a size"),
        (["--path", "{}", "--json", "{}"], "--json: cannot write to"),
        (["--path", "{}", "--json", "{}/no/x.json"], "--json: cannot write to"),
        (["--path", "{}", "--json", "/dev"], "--json: cannot write to"),
        (["--path", "{}", "--siz", "1GiB"], "unknown argument '--siz'; did you mean --size?"),
        (["step"], "unknown argument 'step'"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert left_in(tmp_path) == []


def test_what_will_be_written_is_said_before_and_is_not_exceeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--path", str(tmp_path), "--size", "40MiB"]) == 0
    out = capsys.readouterr().out
    assert "--size 40.00 MiB: 32.00 MiB are used" in out
    said = re.search(r"will write to .*: ([0-9.]+ [KMG]iB) at most", out)
    did = re.search(r"written to this disk: about ([0-9.]+ [KMG]iB)", out)
    assert said is not None
    assert did is not None
    assert out.index(said[0]) < out.index(" GB/s")
    assert 0 < int(str(parse_bytes(did[1]))) <= int(str(parse_bytes(said[1])))


@pytest.mark.parametrize("cache", ["~nobody.here", "/dev/null"])
def test_a_survey_that_cannot_be_remembered_is_a_survey(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert main(["--path", str(tmp_path), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "The planner cannot read these figures" in out
    assert "A swap config for these disks" in out
    assert profile_of(tmp_path) is None


def test_a_small_file_is_not_written_over_and_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--path", str(tmp_path), "--size", "16MiB"]) == 0
    did = re.search(r"written to this disk: about ([0-9.]+) MiB", capsys.readouterr().out)
    assert did is not None
    assert float(did[1]) < 16 * 20


def test_a_path_that_looks_like_markup_is_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "[bold]a: #, b[/]"
    disk.mkdir(parents=True)
    assert main(["--path", str(disk), *SMALL]) == 0
    out = capsys.readouterr().out
    (tmp_path / "swap.yaml").write_text(out[out.index("# measured") :])
    assert load_config(tmp_path / "swap.yaml").nvme.paths == [disk / "infinity-swap"]


@pytest.mark.parametrize(
    ("total", "kept"), [(10 << 30, (10 << 30) // 20), (252 << 30, 2 << 30)], ids=["a small disk", "a large disk"]
)
def test_some_space_stays_free(total: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = kept + (48 << 20)
    usage = SimpleNamespace(total=total, free=free)
    monkeypatch.setattr(scratch_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BenchError, match="set --size to at most 48.00 MiB"):
        ScratchFile(tmp_path, 512 << 20)
    ScratchFile(tmp_path, 48 << 20).close()


# ---------------------------------------------------------------------------------------------------------- cleaning up


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    child = Forked(main, ["--path", str(tmp_path), "--sustained", *SMALL])
    deadline = time.monotonic() + 60
    while not (scratch := opened_in(tmp_path, child.pid)):
        assert child.returncode is None, child.finished()
        assert time.monotonic() < deadline
    with scratch[0].open("rb") as file:  # its space is given back when nobody has it open and it has no name
        child.send_signal(number)
        printed, _ = child.finished()
        assert os.fstat(file.fileno()).st_nlink == 0
    assert child.returncode == (-number if number == signal.SIGKILL else 130), printed
    assert left_in(tmp_path) == ["mine"]
    assert (tmp_path / "mine").read_text() == "keep me"


def opened_in(directory: Path, pid: int) -> list[Path]:
    """Return the descriptors of files below a directory that a process has open and that no longer have a name."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name, names = os.readlink(descriptor), descriptor.stat().st_nlink
        except OSError:
            continue
        if name.startswith(str(directory)) and names == 0:
            found.append(descriptor)
    return found


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (point,) = entry_points(group="console_scripts", name="infinity-bench")
    assert point.load() is entry.main
