"""Plans as tables for a person."""

from ddp_slurm.console import table
from ddp_slurm.errors import counted
from ddp_slurm.plan import Plan


def plan_table(plan: Plan) -> str:
    """A line for each node: its ranks, GPUs and the shares of the global batch."""
    rows = [("RANKS", "NODE", "GPUS", "CPUS/RANK", "MEMORY", "PARTITION", "SHARES")]
    first = 0
    for component in plan.components:
        for node in component.nodes:
            last = first + component.tasks_per_node - 1
            shares = plan.shares[first : last + 1] if plan.shares else ()
            rows.append(
                (
                    str(first) if first == last else f"{first}-{last}",
                    node,
                    component.gres.removeprefix("gpu:"),
                    str(component.cpus_per_task),
                    f"{component.memory_mb / 1024:g}G" if component.memory_mb else "-",
                    component.partition or "-",
                    " ".join(map(str, shares)) or "-",
                )
            )
            first = last + 1
    return f"{table(rows)}\n{plan.size} in {counted(len(plan.components), 'component')}\n"
