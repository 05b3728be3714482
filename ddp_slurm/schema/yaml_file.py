"""YAML files checked against a schema, with every fault reported at once and where it stands.

Scalars keep their text: YAML 1.1 would read 0123 as octal, 12:30:00 as sexagesimal, ``no`` as false and 1_0 as ten,
and a partition, a type or a time would silently become another value. The schema converts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.schema import Invalid, KeyPath, Reader, fault_text

MAX_VALUES = 500_000
"""More values than this (aliases expanded) are an attack or an accident, not a cluster."""

T = TypeVar("T")
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
    if node is None:
        raise error(f"{path}: the file is empty; a YAML file with keys was expected")
    file = YamlFile(path, None)
    try:
        file.data = _Converter(file, error).convert(node, ())
    except RecursionError:
        raise error(f"{path}: its lists and mappings are nested too deep") from None
    return file


class _Converter:
    def __init__(self, file: YamlFile, error: type[DdpSlurmError]) -> None:
        self.file, self.error, self.count = file, error, 0
        self.open_nodes: set[int] = set()

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        line = node.start_mark.line + 1
        if self.count > MAX_VALUES or id(node) in self.open_nodes:
            raise self.error(
                f"{self.file.path}:{line}: an alias that contains itself, or too many values"
            )
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
            if key == "<<":
                raise self.error(
                    f"{self.file.path}:{line}: merge keys (<<) are not read; write the keys out"
                )
            if key in result:
                first = self.file.lines[(*path, key)]
                twice = fault_text((*path, key), f"the key stands twice, first on line {first}")
                self.file.faults.append(f"{self.file.path}:{line}: {twice}")
            self.file.lines[(*path, key)] = line
            result[key] = self.convert(child, (*path, key))
        return result


def validate(read: Reader[T], file: YamlFile, error: type[DdpSlurmError]) -> T:
    """The file's values as ``read`` gives them. Raises ``error`` with all faults, a line each.

    A line reads ``file:line: key path: the value and what is wrong with it``.
    """
    faults = list(file.faults)
    try:
        checked = read(file.data)
    except Invalid as invalid:
        faults += [
            f"{file.path}:{_line(file, path)}: {fault_text(path, text)}"
            for path, text in invalid.faults
        ]
    except ValueError as fault:
        faults.append(f"{file.path}: {fault}")
    if faults:
        raise error("\n".join(_in_order_of_lines(faults)))
    return checked


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
    return yaml.safe_dump(
        dict(value), sort_keys=False, allow_unicode=True, default_flow_style=False
    )
