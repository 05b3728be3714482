"""The task's command inside a container: docker without Slurm, pyxis (enroot) under Slurm, apptainer on both.

Pure: options to words of a shell. The working folder is mounted at the same path and is the working
folder inside the container.
"""

from collections.abc import Iterable

from ddp_slurm.job.containers import Container, Mount
from ddp_slurm.render.quoting import shell_quote

FOLDER_CHECK = (
    r"""case $PWD in *[,:\"\\]*) echo "$PWD: a folder with a comma, a colon, a quote or a backslash in its name """
    r"""cannot be mounted in a container" >&2; exit 2 ;; esac"""
)
"""A line of bash that refuses a working folder which the engines would not mount as it stands."""


def apptainer_words(container: Container, mounts: Iterable[Mount]) -> list[str]:
    """The words before the command, quoted for a shell. The environment goes in as it is."""
    binds = [word for mount in mounts for word in ("--bind", shell_quote(mount.text))]
    # --nv only warns where there is no NVIDIA driver
    return [
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        '"$PWD"',
        *binds,
        "--pwd",
        '"$PWD"',
        shell_quote(container.image),
    ]


def docker_words(
    container: Container,
    mounts: Iterable[Mount],
    *,
    name: str,
    network: str | None,
    env_names: Iterable[str],
) -> list[str]:
    """The words before the command, quoted for a shell. Variables are passed by name: their values stay out of ``ps``.

    NCCL wants shared memory of the host's size and locked pages; files made in mounted folders belong to the user.
    """
    mounted = [
        shell_quote(
            f"type=bind,source={mount.source},target={mount.target}"
            + (",readonly" if mount.read_only else "")
        )
        for mount in mounts
    ]
    return [
        "docker",
        "run",
        "--rm",
        "--init",
        f"--name={shell_quote(name)}",
        f"--network={shell_quote(network or 'host')}",
        *([f"--network-alias={shell_quote(name)}"] if network else []),
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--ulimit=stack=67108864",
        "--gpus=all",
        '--user="$(id -u):$(id -g)"',
        "--env=HOME=/tmp",
        '--env=USER="$(id -un)"',
        *(f"--env={env_name}" for env_name in env_names),
        '--mount=type=bind,source="$PWD",target="$PWD"',
        *(f"--mount={text}" for text in mounted),
        '--workdir="$PWD"',
        shell_quote(container.image),
    ]


def pyxis_options(
    container: Container, mounts: Iterable[Mount], env_names: Iterable[str]
) -> list[str]:
    """srun's options, quoted for a shell. ``--container-env`` lets ours win over the image's own variables."""
    also = "".join(f",{mount.text}" for mount in mounts)
    return [
        f"--container-image={shell_quote(container.image)}",
        f'--container-mounts="$PWD:$PWD"{shell_quote(also) if also else ""}',
        '--container-workdir="$PWD"',
        f"--container-env={','.join(env_names)}",
    ]
