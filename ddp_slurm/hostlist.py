"""Slurm's host expressions (``gpu[01-03,7]``) and task-count expressions (``4(x2),1``).

The order is kept: it decides which rank runs where. Standard library only: every rank imports
this. Source: the manual pages of scontrol ("show hostnames") and srun (SLURM_TASKS_PER_NODE).
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, product

from ddp_slurm.errors import DdpSlurmError, quoted

MAX_HOSTS = 1_000_000
"""More hosts than this in one expression are a typing error, not a cluster."""
NUMBER = "[0-9]{1,255}"
"""Within a host name. int() refuses numbers of thousands of digits with an error of its own."""


class HostlistError(DdpSlurmError, ValueError):
    """A host or task-count expression that Slurm would not have written."""


def expand_hostlist(text: str, limit: int = MAX_HOSTS) -> list[str]:
    """Every host of an expression, in its own order; the last bracket varies fastest.

    >>> expand_hostlist("node[08-10,2],login")
    ['node08', 'node09', 'node10', 'node2', 'login']
    >>> expand_hostlist("rack[0-1]_blade[1,0]")
    ['rack0_blade1', 'rack0_blade0', 'rack1_blade1', 'rack1_blade0']

    Raises HostlistError, with the expression, for unbalanced brackets, empty parts, descending
    ranges, and more than ``limit`` hosts.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts += _expand_part(part, text, limit - len(hosts))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts = []
    depth = start = 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if depth not in (0, 1):
            raise _error(text, f"has unbalanced brackets at character {i + 1}")
    if depth:
        raise _error(text, "has a bracket that is not closed")
    parts.append(text[start:])
    return parts


def _expand_part(part: str, text: str, limit: int) -> list[str]:
    if not part or re.search(r"\s", part):
        raise _error(text, "contains an empty name or white space")
    pieces = re.split(r"\[([^]]*)\]", part)
    literals, brackets = pieces[0::2], pieces[1::2]
    choices = [_expand_ranges(ranges, text, limit) for ranges in brackets]
    count = math.prod(len(numbers) for numbers in choices)
    if count > limit:
        raise _too_many(text)
    if not choices:
        return [part]
    return _all_names(literals, choices)


def _all_names(literals: Sequence[str], choices: Sequence[Sequence[str]]) -> list[str]:
    """``literals[0] choices[0] literals[1] choices[1] ...`` for all combinations.

    The last bracket varies fastest, and of three or more the first one is next: a[0-1]b[0-1]c[0-1]
    begins a0b0c0, a0b0c1, a1b0c0 in "scontrol show hostnames" of 20.11 to 26.05.
    """
    *leading, last = choices
    end = literals[-1]
    hosts: list[str] = []
    for reversed_numbers in product(*reversed(leading)):
        numbers = [*reversed(reversed_numbers), ""]
        before_last = zip(literals[:-1], numbers, strict=True)
        start = "".join(literal + number for literal, number in before_last)
        hosts += [start + number + end for number in last]
    return hosts


def _expand_ranges(ranges: str, text: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(rf"({NUMBER})(?:-({NUMBER}))?", item)
        if not match:
            raise _error(text, f"has {item!r} where a number or a range such as 1-4 belongs")
        width = len(match[1])
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise _error(text, f"has the descending range {item!r}")
        if len(numbers) + last - first >= limit:
            raise _too_many(text)
        numbers += [str(n).zfill(width) for n in range(first, last + 1)]
    return numbers


def _error(text: str, problem: str) -> HostlistError:
    return HostlistError(f"host list {quoted(text)} {problem}")


def _too_many(text: str) -> HostlistError:
    return _error(text, f"is too long: {MAX_HOSTS} hosts are the limit for all host lists together")


def compress_hostlist(hosts: Iterable[str]) -> str:
    """The short form of a list of hosts; ``expand_hostlist`` of it returns the same list.

    >>> compress_hostlist(["gpu08", "gpu09", "gpu10", "login"])
    'gpu[08-10],login'
    """
    parts: list[str] = []
    for (prefix, is_numbered), group in groupby(map(_split_number, hosts), key=_prefix_and_kind):
        numbers = [number for _, number in group]
        if is_numbered:
            parts.append(prefix + _in_brackets(_ranges(numbers)))
        else:
            parts += [prefix] * len(numbers)
    return ",".join(parts)


def _split_number(host: str) -> tuple[str, str]:
    """The host's name as prefix and digits; of a longer number the last 18 digits, as in Slurm."""
    without_number = host.rstrip("0123456789")
    number = host[len(without_number) :][-18:]
    return host[: len(host) - len(number)], number


def _prefix_and_kind(split_host: tuple[str, str]) -> tuple[str, bool]:
    prefix, number = split_host
    return prefix, bool(number)


def _ranges(numbers: Sequence[str]) -> list[str]:
    """``["08-10", "2"]`` of 08, 09, 10, 2."""
    ranges: list[list[str]] = []
    following = ""
    for number in numbers:
        if number == following:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
        following = str(int(number) + 1).zfill(len(number))
    return ["-".join(ends) for ends in ranges]


def _in_brackets(ranges: Sequence[str]) -> str:
    is_one_number = len(ranges) == 1 and "-" not in ranges[0]
    return ranges[0] if is_one_number else f"[{','.join(ranges)}]"


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, from Slurm's run-length form.

    >>> expand_tasks_per_node("4(x2),2,1(x3)")
    [4, 4, 2, 1, 1, 1]

    Raises HostlistError, with the expression, for anything else.
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(rf"({NUMBER})(?:\(x({NUMBER})\))?", item)
        times = int(match[2] or 1) if match else 0
        if match is None or times == 0 or len(tasks) + times > MAX_HOSTS:
            raise HostlistError(
                f"task counts {quoted(text)}: {quoted(item)} is not a count such as 4 or 4(x2)"
            )
        tasks += [int(match[1])] * times
    return tasks


def compress_tasks_per_node(tasks: Iterable[int]) -> str:
    """The run-length form of a list of counts, as Slurm writes it.

    >>> compress_tasks_per_node([4, 4, 2, 1, 1, 1])
    '4(x2),2,1(x3)'
    """
    items = []
    for count, group in groupby(tasks):
        times = len(list(group))
        items.append(str(count) if times == 1 else f"{count}(x{times})")
    return ",".join(items)
