"""Record what tasks of real steps find in their environment, for tests/unit/test_rank_env.py.

    python -m tests.slurm.record_environments tests/unit/environments [RELEASE=ROOT ...]

as root. ROOT is the root folder of a system with another Slurm release, made with debootstrap.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_slurm.lab import Lab, daemons
from tests.conftest import without_launcher
from tests.slurm.conftest import load_cluster

CLUSTER = """\
name: record
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}}
  - {name: "beta[1-2]", gpus: {type: v100, count: 2}}
  - {name: alpha, gpus: {type: a100, count: 4}}
"""
UNSET = """
SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK
SLURM_TRES_PER_TASK SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES
SLURM_JOB_CPUS_PER_NODE SLURM_MEM_PER_NODE
"""
Component = tuple[str, int, int]  # gres type, nodes, tasks a node
JOBS: dict[str, tuple[list[Component], str]] = {
    "het_1_2_4": ([("titan", 1, 1), ("v100", 1, 2), ("a100", 1, 4)], ""),
    "het_two_node_component": ([("titan", 1, 1), ("v100", 2, 2), ("a100", 1, 4)], ""),
    "het_two_nodes_first": ([("v100", 2, 2), ("titan", 1, 1)], ""),
    "het_gpus_per_task": ([("titan", 1, 1), ("v100", 1, 2), ("a100", 1, 4)], "--gpus-per-task=1"),
    "homogeneous": ([("v100", 2, 2)], ""),
    "homogeneous_gpus_per_task": ([("v100", 2, 2)], "--gpus-per-task=1"),
}
NOISE = {
    "SLURM_CONF",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_HOST",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST",
    "SLURM_TASK_PID",
    "SLURM_UMASK",
    "SLURM_WORKING_CLUSTER",
    "SLURM_JOB_UID",
    "SLURM_JOB_USER",
    "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME",
    "SLURM_PRIO_PROCESS",
    "SLURM_RLIMIT_CORE",
}


def script(components: list[Component], task_option: str, folder: Path) -> str:
    """A job script whose batch shell and tasks each write their environment into a file."""
    task = f"sh -c 'uname -n >{folder}/$SLURM_PROCID.host; env -0 >{folder}/$SLURM_PROCID'"
    headers, segments = [], []
    for kind, nodes, tasks in components:
        size = f"--nodes={nodes} --ntasks={nodes * tasks} --ntasks-per-node={tasks}"
        headers.append(f"#SBATCH {size} --cpus-per-task=2 --mem=1G --gres=gpu:{kind}:{tasks}\n")
        segments.append(f"{size} --cpus-per-task=2 {task_option} {task}")
    lines = [
        f"uname -n >{folder}/batch.host",
        f"env -0 >{folder}/batch",
        f"unset {' '.join(UNSET.split())}",
        f"srun {' : '.join(segments)}",
    ]
    return "#!/bin/bash\n" + "#SBATCH hetjob\n".join(headers) + "\n".join(lines) + "\n"


def read(file: Path) -> dict[str, str]:
    """The variables of one task that Slurm has set and that are not the machine's own."""
    kept = {"HOST": file.with_suffix(".host").read_text().strip()}
    for line in filter(None, file.read_text().split("\0")):
        name, _, value = line.partition("=")
        is_noise = name in NOISE or name.startswith("SLURM_RLIMIT")
        if name.startswith(("SLURM_", "CUDA_VISIBLE")) and not is_noise:
            kept[name] = value
    return kept


def record(lab: Lab, components: list[Component], task_option: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="record") as name:
        folder = Path(name)
        (folder / "job.sh").write_text(script(components, task_option, folder))
        submit = ["sbatch", "--wait", "-o", f"{folder}/out", f"{folder}/job.sh"]
        lab.run(submit, cwd=folder, env=without_launcher(os.environ), check=True)
        world = sum(nodes * tasks for _, nodes, tasks in components)
        tasks = [read(folder / str(rank)) for rank in range(world)]
        batch = read(folder / "batch")
    common = {
        key: value
        for key, value in tasks[0].items()
        if all(task.get(key) == value for task in tasks)
    }
    own = [{key: task[key] for key in sorted(task.keys() - common.keys())} for task in tasks]
    return {"common": common, "tasks": own, "batch": batch}


def main(target: Path, releases: list[str]) -> None:
    for root in [None, *(release.partition("=")[2] for release in releases)]:
        with tempfile.TemporaryDirectory() as folder:
            cluster = load_cluster(CLUSTER, Path(folder))
        with Lab.up(cluster, "record", root) as lab:
            release = ".".join(daemons.slurm_version(lab).split(".")[:2])
            for name, (components, task_option) in JOBS.items():
                try:
                    recorded = record(lab, components, task_option)
                except subprocess.CalledProcessError as error:
                    print(f"{release} {name}: {error}", file=sys.stderr)
                    continue
                text = json.dumps(recorded, indent=0, sort_keys=True)
                (target / f"{name}.{release}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
