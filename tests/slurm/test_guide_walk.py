"""The guide, typed block by block by a new user on three bare machines, to a finished training.

The blocks are those of the page. Only what a page cannot have is put in: the repository's address
and the other machines' names where it says so. The output has the time of each block.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.guide import OF_ALL, SHELL, Block, is_other_way
from tests.waiting import wait_until

from .guide_faults import BATCHES, RESTART, VENV, Fault
from .systemd_machines import USER, SystemdMachines, systemd_machines

ADDRESSES = {"alpha": "192.168.8.151", "beta": "192.168.8.152", "gamma": "192.168.8.153"}
# Unlike each other, and all served by the torch of this machine, which the stand-in wheel leads to.
CARDS = {
    "alpha": "0|81920|8.0|NVIDIA A100-SXM4-80GB\n1|81920|8.0|NVIDIA A100-SXM4-80GB\n",
    "beta": "0|24564|8.9|NVIDIA GeForce RTX 4090\n",
    "gamma": "0|11264|7.5|NVIDIA GeForce RTX 2080 Ti\n",
}
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdMachines]:
    folder = tmp_path_factory.mktemp("guide")
    with systemd_machines(folder, ADDRESSES, CARDS) as running:
        _put_repository(running, folder / "repository")
        yield running


@pytest.fixture(scope="module")
def outputs(fresh: SystemdMachines) -> dict[int, str]:
    """What each block of the guide printed, by its line, typed one after the other."""
    return {block.line: walk(fresh, block) for block in SHELL if not is_other_way(block)}


def _put_repository(running: SystemdMachines, folder: Path) -> None:
    """This tree as it is, as a repository on the controller."""
    script = f"""
        mkdir {folder}
        git -C {ROOT} ls-files -z --cached --others --exclude-standard |
            tar -C {ROOT} --null --files-from=- -c | tar -C {folder} -x
        cd {folder}
        git init --quiet
        git add --all
        git -c user.name=t -c user.email=t@localhost commit --quiet --message t
    """
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=True)
    tree = subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True)
    unpack = f"mkdir /srv/repository; tar -C /srv/repository -x; chown -R {USER}: /srv/repository"
    subprocess.run([*running.enter("alpha"), "sh", "-c", unpack], input=tree.stdout, check=True)


def test_guide_leads_from_bare_machines_to_a_training(
    fresh: SystemdMachines, outputs: dict[int, str]
) -> None:
    printed = "\n".join(outputs.values())
    assert "rank 3 on gamma" in printed
    assert "all-reduce over 4 ranks with gloo" in printed
    assert "finished: step 80" in printed
    done = fresh.type("alpha", "scontrol -o show job")
    last = done.stdout.strip().splitlines()[-1]
    assert "JobState=COMPLETED" in last, done.stdout


@pytest.mark.skipif(
    not os.environ.get("DDP_SLURM_TEST_GUIDE"), reason="takes minutes: make test-guide"
)
@pytest.mark.parametrize("name", BATCHES)
def test_doctor_names_planted_faults_and_the_cures_cure(
    fresh: SystemdMachines, outputs: dict[int, str], name: str
) -> None:
    batch = BATCHES[name]
    # python3 has no torch there, whose import takes seconds
    python = VENV if name in ("torch", "environment") else "python3"
    healthy = _findings(fresh, python)
    for fault in batch:
        for node in fault.node.split():
            planted = fresh.type(node, fault.plant)
            assert planted.returncode == 0, planted.stdout
    found = _findings(fresh, python)
    missed = [fault for fault in batch if not any(_names(finding, fault) for finding in found)]
    for fault in batch:
        for node in (fault.cured_on or fault.node).split():
            _cure(fresh, node, fault)
    for node in ADDRESSES:  # slurmd runs it every five minutes, and may have done so meanwhile
        fresh.type(node, "sudo /usr/local/sbin/gpu_check.sh")
    assert [fault.plant for fault in missed] == [], found
    # a restarted slurmctld knows its nodes again a moment later
    wait_until(lambda: _findings(fresh, python) == healthy, lambda: str(_findings(fresh, python)))


def _cure(running: SystemdMachines, node: str, fault: Fault) -> None:
    cured = running.type(node, fault.cure)
    if fault.cure == RESTART:
        running.wait_off(node)
        running.boot(node)
    else:
        assert cured.returncode == 0, cured.stdout
    print(f"{fault.check}: {fault.plant[:60]}: cured by {fault.cure[:60]}", flush=True)


def _names(finding: dict[str, object], fault: Fault) -> bool:
    is_same_check = finding["check"] == fault.check
    return (
        is_same_check and fault.cause in str(finding["cause"]) and fault.fix in str(finding["fix"])
    )


def _findings(running: SystemdMachines, python: str) -> list[dict[str, object]]:
    """Warnings and errors, but those of torch where python3 is asked."""
    doctor = f"ddp-slurm doctor --json --python {python} || true"
    done = running.type("alpha", f"cd /opt/ddp/ddp_slurm; {doctor}")
    report = json.loads(done.stdout)
    return [
        finding
        for finding in report["findings"]
        if finding["severity"] in ("warning", "error")
        and (python == VENV or finding["check"] not in ("torch", "versions"))
    ]


def walk(running: SystemdMachines, block: Block) -> str:
    """What a block printed, on one machine or on each. Fails with it where the block fails."""
    names = list(ADDRESSES) if block.place in OF_ALL else ["alpha"]
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda name: _type(running, name, block), names))
    if RESTART in block.text:
        for name in names:  # not in a thread: the machines would end with it
            running.wait_off(name)
            running.boot(name)
    print(f"{time.monotonic() - start:6.1f} s  line {block.line}: {block.place}", flush=True)
    return "\n".join(outputs)


def _type(running: SystemdMachines, name: str, block: Block) -> str:
    text = block.text.replace("REPOSITORY", "/srv/repository")
    if "its own name instead of alpha" in text:
        text = text.replace("set-hostname alpha", f"set-hostname {name}")
    if "ddp-slurm doctor" in text:  # a node just resumed does not respond until it is asked
        running.type(name, r"while sinfo -h -o %T | grep '\*'; do sleep 1; done")
    done = running.type(name, text)
    problem = f"line {block.line} on {name}:\n{text}\n{done.stdout}"
    if "ddp-slurm doctor" in text:
        _assert_only_cards_fail(done.stdout, problem)
    elif "--step first_job" in text:
        assert done.stdout.count("no GPU: torch sees none") >= 4, problem
    else:
        assert done.returncode == 0 or RESTART in text, problem
    return done.stdout


def _assert_only_cards_fail(printed: str, problem: str) -> None:
    """A stand-in computes nothing, and this is reported; everything else is well."""
    assert "no NVIDIA driver" in printed, problem
    findings = [line for line in printed.splitlines() if line.startswith(("error", "warning"))]
    assert [line for line in findings if "cards compute" not in line] == [], problem
