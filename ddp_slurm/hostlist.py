"""Slurm's host expressions (``gpu[01-03,7]``) and task-count expressions (``4(x2),1``).

Order is kept: it decides which rank runs where. Standard library only, since every rank imports this.
Source: the manual pages of scontrol ("show hostnames") and srun (SLURM_TASKS_PER_NODE).
"""

import math
import re
from collections.abc import Iterable
from itertools import product

from ddp_slurm.errors import DdpSlurmError

MAX_HOSTS = 1_000_000
"""More hosts than this in one expression are a typing error, not a cluster."""


class HostlistError(DdpSlurmError, ValueError):
    """A host or task-count expression that Slurm would not have written."""


def expand_hostlist(text: str) -> list[str]:
    """Every host of an expression, in its own order, the last bracket running fastest.

    >>> expand_hostlist("node[08-10,2],login")
    ['node08', 'node09', 'node10', 'node2', 'login']
    >>> expand_hostlist("rack[0-1]_blade[1,0]")
    ['rack0_blade1', 'rack0_blade0', 'rack1_blade1', 'rack1_blade0']

    Raises HostlistError, with the expression, for unbalanced brackets, empty parts and descending ranges.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts += _expand_part(part, text)
        if len(hosts) > MAX_HOSTS:
            raise HostlistError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if depth not in (0, 1):
            raise HostlistError(f"host list {text!r} has unbalanced brackets at character {i + 1}")
    if depth:
        raise HostlistError(f"host list {text!r} has a bracket that is not closed")
    return [*parts, text[start:]]


def _expand_part(part: str, text: str) -> list[str]:
    if not part or re.search(r"\s", part):
        raise HostlistError(f"host list {text!r} has an empty name or white space in it")
    literals = re.split(r"\[[^]]*\]", part)
    choices = [_expand_ranges(ranges, text) for ranges in re.findall(r"\[([^]]*)\]", part)]
    if math.prod(map(len, choices)) > MAX_HOSTS:
        raise HostlistError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
    if not choices:
        return [part]
    # The last bracket runs fastest, and with three or more the first one is next: a[0-1]b[0-1]c[0-1] begins a0b0c0,
    # a0b0c1, a1b0c0 in "scontrol show hostnames" of 20.11 to 26.05.
    *leading, last = choices
    name = "%s".join(literal.replace("%", "%%") for literal in literals)
    return [name % (*reversed(slow), fast) for *slow, fast in product(*reversed(leading), last)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
        if not match:
            raise HostlistError(
                f"host list {text!r} has {item!r} where a number or a range such as 1-4 belongs"
            )
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise HostlistError(f"host list {text!r} has the descending range {item!r}")
        if len(numbers) + int(high) - int(low) >= MAX_HOSTS:
            raise HostlistError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


def compress_hostlist(hosts: Iterable[str]) -> str:
    """The short form of a list of hosts: ``expand_hostlist`` of it gives the same hosts in the same order.

    >>> compress_hostlist(["gpu08", "gpu09", "gpu10", "login"])
    'gpu[08-10],login'
    """
    runs: list[tuple[str, int, int, int]] = []  # prefix, digits of the first number, first, last
    for host in hosts:
        digits = host[len(host.rstrip("0123456789")) :][-18:]
        if not digits:
            runs.append((host, 0, 0, 0))
            continue
        prefix, number = host[: -len(digits)], int(digits)
        if runs:
            last_prefix, width, first, last = runs[-1]
            if (
                width
                and prefix == last_prefix
                and number == last + 1
                and digits == str(number).zfill(width)
            ):
                runs[-1] = (prefix, width, first, number)
                continue
        runs.append((prefix, len(digits), number, number))
    return ",".join(_join_runs(runs))


def _join_runs(runs: list[tuple[str, int, int, int]]) -> list[str]:
    parts: list[tuple[str, list[str]]] = []
    for prefix, width, first, last in runs:
        low, high = str(first).zfill(width), str(last).zfill(width)
        item = "" if not width else low if first == last else f"{low}-{high}"
        if width and parts and parts[-1][0] == prefix and parts[-1][1]:
            parts[-1][1].append(item)
        else:
            parts.append((prefix, [item] if width else []))
    return [
        prefix
        + (
            items[0]
            if len(items) == 1 and "-" not in items[0]
            else f"[{','.join(items)}]"
            if items
            else ""
        )
        for prefix, items in parts
    ]


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, from Slurm's run-length form.

    >>> expand_tasks_per_node("4(x2),2,1(x3)")
    [4, 4, 2, 1, 1, 1]

    Raises HostlistError, with the expression, for anything else.
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item)
        if not match or match[2] == "0" or len(tasks) + int(match[2] or 1) > MAX_HOSTS:
            raise HostlistError(f"task counts {text!r}: {item!r} is not a count such as 4 or 4(x2)")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def compress_tasks_per_node(tasks: Iterable[int]) -> str:
    """The run-length form of a list of counts, Slurm's way.

    >>> compress_tasks_per_node([4, 4, 2, 1, 1, 1])
    '4(x2),2,1(x3)'
    """
    runs: list[list[int]] = []
    for count in tasks:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
