"""Which ranks share a node, and what goes through a node's link."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of each node, in the order of node ranks. The first of a node is its leader."""

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, node_ranks: Sequence[int]) -> "Layout":
        """From the node rank of every rank.

        >>> Layout.of([0, 0, 1]).nodes
        ((0, 1), (2,))
        """
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(node_ranks):
            nodes.setdefault(node, []).append(rank)
        return cls(tuple(tuple(nodes[node]) for node in sorted(nodes)))

    @property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.nodes)

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.nodes)

    @property
    def has_two_levels(self) -> bool:
        """Whether several nodes exist, and one of them has several ranks."""
        return 1 < len(self.nodes) < self.world_size

    def traffic(self, *, two_levels: bool) -> float:
        """What goes out through a node's link in an all-reduce, as a multiple of its bytes.

        A ring over R ranks sends 2(R-1)/R, one over the leaders of N nodes 2(N-1)/N.

        >>> round(Layout.of([0, 0, 0, 0, 1, 1]).traffic(two_levels=False), 3)
        1.667
        """
        members = len(self.nodes) if two_levels else self.world_size
        return 0.0 if len(self.nodes) == 1 else 2 * (members - 1) / members

    def __str__(self) -> str:
        """``4+2+1``; long ones as ``40 nodes``."""
        if len(self.nodes) > 8:
            return f"{len(self.nodes)} nodes"
        return "+".join(str(len(ranks)) for ranks in self.nodes)
