"""The output directory of `infinity finetune`.

infinity checks the directory before the run begins, and never removes a complete model because of an error.

The result is first written to a directory beside the output directory, and this directory is then renamed. If an error
occurs after the model is complete, the model is kept, and the error says where it is.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.atomic_directory import move_into, put_in_place
from infinity.errors import ConfigError, InfinityError, SwapIOError, printable
from infinity.quoting import raised
from infinity.sizes import format_bytes

_NAME_CHARS = 48
"""Maximum number of characters of the output's name in the name of the directory beside the output.

File systems limit the length of names.
"""
_REST_BYTES = 64 << 20
"""Upper bound of the bytes of all other files of the output: the tokenizer, the report and the loss curve."""


@dataclass(frozen=True)
class SavedModel:
    """A complete model on disk.

    Attributes:
        directory: where the model is now.
        problem: reason why the model is not in the directory beside the output; '' if the model is there.
    """

    directory: Path
    problem: str

    def __str__(self) -> str:
        return f"The model is complete in {printable(self.directory)}: move it, with `mv {self._quoted} DIRECTORY`."

    @property
    def _quoted(self) -> str:
        text = str(self.directory)
        return shlex.quote(text) if text.isprintable() else f"${text!a}"


class OutputDirectory:
    """The directory that --output names. It must be missing or empty.

    Args:
        directory: the output.
        apart: other directories, by the option that names them. The output must not be one of these directories, must
            not be inside one of them, and must not contain one of them.

    Raises:
        ConfigError: the result cannot be written to the output directory. The check leaves no files.
    """

    def __init__(self, directory: Path, apart: Mapping[str, Sequence[Path]] | None = None) -> None:
        self._named = f"--output {printable(directory)}"
        # the path has bytes that are not UTF-8
        if any("\ud800" <= character <= "\udfff" for character in str(directory)):
            raise ConfigError(
                f"{self._named}: the name is not UTF-8, but the names of a model's files must be UTF-8; choose another "
                "name"
            )
        try:
            self._target = directory.resolve()
            if os.path.lexists(self._target) and not (self._target.is_dir() and not any(self._target.iterdir())):
                raise ConfigError(f"{self._named}: exists and is not an empty directory; choose another directory")
            for option, others in (apart or {}).items():
                for other in others:
                    require_disjoint(self._named, self._target, option, other)
            self.disk.mkdir(parents=True, exist_ok=True)
            self._make_aside(self.disk).rmdir()
        except (OSError, RuntimeError) as error:  # RuntimeError is raised for symbolic links that form a circle
            why = getattr(error, "strerror", None) or raised(error)
            raise ConfigError(f"{self._named}: cannot write to {printable(directory.parent)}: {why}") from error

    @property
    def disk(self) -> Path:
        """The directory in which the result is first written, which is the parent of the output directory.

        If the parent is not writable or is on another disk, this is the output directory itself.
        """
        above = self._target.parent
        if not self._target.is_dir():
            return above
        same = os.stat(self._target).st_dev == os.stat(above).st_dev and not os.path.ismount(self._target)
        return above if same and os.access(above, os.W_OK | os.X_OK) else self._target

    def require_room(self, model_bytes: int) -> None:
        """Check that the disk has room for the output.

        Args:
            model_bytes: bytes of the model.

        Raises:
            ConfigError: the disk has too little room.
        """
        needed, free = model_bytes + _REST_BYTES, shutil.disk_usage(self.disk).free
        if needed > free:
            raise ConfigError(
                f"{self._named}: the trained model takes {format_bytes(needed)}, and the disk has {format_bytes(free)} "
                "free. Free space, or choose a directory on another disk."
            )

    def save(self, write: Callable[[Path], None], elsewhere: Sequence[Path] = ()) -> SavedModel:
        """Write the model to a new directory beside the output.

        If writing fails, write the model to one of the directories in `elsewhere`.

        Args:
            write: function that creates the directory at a given path and writes the model into this directory.
            elsewhere: directories on other disks, in the order in which they are tried.

        Raises:
            SwapIOError: the model cannot be read from the store.
            InfinityError: the model could not be written to any of these disks.
        """
        problem = ""
        for place in (self.disk, *elsewhere):
            made: Path | None = None
            try:
                made = self._make_aside(place)
                write(made / "model")
                return SavedModel(made / "model", problem)
            except BaseException as error:
                if made is not None:
                    shutil.rmtree(made, ignore_errors=True)  # this call has created the directory
                if isinstance(error, SwapIOError) or not isinstance(error, OSError | InfinityError):
                    raise
                problem = problem or str(error)
        raise InfinityError(f"{self._named}: the model could not be saved. {problem}")

    def publish(self, saved: SavedModel, write: Callable[[Path], None]) -> None:
        """Write the other files of the output, and move the model and these files to the output.

        Args:
            saved: the complete model.
            write: function that writes the other files to the model's directory.

        Raises:
            InfinityError: the output is not complete. The error says where the model is.
        """
        problem = saved.problem
        try:
            write(saved.directory)
            if not problem:
                self._put_in_place(saved.directory)
        except KeyboardInterrupt:
            print(saved, file=sys.stderr)
            raise
        except Exception as error:
            taken = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            problem = "another process wrote to it while the model was saved" if taken else raised(error)
        if problem:
            raise InfinityError(f"{self._named}: {problem.rstrip('.')}. {saved}")

    def _put_in_place(self, made: Path) -> None:
        if made.parent.parent == self._target:
            for path in made.iterdir():
                if os.path.lexists(self._target / path.name):
                    raise FileExistsError(f"{self._target / path.name} appeared")
            move_into(made, self._target, last="config.json")  # a model without its config cannot be loaded
            made.rmdir()
        else:
            put_in_place(made, self._target)
        made.parent.rmdir()

    def _make_aside(self, directory: Path) -> Path:
        return Path(tempfile.mkdtemp(prefix=f".{self._target.name[:_NAME_CHARS]}-", dir=directory))


def require_disjoint(what: str, directory: Path, option: str, other: Path) -> None:
    """Check that two directories are not the same, and that neither is inside the other.

    Args:
        what: name of the first directory, for the error message.
        directory: the first directory.
        option: option that names the second directory, for the error message.
        other: the second directory.

    Raises:
        ConfigError: the directories are the same, or one is inside the other.
    """
    mine, others = directory.resolve(), other.expanduser().resolve()
    if mine == others:
        raise ConfigError(f"{what} and {option} {printable(other)} are the same; choose different directories")
    if others in mine.parents:
        raise ConfigError(f"{what} is in {option} {printable(other)}; choose a directory outside it")
    if mine in others.parents:
        raise ConfigError(f"{option} {printable(other)} is in {what}; choose a directory outside it")
