"""The blocks of the set-up guide, and where each of them runs."""

import re
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "cluster_setup/README.md"
TEXT = GUIDE.read_text()


@dataclass(frozen=True)
class Block:
    line: int
    info: str
    text: str

    @property
    def place(self) -> str:
        """``on each node``, ``on the controller``, or ``only with ...``: from its first line."""
        return self.text.splitlines()[0].removeprefix("# ").split(":")[0]


def blocks() -> list[Block]:
    """The fenced blocks, also indented ones, without their indent."""
    found: list[Block] = []
    lines = TEXT.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"( *)```(.*)", line)
        if fence and start is None:
            start, indent, info = number, fence[1], fence[2]
        elif fence and start is not None:
            text = "\n".join(body.removeprefix(indent) for body in lines[start + 1 : number])
            found.append(Block(start + 1, info, text + "\n"))
            start = None
    assert start is None, "a block is not closed"
    return found


SHELL = [block for block in blocks() if block.info in ("bash", "bash run")]

OF_ALL = ("on each node", "on each node with an NVIDIA card")
OF_CONTROLLER = ("on the controller",)
OTHER_WAYS = ("only with ", "by hand", "on each node whose firewall is on")


def is_other_way(block: Block) -> bool:
    """Whether a reader types a block only where machines are unlike those of the guide."""
    return block.place.startswith(OTHER_WAYS)
