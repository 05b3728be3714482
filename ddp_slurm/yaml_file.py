"""YAML files checked against a pydantic model, with every fault reported at once and where it stands.

Scalars keep their text: YAML 1.1 would read 0123 as octal, 12:30:00 as sexagesimal, ``no`` as false and 1_0 as ten,
and a partition, a type or a time would silently become another value. The model converts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from .errors import DdpSlurmError, did_you_mean

MAX_VALUES = 500_000
"""More values than this (aliases expanded) are an attack or an accident, not a cluster."""

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=pydantic.BaseModel)
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the C one is about ten times faster


@dataclass
class YamlFile:
    """The values of a file, and the line of each key path.

    ``faults`` are those that the syntax tree shows, such as a key that stands twice.
    """

    path: Path
    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def load_yaml(path: Path, error: type[DdpSlurmError]) -> YamlFile:
    """Read a file into dicts, lists and strings. Raises ``error`` for one that cannot be read or is not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file (no UTF-8); a YAML file was expected") from None
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        line = mark.line + 1 if mark else 1
        raise error(f"{path}:{line}: not valid YAML: {fault.problem or fault.context}") from None
    except (yaml.YAMLError, ValueError) as fault:
        raise error(f"{path}: not valid YAML: {str(fault).splitlines()[0]}") from None
    file = YamlFile(path, None)
    if node is not None:
        file.data = _Converter(file, error).convert(node, ())
    return file


class _Converter:
    def __init__(self, file: YamlFile, error: type[DdpSlurmError]) -> None:
        self.file, self.error, self.count = file, error, 0
        self.open_nodes: set[int] = set()

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        line = node.start_mark.line + 1
        if self.count > MAX_VALUES or id(node) in self.open_nodes:
            raise self.error(f"{self.file.path}:{line}: an alias that contains itself, or too many values")
        self.file.lines.setdefault(path, line)
        if isinstance(node, yaml.ScalarNode):
            return node.value
        self.open_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.convert(child, (*path, i)) for i, child in enumerate(node.value)]
        else:
            value = self.mapping(node, path)
        self.open_nodes.remove(id(node))
        return value

    def mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.error(f"{self.file.path}:{line}: a key must be one word")
            key = key_node.value
            if key in result:
                first = self.file.lines[(*path, key)]
                where = f"{self.file.path}:{line}: {key_path_text((*path, key))}"
                self.file.faults.append(f"{where}: the key stands twice, first on line {first}")
            self.file.lines[(*path, key)] = line
            result[key] = self.convert(child, (*path, key))
        return result


def validate(model: type[Model], file: YamlFile, error: type[DdpSlurmError]) -> Model:
    """The file's values as ``model``. Raises ``error`` with all faults, a line each.

    A line reads ``file:line: key path: the value and what is wrong with it``.
    """
    faults = list(file.faults)
    checked: Model | None = None
    if not isinstance(file.data, dict):
        found = "empty" if file.data in (None, "") else "a list" if isinstance(file.data, list) else "one single value"
        raise error(f"{file.path}: the file is {found}; expected keys such as '{next(iter(model.model_fields))}:'")
    try:
        checked = model.model_validate(file.data)
    except pydantic.ValidationError as invalid:
        for fault in invalid.errors(include_url=False):
            path = tuple(part for part in fault["loc"] if not _is_branch_label(part))
            faults.append(f"{file.path}:{_line(file, path)}: {describe_fault(model, fault)}")
    if faults or checked is None:
        raise error("\n".join(_in_order_of_lines(faults)))
    return checked


def _is_branch_label(part: object) -> bool:
    # pydantic puts the tried branch of a union or a validator's name into the path, e.g. "function-before[...]"
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "list"))


def describe_fault(model: type[pydantic.BaseModel], fault: Any) -> str:
    """One pydantic fault as ``key path: what is wrong``, with the near word for a mistyped key."""
    path = tuple(part for part in fault["loc"] if not _is_branch_label(part))
    where = key_path_text(path)
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(str(path[-1]), _keys_beside(model, path))}"
    if fault["type"] == "missing":
        return f"{where}: missing"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {fault['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys_beside(model: type[pydantic.BaseModel], path: KeyPath) -> list[str]:
    """The keys that the model knows in the mapping that holds the last part of ``path``."""
    for part in path[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_inside(model.model_fields[part].annotation)
            if inner is None:
                break
            model = inner
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_inside(annotation: Any) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_inside(inner)
        if found is not None:
            return found
    return None


def key_path_text(path: Sequence[str | int]) -> str:
    """``nodes[0].gpus.type`` of ``("nodes", 0, "gpus", "type")``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _line(file: YamlFile, path: KeyPath) -> int:
    """The line of the longest part of ``path`` that the file has (a missing key: that of its mapping)."""
    while path and path not in file.lines:
        path = path[:-1]
    return file.lines.get(path, 1)


def _in_order_of_lines(faults: list[str]) -> list[str]:
    def line(fault: str) -> int:
        return next((int(part) for part in fault.split(":") if part.isdigit()), 0)

    return sorted(dict.fromkeys(faults), key=line)


def plain(value: Mapping[str, Any]) -> str:
    """Values as YAML text that this module reads back unchanged."""
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, default_flow_style=False)
