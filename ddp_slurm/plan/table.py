"""A plan as a table for a person."""

from collections.abc import Sequence

from ddp_slurm.console import table
from ddp_slurm.errors import counted
from ddp_slurm.plan import Component, Plan
from ddp_slurm.plan.forecast_text import faster_line, forecast_text
from ddp_slurm.plan.prediction import Choice, forecast
from ddp_slurm.plan.shares import passes

HEADER = ("RANKS", "NODE", "GPUS", "CPUS/RANK", "MEMORY", "PARTITION", "SHARES")
MOST_NAMED = 8
PREDICTED = ("COMPUTE MS", "BUSY %")


def plan_table(plan: Plan) -> str:
    """A line for each node: its ranks, GPUs and the shares of the global batch.

    With a file of speeds also each rank's compute and the part of the step that it is busy, the
    prediction of the whole step, and first the nodes without which it would be faster.
    """
    predicted = forecast(plan)
    rows: list[Sequence[str]] = [HEADER + (PREDICTED if predicted else ())]
    first = 0
    for component in plan.components:
        for node in component.nodes:
            end = first + component.tasks_per_node
            shares = plan.shares[first:end] if plan.shares else ()
            row = _row(component, node, range(first, end), shares)
            rows.append(row + (_predicted(predicted.plan, first, end) if predicted else ()))
            first = end
    text = f"{table(rows)}\n{plan.size} in {counted(len(plan.components), 'component')}\n"
    text += _passes_line(plan)
    if predicted is None:
        return text
    faster = faster_line(predicted)
    start = f"{faster}\n" if faster else ""
    return f"{start}{text}{forecast_text(predicted, plan.options.balance)}"


def _passes_line(plan: Plan) -> str:
    """The ranks whose share their memory does not hold at once; empty where all do."""
    found = passes(plan)
    if not found:
        return ""
    named = [f"rank {rank.rank} {number} of {most}" for rank, number, most in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more ranks" if len(found) > MOST_NAMED else ""
    return (
        f"shares above max_batch, in passes of at most so many samples: {', '.join(named)}{more}. "
        "The Trainer runs them so; a loop of your own needs world.micro_batch\n"
    )


def _predicted(choice: Choice, first: int, end: int) -> tuple[str, str]:
    seconds = choice.computes[first:end]
    step = choice.step.seconds
    return (
        " ".join(f"{1000 * one:.3g}" for one in seconds),
        " ".join(f"{100 * one / step:.0f}" if step else "-" for one in seconds),
    )


def _row(component: Component, node: str, ranks: range, shares: Sequence[int]) -> tuple[str, ...]:
    first, last = ranks[0], ranks[-1]
    memory = component.memory_mb
    return (
        str(first) if first == last else f"{first}-{last}",
        node,
        component.gres.removeprefix("gpu:"),
        str(component.cpus_per_task),
        f"{memory / 1024:g}G" if memory else "-",
        component.partition or "-",
        " ".join(map(str, shares)) or "-",
    )
