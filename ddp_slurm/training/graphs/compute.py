"""The gradient of a rank's share: each micro-batch by a graph of its size, or kernel by kernel."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddp_slurm.training.graphs import capture
from ddp_slurm.training.graphs.flat import FlatGradients
from ddp_slurm.training.graphs.python_side import (
    PlainValues,
    cpu_random_state,
    reason_of_gradients,
    reason_of_hooks,
)
from ddp_slurm.training.memory.halving import evenly
from ddp_slurm.training.memory.out_of_memory import free_memory, is_out_of_memory

MOST_GRAPHS = 2
"""The parts of an accumulated share differ by one sample, so they have two sizes."""
WATCHED = 2
"""The run of a size that is watched for what cannot be captured; the next one is captured."""
MOST_CAPTURES = 4
LEAST_REPLAYS = 20
"""After so many captures, so many replays for each are expected: inputs whose shapes keep changing
are not worth it."""

Key = tuple[object, ...]


class GraphedCompute:
    """Adds up gradients in buffers that stay. All of it is this rank's own: no rank waits.

    Args:
        forward_backward: a module whose forward takes (inputs, targets, factor, weights), runs
            backward, and adds the targets' weights to the scalar ``weights``. It must have no other
            effect than on gradients, buffers and tensors that live on.
        failed: gets the reason, once, if nothing more will be captured.
        ran_out: gets an error and the samples of the pass that raised it. Returns how many samples
            to run at once instead, or raises.
    """

    def __init__(
        self,
        forward_backward: nn.Module,
        failed: Callable[[str], None],
        ran_out: Callable[[RuntimeError, int], int],
    ) -> None:
        self.flat = FlatGradients(dict(forward_backward.named_parameters()))
        self._forward_backward = forward_backward
        self._plain_values = PlainValues(forward_backward)
        self._values = self._plain_values.now()
        self._failed = failed
        self._ran_out = ran_out
        self._may_capture = True
        self._graphs: dict[Key, _Graph] = {}
        self._pool: Any = None
        self._seen: Counter[Key] = Counter()
        self._captures, self._replays = 0, 0

    def reason_of_gradients(self) -> str | None:
        """Why graphs would give some parameter another gradient than the step before had."""
        return reason_of_gradients(self._forward_backward)

    def begin_step(self) -> None:
        """Give the parameters their gradients; forget graphs of a model that has changed."""
        values = self._plain_values.now()
        if values != self._values:
            self._values = values
            self.forget()
            for parameter in self._forward_backward.parameters():
                parameter.grad = None
            self.flat = FlatGradients(dict(self._forward_backward.named_parameters()))
        self.flat.give_to_parameters()

    def __call__(
        self, parts: Sequence[tuple[Tensor, Tensor]], factor: Tensor, *, is_whole: bool
    ) -> None:
        """Leave the gradient of all micro-batches in ``flat``.

        Args:
            parts: inputs and targets of each, none of them empty.
            factor: for the sum of the losses, a float64 scalar on the device.
            is_whole: the sizes will come again.
        """
        replays_all = all(_key(*part) in self._graphs for part in parts)
        saved = [] if replays_all else self._state()
        while True:
            self.flat.zero()
            try:
                for part in parts:
                    self._add(*part, factor, is_whole=is_whole)
                return
            except RuntimeError as error:
                most = self._ran_out(error, max(len(targets) for _, targets in parts))
            # Outside of the except block, whose error holds the tensors of the failed pass.
            parts = self._take_back(saved, parts, most)

    def _add(self, inputs: Tensor, targets: Tensor, factor: Tensor, *, is_whole: bool) -> None:
        graph = self._graphs.get(_key(inputs, targets))
        if graph is not None:
            graph.replay(inputs, targets, factor)
            self._replays += 1
        elif is_whole and self._may_capture:
            self._approach(inputs, targets, factor)
        else:
            self._run(inputs, targets, factor)

    def _state(self) -> list[tuple[Tensor, Tensor]]:
        """What a step changes besides gradients, with copies: statistics, the sum of the losses."""
        return [(buffer, buffer.clone()) for buffer in self._forward_backward.buffers()]

    def _take_back(
        self,
        saved: Sequence[tuple[Tensor, Tensor]],
        parts: Sequence[tuple[Tensor, Tensor]],
        most: int,
    ) -> list[tuple[Tensor, Tensor]]:
        """Undo the passes of a step that ran out of memory; the smaller passes to take instead."""
        if self._may_capture:
            self._give_up("its memory ran out")
        free_memory(self.flat.buffers[0].device)
        with torch.no_grad():
            for buffer, content in saved:
                buffer.copy_(content)
        halves = (evenly(*part, -(-len(part[1]) // most)) for part in parts)
        return list(itertools.chain.from_iterable(halves))

    def forget(self) -> None:
        """Free the graphs: the shares have changed."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def _run(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        arguments = (inputs, targets, factor, self.flat.weight)
        functional_call(self._forward_backward, self.flat.aliases(), arguments)

    def _approach(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        """The first time with a size warms up, the second is watched, the third is captured."""
        key = _key(inputs, targets)
        self._seen[key] += 1
        if self._seen[key] < WATCHED:
            self._run(inputs, targets, factor)
        elif self._seen[key] == WATCHED:
            self._watch(inputs, targets, factor)
        elif self._captures >= MOST_CAPTURES and self._replays < LEAST_REPLAYS * self._captures:
            self._give_up("the shapes of the batches vary, or numbers in the model")
            self._run(inputs, targets, factor)
        else:
            self._capture(inputs, targets, factor)

    def _watch(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        """Run it, and look for what a graph would not do again."""
        reason = reason_of_hooks(self._forward_backward)
        randomness = cpu_random_state()
        with capture.watch_for_waiting() as places:
            self._run(inputs, targets, factor)
        if places:
            reason = f"the step waits for the GPU at {places[0]}"
        elif cpu_random_state() != randomness:
            reason = "the model draws random numbers on the CPU"
        elif self._plain_values.now() != self._values:
            reason = "the model changes its attributes in each step"
        if reason is not None:
            self._give_up(reason)

    def _capture(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        """Capture this micro-batch and run it, in either way."""
        if len(self._graphs) == MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        # Graphs that run one after another share their memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._captures += 1
        reason = ""
        try:
            graph = _Graph(self._run, (inputs, targets, factor), self._pool)
            self._graphs[_key(inputs, targets)] = graph
        except Exception as error:  # the model's own may be any; nothing has run yet
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if not reason:
            graph.replay(inputs, targets, factor)
            return
        # Outside of the except block, whose error holds the memory of the graph.
        self._give_up(reason)
        free_memory(inputs.device)
        self._run(inputs, targets, factor)

    def _give_up(self, reason: str) -> None:
        self._may_capture = False
        self.forget()
        self._failed(reason)


class _Graph:
    """A captured micro-batch, with the tensors that it reads."""

    def __init__(
        self,
        run: Callable[[Tensor, Tensor, Tensor], None],
        example: tuple[Tensor, Tensor, Tensor],
        pool: Any,
    ) -> None:
        self._inputs, self._targets, self._factor = (tensor.clone() for tensor in example)
        self._replay = capture.captured(
            lambda: run(self._inputs, self._targets, self._factor), pool
        )

    def replay(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> None:
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._factor.copy_(factor)
        self._replay()


def _key(inputs: Tensor, targets: Tensor) -> Key:
    """What a graph is for: the kernels depend on it."""
    return tuple(
        (tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in (inputs, targets)
    )


def as_graph(
    forward_backward: nn.Module, inputs: Tensor, targets: Tensor
) -> Callable[[], None] | None:
    """A function that runs this batch as the training will, or None if not as a graph.

    The parameters have other gradients afterwards.

    Args:
        forward_backward: as of GraphedCompute.
    """
    reasons: list[str] = []

    def ran_out(error: RuntimeError, samples: int) -> int:
        raise error

    compute = GraphedCompute(forward_backward, reasons.append, ran_out)
    factor = factor_tensor(len(targets), targets.device)

    def run() -> None:
        compute([(inputs, targets)], factor, is_whole=True)

    try:
        forward_backward(inputs, targets, factor, compute.flat.weight)
        if compute.reason_of_gradients() is not None:
            return None
        compute.begin_step()
        for _ in range(WATCHED + 1):
            run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return None if reasons else run


def reason_of_device(device: torch.device) -> str | None:
    """Why there are no graphs on this device."""
    return None if device.type == "cuda" else "CUDA graphs need GPUs"


def reason_of_model(model: nn.Module, *, allows_compiled: bool = False) -> str | None:
    """Why this model's forward and backward cannot be a graph, as far as can be known before."""
    for module in model.modules():
        is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if is_compiled and not allows_compiled:
            # Its functions are compiled again for the graph, which takes as long as the first time.
            return "the model is compiled; graphs='on' captures it too, if its mode has no graphs"
        if isinstance(module, nn.SyncBatchNorm):
            return "SyncBatchNorm waits for the other ranks within the model"
        if getattr(module, "sparse", False):
            return f"the model has sparse gradients ({type(module).__name__})"
    return None


def factor_tensor(samples: int, device: torch.device) -> Tensor:
    """``1 / samples``, a float64 scalar on the device."""
    return torch.full((), 1.0 / samples, dtype=torch.float64, device=device)
