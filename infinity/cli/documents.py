"""The documents of --data: which files are read, and how a file is divided into documents."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from infinity.cli.bad_rows import BadRows
from infinity.cli.dataset_rows import in_trl_format
from infinity.cli.table_files import TABLES, is_saved_dataset, rows_of
from infinity.cli.training_examples import LossOn, PreferencePair, TrainingExample, pair_of, text_or_example
from infinity.errors import ConfigError, printable

Text = Iterator[str]
"""A text document as pieces of bounded size. Each piece ends at a place where tokenizers separate words."""
Document = Text | TrainingExample | PreferencePair

PIECE_CHARS = 1 << 20
_CUT_WINDOW = 1 << 16
_LINE_BYTES_MAX = 16 << 20
_BOM = b"\xef\xbb\xbf"
_LINES = (".jsonl", ".ndjson")
_LIST = ".json"
"""Ending of a file that contains a list of rows.

Such a file is read only if the user names the file itself, because in a directory it may be any kind of JSON.
"""
_LIST_BYTES_MAX = 1 << 30
_PIECE_BYTES = 1 << 20
_OTHER_FORMATS = {
    (".feather",): "Give .parquet or .jsonl instead; pandas writes both",
    (
        ".gz",
        ".bz2",
        ".xz",
    ): "Unpack the file and give its contents, or give the file a name that says its format, such as "
    ".jsonl.gz or .txt.gz",
    (".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar"): "Unpack the file and give its contents",
}
"""Endings of files whose format infinity does not read, each with advice for the user."""
_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Endings of compressed files.

A compressed file is unpacked while it is read, if the preceding ending is one of text or rows (as in `.jsonl.gz`).
"""
_UNPACKED = (*_LINES, _LIST, ".txt")
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


@contextmanager
def of_option(option: str) -> Iterator[None]:
    """Add the option that named the data to each ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from error.__cause__


class NotTextError(Exception):
    """The file is not UTF-8 text. The message of the exception is the reason."""


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the files to read, in a fixed order.

    Each file in `paths` is read. Of each directory in `paths`, all files are read, also in its subdirectories; hidden
    files and hidden subdirectories are left out. Symbolic links are followed.

    Returns:
        The files, and the entries of directories that are not read, each with the reason.

    Raises:
        ConfigError: a path is missing, not a regular file, empty, or of a format that is not read; or a directory has
            no files that can be read, or cannot be listed.
    """
    files: list[Path] = []
    others: list[tuple[Path, str]] = []
    for path in paths:
        kind = _kind(path)
        if kind == "directory" and is_saved_dataset(path):
            files.append(path)
        elif kind == "directory":
            found = list(_walk(path, set()))
            if not found:
                raise ConfigError(f"{printable(path)}: the directory has no files")
            why = {file: _kind(file) or _other_format(file, in_directory=True) for file in found}
            readable = [file for file in found if not why[file]]
            if not readable:  # the directory is probably a dataset in a format that is not read
                for file in found:
                    _require_format(file)
                raise ConfigError(f"{printable(found[0])}: {why[found[0]]}")
            files += readable
            others += [(file, why[file]) for file in found if file not in readable]
        elif kind:
            raise ConfigError(f"{printable(path)}: {kind}")
        elif not path.stat().st_size:
            raise ConfigError(f"{printable(path)}: the file is empty")
        else:
            _require_format(path)
            files.append(path)
    return files, others


