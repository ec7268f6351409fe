"""A store whose headers are damaged or missing is resumed, listed, verified and exported all the same; whatever could
be of another run, or of no step, is refused, and nothing is written to it."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import _native, files
from infinity.cli.job import _past, _saved_config
from infinity.cli.main import main
from infinity.errors import (
    DirtyStoreError,
    ManifestError,
    NewerVersionError,
    ResumeError,
    StoreNotEmptyError,
    SwapIOError,
)
from infinity.io import atomic_file, document, store
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from infinity.io.generations import Generations
from infinity.io.manifest import read_manifest, write_manifest
from infinity.io.store import SwapStore
from infinity.sizes import PAGE_BYTES
from tests.conftest import weights_of
from tests.io.extents import ExtentMap

STEPS = 2
DISKS = ("a", "b")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


def config(*paths: Path, **overrides: Any) -> dict[str, Any]:
    nvme = {"paths": [str(path) for path in paths], "engine": "threads"} | overrides.pop("nvme", {})
    base = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "1MiB", "host": "64MiB"}}
    return base | {"nvme": nvme, "update": {"tile": "16KiB", "threads": 1}, "commit_every": 1, "keep": 2} | overrides


def trained(settings: dict[str, Any], seed: int = 0, stripe: int = 4096) -> dict[str, torch.Tensor]:
    """Weights after a run of STEPS steps that has ended; every state is on both disks, where stripes are as short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "STRIPE_BYTES", stripe)
        patch.setattr(store, "_probe", lambda *_: 1e9)
        net = infinity.offload(build(), settings)
    optim = infinity.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        net(
            torch.randn(4, 64, generator=torch.Generator().manual_seed(seed + step)).bfloat16()
        ).square().mean().backward()
        optim.step()
        optim.zero_grad()
    result = weights_of(net)
    infinity.close(net)
    return result


Run = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("run")
    return root, trained(config(*(root / disk for disk in DISKS)))


@pytest.fixture
def disks(made: Run, tmp_path: Path) -> list[Path]:
    """A copy of the run's directories."""
    for disk in DISKS:
        shutil.copytree(made[0] / disk, tmp_path / disk)
    return [tmp_path / disk for disk in DISKS]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def headers(disks: list[Path]) -> list[bytes | None]:
    return [path.read_bytes() if path.exists() else None for path in (disk / HEADER_NAME for disk in disks)]


def without_store(path: Path) -> None:
    """Write the header like a version that did not store the facts of other headers there."""
    value = document.read(path, "generation", 2)
    del value["store"]
    path.write_bytes(b"".join(document.write("generation", value)))


def rewrite(path: Path, kind: str, known: int, version: int) -> None:
    """Write the header like a newer infinity: with a field that this one does not know."""
    path.write_bytes(b"".join(document.write(kind, document.read(path, kind, known) | {"more": 1}, version)))


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "missing"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_headers_are_rebuilt_on_every_disk(which: tuple[int, ...], damage: Any, disks: list[Path], made: Run) -> None:
    before = headers(disks)
    for index in which:
        damage(disks[index] / HEADER_NAME)
    net = infinity.resume(build(), config(*disks))
    assert all(torch.equal(value, made[1][name]) for name, value in weights_of(net).items())
    infinity.close(net)
    assert headers(disks) == before


def test_an_intact_header_serves_where_manifests_do_not_say_what_it_says(disks: list[Path], made: Run) -> None:
    for path in generations_in(disks[0]).values():
        without_store(path)
    flip(disks[0] / HEADER_NAME)
    net = infinity.resume(build(), config(*disks))
    assert all(torch.equal(value, made[1][name]) for name, value in weights_of(net).items())
    infinity.close(net)


def test_old_manifests_are_read_and_the_error_says_what_they_lack(disks: list[Path]) -> None:
    for path in generations_in(disks[0]).values():
        without_store(path)
    infinity.close(infinity.resume(build(), config(*disks)))
    for disk in disks:
        flip(disk / HEADER_NAME)
    before = headers(disks)
    with pytest.raises(
        ManifestError, match=rf"{HEADER_NAME} is damaged.*cannot be rebuilt: generation 2 was written by"
    ):
        infinity.resume(build(), config(*disks))
    assert headers(disks) == before


