"""The task's command inside a container: docker, apptainer, or pyxis (enroot) under Slurm.

Pure: options to words of a shell. The working folder is mounted at the same path and is the working
folder inside the container.
"""

from collections.abc import Iterable

from ddp_slurm.job.containers import Container, Mount
from ddp_slurm.render.quoting import shell_quote

FOLDER_CHECK = (
    r"""case $PWD in *[,:\"\\]*) echo "$PWD: a folder with a comma, a colon, a quote or """
    r"""a backslash in its name cannot be mounted in a container" >&2; exit 2 ;; esac"""
)
"""A line of bash that refuses a working folder which the engines would not mount as it is named."""

GPU_OPTIONS = (
    "$([ ! -e /proc/driver/nvidia ] && [ ! -e /dev/dxg ] "
    "|| echo --gpus=all --ulimit=memlock=-1 --ulimit=stack=67108864)"
)
"""Docker's options on a node with an NVIDIA driver, also that of Windows; none on others.

Without the driver's runtime an engine refuses ``--gpus``. NCCL locks pages; an engine that runs in
a container itself may have no right to allow it."""


def apptainer_words(container: Container, mounts: Iterable[Mount]) -> list[str]:
    """The words before the command, quoted for a shell. apptainer passes the environment on."""
    # Without an NVIDIA driver --nv only prints a warning.
    words = ["apptainer", "exec", "--nv", "--bind", '"$PWD"']
    for mount in mounts:
        words += ["--bind", shell_quote(str(mount))]
    return [*words, "--pwd", '"$PWD"', shell_quote(container.image)]


def docker_words(
    container: Container,
    mounts: Iterable[Mount],
    *,
    name: str,
    network: str | None,
    env_names: Iterable[str],
) -> list[str]:
    """The words before the command, quoted for a shell.

    Args:
        name: of the container, and its host name in ``network``.
        network: docker's overlay network, or None for the node's own network.
        env_names: variables to pass on. Only names: their values stay out of ``ps``.
    """
    words = ["docker", "run", "--rm", "--init", f"--name={shell_quote(name)}"]
    if network:
        words.append(f"--network={shell_quote(network)}")
        words.append(f"--network-alias={shell_quote(name)}")
    else:
        words.append("--network=host")
    words.append("--ipc=host")  # NCCL and loader workers need shared memory of the host's size
    words.append(GPU_OPTIONS)
    # Files that are created in mounted folders belong to the user.
    words.append('--user="$(id -u):$(id -g)"')
    words += ["--env=HOME=/tmp", '--env=USER="$(id -un)"']
    words += [f"--env={env_name}" for env_name in env_names]
    words.append('--mount=type=bind,source="$PWD",target="$PWD"')
    words += [f"--mount={_docker_mount(mount)}" for mount in mounts]
    words.append('--workdir="$PWD"')
    words.append(shell_quote(container.image))
    return words


def _docker_mount(mount: Mount) -> str:
    text = f"type=bind,source={mount.source},target={mount.target}"
    if mount.read_only:
        text += ",readonly"
    return shell_quote(text)


def pyxis_options(
    container: Container, mounts: Iterable[Mount], env_names: Iterable[str]
) -> list[str]:
    """srun's options, quoted for a shell.

    ``env_names`` are the variables whose values win over those of the image.
    """
    more_mounts = "".join(f",{mount}" for mount in mounts)
    mounts_text = '"$PWD:$PWD"'
    if more_mounts:
        mounts_text += shell_quote(more_mounts)
    return [
        f"--container-image={shell_quote(container.image)}",
        f"--container-mounts={mounts_text}",
        '--container-workdir="$PWD"',
        f"--container-env={','.join(env_names)}",
    ]
