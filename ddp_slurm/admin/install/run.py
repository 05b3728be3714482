"""Run the steps in their order."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ddp_slurm.admin.install.before import common_release, look, without_control_groups
from ddp_slurm.admin.install.settings import (
    common_settings,
    settings_of_controller,
    settings_of_release,
)
from ddp_slurm.admin.install.steps import STEPS, InstallError, Outcome, Step, run_step
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.errors import did_you_mean
from ddp_slurm.ssh.run import Runner, run

T = TypeVar("T", Node, Step)


def install(
    cluster: Cluster,
    *,
    nodes: Sequence[str] = (),
    steps: Sequence[str] = (),
    dry_run: bool = False,
    python: str | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
    runner: Runner = run,
) -> list[Outcome]:
    """Run the steps, each on all nodes at once, and stop after the first that fails on any node.

    ``nodes`` and ``steps`` restrict it; steps of the controller are left out where it is not among
    the nodes. ``python``, the interpreter that trains, makes the first job a proof on every GPU.
    Raises InstallError when a step fails, when one of ``nodes`` or the controller cannot
    be reached, when the nodes would get different releases, or one that cannot use their addresses.
    """
    chosen = _chosen("node", cluster.nodes, nodes)
    plan = _chosen("step", STEPS, steps)
    settings = common_settings(cluster, dry_run=dry_run)
    needed = {node.name for node in chosen} | {cluster.controller_name}
    before = look(cluster, needed, settings, runner)
    outcomes: list[Outcome] = []
    for name, cause in before.absent.items():
        outcomes.append(Outcome("before", name, "skipped", (cause,)))
        report(outcomes[-1])
    settings |= settings_of_controller(before.nodes[cluster.controller_name])
    if any(step.needs_slurm for step in plan):
        release = common_release(before, dry_run=dry_run)
        unlimited = without_control_groups(before, release)
        if unlimited:
            outcomes.append(_no_limits(unlimited, release, cluster.controller_name))
            report(outcomes[-1])
        settings |= settings_of_release(cluster, release, python, control_groups=not unlimited)
        _check_configless(plan, settings["SLURM_CONF"], release)
    for step in plan:
        step_nodes = chosen
        if step.on_controller_only:
            step_nodes = tuple(node for node in chosen if node.name == cluster.controller_name)
        new = run_step(step, step_nodes, settings, runner)
        for outcome in new:
            report(outcome)
        outcomes += new
        _check_success(step, new)
    return outcomes


def _no_limits(nodes: Sequence[str], release: str, controller: str) -> Outcome:
    reason = (
        f"Slurm {release} has no plugin for cgroup v2, which {', '.join(nodes)} use: nothing keeps "
        "a job to its memory and its GPUs; later releases do (see the guide, step 3)"
    )
    return Outcome("before", controller, "ok", (reason,))


def _chosen(kind: str, items: Sequence[T], names: Sequence[str]) -> tuple[T, ...]:
    """The items of these names in their own order; all of them for no names.

    Raises InstallError for an unknown name.
    """
    known = [item.name for item in items]
    for name in names:
        if name not in known:
            raise InstallError(f"{kind} {name!r} does not exist{did_you_mean(name, known)}")
    return tuple(item for item in items if not names or item.name in names)


def _check_configless(plan: Sequence[Step], slurm_conf: str, release: str) -> None:
    needs_it = any(step.name in ("slurmctld", "slurmd") for step in plan)
    if needs_it and "enable_configless" not in slurm_conf:
        raise InstallError(
            f"Slurm {release} cannot send its configuration to the nodes over IPv6; 24.11 and "
            "later can: use IPv4 addresses in cluster.yaml, or install a later release first (see "
            "the guide)"
        )


def _check_success(step: Step, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.result == "failed"]
    if not failed:
        return
    lines = [f"step {step.name} failed; the ones after it were not started"]
    for outcome in failed:
        lines.append(f"{outcome.node}: {'; '.join(outcome.reasons)}")
    raise InstallError("\n".join(lines))
