"""Submits a rendered script through the sbatch of this machine."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence

from ddp_slurm.ask import NOT_FOUND, TIMED_OUT, Answer, ask
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import ask_slurm, clean_environ
from ddp_slurm.user import user_name

SBATCH_SECONDS = 600
"""The limit of sbatch, which itself retries for minutes while slurmctld starts."""
LOOK_SECONDS = 180.0
"""How long Slurm may be silent while an accepted job is looked for."""
SETTLE_SECONDS = 10.0
"""How long a submission may still be in slurmctld's queue when it answers other questions again."""
LOOK_AGAIN_SECONDS = 2.0
LATEST_JOBS = 20
"""So many of the user's jobs are looked at, the latest first."""
REPORTED_ID = re.compile(r"([0-9]+)(;[^\s;]+)?|.*\bSubmitted batch job ([0-9]+)\b.*")
"""A line with a job's id: of ``--parsable`` (``48;cluster`` with several clusters), or without."""
LOST_ANSWER = re.compile(
    r"timed out|zero bytes|(send|receive|shutdown) failure|connection reset|broken pipe"
    r"|missing socket|longer than data|insane message",
    re.IGNORECASE,
)
"""Errors of a connection that broke after the request may have been sent (slurm_errno.c)."""


class SubmitError(DdpSlurmError):
    """Slurm did not accept the job, or did not report whether it did."""


def check_setup(lines: Sequence[str]) -> None:
    """Raises SubmitError, with bash's message, for setup lines that bash cannot parse.

    They would end the job before it begins.
    """
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    answer = ask(["/bin/bash", "-n"], input=text.encode())
    if answer.status in (0, NOT_FOUND):  # a machine without bash: the script runs elsewhere
        return
    messages = [line.removeprefix("/bin/bash: ") for line in answer.err.splitlines()]
    raise SubmitError(f"--setup: bash cannot parse these lines: {' '.join(messages)}")


def is_available() -> bool:
    return shutil.which("sbatch") is not None


def submit(script: str) -> str:
    """Give the script to sbatch. Returns the job id.

    Where sbatch does not report the id, or its answer is lost, the job is looked for by a mark in
    its script. Raises SubmitError with sbatch's message.
    """
    if not is_available():
        raise SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? "
            "Without Slurm use --backend local"
        )
    mark = f"# submission {uuid.uuid4().hex}"
    answer = _sbatch(f"{script}{mark}\n")
    ids = _reported_ids(answer)
    if answer.status == 0 and len(ids) == 1:
        return ids.pop()
    was_refused = answer.status != 0 and not ids and not _is_lost(answer)
    if was_refused:
        raise SubmitError(f"sbatch refused the job: {answer.text or 'no reason given'}")
    say(f"sbatch did not report the job's id ({_one_line(answer)}); looking for the job")
    job_id = _find(mark)
    if job_id is None:
        raise SubmitError(_not_found(answer))
    say(f"the job was accepted: it is {job_id}")
    return job_id


def _sbatch(script: str) -> Answer:
    try:
        return ask(
            ["sbatch", "--parsable"],
            environ=clean_environ(os.environ),
            input=script.encode(),
            timeout_seconds=SBATCH_SECONDS,
        )
    except KeyboardInterrupt:
        say("interrupted before sbatch had answered: the job may have been accepted; see squeue")
        raise


def _reported_ids(answer: Answer) -> set[str]:
    """The ids in sbatch's output, to which wrappers and plug-ins of a site add lines."""
    matches = [REPORTED_ID.fullmatch(line.strip()) for line in answer.out.splitlines()]
    in_words = {match[3] for match in matches if match and match[3]}
    alone = {match[1] for match in matches if match and match[1]}
    return in_words or alone


def _is_lost(answer: Answer) -> bool:
    """Whether sbatch failed without an answer of Slurm."""
    # 255 is sbatch's own status, such as for an option that it does not know.
    was_killed = answer.status < 0 or 128 < answer.status < 255 or answer.status == TIMED_OUT
    return was_killed or LOST_ANSWER.search(answer.text) is not None


def _find(mark: str) -> str | None:
    """The id of the user's job whose script contains the mark; None if Slurm has no such job."""
    now = time.monotonic()
    give_up = now + LOOK_SECONDS
    while now < give_up:
        jobs = ask_slurm(
            ["squeue", "--noheader", f"--user={user_name()}", "--states=all", "--format=%i"]
        )
        for job_id in _latest_jobs(jobs.out):
            if mark in ask_slurm(["scontrol", "write", "batch_script", job_id, "-"]).out:
                return job_id
        has_answered = jobs.status == 0
        if has_answered:
            give_up = min(give_up, now + SETTLE_SECONDS)
        time.sleep(LOOK_AGAIN_SECONDS)
        now = time.monotonic()
    return None


def _latest_jobs(listing: str) -> list[str]:
    """The latest jobs of a listing, without the offsets of components."""
    ids = {int(found) for found in re.findall(r"^([0-9]+)(?:\+[0-9]+)?\s*$", listing, re.M)}
    return [str(job_id) for job_id in sorted(ids, reverse=True)[:LATEST_JOBS]]


def _not_found(answer: Answer) -> str:
    if answer.status == 0:
        return (
            "sbatch accepted the job, but did not report its id, and Slurm does not show the job; "
            f"see squeue. sbatch's output: {_one_line(answer)}"
        )
    return (
        "sbatch's answer was lost: the job may have been accepted; look for it with squeue before "
        f"you submit it again. sbatch's output: {_one_line(answer)}"
    )


def _one_line(answer: Answer) -> str:
    lines = [line.strip() for line in f"{answer.out}\n{answer.err}".splitlines()]
    return "; ".join(line for line in lines if line) or "no output"
