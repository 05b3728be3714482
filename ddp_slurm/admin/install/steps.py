"""The steps, and running one on a node."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, last_lines, on_all, run_script

STEP_TIMEOUT_SECONDS = 1800.0
"""apt takes long over a slow connection."""

LOCK_HELD = 75
LOCK_FILE = "/run/ddp-slurm-install.lock"
LOCK = ("flock", "-o", "-w", "900", "-E", str(LOCK_HELD), LOCK_FILE)
"""The shell of an interrupted installer continues by itself; the next installer waits for it."""


class InstallError(DdpSlurmError):
    """The installation stopped; the text has the step, the nodes and their causes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One file of cluster_setup/steps, which begins with what the step is for."""

    name: str
    on_controller_only: bool = False
    changes_nothing: bool = False
    needs_slurm: bool = True
    """It depends on Slurm's release; the others run also where none can be installed yet."""
    settings: tuple[str, ...] = ()
    """The variables that it needs besides those of every step."""


SETTINGS_OF_ALL = ("NODES", "CONTROLLER", "CONTROLLER_ADDRESS", "DRY_RUN")
CONFIGURATION = ("SLURM_CONF", "GRES_CONF", "CGROUP_CONF")
STEPS = (
    Step("hosts", needs_slurm=False),
    Step("users", needs_slurm=False, settings=("MUNGE_UID", "SLURM_UID")),
    Step("clock", needs_slurm=False),
    Step("packages"),
    Step("munge", settings=("MUNGE_KEY",)),
    Step("slurmctld", on_controller_only=True, settings=CONFIGURATION),
    Step("slurmd", settings=(*CONFIGURATION, "GPU_CHECK")),
    Step("nodes", on_controller_only=True),
    Step("first_job", on_controller_only=True, changes_nothing=True, settings=("SRUN", "TASKS")),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did on a node, with its reasons."""

    step: str
    node: str
    result: str
    """``ok``, ``changed``, ``would-change``, ``skipped`` or ``failed``."""
    reasons: tuple[str, ...] = ()


def run_step(
    step: Step, nodes: Iterable[Node], settings: Mapping[str, str], runner: Runner
) -> list[Outcome]:
    """Run a step on all nodes at once."""
    if step.changes_nothing and settings["DRY_RUN"] == "yes":
        reason = "a dry run submits nothing"
        return [Outcome(step.name, node.name, "skipped", (reason,)) for node in nodes]
    names = (*SETTINGS_OF_ALL, *step.settings)
    given = {name: settings[name] for name in names}
    answers = on_all(nodes, lambda node: run_shell(node, step.name, given, "run_step", runner))
    return [_outcome(step, name, answer) for name, answer in answers.items()]


def _outcome(step: Step, node: str, answer: Answer | RemoteError) -> Outcome:
    if isinstance(answer, RemoteError):
        return Outcome(step.name, node, "failed", (str(answer),))
    reasons = []
    results = []
    for line in answer.out.splitlines():
        key, _, value = line.partition(" ")
        if key == "say":
            reasons.append(value)
        elif key == "result":
            results.append(value)
    if answer.status == 0 and results:
        result = results[0]
    else:
        result = "failed"
        reasons.append(error_text(answer))
    unique_reasons = tuple(dict.fromkeys(reasons))  # a step looks before and after
    return Outcome(step.name, node, result, unique_reasons)


def error_text(answer: Answer) -> str:
    """How the error output of a shell ends."""
    return last_lines(answer.err, 4) or "no message"


def run_shell(
    node: Node, name: str, settings: Mapping[str, str], call: str, runner: Runner
) -> Answer:
    """Run a file of cluster_setup/steps as root, while no other installer is at work there."""
    answer = run_script(
        node,
        step_script(name, {"NODE": node.name, **settings}, call),
        as_root=True,
        wrapper=LOCK,
        timeout_seconds=STEP_TIMEOUT_SECONDS,
        runner=runner,
    )
    if answer.status == LOCK_HELD:  # flock itself prints nothing
        raise RemoteError(
            f"{node.name}: another installer has been running there for 15 minutes ({LOCK_FILE})"
        )
    return answer


def step_script(name: str, settings: Mapping[str, str], call: str = "run_step") -> str:
    """The whole text that a node's shell reads: settings, the common part, the step, the call."""
    folder = resources.files("ddp_slurm.cluster_setup").joinpath("steps")
    common = folder.joinpath("common.sh").read_text(encoding="utf-8")
    step = folder.joinpath(f"{name}.sh").read_text(encoding="utf-8")
    assignments = [f"{key}={shlex.quote(value)}" for key, value in settings.items()]
    # echo: what the login shell printed before may not end with a newline
    return "\n".join([*assignments, "echo", common, step, call])
