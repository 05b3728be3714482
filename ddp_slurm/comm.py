"""``--comm``: how the ranks exchange what they have learned. Standard library only."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_slurm.errors import did_you_mean, quoted

FORMS = ("exact", "bf16", "powersgd", "local:STEPS", "auto", "auto:bf16", "auto:local")
MOST_STEPS = 100_000


@dataclass(frozen=True)
class Comm:
    """The value of --comm."""

    kind: str
    """``exact``, ``bf16``, ``powersgd``, ``local`` or ``auto``."""
    steps: int = 0
    """Of ``local``: the optimizer steps between two averages of the parameters."""
    allows: str = "exact"
    """Of ``auto``: the least exact way that it may take, ``exact``, ``bf16`` or ``local``."""

    @classmethod
    def read(cls, value: Any) -> "Comm":
        """Raises ValueError with the value and the forms that are valid."""
        if isinstance(value, cls):
            return value
        text = str(value)
        if text in ("exact", "bf16", "powersgd", "auto"):
            return cls(text)
        if text in ("auto:bf16", "auto:local"):
            return cls("auto", allows=text.removeprefix("auto:"))
        steps = re.fullmatch("local:([1-9][0-9]{0,5})", text)
        if steps and int(steps[1]) <= MOST_STEPS:
            return cls("local", steps=int(steps[1]))
        guess = did_you_mean(text, [form for form in FORMS if form != "local:STEPS"])
        raise ValueError(
            f"{quoted(text)} is not one of {', '.join(FORMS)}, with STEPS from 1 to "
            f"{MOST_STEPS}{guess}"
        )

    @property
    def is_exact(self) -> bool:
        """Whether every optimizer step is that of one process with the whole batch."""
        return self.kind == "exact" or (self.kind == "auto" and self.allows == "exact")

    def __str__(self) -> str:
        if self.kind == "local":
            return f"local:{self.steps}"
        return self.kind if self.allows == "exact" else f"auto:{self.allows}"


EXACT = Comm("exact")
