"""A plan as a table for a person."""

from collections.abc import Sequence

from ddp_slurm.console import table
from ddp_slurm.errors import counted
from ddp_slurm.plan import Component, Plan

HEADER = ("RANKS", "NODE", "GPUS", "CPUS/RANK", "MEMORY", "PARTITION", "SHARES")


def plan_table(plan: Plan) -> str:
    """A line for each node: its ranks, GPUs and the shares of the global batch."""
    rows: list[Sequence[str]] = [HEADER]
    first = 0
    for component in plan.components:
        for node in component.nodes:
            end = first + component.tasks_per_node
            shares = plan.shares[first:end] if plan.shares else ()
            rows.append(_row(component, node, range(first, end), shares))
            first = end
    return f"{table(rows)}\n{plan.size} in {counted(len(plan.components), 'component')}\n"


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
