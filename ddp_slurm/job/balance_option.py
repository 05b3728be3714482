"""``--balance equal|measured|adaptive|FILE|TYPE=SPEED,...``: how the global batch is shared out."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm.errors import did_you_mean, quoted
from ddp_slurm.job import values
from ddp_slurm.job.speeds import Speed, Speeds, SpeedsError, read_speeds
from ddp_slurm.schema.fields import word
from ddp_slurm.schema.schema import Invalid

WORDS = ("equal", "measured", "adaptive")
RELATIVE_SPEED = r"[0-9]{1,6}(\.[0-9]{1,6})?"


@dataclass(frozen=True)
class Balance:
    """The value of --balance."""

    kind: str
    """``equal``, ``measured`` (by the ranks, at the start), ``adaptive`` (the same, and changed
    while they train), or ``planned`` by speeds."""
    source: str | None = None
    """What was written for the speeds: the path of a file, or relative speeds."""
    speeds: Speeds | None = None
    is_relative: bool = False
    """The speeds' unit is not the second: shares follow from them, and no times."""

    @classmethod
    def read(cls, value: Any) -> "Balance":
        """Raises ValueError, for a file with all its errors."""
        if isinstance(value, cls):
            return value
        text = values.path(value)
        if text in WORDS:
            return cls(text)
        if "=" in text and not os.path.exists(text):
            return cls("planned", text, Speeds(_relative_speeds(text)), is_relative=True)
        looks_like_a_path = re.search("[./]", text) or os.path.exists(text)
        if not looks_like_a_path:
            raise ValueError(
                f"the file {quoted(text)} does not exist{did_you_mean(text, list(WORDS))}"
            )
        try:
            return cls("planned", text, read_speeds(Path(text)))
        except SpeedsError as error:
            raise Invalid([((), line) for line in str(error).splitlines()]) from None

    @property
    def file(self) -> str | None:
        """Path of the file of speeds."""
        return None if self.is_relative else self.source

    def with_file(self, path: Path) -> "Balance":
        """The same speeds, read from a copy of the file."""
        return Balance(self.kind, str(path), self.speeds)

    def __str__(self) -> str:
        return self.source or self.kind


EQUAL = Balance("equal")


def _relative_speeds(text: str) -> dict[str, Speed]:
    """``rtx3090=2,titan=1``: a sample takes half as long on the first."""
    speeds: dict[str, Speed] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if not re.fullmatch(RELATIVE_SPEED, number) or float(number) == 0:
            raise ValueError(
                f"{quoted(item)} is not TYPE=SPEED with a speed above 0, such as rtx3090=2"
            )
        if name in speeds:
            raise ValueError(f"duplicate {name!r} in {quoted(text)}")
        speeds[word(name)] = Speed(beta=repr(1 / float(number)))
    return speeds