@pytest.mark.parametrize(("version", "message"), [(1, "has a wrong value: more"), (2, "written by a newer infinity")])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_a_header_that_is_not_understood_stays(
    which: tuple[int, ...], version: int, message: str, disks: list[Path]
) -> None:
    for index in which:
        rewrite(disks[index] / HEADER_NAME, "store", 1, version)
    before = headers(disks)
    with pytest.raises(ManifestError, match=message):
        infinity.resume(build(), config(*disks))
    assert headers(disks) == before


def test_a_header_that_cannot_be_read_now_stays(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = headers(disks)
    with monkeypatch.context() as patch:
        fail_reading(disks[1] / HEADER_NAME, patch)
        with pytest.raises(ManifestError, match=f"{disks[1]}.*cannot be read: Input"):
            infinity.resume(build(), config(*disks))
    assert headers(disks) == before


@pytest.mark.parametrize("which", range(1, STEPS + 1))
def test_a_generation_whose_manifest_cannot_be_read_now_stays(
    which: int, disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = generations_in(disks[0])
    with monkeypatch.context() as patch:
        fail_reading(found[which], patch)
        with pytest.raises(ResumeError, match=f"{found[which]} cannot be read: Input.*Try again.*remove the file"):
            infinity.resume(build(), config(*disks))
    assert generations_in(disks[0]) == found
    infinity.close(infinity.resume(build(), config(*disks)))
    assert generations_in(disks[0]) == found


def fail_reading(which: Path, patch: pytest.MonkeyPatch) -> None:
    """Make every read of this file fail with an I/O error."""
    opened = files.opened

    def failing(path: Path, **options: Any) -> Any:
        if path == which:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, **options)

    patch.setattr(files, "opened", failing)


@pytest.mark.parametrize("headerless", [False, True])
@pytest.mark.parametrize("newer", range(1, STEPS + 1))
@pytest.mark.parametrize("step", [None, *range(1, STEPS + 1)])
def test_a_manifest_of_a_newer_infinity_is_never_removed(
    step: int | None, newer: int, headerless: bool, disks: list[Path]
) -> None:
    rewrite(generations_in(disks[0])[newer], "generation", 2, 3)
    for disk in disks if headerless else ():
        flip(disk / HEADER_NAME)
    before = headers(disks), {path: path.read_bytes() for path in generations_in(disks[0]).values()}
    with pytest.raises(NewerVersionError, match="was written by a newer infinity"):
        infinity.resume(build(), config(*disks), step=step)
    assert (headers(disks), {path: path.read_bytes() for path in generations_in(disks[0]).values()}) == before


def test_an_older_manifest_serves_where_the_newest_is_damaged(disks: list[Path], caplog: Any) -> None:
    caplog.set_level("WARNING", "infinity")
    for path in (*(disk / HEADER_NAME for disk in disks), generations_in(disks[0])[STEPS]):
        flip(path)
    net = infinity.resume(build(), config(*disks))
    infinity.AdamW(net.parameters())
    assert infinity.track(model=net) == STEPS - 1
    infinity.close(net)
    assert f"rebuilt from generation {STEPS - 1}" in caplog.text


@pytest.mark.parametrize("member", [0, 1])
def test_the_header_of_another_runs_disk_is_never_rebuilt(member: int, disks: list[Path], tmp_path: Path) -> None:
    """Same model, same config, another run: only the checksums of its data tell."""
    others = [tmp_path / "others" / disk for disk in DISKS]
    others[0].parent.mkdir()
    trained(config(*others), seed=100)
    shutil.copy(others[member] / SWAP_NAME, disks[member] / SWAP_NAME)
    flip(disks[member] / HEADER_NAME)
    before = headers(disks)
    with pytest.raises(ResumeError, match="does not have the checksum of the data that was written"):
        infinity.resume(build(), config(*disks))
    assert headers(disks) == before


def test_a_header_is_not_rebuilt_where_no_byte_of_the_generation_lies(tmp_path: Path) -> None:
    """The whole store is in the first disk's first stripe: checksums say nothing of the second disk."""
    runs = [[tmp_path / run / disk for disk in DISKS] for run in ("one", "two")]
    for seed, paths in enumerate(runs):
        paths[0].parent.mkdir()
        trained(config(*paths), seed=100 * seed, stripe=store.STRIPE_BYTES)
    mistaken = [runs[0][0], runs[1][1]]
    flip(mistaken[1] / HEADER_NAME)
    before = headers(mistaken)
    for paths in (mistaken, runs[1]):  # nobody can tell which is right
        with pytest.raises(ResumeError, match=rf"{mistaken[1] / SWAP_NAME}, whose header.*checkpoint export"):
            infinity.resume(build(), config(*paths))
    assert headers(mistaken) == before
    assert main(["checkpoint", "export", *map(str, runs[1]), "--output", str(tmp_path / "copy")]) == 0


class Small:
    """A store in stripes of a page with one generation of an extent, and its second copy written; then resumed without
    headers."""

    def __init__(self, root: Path, pages: int) -> None:
        self.paths = [root / disk for disk in DISKS]
        self.memory = _native.Arena(16 * PAGE_BYTES, huge_pages=False).view(0, 16 * PAGE_BYTES)
        extents = ExtentMap()
        self.extent = extents.add("unit", "weight", pages * PAGE_BYTES, copies=2)
        self.engine = _native.IOEngine()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "STRIPE_BYTES", PAGE_BYTES)
            patch.setattr(store, "_probe", lambda *_: 1e9)
            first = SwapStore(self.paths, extents.nbytes, self.engine, mode="generations")
        for copy in (0, 1):
            first.write(self.extent, self.memory[: self.extent.nbytes], copy_index=copy).result()
        self.extent.newest_copy = 1
        Generations(first, [self.extent], 1).make(1, {}, {})
        first.close()
        self.extent.newest_copy = 0
        self.before = headers(self.paths)
        for path in self.paths:
            (path / HEADER_NAME).unlink()
        self.store = SwapStore(self.paths, extents.nbytes, self.engine, mode="resume")
        self.generations = Generations(self.store, [self.extent], 1)

    def close(self) -> None:
        self.engine.close()
        self.store.close()


