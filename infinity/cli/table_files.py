"""Reading of tables, which are parquet, CSV and arrow files, and directories that the library `datasets` has saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, printable
from infinity.quoting import raised

TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
"""Names of table formats in `datasets`, by the ending of the file name."""
_SAVED = ("state.json", "dataset_dict.json")


def is_saved_dataset(directory: Path) -> bool:
    """Return whether the directory was written by `save_to_disk` of `datasets`."""
    return any((directory / name).is_file() for name in _SAVED)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, or of a directory that `save_to_disk` wrote. Cells without a value are left out.

    Raises:
        ConfigError: the file cannot be read, or the directory has no split 'train'.
    """
    import datasets

    try:
        table = _saved(datasets, path) if path.is_dir() else _streamed(datasets, path)
        for row in table:
            yield {key: value for key, value in row.items() if value is not None}
    except ConfigError:
        raise
    except Exception as error:  # each format raises errors of its own
        raise ConfigError(f"{printable(path)}: cannot be read: {raised(error)}") from error


def _streamed(datasets: Any, path: Path) -> Any:
    options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    kind = TABLES[path.suffix.lower()]
    return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)


def _saved(datasets: Any, path: Path) -> Any:
    found = datasets.load_from_disk(str(path))
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        raise ConfigError(
            f"{printable(path)}: it has no split 'train' but {', '.join(map(printable, found))}: name the directory of "
            "one of them"
        )
    return found["train"]
