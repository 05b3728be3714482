"""What a check reports."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """The value is the exit status where nothing worse was found; ``SKIPPED`` counts as 0."""

    SKIPPED = -1
    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: the nodes, what is wrong and why, and how to fix it."""

    severity: Severity
    nodes: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""
    check: str = ""
    """The name of the check, which ``diagnose`` fills in."""


Groups = Mapping[str, list[str]]
"""Nodes by a value that they have."""
Findings = Iterator[Finding]
"""What a check yields; nothing at all where everything is well."""


def error(nodes: str | Collection[str], cause: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, _names(nodes), cause, fix)


def warning(nodes: str | Collection[str], cause: str, fix: str) -> Finding:
    return Finding(Severity.WARNING, _names(nodes), cause, fix)


def well(nodes: str | Collection[str], result: str) -> Finding:
    """Nothing is wrong, and the result of the check is worth a line."""
    return Finding(Severity.OK, _names(nodes), result)


def skipped(cause: str, nodes: str | Collection[str] = ()) -> Finding:
    """The check could not run, on these nodes or at all."""
    return Finding(Severity.SKIPPED, _names(nodes), cause)


def _names(nodes: str | Collection[str]) -> tuple[str, ...]:
    return (nodes,) if isinstance(nodes, str) else tuple(nodes)


def outside_largest(groups: Groups) -> tuple[str, ...]:
    """The nodes that are not in the largest group."""
    largest = max(groups.values(), key=len)
    odd: list[str] = []
    for names in groups.values():
        if names is not largest:
            odd += names
    return tuple(odd)


def disagreement(
    report: Callable[[list[str], str, str], Finding], what: str, groups: Groups, fix: str
) -> Findings:
    """One finding, for the smallest group, where nodes have different values."""
    if len(groups) > 1:
        fewest = min(groups.values(), key=len)
        yield report(fewest, f"different {what}: {listed(groups)}", fix)


def listed(groups: Groups) -> str:
    """``1.0 on alpha, beta, 1.1 on gamma``."""
    return ", ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
