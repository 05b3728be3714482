"""``--balance equal|measured|FILE``: how the global batch is shared out among the ranks."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm.errors import DdpSlurmError, did_you_mean, quoted
from ddp_slurm.job import values
from ddp_slurm.schema.fields import positive_number, seconds, word
from ddp_slurm.schema.schema import Invalid, Schema, key, mapping_of
from ddp_slurm.schema.yaml_file import load_yaml, validate

WORDS = ("equal", "measured")


@dataclass(frozen=True, init=False)
class Speed(Schema):
    """Seconds of one optimizer step on a GPU that gets n samples: ``alpha + beta * n``.

    A rank that drives all GPUs of its node shares its samples out to them, whether its speed was
    found under the node's name or the GPU type's.
    """

    alpha: float = key(seconds, 0.0)
    beta: float = key(seconds)
    max_batch: int | None = key(positive_number, None)


class SpeedsError(DdpSlurmError):
    """A file of speeds cannot be used."""


@dataclass(frozen=True)
class Balance:
    """The value of --balance."""

    kind: str
    """``equal``, ``measured`` (by the ranks, at the start), or ``planned`` by a file of speeds."""
    file: str | None = None
    """Path of the file of speeds."""
    speeds: Mapping[str, Speed] | None = None
    """The file's contents: by node name or GPU type; a node's own entry comes before its type's."""

    @classmethod
    def read(cls, value: Any) -> "Balance":
        """Raises ValueError, for a file with all its errors."""
        if isinstance(value, cls):
            return value
        text = values.path(value)
        if text in WORDS:
            return cls(text)
        looks_like_a_path = re.search("[./]", text) or os.path.exists(text)
        if not looks_like_a_path:
            raise ValueError(
                f"the file {quoted(text)} does not exist{did_you_mean(text, list(WORDS))}"
            )
        return cls("planned", text, _read_speeds(Path(text)))

    def with_file(self, path: Path) -> "Balance":
        """The same speeds, read from a copy of the file."""
        return Balance(self.kind, str(path), self.speeds)

    def __str__(self) -> str:
        return self.file or self.kind


EQUAL = Balance("equal")


def _read_speeds(path: Path) -> dict[str, Speed]:
    read = mapping_of(word, Speed.read)
    try:
        return validate(read, load_yaml(path, SpeedsError), SpeedsError)
    except SpeedsError as error:
        raise Invalid([((), line) for line in str(error).splitlines()]) from None
