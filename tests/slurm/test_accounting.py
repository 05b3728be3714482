"""Job state with an accounting database: the shipped slurmdbd.conf, a live slurmdbd and MariaDB."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.admin.configs import render_configs
from ddp_slurm.admin.installation import USERS_MACHINES
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster
from ddp_slurm.lab import Lab, daemons
from ddp_slurm.runs.job import Job
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.sources import read_state

from .conftest import LIVE_CLUSTER

PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
}
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
pytestmark = pytest.mark.timeout(600)


def wait(done: Callable[[], bool], log: Path) -> None:
    give_up = time.monotonic() + 120
    while not done():
        assert time.monotonic() < give_up, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def accounting_lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose slurmctld reports to a slurmdbd.

    All daemons are in its controller's namespace, and end with it.
    """
    missing = sorted(
        {
            package
            for program, package in PROGRAMS.items()
            if shutil.which(program, path=PATH) is None
        }
    )
    if missing:
        pytest.skip(f"not installed: {' '.join(missing)}")
    file = tmp_path_factory.mktemp("accounting") / "cluster.yaml"
    file.write_text(LIVE_CLUSTER)
    cluster = Cluster.load(file)
    with Lab.up(cluster, f"test-{os.getpid()}-dbd") as lab:
        start_mariadb(lab)
        start_slurmdbd(lab, cluster)
        report_to_slurmdbd(lab)
        yield lab


def start(lab: Lab, argv: list[str], **environ: str) -> None:
    subprocess.Popen(
        lab.inside(None, argv),
        env={"PATH": PATH, **environ},
        cwd="/",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def start_mariadb(lab: Lab) -> None:
    data = lab.folder / "mysql"
    options = ["--no-defaults", f"--datadir={data}", "--user=root"]
    subprocess.run(
        [
            "mariadb-install-db",
            *options,
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
        ],
        env={"PATH": PATH},
        check=True,
        capture_output=True,
    )
    start(
        lab,
        [
            "mariadbd",
            *options,
            "--skip-networking",
            f"--socket={data}/socket",
            f"--pid-file={data}/pid",
            f"--log-error={data}/log",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
        ],
    )
    sql = [
        "mariadb",
        "--no-defaults",
        f"--socket={data}/socket",
        "-e",
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db",
    ]
    wait(
        lambda: subprocess.run(sql, env={"PATH": PATH}, capture_output=True).returncode == 0,
        data / "log",
    )


def start_slurmdbd(lab: Lab, cluster: Cluster) -> None:
    site = replace(
        USERS_MACHINES,
        controller=lab.controller,
        slurm_user="root",
        log_dir=str(lab.folder / "log"),
        run_dir=str(lab.folder / "state"),
    )
    text = render_configs(cluster, installation=site, slurmdbd=True)["slurmdbd.conf"]
    conf = lab.slurm_conf.with_name("slurmdbd.conf")
    conf.touch(0o600)
    conf.write_text(f"{text}AuthInfo=socket={lab.folder / 'munge/socket'}\n")
    start(
        lab,
        ["slurmdbd", "-D"],
        SLURM_CONF=str(lab.slurm_conf),
        MYSQL_UNIX_PORT=str(lab.folder / "mysql/socket"),
    )
    log = lab.folder / "log/slurmdbd.log"
    wait(lambda: log.exists() and "slurmdbd version" in log.read_text(), log)


def report_to_slurmdbd(lab: Lab) -> None:
    """slurmctld reads the type of its accounting only when it starts."""
    with lab.slurm_conf.open("a") as conf:
        conf.write(
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={lab.controller_address}\nAccountingStorageTRES=gres/gpu\n"
            f"AccountingStoragePass={lab.folder / 'munge/socket'}\n"
        )
    os.kill(int((lab.folder / "state/slurmctld.pid").read_text()), signal.SIGTERM)
    wait(lambda: not daemons.is_running(lab, None, "slurmctld"), lab.folder / "log/slurmctld.log")
    daemons.start_slurmctld(lab)
    daemons.wait_for_nodes(lab)


@pytest.fixture
def here(
    accounting_lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clean_environ: dict[str, str],
) -> Path:
    """A folder to submit from, with the lab's cluster.yaml."""
    for name in set(os.environ) - set(clean_environ):
        monkeypatch.delenv(name)
    for name, value in accounting_lab.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    return tmp_path


def forgetful(argv: Sequence[str]) -> Answer:
    """A slurmctld that has forgotten its jobs, with the real sacct."""
    if argv[0] == "sacct":
        return ask_slurm(argv)
    return Answer(1, "", "slurm_load_jobs error: Invalid job id specified")


def submit(*command: str) -> Job:
    from ddp_slurm.backends import sbatch
    from ddp_slurm.job.options import JobOptions
    from ddp_slurm.job.runs_folder import runs_folder
    from ddp_slurm.plan import make_plan
    from ddp_slurm.render import render_sbatch
    from ddp_slurm.runs.keep import Submission, keep_run

    plan = make_plan(Cluster.load("cluster.yaml"), JobOptions(command=command, time="5"))
    runs, now = runs_folder(plan.options.output), time.time()
    script = render_sbatch(plan, runs)
    job_id = sbatch.submit(script)
    run = keep_run(Submission(plan, "sbatch", script, now), runs, job_id)
    return Job(job_id, run)


def test_slurm_and_its_database_know_how_jobs_ended(here: Path) -> None:
    good, bad = submit("true"), submit("bash", "-c", "exit $((SLURM_PROCID == 4 ? 3 : 0))")
    for job, state, status in ((good, "COMPLETED", 0), (bad, "FAILED", 3)):
        wait(lambda job=job: job.state().is_final, here / f"lab-{job.id}.out")
        assert (job.state().state, job.state().exit_status) == (state, status)
        # slurmdbd hears of the components one by one
        wait(
            lambda job=job: len(read_state(job.id, ask=forgetful).components) == 3,
            here / f"lab-{job.id}.out",
        )
        wait(lambda job=job: read_state(job.id, ask=forgetful).is_final, here / f"lab-{job.id}.out")
        accounted = read_state(job.id, ask=forgetful)
        assert (accounted.state, accounted.source, accounted.exit_status) == (
            state,
            "sacct",
            status,
        )
        assert [(c.job_id, c.nodes) for c in accounted.components] == [
            (f"{job.id}+0", "gamma"),
            (f"{job.id}+1", "beta"),
            (f"{job.id}+2", "alpha"),
        ]


def test_cancelled_job_in_the_database(here: Path) -> None:
    job = submit("sleep", "600")
    wait(lambda: job.state().state == "RUNNING", here / f"lab-{job.id}.out")
    subprocess.run(["scancel", job.id], check=True)
    wait(lambda: job.state().is_final, here / f"lab-{job.id}.out")
    assert job.state().state == "CANCELLED"
    wait(lambda: read_state(job.id, ask=forgetful).is_final, here / f"lab-{job.id}.out")
    assert read_state(job.id, ask=forgetful).state == "CANCELLED"


def test_submitit_with_accounting(here: Path) -> None:
    pytest.importorskip("submitit")
    from submitit.core import utils

    from ddp_slurm.backends.submitit.executor import HetSlurmExecutor

    executor = HetSlurmExecutor(here / "folder")
    executor.update_parameters(time=5)
    assert executor.submit(max, 1, 2).results() == [2] * 7
    job = executor.submit(os._exit, 3)
    with pytest.raises(
        utils.UncompletedJobError, match=r"is FAILED \(exit status [0-9]+, NonZeroExitCode\)"
    ):
        job.results()
