"""What a check says."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """Its value is the exit status of a doctor that found nothing worse; ``SKIPPED`` counts as fine."""

    SKIPPED = -1
    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: where, what is wrong and why, and what to do."""

    check: str
    severity: Severity
    nodes: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""


Findings = Iterator[tuple[Severity, tuple[str, ...], str, str]]
"""What a check yields: severity, nodes, cause, fix; nothing at all where everything is well."""