@pytest.mark.parametrize(("pages", "proven"), [(1, False), (2, True), (3, True)])
def test_a_page_of_the_generation_on_each_disk_proves_the_headers(pages: int, proven: bool, tmp_path: Path) -> None:
    """A block of checksums may lie on several disks, and another copy proves nothing."""
    small = Small(tmp_path, pages)
    with contextlib.nullcontext() if proven else pytest.raises(ResumeError, match=str(small.paths[0] / SWAP_NAME)):
        small.generations.recover(small.memory)
    small.close()
    assert headers(small.paths) == (small.before if proven else [None, None])
    assert small.extent.newest_copy == int(proven)


def test_a_header_that_cannot_be_written_is_written_when_recover_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(tmp_path, 2)
    write = atomic_file.write_file

    def fail(path: Path, parts: Any) -> None:
        if path.parent == small.paths[1]:
            raise SwapIOError("writing", path=str(path), errno=5)
        write(path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "write_file", fail)
        with pytest.raises(SwapIOError):
            small.generations.recover(small.memory)
    assert (small.extent.newest_copy, small.generations.newest, small.store.proven) == (0, None, False)
    assert headers(small.paths) == [small.before[0], None]
    assert small.generations.recover(small.memory).step == 1
    assert (small.extent.newest_copy, small.store.proven) == (1, True)
    small.close()
    assert headers(small.paths) == small.before


def test_disks_in_the_wrong_order_are_refused(disks: list[Path]) -> None:
    flip(disks[1] / HEADER_NAME)
    with pytest.raises(ResumeError, match="is part 1 of 2 of its store, and nvme.paths names it as part 2 of 2"):
        infinity.resume(build(), config(*reversed(disks)))
    flip(disks[0] / HEADER_NAME)
    with pytest.raises(ManifestError, match="cannot be rebuilt: its directory has no generation"):
        infinity.resume(build(), config(*reversed(disks)))
    with pytest.raises(ResumeError, match="is part 1 of 2 of its store, and nvme.paths names it as part 1 of 1"):
        infinity.resume(build(), config(disks[0]))


