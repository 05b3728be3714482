"""All ranks stop after the same step, though a signal reaches them at different moments, or only
some of them."""

import time

import torch
import torch.distributed as dist

SECONDS_BETWEEN_VOTES = 0.01
MOST_STEPS_BETWEEN_VOTES = 8
"""Steps may become slower at any time, and a signal before a time limit has to be seen."""


class StopVote:
    """A vote in the background: cast before a step, counted before the next one.

    It goes over a gloo group, so no rank waits for its GPU, and the result is the same on every
    rank. A vote can take as long as a step of a small model, so where steps take milliseconds there
    is none in each of them; the ranks agree in each vote on the step of the next one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # whether to stop; minus the number of steps until the next vote
        self._ballot = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._stops = False
        self._steps, self._steps_left = 0, 0
        self._cast_at = 0.0

    def cast(self, stop: bool) -> None:
        """Before each step, with this rank's wish; all ranks call it. Votes when one is due."""
        self.result()
        self._steps += 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        self._ballot[0] = int(stop)
        self._ballot[1] = -self._steps_between()
        self._work = dist.all_reduce(
            self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def result(self) -> bool:
        """Whether any rank has asked to stop in the last vote."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            stops, steps = self._ballot.tolist()
            self._stops, self._steps_left = bool(stops), -steps
        return self._stops

    def _steps_between(self) -> int:
        """The wish of this rank, by the steps since its last vote; the smallest one counts."""
        now = time.perf_counter()
        seconds = (now - self._cast_at) / self._steps
        self._steps, self._cast_at = 0, now
        return min(MOST_STEPS_BETWEEN_VOTES, max(1, int(SECONDS_BETWEEN_VOTES / seconds)))
