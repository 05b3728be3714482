"""Plain values: what a snapshot can hold, and how many bytes of tensors are in it."""

import numbers
from typing import Any

from torch import Tensor

from ddp_slurm.training.snapshot.errors import SnapshotError


def plain(value: Any, where: str) -> Any:
    """The value in the types that ``weights_only=True`` reads back.

    NumPy's numbers, enums, named tuples and other subclasses become the plain type.

    Raises SnapshotError, with the place in it, for anything else.
    """
    if isinstance(value, dict):
        return {
            plain(key, f"key of {where}"): plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, Tensor | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)  # an enum's own __str__ would give its name
    if isinstance(value, bytes):
        return bytes(value)
    raise SnapshotError(
        f"a snapshot cannot hold {where}: {type(value).__name__}; expected tensors, numbers, "
        "strings, dicts, lists and tuples"
    )


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a plain value; storage that tensors share counts once."""
    sizes: dict[int, int] = {}
    _add_storages(value, sizes)
    return sum(sizes.values())


def _add_storages(value: Any, sizes: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for item in value.values():
            _add_storages(item, sizes)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_storages(item, sizes)
