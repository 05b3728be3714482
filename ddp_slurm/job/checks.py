"""Options that are each right and cannot be combined."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from ddp_slurm.job.options import JobOptions
from ddp_slurm.job_env import ADAPTIVE, MEASURED
from ddp_slurm.launchers import launcher_error, launcher_in
from ddp_slurm.schema.fields import limit_seconds


class Check(NamedTuple):
    """One rule over several options."""

    keys: tuple[str, ...]
    """The options that it looks at."""
    error: Callable[[JobOptions], str | None]
    """Returns the message, or None where the rule is kept."""


def combination_errors(options: JobOptions, unread: Collection[str] = ()) -> list[str]:
    """A message for each rule that the options break.

    Args:
        unread: keys whose values could not be read; rules that look at them are left out.
    """
    checks = [check for check in CHECKS if not set(check.keys) & set(unread)]
    errors = [check.error(options) for check in checks]
    return [error for error in errors if error]


def _command(options: JobOptions) -> str | None:
    if not options.command or not options.command[0].startswith("-"):
        return None
    return (
        f"the command begins with {options.command[0]!r}, which srun would take for an option of "
        "its own; did you forget python?"
    )


def _launcher(options: JobOptions) -> str | None:
    launcher = launcher_in(options.command)
    return None if launcher is None else launcher_error(launcher)


def _uneven(options: JobOptions) -> str | None:
    if not options.uneven:
        return None
    if not options.comm.is_exact:
        return (
            f"--comm {options.comm} is for scripts that call world.wrap(model); it cannot be "
            "combined with --uneven, whose gradients are exact"
        )
    if options.balance.kind in (MEASURED, ADAPTIVE):
        return (
            f"--balance {options.balance} cannot be combined with --uneven: the shares are needed "
            "before the script has a model to measure. Give the speeds in a file (ddp-slurm "
            "measure writes it): --balance speeds.yaml"
        )
    return None


def _interpreter(options: JobOptions) -> str | None:
    given = {
        "--python": options.python,
        "--conda-env": options.conda_env,
        "--venv": options.venv,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) < 2:
        return None
    return f"{' and '.join(names)} cannot be combined: each names the interpreter"


def _speeds(options: JobOptions) -> str | None:
    if options.balance.speeds is None or options.global_batch_size is not None:
        return None
    return (
        f"--balance {options.balance} needs --global-batch-size, the number of samples to share out"
    )


def _container_options(options: JobOptions) -> str | None:
    if options.container is not None or not (options.mount or options.container_network):
        return None
    return "--mount and --container-network need --container"


def _container_network(options: JobOptions) -> str | None:
    container = options.container
    if not options.container_network or container is None or container.engine == "docker":
        return None
    return f"--container-network is docker's; {container.engine} uses the nodes' own network"


def _container_interpreter(options: JobOptions) -> str | None:
    if options.container is None or not (options.conda_env or options.venv):
        return None
    return (
        "--conda-env and --venv are on the node and cannot be combined with --container, "
        "which has its own Python; use --python"
    )


def _dataset_cache(options: JobOptions) -> str | None:
    if options.dataset_cache is None or options.dataset is not None:
        return None
    return "--dataset-cache needs --dataset, the server to fetch from"


def _signal(options: JobOptions) -> str | None:
    if options.signal_seconds is None:
        return None
    if options.time is None:
        return "--signal-seconds needs --time: it counts back from that limit"
    limit = limit_seconds(options.time)
    if limit is None or options.signal_seconds < limit:
        return None
    return (
        f"--signal-seconds {options.signal_seconds}: the signal would come before the job begins; "
        f"--time {options.time} is {limit} seconds"
    )


CHECKS = (
    Check(("command",), _command),
    Check(("command",), _launcher),
    Check(("uneven", "comm", "balance"), _uneven),
    Check(("python", "conda_env", "venv"), _interpreter),
    Check(("balance", "global_batch_size"), _speeds),
    Check(("container", "mount", "container_network"), _container_options),
    Check(("container", "container_network"), _container_network),
    Check(("container", "conda_env", "venv"), _container_interpreter),
    Check(("dataset", "dataset_cache"), _dataset_cache),
    Check(("signal_seconds", "time"), _signal),
)
