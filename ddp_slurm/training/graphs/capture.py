"""What torch.cuda does for a graph: capture one, and find what cannot be captured."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

SYNCHRONISES = "synchronizing CUDA operation"
"""In torch's warning of an operation that waits, with ``set_sync_debug_mode``."""
PROTOTYPE = "Synchronization debug mode"
"""In torch's warning of ``set_sync_debug_mode`` itself."""


def captured(function: Callable[[], object], pool: Any) -> Callable[[], None]:
    """Capture what ``function`` would do on the GPU; the result is a function that does it.

    Raises what ``function`` raises, and RuntimeError for what CUDA cannot capture, or if the rest
    of the memory would not hold the same work outside of the graph.
    """
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    try:
        # Other threads may do what a capture forbids: autograd's, NCCL's watchdog, a loader's.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    except BaseException:
        _recover(before)
        raise
    _check_room(torch.cuda.memory_reserved() - reserved)
    replay: Callable[[], None] = graph.replay
    return replay


def _check_room(needed: int) -> None:
    """Steps without the graph, such as the last of an epoch, need about its memory once more."""
    free, total = torch.cuda.mem_get_info()
    allowed = total * torch.cuda.get_per_process_memory_fraction() - torch.cuda.memory_reserved()
    free = min(free, int(allowed))
    if free < needed:
        raise RuntimeError(
            f"the graph takes {needed >> 20} MiB and leaves {free >> 20} MiB, too little for the "
            "steps without it"
        )


def _recover(stream: torch.cuda.Stream) -> None:
    """Undo what a failed capture leaves behind.

    Source: torch.cuda.graph.__exit__ leaves its stream only after a success, and only then does
    CUDAGraph::capture_end (ATen/cuda/CUDAGraph.cpp) end the random generator's capture mode.
    """
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)


@contextlib.contextmanager
def watch_for_waiting() -> Iterator[list[str]]:
    """Afterwards the list holds where the CPU waited for the GPU, which no capture allows."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        text = str(warning.message)
        if SYNCHRONISES in text:
            places.append(f"{warning.filename}:{warning.lineno}")
        elif PROTOTYPE not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