@pytest.mark.parametrize(
    ("kept", "advice"),
    [(False, "was made without.*Put back the header"), (True, "has checksums.*set nvme.checksums: true")],
    ids=["not kept", "not checked"],
)
def test_without_checksums_nothing_proves_a_rebuilt_header(kept: bool, advice: str, tmp_path: Path) -> None:
    path = tmp_path / "swap"
    settings = config(path, nvme={"checksums": False})
    trained(config(path) if kept else settings)
    infinity.close(infinity.resume(build(), settings))
    flip(path / HEADER_NAME)
    before = headers([path])
    with pytest.raises(ResumeError, match=f"only checksums can show.*{advice}"):
        infinity.resume(build(), settings)
    assert headers([path]) == before
    if kept:
        infinity.close(infinity.resume(build(), config(path)))
    else:
        with pytest.raises(ResumeError, match=advice):
            infinity.resume(build(), config(path))


def test_a_store_updated_in_place_is_never_resumed(tmp_path: Path, made: Run) -> None:
    path = tmp_path / "swap"
    net = infinity.offload(build(), config(path, commit_every=0))
    shutil.copytree(path, tmp_path / "left")  # as a run leaves it that is killed
    infinity.close(net)
    left = tmp_path / "left"
    with pytest.raises(DirtyStoreError):
        infinity.resume(build(), config(left))
    flip(left / HEADER_NAME)
    with pytest.raises(ManifestError, match="cannot be rebuilt: its directory has no generation"):
        infinity.resume(build(), config(left))
    manifest = read_manifest(generations_in(made[0] / "a")[STEPS])
    alone = manifest.store.model_copy(update={"members": [str(left)], "shares": [1]}) if manifest.store else None
    (left / generations_in(made[0] / "a")[STEPS].name).write_bytes(
        b"".join(write_manifest(manifest.model_copy(update={"store": alone})))
    )
    os.truncate(left / SWAP_NAME, manifest.store.nbytes if manifest.store else 0)
    with pytest.raises(ResumeError, match="does not have the checksum of the data that was written"):
        infinity.resume(build(), config(left))


def test_the_command_line_works_beside_a_damaged_header(
    disks: list[Path], tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    caplog.set_level("WARNING", "infinity")
    for disk in disks:
        flip(disk / HEADER_NAME)
    before, paths = headers(disks), [str(disk) for disk in disks]
    assert main(["checkpoint", "list", paths[0]]) == 1
    out = capsys.readouterr().out
    assert f"{HEADER_NAME} is damaged" in out
    assert f"rebuilt from generation {STEPS}" in out
    assert out.count("committed") == 2
    assert main(["checkpoint", "verify", *paths]) == 1
    assert capsys.readouterr().out.count("every byte is as it was written") == 2
    assert caplog.text.count(f"{HEADER_NAME} is damaged") == len(disks)
    assert main(["checkpoint", "export", *paths, "--output", str(tmp_path / "copy")]) == 0
    assert headers(disks) == before, "what only reads writes nothing"
    assert main(["checkpoint", "list", paths[1]]) == 2
    assert "cannot be rebuilt: its directory has no generation" in capsys.readouterr().err
    assert main(["checkpoint", "remove", *paths]) == 0
    there = [disk for disk in disks if disk.exists()]
    assert not any(name.endswith("infinity") for disk in there for name in os.listdir(disk))


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "missing"])
def test_a_part_of_a_store_is_not_removed_alone(damage: Any, disks: list[Path], capsys: Any) -> None:
    damage(disks[1] / HEADER_NAME)
    for disk in disks:
        assert main(["checkpoint", "remove", str(disk)]) == 2
        assert "directories" in capsys.readouterr().err
        assert (disk / SWAP_NAME).exists()
    infinity.close(infinity.resume(build(), config(*disks)))
    damage(disks[1] / HEADER_NAME)
    assert main(["checkpoint", "remove", *map(str, disks)]) == 0
    assert not any((disk / SWAP_NAME).exists() for disk in disks)


