"""What rank 0 prints: the table of ranks, progress, the first step.

With rich on a terminal, as plain lines in a log.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime

from ddp_slurm.console import show, table
from ddp_slurm.training.process_group.facts import RankFacts

IMPORTED_AT = time.time()


def process_started_at() -> float:
    """Seconds since 1970 at the start of this process.

    Source: proc(5), /proc/PID/stat, field 22.
    """
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def print_rank_table(ranks: Sequence[RankFacts], shares: Sequence[int]) -> None:
    """Print the table of ranks; on a terminal with lines around it."""
    columns = ("rank", "node", "local rank", "device", "share")
    rows: list[tuple[str, ...]] = []
    for fact, share in zip(ranks, shares, strict=True):
        device = f"cuda:{fact.device_index} {fact.device_name}" if fact.visible_gpus else "cpu"
        rows.append((str(fact.rank), fact.node_name, str(fact.local_rank), device, str(share)))
    if not is_terminal():
        show(table([columns, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    framed = Table(*columns, title=f"world of {len(ranks)}")
    for row in rows:
        framed.add_row(*row)
    Console().print(framed)


def first_step_line(rendezvous_seconds: float) -> str:
    """When the first optimizer step was finished, and what the time until then was spent on."""
    now, started = time.time(), process_started_at()
    imports = IMPORTED_AT - started
    rest = now - started - imports - rendezvous_seconds
    stamp = datetime.fromtimestamp(now).isoformat(timespec="milliseconds")
    return (
        f"first optimizer step finished at {stamp}, {now - started:.2f} s after the process "
        f"started: python and imports {imports:.2f} s, rendezvous {rendezvous_seconds:.2f} s, "
        f"data, model and step {rest:.2f} s"
    )


def print_prediction(predicted: float | None, seen: Sequence[float], global_batch: int) -> None:
    """Print the predicted time of a step beside what it took, the median of the reports.

    The first report is left out, since it has the start in it. Nothing without a prediction.

    Args:
        predicted: seconds of a step; None without a prediction.
        seen: mean seconds of a step between two reports each.
    """
    if predicted is None or not seen:
        return
    took = statistics.median(seen[1:] or seen)
    show(
        f"a step was predicted to take {1000 * predicted:.3g} ms, {global_batch / predicted:,.0f} "
        f"images/s; it took {1000 * took:.3g} ms, {global_batch / took:,.0f} images/s "
        f"({100 * (took / predicted - 1):+.0f} %)"
    )


def is_terminal() -> bool:
    if not sys.stdout.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
