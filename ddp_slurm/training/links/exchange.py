"""Sums over all ranks beside the computation: in one level or two, between nodes also in bf16.

Two levels: a sum inside each node at its leader, a sum over the leaders, a broadcast inside each
node. So a node's link carries the leader's part only.

The buffers are summed one after another, in the order in which they were given, which is the same
on every rank: no two ranks can wait for each other in different collectives. On GPUs a stream of
its own keeps that order, and the CPU waits for nothing; on CPUs a thread does.
"""

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddp_slurm.training.links.layout import Layout

MOST_PIECES = 8
LEAST_IN_A_PIECE = 1 << 15
"""Numbers."""


class Exchange:
    """Sums buffers over all ranks. All ranks make it, with the same arguments.

    Args:
        layout: of the default process group.
        device: of this rank's buffers.
        timeout_seconds: the longest that any collective may take.
    """

    def __init__(
        self, layout: Layout, device: torch.device, timeout_seconds: float = 600.0
    ) -> None:
        self.layout = layout
        self.device = device
        self.two_levels = False
        """Whether the sums are made inside the nodes first."""
        self.bf16 = False
        """Whether what crosses the links is rounded to bf16, before and after the sum. The sums
        themselves are fp32 (fp64 for such buffers)."""
        limit = timedelta(seconds=timeout_seconds)
        rank = dist.get_rank()
        # Never the default group: what else the training sends there comes in another order.
        self._everyone = _new_group(range(layout.world_size), limit)
        self._node = next(ranks for ranks in layout.nodes if rank in ranks)
        self._inside = self._between = self._everyone
        if layout.has_two_levels:
            groups = [_new_group(ranks, limit) for ranks in layout.nodes]
            self._inside = groups[layout.nodes.index(self._node)]
            self._between = _new_group(layout.leaders, limit)
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[tuple[Tensor, Future[Tensor]]] = queue.SimpleQueue()
        if self._stream is None:
            threading.Thread(target=self._work, name="ddp_slurm exchange", daemon=True).start()

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Begin to replace ``buffer``, of one dimension, by its sum over all ranks."""
        if self._stream is None:
            future: Future[Tensor] = Future()
            self._jobs.put((buffer, future))
            return future
        future = Future(devices=[self.device])
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._sum(buffer)
            future.set_result(buffer)
        return future

    def _work(self) -> None:
        while True:
            buffer, future = self._jobs.get()
            try:
                self._sum(buffer)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

    @torch.no_grad()
    def _sum(self, buffer: Tensor) -> None:
        if not (self.two_levels and self.layout.has_two_levels):
            self._sum_on_links(buffer, self._everyone)
            return
        leader = self._node[0]
        is_alone = len(self._node) == 1
        if not is_alone:
            dist.reduce(buffer, dst=leader, group=self._inside)
        if leader == dist.get_rank():
            self._sum_on_links(buffer, self._between)
        if not is_alone:
            dist.broadcast(buffer, src=leader, group=self._inside)

    def _sum_on_links(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        if self.bf16:
            sum_in_bf16(buffer, group)
        else:
            dist.all_reduce(buffer, group=group)


def _new_group(ranks: Sequence[int], limit: timedelta) -> Any:
    """All ranks of the world call it; what it returns is of use in its members only."""
    return dist.new_group(list(ranks), timeout=limit)


def sum_in_bf16(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``buffer`` by its sum over the ranks of ``group``; bf16 is what is sent.

    Each rank adds up one part of it, in at least fp32, and sends the sum to the others: what every
    rank gets has the same bits. A ring in bf16 would round at each rank.
    """
    size = dist.get_world_size(group)
    wide = torch.promote_types(buffer.dtype, torch.float32)
    pieces = buffer.chunk(_number_of_pieces(buffer))
    sent = [_begin_exchange(_in_bf16(piece, size), group) for piece in pieces]
    returned = []
    for received, work in sent:
        work.wait()
        own_sum = received.view(size, -1).to(wide).sum(dim=0).to(torch.bfloat16)
        returned.append(_begin_exchange(own_sum.repeat(size), group))
    for piece, (received, work) in zip(pieces, returned, strict=True):
        work.wait()
        piece.copy_(received[: piece.numel()])


def _number_of_pieces(buffer: Tensor) -> int:
    """Several at once: with one large message gloo's two directions took turns in half of the
    cases, on links of 80 Mbit/s."""
    if buffer.device.type == "cuda":
        return 1
    return max(1, min(MOST_PIECES, buffer.numel() // LEAST_IN_A_PIECE))


def _in_bf16(piece: Tensor, size: int) -> Tensor:
    """With zeros at its end, so that it has as many equal parts as there are ranks."""
    part = -(-piece.numel() // size)
    result = torch.zeros(size * part, dtype=torch.bfloat16, device=piece.device)
    result[: piece.numel()] = piece
    return result


def _begin_exchange(sent: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """The i-th part of ``sent`` goes to the i-th rank; theirs come back in the ranks' order."""
    received = torch.empty_like(sent)
    # As bytes: not every release of gloo knows bf16.
    as_bytes = received.view(torch.uint8), sent.view(torch.uint8)
    return received, dist.all_to_all_single(*as_bytes, group=group, async_op=True)
