"""`infinity checkpoint` on stores whose generations checkpoint folders pin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import infinity
from infinity.cli.main import main
from infinity.io.directory import pinned_in
from infinity.io.generation_pins import MARKER_NAME, PINS_NAME
from infinity.runtime.pins import pinned
from tests.runtime.test_pins import Run, same

Said = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ended at step 6; checkpoint-2 and checkpoint-4 are pinned."""
    made = Run(tmp_path)
    for step in (2, 4):
        made.to(step).save()
    made.to(6).end()
    return made


def act(verb: str, run: Run, *options: object) -> int:
    return main(["checkpoint", verb, str(run.root / "swap"), *map(str, options)])


def steps(run: Run) -> list[int]:
    again = Run(run.root, resumes=True)
    found = list(pinned(again.model).values())
    again.end()
    return found


def test_list_names_who_pins_and_whose_folder_is_gone(run: Run, capsys: Said) -> None:
    shutil.rmtree(run.folder(4))
    assert act("list", run) == 0
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines() if "committed" in line]
    assert [line.split("of states")[1] for line in lines] == [
        "",
        f", pinned by {run.folder(4)} (its folder is gone)",
        f", pinned by {run.folder(2)}",
    ]


def test_a_generation_that_is_kept_and_pinned_is_one_generation(tmp_path: Path, capsys: Said) -> None:
    run = Run(tmp_path).to(3)
    run.save()
    run.end()
    assert act("list", run) == 0
    out = capsys.readouterr().out
    assert out.count("generation        3") == 1
    assert f"pinned by {run.folder(3)}" in out
    assert act("verify", run) == 0
    assert capsys.readouterr().out.count("generation 3: ") == 1


def test_verify_reads_pinned_generations_too(run: Run, capsys: Said) -> None:
    assert act("verify", run) == 0
    out = capsys.readouterr().out
    assert all(f"generation {step}: " in out for step in (2, 4, 6))
    manifest = pinned_in(run.root / "swap")[0]
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert act("verify", run) == 1
    assert act("list", run) == 1
    assert f"damaged: {manifest}" in capsys.readouterr().out


def test_export_finds_a_pinned_generation_by_its_step(run: Run, tmp_path: Path) -> None:
    assert act("export", run, "--output", tmp_path / "copy", "--step", 2) == 0
    assert (tmp_path / "copy" / "SHA256SUMS").exists()


def test_unpin_lets_one_folder_go_whether_it_is_there_or_not(run: Run, capsys: Said) -> None:
    assert act("unpin", run, "--folder", run.folder(2)) == 0
    assert f"unpinned {run.folder(2)} (generation 2)" in capsys.readouterr().out
    assert not (run.folder(2) / MARKER_NAME).exists()
    shutil.rmtree(run.folder(4))
    assert steps(run) == [4]
    assert act("unpin", run, "--folder", run.folder(4)) == 0
    assert pinned_in(run.root / "swap") == []
    assert steps(run) == []


def test_unpin_all_gone_leaves_the_folders_that_are_there(run: Run, capsys: Said) -> None:
    assert act("unpin", run, "--all-gone") == 0
    assert "nothing was unpinned" in capsys.readouterr().out
    shutil.rmtree(run.folder(2))
    assert act("unpin", run, "--all-gone") == 0
    assert steps(run) == [4]


def test_unpin_says_what_is_missing_and_what_is_pinned(run: Run, capsys: Said) -> None:
    assert act("unpin", run) == 2
    assert "--folder FOLDER, or --all-gone" in capsys.readouterr().err
    assert act("unpin", run, "--folder", "elsewhere") == 2
    assert f"Pins there: {run.folder(2)} (generation 2)" in capsys.readouterr().err
    again = Run(run.root, resumes=True)
    assert act("unpin", run, "--folder", run.folder(2)) == 2
    assert "in use by another run" in capsys.readouterr().err
    again.end()


def test_remove_is_refused_while_folders_pin_and_leaves_none_that_looks_resumable(run: Run, capsys: Said) -> None:
    assert act("remove", run) == 2
    said = capsys.readouterr().err
    assert f"{run.folder(2)} (generation 2)" in said
    assert "--folder FOLDER" in said
    assert "--pinned" in said
    again = Run(run.root, folder=run.folder(2))
    assert again.done == 2
    again.end()
    assert act("remove", run, "--pinned") == 0
    assert not (run.folder(2) / MARKER_NAME).exists()
    assert not (run.root / "swap" / PINS_NAME).exists()
    Run(run.root).end()


def test_remove_needs_no_option_for_folders_that_are_gone(run: Run) -> None:
    shutil.rmtree(run.root / "out")
    assert act("remove", run) == 0
    assert not (run.root / "swap").exists() or not list((run.root / "swap").iterdir())


def test_damaged_pins_are_named_and_stop_whoever_would_lose_a_generation(run: Run, capsys: Said) -> None:
    pins = run.root / "swap" / PINS_NAME
    pins.write_bytes(pins.read_bytes()[:-1])
    assert act("list", run) == 1
    assert f"damaged: {pins}" in capsys.readouterr().out
    with pytest.raises(infinity.ManifestError, match="put an undamaged copy back, or remove"):
        Run(run.root, resumes=True)
    assert act("remove", run) == 2
    pins.unlink()
    again = Run(run.root, resumes=True).to(7)
    assert pinned(again.model) == {}
    again.end()
    assert pinned_in(run.root / "swap") == []


def test_a_pinned_generation_stands_in_for_a_damaged_newest_one(run: Run) -> None:
    (manifest,) = (run.root / "swap").glob("generation-*")
    manifest.write_bytes(b"")
    again = Run(run.root, resumes=True)
    assert again.done == 4
    from_folder, found = again.bits, again
    found.end()
    again = Run(run.root, folder=run.folder(4))
    assert same(again.bits, from_folder)
    again.end()
