"""The kinds of value that only a job's options have, each checked where it is read."""

import os
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

from ddp_slurm.errors import quoted
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import Reader, tuple_of

AUTO = "auto"
"""The value of --nodes that stands for the fastest choice; names behind it are the candidates."""

ENDS_IN_A_BACKSLASH = re.compile(r"(?<!\\)(\\\\)*\\$")


def words(value: Any) -> tuple[str, ...]:
    """A command: a list of words, or a text that is split as a shell would split it."""
    if not isinstance(value, str):
        return tuple_of(fields.one_line)(value)
    try:
        split = shlex.split(fields.one_line(_unfolded(value)))
    except ValueError as error:
        raise ValueError(
            f"{quoted(value)} cannot be split into words as a shell would: {error}"
        ) from None
    return tuple_of(fields.one_line)(split)


def env(value: Any) -> dict[str, str]:
    """A mapping, or ``["NAME=VALUE", ...]`` of the command line."""
    if isinstance(value, list):
        value = dict(_pair(item) for item in value)
    return fields.env(value)


def _pair(item: Any) -> tuple[str, str]:
    name, equals, text = fields.one_line(item).partition("=")
    if not equals:
        raise ValueError(f"{quoted(item)} is not NAME=VALUE")
    return name, text


def list_of(read: Reader[Any]) -> Reader[tuple[Any, ...]]:
    """Reader of a list, or of its only item."""

    def read_list(value: Any) -> tuple[Any, ...]:
        return tuple_of(read)([value] if isinstance(value, str) else value)

    return read_list


def setup_line(value: Any) -> str:
    line = fields.one_line(_unfolded(value))
    if ENDS_IN_A_BACKSLASH.search(line):
        raise ValueError(
            f"{quoted(line)} ends in a backslash, which would join it with the next line of "
            "the script"
        )
    return line


def path(value: Any) -> str:
    """``~`` is expanded to the home of the user who submits.

    ``~NAME`` of an unknown user stays as written: the path is then one that does not exist.
    """
    return os.path.expanduser(fields.filled_text(value))


def server_url(value: Any) -> str:
    """``http://host:port``, without a password: everybody can read a list of processes."""
    url = fields.filled_text(value)
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and parts.hostname
        has_more = parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0
    except ValueError:
        is_complete, has_more = None, True
    if not is_complete or has_more:
        raise ValueError(
            f"{quoted(value)} is not the address of a data set's server, such as "
            "http://192.168.8.1:8400"
        )
    return url


def conda_env(value: Any) -> str:
    return path(value) if "/" in str(value) else fields.filled_text(value)


def job_name(value: Any) -> str:
    name = fields.plain_text(value)
    if not name or "/" in name or name != name.strip():
        raise ValueError(
            f"{quoted(value)} is not a job name: it becomes part of the log's file name, so it "
            "must not be empty, hold a '/', or begin or end with a blank"
        )
    return name


def node_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(expand_hostlist(fields.one_line(value)))
    return tuple_of(fields.word)(value)


def _unfolded(value: Any) -> Any:
    """Without the newline that YAML's ``>`` and ``|`` leave at the end of a text."""
    return value.removesuffix("\n") if isinstance(value, str) else value
