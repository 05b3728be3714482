"""A mapping that a user wrote as a frozen dataclass: a function reads each key, all errors at once.

Our own, and this small, because every command on a login node waits for it: importing a validation
library and compiling its schemas takes more than half of the time of a dry run of ten thousand
nodes (benchmarks/README.md).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar, overload

from ddp_slurm.errors import MAX_QUOTED, did_you_mean, quoted

KeyPath = tuple[str | int, ...]
Error = tuple[KeyPath, str]
"""The path from a value down to the part that is wrong, and what is wrong with it."""
T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound="Schema")
Reader = Callable[[Any], T]
"""Returns the value of what was written, or raises ValueError; accepts its own results as well."""


class Invalid(ValueError):
    """All errors of a value."""

    def __init__(self, errors: list[Error]) -> None:
        super().__init__("; ".join(error_text(*error) for error in errors))
        self.errors = errors


def error_text(path: KeyPath, message: str) -> str:
    """``nodes[0].gpus.type: 'a b' is not ...``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            dot = "." if text else ""
            is_plain = part.isprintable() and 0 < len(part) <= MAX_QUOTED
            text += dot + (part if is_plain else quoted(part))
    return f"{text}: {message}" if text else message


def short(value: object) -> str:
    """A value as messages name it."""
    if value in (None, ""):
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return quoted(value)


@dataclass(frozen=True)
class Key:
    """How one key is read, and what its option and the reference print of it."""

    read: Reader[Any]
    metavar: str = ""
    help: str = ""
    default: Any = field(default_factory=lambda: MISSING)  # a plain MISSING means no default
    """Of a key that was not written; MISSING: it is required."""
    name: str = ""
    """The key, where it is not the field's name."""
    field: str = ""
    """The name of the field."""


@overload
def key(read: Reader[T]) -> T: ...
@overload
def key(read: Reader[T], default: D, metavar: str = ..., help: str = ...) -> T | D: ...
def key(read: Reader[Any], default: Any = MISSING, metavar: str = "", help: str = "") -> Any:
    """A field of a Schema. A key without a ``default`` is required; None is valid where it is the
    default."""
    return field(metadata={"key": Key(read, metavar, help, default)})


_keys: dict[type, dict[str, Key]] = {}


def keys_of(schema: type) -> dict[str, Key]:
    """The keys of a Schema, or of a NamedTuple whose types are ``Annotated[TYPE, Key(...)]``."""
    if schema not in _keys:
        _keys[schema] = _find_keys(schema)
    return _keys[schema]


def _find_keys(schema: type) -> dict[str, Key]:
    if issubclass(schema, Schema):
        own = {f.name: f.metadata["key"] for f in fields(schema)}  # type: ignore[arg-type]
    else:
        defaults = schema._field_defaults  # type: ignore[attr-defined]
        own = {
            name: replace(annotation.__metadata__[0], default=defaults.get(name, MISSING))
            for name, annotation in schema.__annotations__.items()
        }
    return {one.name or name: replace(one, field=name) for name, one in own.items()}


def read_keys(schema: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Error]]:
    """The fields' values from the keys that were written, and what is wrong with these.

    A field whose value cannot be read is missing in the result.
    """
    keys = keys_of(schema)
    errors: list[Error] = []
    spellings = _spellings(keys, values, errors)
    result = {}
    for name, one in keys.items():
        if name in spellings:
            spelling = spellings[name]
            written = values[spelling]
            is_default = written is None and one.default is None
            value = None if is_default else check(one.read, written, spelling, errors)
        else:
            value = one.default
            if value is MISSING:
                errors.append(((name,), "missing"))
        if value is not MISSING:
            result[one.field] = value
    return result, errors


def _spellings(
    keys: Mapping[str, Key], values: Mapping[str, Any], errors: list[Error]
) -> dict[str, str]:
    """The written form of each key that was written: with ``_`` or, like an option, with ``-``."""
    spellings: dict[str, str] = {}
    for written in values:
        name = written.replace("-", "_")
        if name not in keys:
            known = dict.fromkeys(key.replace("_", mark) for mark in "_-" for key in keys)
            errors.append(((written,), f"unknown key{did_you_mean(written, known)}"))
        elif name in spellings:
            errors.append(((written,), f"duplicate key, also written {spellings[name]!r}"))
        else:
            spellings[name] = written
    return spellings


class Schema:
    """Base of ``@dataclass(frozen=True, init=False)`` classes whose fields are ``key(...)``.

    Keys may be written with ``-`` for ``_``, as options are.
    """

    given: frozenset[str]
    """The keys that were written, in the fields' spelling."""

    def __init__(self, /, **values: Any) -> None:
        """Raises Invalid with all errors of the values."""
        read, errors = read_keys(type(self), values)
        for name, value in read.items():
            object.__setattr__(self, name, value)
        if len(read) == len(keys_of(type(self))):
            errors += self.misfits()
        if errors:
            raise Invalid(errors)
        object.__setattr__(self, "given", frozenset(name.replace("-", "_") for name in values))

    def misfits(self) -> list[Error]:
        """Errors of values that are valid by themselves and cannot be combined."""
        return []

    @classmethod
    def read(cls: type[S], value: Any) -> S:
        """The reader of this schema. Raises Invalid, or ValueError if there is no mapping."""
        if isinstance(value, cls):
            return value
        return cls(**expect_mapping(value, cls))

    def replaced(self: S, **values: Any) -> S:
        """A copy with other values, which are not checked."""
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        object.__setattr__(changed, "given", self.given | values.keys())
        return changed


def expect_mapping(value: Any, schema: type) -> dict[str, Any]:
    """The value, a mapping with keys of ``schema``. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        first_key = next(iter(keys_of(schema)))
        raise ValueError(f"expected keys such as '{first_key}:', got {short(value)}")
    return value


def tuple_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Reader of a list."""

    def read_list(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, got {short(value)}")
        errors: list[Error] = []
        items = tuple(check(read, item, index, errors) for index, item in enumerate(value))
        if errors:
            raise Invalid(errors)
        return items

    return read_list


def mapping_of(read_key: Reader[str], read: Reader[T]) -> Reader[dict[str, T]]:
    """Reader of a mapping with keys that the user chose."""

    def read_mapping(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping, got {short(value)}")
        errors: list[Error] = []
        items = {}
        for written, inner in value.items():
            name = check(read_key, written, written, errors)
            items[name] = check(read, inner, written, errors)
        if errors:
            raise Invalid(errors)
        return items

    return read_mapping


def check(read: Reader[Any], value: Any, place: str | int, errors: list[Error]) -> Any:
    """What ``read`` returns, or MISSING, with what is wrong added to ``errors``."""
    try:
        return read(value)
    except Invalid as below:
        errors += [((place, *path), message) for path, message in below.errors]
    except ValueError as error:
        errors.append(((place,), str(error)))
    return MISSING
