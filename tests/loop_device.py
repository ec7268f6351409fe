"""A small separate file system on a loop device, for tests that fill it, make it read-only or remove it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, nbytes: int) -> Iterator[Path]:
    """Mount an empty ext4 file system of `nbytes` bytes. Skip the test if the privilege or the tools are missing."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or shutil.which("losetup") is None:
        pytest.skip("mounting a loop device needs root, losetup and mkfs.ext4")
    image, place = directory / "image", directory / "mount"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no loop device may be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def remount_read_only(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
