"""All ranks meet at rank 0's store, and leave it in order.

Rank 0 collects what the ranks report about themselves and judges it, so that all of them raise the
same errors, before the first collective could hang.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.process_group.ending import Deadline, print_last
from ddp_slurm.training.process_group.facts import (
    Arrival,
    RankFacts,
    arrival_from_dict,
    complete_envs,
    rank_facts,
)
from ddp_slurm.training.process_group.failure import LATE_SECONDS, REPORT_SECONDS, FailureWatch
from ddp_slurm.training.process_group.peers import Ending, Peers, left_key, report_failure, wait_for
from ddp_slurm.training.process_group.startup_check import find_errors
from ddp_slurm.training.process_group.store import connect, describe_token

VERDICT_SECONDS = 30.0
"""The others wait for rank 0 so much longer than it waits for them, so that its verdict on who is
missing still arrives."""
READ_SECONDS = 5.0


class LostRankError(DdpSlurmError):
    """A rank ended without leaving in order, and another one waited for it."""

    exit_status = 1


@dataclass(frozen=True)
class Meeting:
    """A world that has met: this rank's connection to rank 0's store, its complete RankEnv, and on
    rank 0 the facts of all ranks."""

    store: Store
    env: RankEnv
    facts: list[RankFacts]


class Verdict(NamedTuple):
    """Rank 0's: the errors of the world, and whether it derived what launchers did not set."""

    errors: list[str]
    is_env_derived: bool = False


def join_store(arrival: Arrival, seconds: float) -> Store:
    """Connect to rank 0's store, within ``seconds``; rank 0 opens it. Raises LaunchError."""
    env = arrival.env
    try:
        with _deadline(arrival, seconds):
            return connect(env, seconds, opens_as=arrival.place if env.rank == 0 else None)
    except (OSError, RuntimeError) as error:
        if env.rank == 0:
            raise LaunchError(
                f"{arrival.place}: cannot listen on port {env.master_port} ({error}); another job "
                "there? Set MASTER_PORT to a free port"
            ) from error
        raise LaunchError(
            f"{arrival.place}: no answer from rank 0 at {_address(env)} within {seconds:.0f} s; "
            "did rank 0 start, does a firewall let the port through, and does rank 0 have "
            f"{describe_token()} ({error})"
        ) from error


def meet(store: Store, arrival: Arrival, seconds: float) -> Meeting:
    """Wait for all ranks of the world, ``seconds`` at most.

    Raises LaunchError, on every rank that can be reached, for a world that is not the planned one.
    """
    env = arrival.env
    patience = seconds + VERDICT_SECONDS
    with _deadline(arrival, patience):
        _report_arrival(store, arrival)
        facts = _judge_and_publish(store, env.world_size, seconds) if env.rank == 0 else []
        verdict = _read_verdict(store, arrival.place, patience)
        if verdict.errors:
            _acknowledge(store, env)
            errors = "\n  ".join(verdict.errors)
            raise LaunchError(f"the world is not the planned one:\n  {errors}")
        if verdict.is_env_derived:
            env = RankEnv(**json.loads(store.get(f"env/{env.rank}")))
        return Meeting(store, env, facts)


def _deadline(arrival: Arrival, seconds: float) -> Deadline:
    text = (
        f"{arrival.place}: rank 0 at {_address(arrival.env)} does not respond; it hangs, or "
        "the link to its host is cut"
    )
    return Deadline(seconds + REPORT_SECONDS, text, LaunchError.exit_status)


def leave(watch: FailureWatch) -> None:
    """Leave in order: rank 0, which holds the store, leaves last.

    Rank 0 waits for a rank that is late a little longer than a collective would, and names it.
    Raises LostRankError where a rank ended without leaving.
    """
    peers = watch.peers
    if peers.rank == 0:
        peers.store.set(left_key(0), "")
        _wait_for_late_ranks(peers, watch.timeout_seconds)
        watch.finish()  # only now: a rank that fails while rank 0 waits for it ends rank 0 too
        return
    with Deadline(REPORT_SECONDS, peers.ends_because(peers.rank_0_does_not_respond())):
        watch.finish()


