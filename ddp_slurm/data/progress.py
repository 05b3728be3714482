"""A progress bar on stderr; nothing where stderr is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(what: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes the bytes done since its last call.

    Args:
        total: bytes; None where it is not known.
        done: bytes at the start.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda count: progress.advance(task, count)
