"""``--sbatch KEY=VALUE``: any sbatch option that the plan does not decide itself."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_slurm.errors import quoted
from ddp_slurm.schema import fields

CLUSTERS = "status, logs and cancel ask this cluster; submit on a login node of the other one"
NOTHING = "nothing would be submitted"
TASKS = "the plan sets the tasks of each component"
USERS = "the run would be kept for you; submit as the other user"

KEYS_OF_THE_PLAN = {
    "account": "use --account",
    "array": "Slurm refuses arrays of heterogeneous jobs; submit the jobs one by one",
    "autocomplete": NOTHING,
    "batch": "the script runs on the host of rank 0",
    "chdir": "submit in that folder: the ranks start there, the log and the run folder are in it",
    "cluster": CLUSTERS,
    "clusters": CLUSTERS,
    "cpus-per-gpu": "use --cpus-per-task",
    "cpus-per-task": "use --cpus-per-task",
    "distribution": "the shares are planned for ranks in the order of the nodes",
    "error": "both streams of all ranks go to the log of --output, which status and logs read",
    "export": "the ranks would not get the script's variables; use --env for yours",
    "export-file": "use --env",
    "external": "the script would not be run",
    "gid": USERS,
    "gpus": "use --gpus N for a part of the cluster",
    "gpus-per-node": "the plan sets gres for each component",
    "gpus-per-socket": "the plan sets gres for each component",
    "gpus-per-task": "it would hide the other GPUs of the node from each rank; the plan sets gres",
    "gres": "the plan sets it for each component, from the nodes' gpus",
    "help": NOTHING,
    "hetjob": "the plan makes the components",
    "job-name": "use --name",
    "mem": "use --memory",
    "mem-per-cpu": "use --memory SIZE/cpu, such as 4G/cpu",
    "mem-per-gpu": "use --memory; its default is in proportion to the GPUs",
    "no-requeue": "use --max-restarts",
    "nodefile": "use --nodes LIST for a part of the cluster",
    "nodelist": "use --nodes LIST for a part of the cluster",
    "nodes": "use --nodes LIST for a part of the cluster",
    "ntasks": TASKS,
    "ntasks-per-gpu": TASKS,
    "ntasks-per-node": TASKS,
    "ntasks-per-socket": TASKS,
    "ntasks-per-tres": TASKS,
    "output": "use --output",
    "packjob": "the plan makes the components",
    "partition": "use --partition",
    "qos": "use --qos",
    "requeue": "use --max-restarts",
    "signal": "use --signal-seconds",
    "tasks-per-node": TASKS,
    "test-only": "nothing would be submitted; use --script FILE, then: sbatch --test-only FILE",
    "time": "use --time",
    "tres-per-task": "the plan sets gres and --cpus-per-task",
    "uid": USERS,
    "usage": NOTHING,
    "version": NOTHING,
    "wait": "use --follow",
    "wrap": "put the command after --",
}
"""sbatch's options that --sbatch refuses, each with the reason or the option to use.

From the long options of sbatch 20.11, 22.05, 24.11 and 26.05.
"""

FORM = re.compile(r"(?:([0-9]{1,3}):)?(?:--)?([a-z][a-z0-9-]*)(?:=(.*))?")


@dataclass(frozen=True)
class SbatchOption:
    """An sbatch option for one component, or for all where ``component`` is None."""

    component: int | None
    key: str
    value: str | None

    @classmethod
    def read(cls, value: Any) -> "SbatchOption":
        """Raises ValueError."""
        if isinstance(value, cls):
            return value
        match = FORM.fullmatch(fields.plain_text(value))
        if not match:
            raise ValueError(
                f"{quoted(value)} is not KEY=VALUE or COMPONENT:KEY=VALUE, such as "
                "'reservation=lab' or '1:mincpus=4'"
            )
        component, key, text = match.groups()
        _check_key(key)
        return cls(component=None if component is None else int(component), key=key, value=text)

    def __str__(self) -> str:
        component = "" if self.component is None else f"{self.component}:"
        value = "" if self.value is None else f"={self.value}"
        return f"{component}{self.key}{value}"


def _check_key(key: str) -> None:
    """Raises ValueError for an option of the plan, also where its name is cut short.

    sbatch accepts the beginning of a name that only one of its options has (getopt_long(3)).
    """
    if key in KEYS_OF_THE_PLAN:
        raise ValueError(f"{key!r} cannot be set here: {KEYS_OF_THE_PLAN[key]}")
    longer = [name for name in KEYS_OF_THE_PLAN if name.startswith(key)]
    if longer:
        raise ValueError(
            f"{key!r}: write the option's whole name; sbatch would take this for "
            f"{' or '.join(repr(name) for name in longer)}"
        )
