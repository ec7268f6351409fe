"""Schemas of small files: every field has a type and limits, unknown fields are errors, and values are never converted.

An error describes the first problem in one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from infinity.errors import ManifestError, printable
from infinity.sizes import PAGE_BYTES

BYTES_MAX = 1 << 60
COUNT_MAX = 1 << 48

Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Bytes = Annotated[int, Field(ge=0, le=BYTES_MAX, multiple_of=PAGE_BYTES)]
Name = Annotated[str, Field(max_length=4096)]


def _absolute(name: str) -> str:
    if not os.path.isabs(name) or "\0" in name:
        raise ValueError(f"{name!r} is not an absolute path")
    return name


AbsolutePath = Annotated[Name, AfterValidator(_absolute)]


def _as_files_have_it(text: str) -> str:
    text.encode()  # a UnicodeEncodeError is a ValueError
    return text


Text = Annotated[str, AfterValidator(_as_files_have_it)]
"""Text that can be encoded as UTF-8. JSON can contain half of a surrogate pair, which cannot be encoded."""


class DiskRecord(BaseModel):
    """Data from disk. Every field has a type, unknown fields are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], value: Any, source: object) -> _Model:
    """Check a value against a schema, and return it as an object of `model`. Raises a ManifestError that names `source`
    and the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ManifestError(source, f"has a wrong value: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Return a description of the first problem of a validation: the field, and the problem with its value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    return printable(f"{where}: {what}" if where else what)


def require_unique(names: Iterable[Any], what: str) -> None:
    """Raise ValueError if a name occurs twice."""
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} twice")
        seen.add(name)
