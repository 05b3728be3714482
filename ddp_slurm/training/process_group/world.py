"""The start and the end of a distributed training: who takes part is checked before the first collective."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_slurm.balance import planned_shares
from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.process_group.failure import FailureWatch, print_faults_plainly, tell_all
from ddp_slurm.training.process_group.startup_check import (
    RankFacts,
    check_launch,
    facts_from_dict,
    facts_to_dict,
    find_faults,
    gather_own_facts,
    node_name,
)

_stop_signals: list[int] = []
"""Of the process, not of a world: it is the process that the signal reaches, maybe before its world has met. A list and
not an Event, whose lock a handler that interrupts itself would wait for without end."""
_joined = False
"""Whether this process has been part of a world."""


@dataclass
class World:
    """This rank's place among all ranks. A context manager: leaving it closes the process group.

    ``control`` is a gloo group over all ranks for small CPU messages (stop votes, snapshots, measured costs), so
    that none of them waits for the GPU. ``ranks`` holds the facts of every rank, in rank order.
    """

    env: RankEnv
    device: torch.device
    backend: str
    control: dist.ProcessGroup
    ranks: list[RankFacts]
    rendezvous_seconds: float
    _timeout_seconds: float
    _watch: FailureWatch | None = field(default=None, repr=False)
    _store: Store | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def place(self) -> str:
        """``rank 3 on alpha``, for messages."""
        return self.ranks[self.rank].place

    @property
    def stop_requested(self) -> bool:
        """Whether this process was sent SIGUSR2 since ``init_distributed`` began."""
        return bool(_stop_signals)

    def planned_shares(self, global_batch: int) -> list[int]:
        """Samples of one global batch per rank, as the plan of the job has them (DDP_SLURM_SHARES), else equal.

        A plan made for another global batch keeps its proportions.
        """
        return planned_shares(global_batch, self.world_size)

    def close(self) -> None:
        """Leave in order: rank 0, which holds the store, leaves last."""
        store, self._store = self._store, None
        watch, self._watch = self._watch, None
        if store is None:
            return
        if watch is not None and self.rank != 0:
            watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()
        _say_goodbye(store, self.rank, self.world_size, self._timeout_seconds)
        if watch is not None and self.rank == 0:
            watch.end()  # only now: a rank that fails while rank 0 waits for it ends rank 0 too

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif isinstance(error, SystemExit) and self._watch is not None:
            self._watch.tell_exit(error.code)


def init_distributed(
    *,
    backend: str | None = None,
    timeout_seconds: float = 600.0,
    rendezvous_seconds: float = 180.0,
) -> World:
    """Join this process to the world that srun, torchrun or the local backend started.

    In this order: RankEnv from the environment, the device, the meeting of all ranks at rank 0's store, the check of
    what they found against the plan (DDP_SLURM_WORLD_SIZE, DDP_SLURM_TASKS_PER_NODE), and only then the process group.

    Args:
        backend: ``nccl`` or ``gloo``; None takes nccl where every rank has a GPU.
        timeout_seconds: the longest that any collective may take.
        rendezvous_seconds: the longest to wait for all ranks to arrive.

    SIGUSR2, which the job's time limit sends ahead, sets ``World.stop_requested`` from the first line on instead of
    ending the process: the ranks then meet, and stop after one step. An exception that nobody catches ends all ranks,
    see ``failure``.

    Raises LaunchError on every rank, with rank, host, expected and found, for a world that is not the planned one. A
    process can join one world only: rank 0's store, which may still have readers, keeps the port.
    """
    global _joined
    started = time.monotonic()
    _catch_stop_signal()
    print_faults_plainly(f"process {os.getpid()} on {node_name()}")
    env = RankEnv.from_environ()
    print_faults_plainly(f"rank {env.rank} on {node_name()}")
    if _joined:
        raise LaunchError(
            f"rank {env.rank}: init_distributed a second time in this process; use the first one's world for all of it"
        )
    check_launch(env)
    own = gather_own_facts(env, use_gpus=backend != "gloo")
    use_gpu = own.visible_gpus > 0
    device = torch.device("cuda", env.device_index) if use_gpu else torch.device("cpu")
    if use_gpu and env.device_index < own.visible_gpus:
        torch.cuda.set_device(
            device
        )  # before the group starts: NCCL's barrier takes the current device
    store = _join_store(env, own, rendezvous_seconds)
    _joined = True
    facts = _meet(store, env, own, rendezvous_seconds)
    watch = _watch_for_failure(store, env, own, rendezvous_seconds)
    backend = backend or ("nccl" if use_gpu else "gloo")
    limit = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=limit,
        device_id=device if backend == "nccl" else None,
    )
    control = (
        dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
    )
    assert isinstance(control, dist.ProcessGroup)
    message = [
        facts
    ]  # by broadcast and not through the store, which would send it from one socket to each rank
    dist.broadcast_object_list(message, src=0, group=control)
    ranks = [facts_from_dict(values) for values in message[0]]
    return World(
        env,
        device,
        backend,
        control,
        ranks,
        time.monotonic() - started,
        timeout_seconds,
        watch,
        store,
    )


def _watch_for_failure(
    store: Store, env: RankEnv, own: RankFacts, rendezvous_seconds: float
) -> FailureWatch | None:
    if env.world_size == 1:
        return None
    waiting = _connect(env, False, timedelta(seconds=rendezvous_seconds))
    watch = FailureWatch(store, waiting, env.rank, env.world_size, own.place)
    watch.start()
    return watch


def _prefixed(store: Store) -> Store:
    # A second job that was given the same port must not speak here; and torchrun keeps one store over its restarts.
    # With RANK set by hand a world may span several Slurm jobs.
    name = "TORCHELASTIC_RUN_ID" if "RANK" in os.environ else "SLURM_JOB_ID"
    job = os.environ.get(name, "")
    return PrefixStore(
        f"ddp_slurm/{job}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )


def _connect(env: RankEnv, serve: bool, timeout: timedelta) -> Store:
    return _prefixed(
        TCPStore(
            env.master_addr,
            env.master_port,
            is_master=serve,
            timeout=timeout,
            wait_for_workers=False,
        )
    )


def _join_store(env: RankEnv, own: RankFacts, rendezvous_seconds: float) -> Store:
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = env.rank == 0 and not torchrun_serves
    try:
        return _connect(env, serve, timedelta(seconds=rendezvous_seconds))
    except RuntimeError as error:
        where = f"{env.master_addr}:{env.master_port}"
        if serve:
            raise LaunchError(
                f"{own.place}: cannot listen on port {env.master_port} ({error}); another job there? "
                "Set MASTER_PORT to a free port"
            ) from error
        raise LaunchError(
            f"{own.place}: no answer from rank 0 at {where} within {rendezvous_seconds:.0f} s; did rank 0 start, and "
            f"does a firewall let the port through? ({error})"
        ) from error


def _meet(
    store: Store, env: RankEnv, own: RankFacts, rendezvous_seconds: float
) -> list[dict[str, Any]]:
    """Rank 0 collects and judges every rank's facts, so that all ranks raise the same faults; it gets them back."""
    facts: list[dict[str, Any]] = []
    if store.add(f"arrived/{env.rank}", 1) > 1:
        word = f"{own.place}: another process has this rank already; expected one process a rank"
        store.compare_set("verdict", "", json.dumps({"faults": [word]}))
        # The world may have met already, without this process.
        tell_all(store, env.world_size, env.rank, word, LaunchError.exit_status)
        raise LaunchError(word)
    store.set(f"facts/{env.rank}", json.dumps(facts_to_dict(own)))
    if env.rank == 0:
        faults, facts = _judge(store, env, rendezvous_seconds)
        store.compare_set("verdict", "", json.dumps({"faults": faults}))
    try:
        # Longer than rank 0 waits for the others, so that its verdict on who is missing still arrives.
        store.wait(["verdict"], timedelta(seconds=rendezvous_seconds + 30))
        verdict = json.loads(store.get("verdict"))
    except RuntimeError as error:
        raise LaunchError(f"{own.place}: rank 0 left before the world had met ({error})") from error
    if verdict["faults"]:
        _acknowledge(store, env)
        raise LaunchError("the world is not the planned one:\n  " + "\n  ".join(verdict["faults"]))
    return facts


