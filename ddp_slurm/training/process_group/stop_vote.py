"""All ranks stop after the same step, though a signal reaches them at different moments, or only
some of them."""

import torch
import torch.distributed as dist


class StopVote:
    """A vote each step, in the background: cast before the step, counted before the next one.

    It goes over a gloo group, so no rank waits for its GPU, and the result is the same on every
    rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ballot = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def cast(self, stop: bool) -> None:
        """Begin a vote with this rank's wish in it; all ranks call it."""
        self.result()
        self._ballot.fill_(int(stop))
        self._work = dist.all_reduce(
            self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def result(self) -> bool:
        """Whether any rank has asked to stop in the last vote."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._ballot.item())
