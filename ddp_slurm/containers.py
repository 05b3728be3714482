"""The task's command inside a container: docker on plain machines, pyxis (enroot) under Slurm, apptainer on both.

Pure: options to words of a shell. The working folder is mounted at the same path and is the working folder inside.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .fields import plain_text
from .templating import shell_quote

ENGINES = {
    "docker": "a docker image, as in docker:nvcr.io/nvidia/pytorch:25.01-py3",
    "apptainer": "an image file or an address, as in apptainer:/images/torch.sif or apptainer:docker://pytorch/pytorch",
    "pyxis": "an image file or enroot's address, as in pyxis:/images/torch.sqsh or pyxis:nvcr.io#nvidia/pytorch:25.01",
}
SEPARATORS = re.compile(r'[,:"\\]')
"""docker, apptainer and pyxis split mounts at these, each in its own way and without an escape that all know."""


@dataclass(frozen=True)
class Container:
    """``ENGINE:IMAGE`` of --container."""

    engine: str
    image: str

    @classmethod
    def read(cls, value: Any) -> "Container":
        """Raises ValueError."""
        if isinstance(value, cls):
            return value
        engine, colon, image = plain_text(value).partition(":")
        if engine not in ENGINES or not colon:
            raise ValueError(f"{value!r} is not ENGINE:IMAGE; the engines are {', '.join(ENGINES)}")
        image = os.path.expanduser(image)
        if not re.fullmatch(r"[^\s-]\S*( \S+)*", image) or (engine == "docker" and " " in image):
            raise ValueError(f"{value!r}: {image!r} is not {ENGINES[engine]}")
        return cls(engine=engine, image=image)


@dataclass(frozen=True)
class Mount:
    """``SOURCE[:TARGET[:ro]]`` of --mount; the target is the source's path where it is not said."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def read(cls, value: Any) -> "Mount":
        """Raises ValueError."""
        if isinstance(value, cls):
            return value
        source, *rest = plain_text(value).split(":")
        source = os.path.expanduser(source)
        mode = rest.pop() if rest[-1:] in (["ro"], ["rw"]) else "rw"
        target = rest[0] if rest else source
        if len(rest) > 1 or not (source.startswith("/") and target.startswith("/")):
            raise ValueError(f"{value!r} is not SOURCE[:TARGET[:ro]] with absolute paths, as in /data:/mnt/data:ro")
        if SEPARATORS.search(source + target):
            raise ValueError(f"{value!r}: a path with a comma, a quote or a backslash cannot be mounted")
        return cls(source=source, target=target, read_only=mode == "ro")

    @property
    def text(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


FOLDER_CHECK = (
    r"""case $PWD in *[,:\"\\]*) echo "$PWD: a folder with a comma, a colon, a quote or a backslash in its name """
    r"""cannot be mounted in a container" >&2; exit 2 ;; esac"""
)
"""A line of bash that refuses a working folder which the engines would not mount as it stands."""


def apptainer_words(container: Container, mounts: Iterable[Mount]) -> list[str]:
    """The words before the command, quoted for a shell. The environment goes in as it is."""
    binds = [word for mount in mounts for word in ("--bind", shell_quote(mount.text))]
    # --nv only warns where there is no NVIDIA driver
    return ["apptainer", "exec", "--nv", "--bind", '"$PWD"', *binds, "--pwd", '"$PWD"', shell_quote(container.image)]


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
        shell_quote(f"type=bind,source={mount.source},target={mount.target}" + (",readonly" if mount.read_only else ""))
        for mount in mounts
    ]
    return [
        "docker", "run", "--rm", "--init", f"--name={shell_quote(name)}",
        f"--network={shell_quote(network or 'host')}",
        *([f"--network-alias={shell_quote(name)}"] if network else []),
        "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864", "--gpus=all",
        '--user="$(id -u):$(id -g)"', "--env=HOME=/tmp", '--env=USER="$(id -un)"',
        *(f"--env={env_name}" for env_name in env_names),
        '--mount=type=bind,source="$PWD",target="$PWD"', *(f"--mount={text}" for text in mounted),
        '--workdir="$PWD"', shell_quote(container.image),
    ]  # fmt: skip


def pyxis_options(container: Container, mounts: Iterable[Mount], env_names: Iterable[str]) -> list[str]:
    """srun's options, quoted for a shell. ``--container-env`` lets ours win over the image's own variables."""
    also = "".join(f",{mount.text}" for mount in mounts)
    return [
        f"--container-image={shell_quote(container.image)}",
        f'--container-mounts="$PWD:$PWD"{shell_quote(also) if also else ""}',
        '--container-workdir="$PWD"',
        f"--container-env={','.join(env_names)}",
    ]