def documents(
    path: Path,
    tokenizer: Any,
    loss_on: LossOn,
    columns: Mapping[str, str],
    unread: Callable[[Iterable[str]], None],
    method: str = "sft",
) -> Iterator[Document]:
    """Yield the documents of a file.

    A text file is one document. Each row of a .jsonl file, of a table or of a saved dataset is a document, which
    dataset_rows.py and training_examples.py convert.

    Args:
        path: the file or the directory of a saved dataset.
        tokenizer: tokenizer of the model.
        loss_on: the tokens that contribute to the loss, in rows with prompts or messages.
        columns: values of --columns, by name.
        unread: function that is called with the fields of each row that are not read.
        method: --method of the run. The methods "dpo" and "reward" learn pairs of answers.

    Raises:
        NotTextError: the file is not UTF-8 text; some of its documents may already have been yielded.
        ConfigError: the file cannot be read; the method learns pairs but the file has no rows; or rows cannot be used,
            for example because their layout is unknown. The error names file:line of the first rows.
    """

    if _ending(path) not in (_LIST, *_LINES, *TABLES) and not path.is_dir():
        if method != "sft":
            raise ConfigError(
                f"{printable(path)}: --method {method} learns rows with 'chosen' and 'rejected', but this file is read "
                "as text: give files of rows, such as .jsonl"
            )
        yield _text_pieces(path)
        return
    chat = bool(getattr(tokenizer, "chat_template", None))
    bad = BadRows()
    for where, record in bad.until_enough(_rows(path)):
        try:
            if isinstance(record, ConfigError):
                raise record
            row = in_trl_format(record, where, columns, chat=chat)
            found: str | TrainingExample | PreferencePair = (
                text_or_example(row, where, tokenizer, loss_on)
                if method == "sft"
                else pair_of(row, where, tokenizer, method)
            )
        except ConfigError as error:
            bad.add(where, error)
            continue
        if not bad:
            unread(row.unread)
            yield found if not isinstance(found, str) else pieces(io.StringIO(found).read)
    bad.refuse()


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each with its place (file:line). A line that is no row is yielded as a ConfigError."""
    if _ending(path) in _LINES:
        yield from _json_lines(path)
        return
    for number, record in enumerate(_list(path) if _ending(path) == _LIST else rows_of(path), 1):
        yield f"{printable(path)}:{number}", record


def pieces(read: Callable[[int], str]) -> Text:
    """Yield a text in pieces of at most PIECE_CHARS.

    Args:
        read: function that returns the next characters of the text. Its argument is the number of characters. At the
            end of the text it returns fewer characters, and after the end ''.
    """
    text = ""
    while more := read(PIECE_CHARS):
        text += more
        while len(text) > PIECE_CHARS:
            cut = _cut(text)
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def _cut(text: str) -> int:
    """Return the length of the first piece of a text.

    The piece ends where tokenizers separate words: if possible after a single line break or before a single space,
    otherwise at any white space. If the text has no white space, the piece has the maximum length.
    """
    first = max(PIECE_CHARS - _CUT_WINDOW, 1)
    window = text[first - 1 : PIECE_CHARS + 1]
    for pattern in (r"(?<=\S\n)(?=\S)", r"(?<=\S)(?= \S)", r"(?=\s)"):
        places = [match.start() for match in re.finditer(pattern, window) if match.start()]
        if places:
            return first - 1 + places[-1]
    return PIECE_CHARS


def _kind(path: Path) -> str:
    """Return '' for a regular file, 'directory' for a directory, else the reason why the path cannot be read."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else "no such file or directory"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if stat.S_ISDIR(mode):
        return "directory"
    return "" if stat.S_ISREG(mode) else "not a regular file: write its contents to a file first"