@pytest.mark.parametrize(("version", "message"), [(1, "has a wrong value: more"), (2, "written by a newer infinity")])
def test_a_store_whose_header_is_not_understood_is_not_removed(
    version: int, message: str, disks: list[Path], capsys: Any
) -> None:
    rewrite(disks[1] / HEADER_NAME, "store", 1, version)
    assert main(["checkpoint", "remove", *map(str, disks)]) == 2
    assert message in capsys.readouterr().err
    assert all((disk / SWAP_NAME).exists() for disk in disks)


def test_no_store_among_those_to_remove_is_an_error_before_any_is_removed(
    disks: list[Path], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "remove", *map(str, disks), str(tmp_path / "empty")]) == 2
    assert "holds no store" in capsys.readouterr().err
    assert all((disk / SWAP_NAME).exists() for disk in disks)


def test_a_store_on_two_disks_goes_with_the_command_that_its_error_names(tmp_path: Path) -> None:
    settings = config(tmp_path / "a disk", tmp_path / "b")
    trained(settings)
    with pytest.raises(StoreNotEmptyError) as raised:
        infinity.offload(build(), settings)
    remove = str(raised.value).partition("`infinity checkpoint remove ")[2].partition("`")[0]
    assert main(["checkpoint", "remove", *shlex.split(remove)]) == 0
    infinity.close(infinity.offload(build(), settings))


def test_a_copied_part_is_not_joined_with_the_originals_other_parts(made: Run, disks: list[Path], capsys: Any) -> None:
    original = [made[0] / disk for disk in DISKS]
    before = headers(original)
    for disk in disks:
        for act in (["verify"], ["export", "--output", str(disk.parent / "out")]):
            assert main(["checkpoint", act[0], str(disk), *act[1:]]) == 2
            assert "the directory was copied or moved" in capsys.readouterr().err
        with pytest.raises(ResumeError, match="Name the present directories of all 2 parts"):
            _saved_config({"config": config(*original)}, Namespace(resume=str(disk)))
    assert main(["checkpoint", "verify", *map(str, disks)]) == 0
    assert main(["checkpoint", "verify", str(original[0])]) == 0
    assert _saved_config({"config": config(*original)}, Namespace(resume=str(original[0]))).nvme.paths == original
    assert headers(original) == before


def test_the_second_part_says_where_the_generations_are(disks: list[Path], made: Run, capsys: Any) -> None:
    assert main(["checkpoint", "list", str(disks[1])]) == 0
    assert f"part 2 of 2 of a store; its generations are in {made[0] / DISKS[0]}" in capsys.readouterr().out
    with pytest.raises(ResumeError, match=f"part 2 of a store whose generations are in {made[0] / DISKS[0]}"):
        _past(Namespace(resume=str(disks[1]), from_checkpoint=None), None)


@pytest.mark.parametrize("others", ["one path", "two paths"])
def test_a_header_of_another_run_beside_the_generations_is_a_damaged_one(
    others: str, disks: list[Path], made: Run, tmp_path: Path, capsys: Any
) -> None:
    paths = [tmp_path / "other"] if others == "one path" else [tmp_path / "other", tmp_path / "other2"]
    trained(config(*paths), seed=9)
    shutil.copy(paths[0] / HEADER_NAME, disks[0] / HEADER_NAME)
    before = headers(disks)
    assert main(["checkpoint", "list", str(disks[0])]) == 1
    out = capsys.readouterr().out
    assert "and the generations beside it belong to run" in out
    assert out.count("committed") == STEPS
    assert main(["checkpoint", "remove", str(disks[0])]) == 2
    assert "all its 2 parts" in capsys.readouterr().err
    assert headers(disks) == before
    net = infinity.resume(build(), config(*disks))
    assert all(torch.equal(weight, made[1][name]) for name, weight in weights_of(net).items())
    infinity.close(net)
    assert headers(disks) == headers([made[0] / disk for disk in DISKS])


def test_a_new_run_does_not_take_a_disk_whose_header_is_damaged(disks: list[Path]) -> None:
    flip(disks[1] / HEADER_NAME)
    with pytest.raises(StoreNotEmptyError, match="a part of an earlier run's store"):
        infinity.offload(build(), config(disks[1]))
    assert (disks[1] / SWAP_NAME).exists()