def _wait_for_late_ranks(peers: Peers, timeout_seconds: float) -> None:
    keys = [left_key(rank) for rank in peers.others]
    first_wait = min(LATE_SECONDS, timeout_seconds)
    if wait_for(peers.store, keys, first_wait):
        return
    found = peers.call_roll("leaving")
    if found.lost:
        raise LostRankError(
            f"{peers.place} waited for all ranks to leave, and {peers.lost(found.lost)}"
        )
    gone = peers.ranks_with(left_key)
    late = [rank for rank in peers.others if rank not in gone]
    # Longer than their collectives: a rank that waits for this one fails first, and says so.
    rest = timeout_seconds - first_wait + REPORT_SECONDS
    print_last(
        f"note: {peers.place} has finished and waits for {peers.name(late)}, {rest:.0f} s at most"
    )
    if not wait_for(peers.store, keys, rest):
        print_last(f"note: {peers.place} ends without waiting any longer")


def _address(env: RankEnv) -> str:
    return f"{env.master_addr}:{env.master_port}"


def _report_arrival(store: Store, arrival: Arrival) -> None:
    rank = arrival.env.rank
    if store.add(f"arrived/{rank}", 1) > 1:
        text = (
            f"{arrival.place}: another process has this rank already; expected one process a rank"
        )
        _publish(store, Verdict([text]))
        # The world may have met already, without this process.
        ending = Ending(LaunchError.exit_status, text)
        report_failure(store, rank, arrival.env.world_size, ending)
        raise LaunchError(text)
    store.set(f"arrival/{rank}", json.dumps(asdict(arrival)))


def _judge_and_publish(store: Store, world_size: int, seconds: float) -> list[RankFacts]:
    """On rank 0: wait for all ranks, and publish what is wrong or what follows for each.

    Returns the facts of all ranks; of a world that has not met, none.
    """
    keys = [f"arrival/{rank}" for rank in range(world_size)]
    if not wait_for(store, keys, seconds):
        _publish(store, Verdict([_missing_ranks(store, keys, seconds)]))
        return []
    arrivals = [_read_arrival(store, key) for key in keys]
    envs = complete_envs(arrivals)
    is_env_derived = envs != [arrival.env for arrival in arrivals]
    if is_env_derived:
        for env in envs:
            store.set(f"env/{env.rank}", json.dumps(asdict(env)))
    facts = [rank_facts(arrival, env) for arrival, env in zip(arrivals, envs, strict=True)]
    _publish(store, Verdict(find_errors(facts), is_env_derived))
    return facts


def _read_arrival(store: Store, key: str) -> Arrival:
    return arrival_from_dict(json.loads(store.get(key)))


def _missing_ranks(store: Store, keys: Sequence[str], seconds: float) -> str:
    present = [rank for rank, key in enumerate(keys) if store.check([key])]
    missing = sorted(set(range(len(keys))).difference(present))
    arrived = [_read_arrival(store, keys[rank]).place for rank in present]
    return (
        f"expected {len(keys)} ranks within {seconds:.0f} s, found {len(arrived)}: "
        f"{', '.join(arrived)}; missing: {missing}"
    )


def _publish(store: Store, verdict: Verdict) -> None:
    """The first verdict counts."""
    store.compare_set("verdict", "", json.dumps(verdict))


def _read_verdict(store: Store, place: str, seconds: float) -> Verdict:
    try:
        store.wait(["verdict"], timedelta(seconds=seconds))
        return Verdict(*json.loads(store.get("verdict")))
    except RuntimeError as error:
        raise LaunchError(f"{place}: rank 0 left before the world had met ({error})") from error


def _acknowledge(store: Store, env: RankEnv) -> None:
    """Rank 0, which holds the store, stays some seconds for the others to read the verdict."""
    try:
        store.set(f"read/{env.rank}", "")
        if env.rank == 0:
            keys = [f"read/{rank}" for rank in range(env.world_size)]
            wait_for(store, keys, READ_SECONDS)
    except RuntimeError:
        return  # the store is gone, so everybody has read it