def _walk(directory: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield all entries below a directory, except directories and hidden entries.

    A link to a parent directory is skipped, because following the link would never end.

    Args:
        directory: the directory.
        above: device and inode of each parent directory.
    """
    try:
        at = directory.stat()
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise _unreadable(directory, error) from error
    identity = at.st_dev, at.st_ino
    if identity in above:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _kind(entry) == "directory":
            yield from _walk(entry, above | {identity})
        else:
            yield entry


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{printable(path)}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _ending(path: Path) -> str:
    """Return the ending that names the format of a file, in lower case; for `.jsonl.gz` this is `.jsonl`."""
    inside, last = Path(path.stem).suffix.lower(), path.suffix.lower()
    return inside if last in _PACKED and inside in _UNPACKED else last


def _opened(path: Path) -> IO[bytes]:
    """Open a file for reading.

    A compressed file is unpacked if its format is one that is read compressed (see _PACKED).

    If the file is damaged, opening or reading it raises one of the exceptions in _DAMAGED.
    """
    if not path.stat().st_size:  # a file of /proc may block its reader for ever
        return io.BytesIO()
    last = path.suffix.lower()
    opened: IO[bytes] = path.open("rb") if _ending(path) == last else _PACKED[last](path, "rb")
    return opened


def _other_format(path: Path, *, in_directory: bool = False) -> str:
    """Return '' if the file contains text or rows, and otherwise the reason why the file is not read."""
    if in_directory and _ending(path) == _LIST:
        return "a .json file is read only if its own path is given"
    known = any(_ending(path) in endings for endings in _OTHER_FORMATS)
    return f"a {path.suffix} file is not read" if known else ""


def _require_format(path: Path) -> None:
    for endings, advice in _OTHER_FORMATS.items():
        if _ending(path) in endings:
            raise ConfigError(f"{printable(path)}: {_other_format(path)}. {advice}.")


def _text_pieces(path: Path) -> Text:
    try:
        with io.TextIOWrapper(_opened(path), encoding="utf-8-sig") as file:
            for piece in pieces(file.read):
                if "\0" in piece:
                    raise NotTextError("it has NUL characters, so it is a binary file or UTF-16 text")
                yield piece
    except UnicodeDecodeError:
        raise NotTextError("it is not UTF-8 text") from None
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _at_most(nbytes: int, file: IO[bytes]) -> bytes | None:
    """Return the content of a file; None if the file is larger than `nbytes`.

    The file is read in pieces, because read(nbytes) allocates nbytes even for a small file.
    """
    pieces: list[bytes] = []
    while piece := file.read(_PIECE_BYTES):
        nbytes -= len(piece)
        if nbytes < 0:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _list(path: Path) -> list[Any]:
    """Return the rows of a .json file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not a list of rows.
    """
    try:
        with _opened(path) as file:
            content = _at_most(_LIST_BYTES_MAX, file)
        if content is None:
            raise ConfigError(
                f"{printable(path)}: the file is larger than {_LIST_BYTES_MAX >> 20} MiB, and infinity reads .json "
                "files into memory completely: give .jsonl instead, with one object per line"
            )
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    found = _json(
        content.removeprefix(_BOM), printable(path), "a file with one object per line must have the ending .jsonl"
    )
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{printable(path)}: a .json file needs a list of rows, [{{…}}, {{…}}]")
    return found


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a .jsonl file, each with its place; a ConfigError for a line that is no row."""
    for number, line in enumerate(_lines(path), 1):
        where = f"{printable(path)}:{number}"
        if len(line) > _LINE_BYTES_MAX:
            raise ConfigError(
                f"{where}: the line is longer than {_LINE_BYTES_MAX >> 20} MiB; divide its text among several lines"
            )
        try:
            record = _parse(line.removeprefix(_BOM) if number == 1 else line, where)
        except ConfigError as error:
            record = error
        if record is not None:
            yield where, record


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file.

    If a line is longer than the maximum, the first part of the line that is yielded is also longer than the maximum.
    """
    try:
        with _opened(path) as file:
            while line := file.readline(_LINE_BYTES_MAX + 1):
                yield line
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _parse(line: bytes, where: str) -> Any:
    """Return the value of a line; None for a blank line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line). Convert the file, with `iconv -t "
            "UTF-8 -f` and its encoding"
        ) from None
    if not text.strip():
        return None
    record = _json(text, where, "each line must be one object")
    if record is None:
        raise ConfigError(f"{where}: null instead of an object with a 'text' string or a 'messages' list")
    return record


def _json(text: str | bytes, where: str, form: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{where}: not usable: lists or objects are nested too deeply") from None
    except json.JSONDecodeError as error:  # its own line number is that within one line of the file
        raise ConfigError(f"{where}: not valid JSON at character {error.pos + 1}: {error.msg}; {form}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}; {form}") from None
