"""YAML files checked against a schema; every error is reported at once, with its line.

Scalars keep their text: YAML 1.1 would read 0123 as octal, 12:30:00 as sexagesimal, ``no`` as false
and 1_0 as ten, and a partition, a type or a time would silently become another value. The schema
converts them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.schema import Error, Invalid, KeyPath, Reader, error_text

MAX_VALUES = 500_000
"""More values than this (aliases expanded) are an attack or an accident, not a cluster."""
MAX_ERRORS = 50
"""Lines of one report: nobody reads more, and the last one says how many there are."""

T = TypeVar("T")
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the C one is about ten times faster


@dataclass
class YamlFile:
    """The values of a file and the line of each key path."""

    path: Path
    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    errors: list[Error] = field(default_factory=list)
    """Those that only the file itself shows, such as a duplicate key."""

    def report(self, errors: Iterable[Error]) -> str:
        """A line for each error, in the file's order: ``file:line: key path: what is wrong``."""
        numbered = {(self._line(path), error_text(path, text)) for path, text in errors}
        in_order = sorted(numbered)
        lines = [f"{self.path}:{line}: {text}" for line, text in in_order[:MAX_ERRORS]]
        if len(in_order) > MAX_ERRORS:
            lines.append(f"{self.path}: {len(in_order) - MAX_ERRORS} more errors")
        return "\n".join(lines)

    def _line(self, path: KeyPath) -> int:
        """The line of the longest part of ``path`` that the file has.

        That of the mapping, for a key that is missing.
        """
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def load_yaml(path: Path, error: type[DdpSlurmError]) -> YamlFile:
    """Read a file into dicts, lists and strings. Raises ``error`` if it is not readable YAML."""
    node = _compose(_read_text(path, error), path, error)
    if node is None:
        raise error(f"{path}: the file is empty; expected YAML with keys")
    file = YamlFile(path, None)
    try:
        file.data = _Converter(file, error).convert(node, ())
    except RecursionError:
        raise error(f"{path}: its lists and mappings are nested too deeply") from None
    return file


def _read_text(path: Path, error: type[DdpSlurmError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file in UTF-8; expected a YAML file") from None
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from None


def _compose(text: str, path: Path, error: type[DdpSlurmError]) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = mark.line + 1 if mark else 1
        reason = problem.problem or problem.context
        raise error(f"{path}:{line}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, ValueError) as problem:
        raise error(f"{path}: not valid YAML: {str(problem).splitlines()[0]}") from None


class _Converter:
    def __init__(self, file: YamlFile, error: type[DdpSlurmError]) -> None:
        self.file = file
        self.error = error
        self.count = 0
        self.open_nodes: set[int] = set()

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or id(node) in self.open_nodes:
            raise self._error_at(node, "an alias that contains itself, or too many values")
        self.file.lines.setdefault(path, _line_of(node))
        if isinstance(node, yaml.ScalarNode):
            return node.value
        self.open_nodes.add(id(node))
        value: Any
        if isinstance(node, yaml.SequenceNode):
            value = [self.convert(child, (*path, i)) for i, child in enumerate(node.value)]
        else:
            value = self.mapping(node, path)
        self.open_nodes.remove(id(node))
        return value

    def mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error_at(key_node, "a key must be a single word")
            key = key_node.value
            if key == "<<":
                raise self._error_at(key_node, "merge keys (<<) are not supported; repeat the keys")
            place = (*path, key)
            if key in result:
                first_line = self.file.lines[place]
                message = f"duplicate key {key!r}, first on line {first_line}"
                self.file.errors.append((place, message))
            self.file.lines[place] = _line_of(key_node)
            result[key] = self.convert(child, place)
        return result

    def _error_at(self, node: yaml.Node, problem: str) -> DdpSlurmError:
        return self.error(f"{self.file.path}:{_line_of(node)}: {problem}")


def _line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def validate(read: Reader[T], file: YamlFile, error: type[DdpSlurmError]) -> T:
    """The file's values as ``read`` returns them. Raises ``error`` with all errors, a line each."""
    errors = list(file.errors)
    try:
        checked = read(file.data)
    except Invalid as invalid:
        errors += invalid.errors
    except ValueError as problem:
        errors.append(((), str(problem)))
    if errors:
        raise error(file.report(errors))
    return checked