def _judge(
    store: Store, env: RankEnv, rendezvous_seconds: float
) -> tuple[list[str], list[dict[str, Any]]]:
    """The faults, and the facts of every rank."""
    keys = [f"facts/{rank}" for rank in range(env.world_size)]
    try:
        store.wait(keys, timedelta(seconds=rendezvous_seconds))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        there = [facts_from_dict(json.loads(store.get(key))) for key in keys if store.check([key])]
        fault = (
            f"expected {env.world_size} ranks within {rendezvous_seconds:.0f} s, found {len(there)}: "
            f"{', '.join(fact.place for fact in there)}; missing: {missing}"
        )
        return [fault], []
    facts: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
    return find_faults([facts_from_dict(values) for values in facts]), facts


def _acknowledge(store: Store, env: RankEnv) -> None:
    """Rank 0 holds the store: it stays until the others have read the verdict, at most five seconds."""
    try:
        store.add("read", 1)
        deadline = time.monotonic() + 5
        while (
            env.rank == 0 and store.add("read", 0) < env.world_size and time.monotonic() < deadline
        ):
            time.sleep(0.02)
    except RuntimeError:
        return  # the store is gone, so everybody has read


def _say_goodbye(store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Rank 0 holds the store: it stays for a rank that is late as long as a collective would."""
    try:
        store.add("left", 1)
        deadline = time.monotonic() + timeout_seconds
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
    except RuntimeError:
        return  # rank 0 has gone after its deadline: nothing is left to say


def _catch_stop_signal() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers in the main thread only

    def request(signum: int, frame: FrameType | None) -> None:
        _stop_signals.append(signum)

    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, request)
