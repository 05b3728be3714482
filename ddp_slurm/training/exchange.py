"""Small values between ranks, as JSON: what arrives from another rank is read, never run, as a
pickled object would be."""

import base64
import json
import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in rank order, on every rank.

    Args:
        value: None, bools, numbers, strings, tensors, and lists, tuples and dicts of them; tensors
            arrive on the CPU.
        group: a gloo group; all of its ranks call it.
    """
    own, sizes = _padded(value, group)
    rows = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(rows, own, group=group)
    return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in rank order, on rank 0; an empty list on the others.

    Arguments as of ``all_gather_values``.
    """
    own, sizes = _padded(value, group)
    rows = [torch.empty_like(own) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(own, rows, dst=0, group=group)
    return [_decoded(row[:size]) for row, size in zip(rows or [], sizes, strict=False)]


def broadcast_value(value: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's value, on every rank. Arguments as of ``all_gather_values``."""
    is_rank_0 = dist.get_rank(group) == 0
    message = _encoded(value if is_rank_0 else None)
    size = torch.tensor([len(message)])
    dist.broadcast(size, src=0, group=group)
    if not is_rank_0:
        message = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(message, src=0, group=group)
    return _decoded(message)


def _padded(value: Any, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """The encoded value, as long as the longest of all ranks, and the length of each."""
    own = _encoded(value)
    size = torch.tensor([len(own)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    return torch.nn.functional.pad(own, (0, max(lengths) - len(own))), lengths


def _encoded(value: Any) -> Tensor:
    text = json.dumps(_to_json(value))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(message: Tensor) -> Any:
    return _from_json(json.loads(message.numpy().tobytes()))


def _to_json(value: Any) -> Any:
    """What JSON has no type for is an object with one key, the name of the type."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": _tensor_to_json(value)}
    name = type(value).__name__
    raise TypeError(f"ranks cannot exchange a {name}; expected JSON's types or tensors")


def _from_json(found: Any) -> Any:
    if isinstance(found, list):
        return [_from_json(item) for item in found]
    if not isinstance(found, dict):
        return found
    [(name, content)] = found.items()
    if name == "tensor":
        return _tensor_from_json(*content)
    items = _from_json(content)
    return tuple(items) if name == "tuple" else dict(items)


def _tensor_to_json(value: Tensor) -> list[Any]:
    flat = value.detach().cpu().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    name = str(value.dtype).removeprefix("torch.")
    return [name, list(value.shape), base64.b64encode(data).decode()]


def _tensor_from_json(name: str, shape: list[int], text: str) -> Tensor:
    dtype = getattr(torch, name)
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
