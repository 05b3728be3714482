"""The files that ``cluster configs`` prints, without the lab's changes.

Real paths, users, control groups, and configuration fetched by slurmd.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.admin.configs import render_configs, schedulable_memory_mb, write_configs
from ddp_slurm.cluster import Cluster

ADDRESS = "198.18.77.1"
CGROUPS = Path("/sys/fs/cgroup")
PROGRAM = r"""
scontrol show config | grep -E '^(ProctrackType|TaskPlugin|SlurmUser|SelectType) '
ls /run/slurm/conf/
exec srun --ntasks=2 --gres=gpu:titan:1 --mem=100M sh -c '
    for device in /dev/nvidia0 /dev/nvidia1; do (: <$device) 2>&1; done | sed "s/^.*: /device: /"
    echo "visible: $CUDA_VISIBLE_DEVICES"'
"""


@pytest.fixture
def machine_name() -> Iterator[str]:
    """Of a machine whose control groups are removed at the end: no namespace contains them."""
    if not (CGROUPS / "freezer").is_dir() or not (CGROUPS / "devices").is_dir():
        pytest.skip("no cgroup v1 here, and with v2 slurmd has to be started by systemd")
    name = f"users{os.getpid()}"
    yield name
    for top in CGROUPS.glob(f"*/slurm_{name}"):
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        top.rmdir()


@pytest.fixture
def run_on_machine(
    machine_name: str, tmp_path: Path
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """``run_on_machine(release, program, slurmdbd=False)``, with the files of its own cluster.yaml.

    The daemons' logs are in ``tmp_path / "out"``.
    """
    if not shutil.which("setpriv"):
        pytest.skip("setpriv (util-linux) is not installed")

    def run(
        release: tuple[str, Path | None], program: str, *, slurmdbd: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        version, root = release
        memory_mb = schedulable_memory_mb(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        )
        file, conf, out = tmp_path / "cluster.yaml", tmp_path / "conf", tmp_path / "out"
        file.write_text(
            f"nodes:\n  - {{name: {machine_name}, gpus: {{type: titan, count: 2}}, "
            f"cpus: {os.cpu_count()}, "
            f"memory: {memory_mb}M, features: [cc75]}}\n"
        )
        write_configs(
            render_configs(Cluster.load(file), slurm_version=version, slurmdbd=slurmdbd), conf
        )
        out.mkdir()
        command = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
        ]
        script = Path(__file__).parent / "machine.sh"
        arguments = [
            machine_name,
            ADDRESS,
            str(root or "/"),
            str(conf),
            str(out),
            "sh",
            "-ec",
            program,
        ]
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(
            [*command, str(script), *arguments], env=environ, capture_output=True, text=True
        )

    return run


@pytest.mark.timeout(900)  # a release's root may have to be made first
def test_users_files_run_on_a_machine(
    release: tuple[str, Path | None],
    run_on_machine: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    complaints: Callable[[Path], list[str]],
) -> None:
    done = run_on_machine(release, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert complaints(tmp_path / "out") == []
    for setting in (
        "proctrack/cgroup",
        "task/affinity",
        "task/cgroup",
        "slurm(",
        "select/cons_tres",
    ):
        assert setting in done.stdout
    assert "gres.conf" in done.stdout, "slurmd has fetched the files from slurmctld"
    # Both tasks may open the GPU of their job (it has no driver: another error), but not the other.
    devices = [
        line.removeprefix("device: ")
        for line in done.stdout.splitlines()
        if line.startswith("device: ")
    ]
    assert sorted(devices) == ["No such device or address"] * 2 + ["Operation not permitted"] * 2
    assert done.stdout.count("visible: 0") == 2


ACCOUNTING = """
srun --ntasks=1 --gres=gpu:titan:2 true
until sacct --allocations --noheader --parsable2 --format=State,AllocTRES \
    --starttime=now-1hours | grep COMPLETED
do
    i=$((${i:-0} + 1))
    [ $i -lt 900 ]
    sleep 0.1
done
"""


@pytest.mark.timeout(300)
def test_users_files_run_accounting(
    run_on_machine: Callable[..., "subprocess.CompletedProcess[str]"],
    needs_lab: None,
    tmp_path: Path,
    complaints: Callable[[Path], list[str]],
) -> None:
    """On this machine's own release: a job and its GPUs are in the database."""
    if not shutil.which("mariadbd", path="/usr/sbin") or not shutil.which(
        "slurmdbd", path="/usr/sbin"
    ):
        pytest.skip("no mariadb-server and slurmdbd here")
    version = subprocess.run(
        ["/usr/sbin/slurmd", "-V"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = run_on_machine((version, None), ACCOUNTING, slurmdbd=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gres/gpu=2" in done.stdout
    assert complaints(tmp_path / "out") == []
