"""``--container ENGINE:IMAGE`` and ``--mount SOURCE[:TARGET[:ro]]``."""

import os
import re
from dataclasses import dataclass
from typing import Any

from ddp_slurm.errors import quoted
from ddp_slurm.schema.fields import plain_text

ENGINES = {
    "docker": "a docker image, as in docker:nvcr.io/nvidia/pytorch:25.01-py3",
    "apptainer": (
        "an image file or an address, "
        "as in apptainer:/images/torch.sif or apptainer:docker://pytorch/pytorch"
    ),
    "pyxis": (
        "an image file or enroot's address, "
        "as in pyxis:/images/torch.sqsh or pyxis:nvcr.io#nvidia/pytorch:25.01"
    ),
}
IMAGE = re.compile(r"[^\s-]\S*( \S+)*")
SEPARATORS = re.compile(r'[,:"\\]')
"""docker, apptainer and pyxis split mounts at these, without an escape that all of them know."""


@dataclass(frozen=True)
class Container:
    """The value of --container."""

    engine: str
    image: str

    @classmethod
    def read(cls, value: Any) -> "Container":
        """Raises ValueError."""
        if isinstance(value, cls):
            return value
        engine, colon, image = plain_text(value).partition(":")
        if engine not in ENGINES or not colon:
            raise ValueError(
                f"{quoted(value)} is not ENGINE:IMAGE; the engines are {', '.join(ENGINES)}"
            )
        image = os.path.expanduser(image)
        blank_for_docker = engine == "docker" and " " in image
        if blank_for_docker or not IMAGE.fullmatch(image):
            raise ValueError(f"{quoted(value)}: {quoted(image)} is not {ENGINES[engine]}")
        return cls(engine=engine, image=image)

    def __str__(self) -> str:
        return f"{self.engine}:{self.image}"


@dataclass(frozen=True)
class Mount:
    """One value of --mount; without a target it is the source's path."""

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
        if len(rest) > 1 or not source.startswith("/") or not target.startswith("/"):
            raise ValueError(
                f"{quoted(value)} is not SOURCE[:TARGET[:ro]] with absolute paths, "
                "as in /data:/mnt/data:ro"
            )
        if SEPARATORS.search(source + target):
            raise ValueError(
                f"{quoted(value)}: a path with a comma, a quote or a backslash cannot be mounted"
            )
        return cls(source=source, target=target, read_only=mode == "ro")

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")
