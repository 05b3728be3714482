"""What a user wrote, a mapping, as a frozen dataclass: a function reads each key, and all faults are reported at once.

Ours, and this small, because each command on a login node waits for it: importing a validation library and compiling
its schemas cost more than half of a dry run of ten thousand nodes (benchmarks/README.md).
"""

import copy
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, overload

from ddp_slurm.errors import did_you_mean

KeyPath = tuple[str | int, ...]
T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound="Schema")
Reader = Callable[[Any], T]
"""Returns the value of what was written, or raises ValueError with what is wrong; takes its own results, too."""


class Invalid(ValueError):
    """Faults below a value: of each the path from there down, and what is wrong."""

    def __init__(self, faults: list[tuple[KeyPath, str]]) -> None:
        super().__init__("; ".join(fault_text(*fault) for fault in faults))
        self.faults = faults


def fault_text(path: KeyPath, message: str) -> str:
    """``nodes[0].gpus.type: 'a b' is not ...``."""
    text = ""
    for part in path:
        text += (
            f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part or repr(part)}"
        )
    return f"{text}: {message}" if text else message


def short(value: object) -> str:
    """A value as messages name it."""
    if value in (None, ""):
        return "nothing"
    return (
        "a mapping"
        if isinstance(value, dict)
        else "a list"
        if isinstance(value, list | tuple)
        else repr(value)
    )


@dataclass(frozen=True)
class Key:
    """How one key is read, and what its option on the command line says."""

    read: Reader[Any]
    default: Any
    metavar: str
    help: str


@overload
def key(read: Reader[T]) -> T: ...
@overload
def key(read: Reader[T], default: D, metavar: str = ..., help: str = ...) -> T | D: ...
def key(read: Reader[Any], default: Any = MISSING, metavar: str = "", help: str = "") -> Any:
    """A field of a Schema. Without a ``default`` the key must be there; None is taken where it is the default."""
    return field(metadata={"key": Key(read, default, metavar, help)})


class Schema:
    """Base of ``@dataclass(frozen=True, init=False)`` classes whose fields are ``key(...)``.

    Keys may be written with ``-`` for ``_``, as options are.
    """

    given: frozenset[str]
    """The keys that were written, in the fields' spelling."""

    def __init__(self, /, **values: Any) -> None:
        """Raises Invalid with all faults of the values."""
        keys = keys_of(type(self))
        written: dict[str, str] = {}
        faults: list[tuple[KeyPath, str]] = []
        for name in values:
            field_name = name.replace("-", "_")
            if field_name not in keys:
                known = dict.fromkeys(k.replace("_", mark) for mark in "_-" for k in keys)
                faults.append(((name,), f"unknown key{did_you_mean(name, list(known))}"))
            elif field_name in written:
                faults.append(((name,), f"the key stands twice, also as {written[field_name]!r}"))
            else:
                written[field_name] = name
        all_read = True
        for name, one in keys.items():
            value = one.default
            if name in written and not (values[written[name]] is None and one.default is None):
                value = _attempt(one.read, values[written[name]], written[name], faults)
                all_read &= value is not MISSING
            elif value is MISSING:
                faults.append(((name,), "missing"))
                all_read = False
            object.__setattr__(self, name, value)
        if all_read:
            faults += self.misfits()
        if faults:
            raise Invalid(faults)
        object.__setattr__(self, "given", frozenset(written))

    def misfits(self) -> list[tuple[KeyPath, str]]:
        """Faults of values that are right by themselves and do not go together."""
        return []

    @classmethod
    def read(cls: type[S], value: Any) -> S:
        """The reader of this schema. Raises Invalid, or ValueError for something that is no mapping."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ValueError(
                f"{short(value)} stands here; expected keys such as '{next(iter(keys_of(cls)))}:'"
            )
        return cls(**value)

    def replaced(self: S, **values: Any) -> S:
        """A copy with other values, which are taken as they are."""
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        object.__setattr__(changed, "given", self.given | values.keys())
        return changed


def keys_of(schema: type[Schema]) -> dict[str, Key]:
    """A schema's keys by field name, in their order."""
    return {f.name: f.metadata["key"] for f in fields(schema)}  # type: ignore[arg-type] # its subclasses are dataclasses


def tuple_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Reader of a list."""

    def read_list(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{short(value)} is not a list")
        faults: list[tuple[KeyPath, str]] = []
        items = tuple(_attempt(read, item, index, faults) for index, item in enumerate(value))
        if faults:
            raise Invalid(faults)
        return items

    return read_list


def mapping_of(read_key: Reader[str], read: Reader[T]) -> Reader[dict[str, T]]:
    """Reader of a mapping whose keys are the user's own."""

    def read_mapping(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"{short(value)} is not a mapping")
        faults: list[tuple[KeyPath, str]] = []
        items = {
            _attempt(read_key, k, k, faults): _attempt(read, inner, k, faults)
            for k, inner in value.items()
        }
        if faults:
            raise Invalid(faults)
        return items

    return read_mapping


def _attempt(
    read: Reader[Any], value: Any, place: str | int, faults: list[tuple[KeyPath, str]]
) -> Any:
    """The value read, or MISSING, with what is wrong with it added to the faults."""
    try:
        return read(value)
    except Invalid as below:
        faults += [((place, *path), message) for path, message in below.faults]
    except ValueError as fault:
        faults.append(((place,), str(fault)))
    return MISSING
