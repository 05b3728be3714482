"""The doctor's checks of machines and Slurm: one error at a time on three healthy nodes."""

import pytest

from ddp_slurm.admin.doctor.checks import diagnose
from ddp_slurm.admin.doctor.finding import Severity
from tests.doctor_facts import (
    Case,
    assert_found,
    case,
    errors_and_warnings,
    nodes_text,
    replaced,
    snapshot,
)

E, W = Severity.ERROR, Severity.WARNING

CASES = [
    case(
        "device files",
        E,
        "beta",
        "gres.conf lists /dev/nvidia1, .* the machine has /dev/nvidia0, /dev/nvidia2",
        beta={"device": ["/dev/nvidia0", "/dev/nvidia2"]},
    ),
    case(
        "partitions",
        W,
        ("gamma", "beta", "alpha"),
        "partition all is DOWN",
        everywhere={"slurm.partitions": "PartitionName=all\n   State=DOWN"},
    ),
    case(
        "GPU types",
        E,
        "beta",
        "cluster.yaml has GPUs of type 'v100', slurm.conf of a100",
        everywhere=nodes_text("gpu:2", "gpu:a100:2"),
    ),
    case(
        "reservations",
        W,
        "beta",
        "IDLE.RESERVED: only jobs of a reservation",
        everywhere=nodes_text("State=IDLE", "State=IDLE+RESERVED"),
    ),
    case("temporary folders", W, "beta", "/tmp is mounted noexec", beta={"tmp_noexec": ["yes"]}),
    case(
        "temporary folders",
        W,
        "beta",
        "/dev/shm has 64 MiB",
        beta={"disks": "Filesystem\ntmpfs 65536 0 65536 0% /dev/shm\n/dev/a 9 0 900000 1% /"},
    ),
    case(
        "limits",
        W,
        "beta",
        "limit open files of 256 files",
        beta={"slurmd.limits": "Max open files            256                  256     files"},
    ),
    case(
        "limits",
        W,
        "beta",
        "limit locked memory of 65536 bytes",
        beta={"slurmd.limits": "Max locked memory         65536                65536   bytes"},
    ),
    case(
        "control groups",
        E,
        "beta",
        "control group memory does not exist",
        beta={"cgroup_controllers": ["cpuset cpu io pids"]},
    ),
    case(
        "control groups",
        E,
        "beta",
        "control group devices does not exist",
        beta={"cgroup": ["tmpfs"], "cgroup_controllers": ["cpuset memory freezer"]},
    ),
    case("DNS", W, "beta", "no answer for 5 s .* 10.9.9.9", beta={"dns_silent": ["10.9.9.9"]}),
    case(
        "users",
        W,
        "beta",
        "home folder /home/ann of ann does not exist",
        beta={"no_home": ["ann /home/ann"]},
    ),
    case(
        "users",
        E,
        "beta",
        "user ann has different ids: .* 1000, group 1001 on beta",
        beta={"users": replaced("x:1000:1000", "x:1000:1001")},
    ),
    case(
        "slurmd",
        E,
        "beta",
        "its last error: fatal: can't stat gres.conf file",
        beta={
            "slurmd_runs": ["no"],
            "slurmd.log": "error: x\nfatal: can't stat gres.conf file /dev/nvidia1",
        },
    ),
    case(
        "Slurm release",
        E,
        "beta",
        r"21\.08\.5 on beta",
        beta={"slurmd.version": "slurm-wlm 21.08.5"},
        everywhere=nodes_text("22.05.8", "21.08.5"),
    ),
    case(
        "Slurm release",
        W,
        "beta",
        r"22\.05\.2 on beta",
        beta={"slurmd.version": "slurm-wlm 22.05.2"},
        everywhere=nodes_text("22.05.8", "22.05.2"),
    ),
    case("Slurm release", W, "beta", "still runs", everywhere=nodes_text("22.05.8", "22.05.2")),
    case(
        "Slurm release",
        E,
        "beta",
        "not installed",
        beta={"slurmd.version": None},
        everywhere=nodes_text("Version=22.05.8 ", ""),
    ),
    case(
        "cgroup plugin",
        E,
        "beta",
        "cgroup_v2.so",
        beta={"cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"], "slurmd_runs": ["no"]},
    ),
    case(
        "hardware",
        E,
        "gamma",
        "cluster.yaml has 30000 MiB of memory, the machine 15625",
        gamma={"memory_kib": ["16000000"]},
    ),
    case(
        "hardware",
        E,
        "beta",
        "slurm.conf has 99000 MiB",
        everywhere=nodes_text("RealMemory=30000", "RealMemory=99000"),
    ),
    case(
        "hardware",
        E,
        "beta",
        "slurm.conf has 8 cores, the machine 4",
        everywhere=nodes_text("Sockets=1", "Sockets=2"),
    ),
    case(
        "hardware",
        E,
        "alpha",
        "slurm.conf has 8 CPUs, the machine 4",
        alpha={"cpu": ["0 0", "0 1", "0 2", "0 3"]},
    ),
    case(
        "munge key",
        E,
        "beta",
        "munged is not running",
        beta={
            "unmunge!": '6 unmunge: Error: Failed to access "/run/munge/munge.socket.2": '
            "No such file or directory"
        },
    ),
    case("munge key", E, "beta", "mode 440", beta={"munge_key": ["440 munge 1024"]}),
    case("clock", E, "beta", "400 s behind", beta={"offset": ["-400"]}),
    case("clock", W, "beta", "8 s ahead of", beta={"offset": ["8"]}),
    case(
        "clock",
        E,
        "beta",
        "Rewound credential",
        beta={"unmunge!": "16 unmunge: Error: Rewound credential"},
    ),
    case(
        "users",
        E,
        "beta",
        "slurm has different ids",
        beta={"users": replaced("slurm:x:64030", "slurm:x:118")},
    ),
    case(
        "users", E, "beta", "slurm .* does not exist", beta={"users": replaced("slurm:", "slorm:")}
    ),
    case("users", W, "beta", "ann .* does not exist", beta={"users": replaced("ann:", "bob:")}),
    case(
        "firewall",
        E,
        "alpha",
        r"beta gets no answer from alpha on port 29500 .*, 6817 \(slurmctld\)",
        beta={"port": ["alpha 6817 silent", "alpha 29500 unreachable"]},
    ),
    case("host name", E, "beta", "'ubuntu'", beta={"hostname": ["ubuntu.example"]}),
    case(
        "name resolution",
        E,
        "beta",
        r"beta is 127\.0\.1\.1 here",
        beta={"resolves": ["beta 127.0.1.1"]},
    ),
    case(
        "name resolution",
        W,
        "beta",
        "alpha has different addresses",
        beta={"resolves": ["alpha 10.9.9.9", "beta 10.0.0.2"]},
    ),
    case(
        "configuration",
        E,
        "beta",
        "differs from the one",
        beta={"slurm.config": replaced("Match", "Different Ours=0x1 Slurmctld=0x2")},
    ),
    case(
        "configuration",
        W,
        "beta",
        "/run/slurm/conf/slurm.conf is not the same",
        beta={"config_file": ["/run/slurm/conf/slurm.conf 9 9"]},
    ),
    case(
        "slurmctld",
        E,
        "alpha",
        "does not respond to any node",
        everywhere={"slurm.ping!": "1 Slurmctld(primary) at alpha is DOWN"},
    ),
    case(
        "slurmctld",
        E,
        "beta",
        "slurmctld does not respond: ",
        beta={"slurm.ping!": "1 Slurmctld(primary) at alpha is DOWN"},
    ),
    case(
        "node states",
        E,
        "beta",
        "Low RealMemory",
        everywhere=nodes_text(
            "State=IDLE ThreadsPerCore=2 TmpDisk=0 Partitions=all",
            "State=IDLE+DRAIN ThreadsPerCore=2 TmpDisk=0 Partitions=all Reason=Low RealMemory "
            "(reported:15625 < 100.00% of configured:30000) [slurm@2026-01-01T00:00:00]",
        ),
    ),
    case(
        "host name",
        E,
        "beta",
        "'beta', which is not in slurm.conf",
        everywhere=nodes_text("NodeHostName=beta", "NodeHostName=box7"),
    ),
    case(
        "munge key",
        E,
        "beta",
        "no permission for munge's socket /run/munge/munge.socket.2",
        beta={
            "unmunge!": '6 unmunge: Error: Failed to access "/run/munge/munge.socket.2": '
            "Permission denied (Did you start munged?)"
        },
    ),
    case(
        "slurmd",
        E,
        "beta",
        "slurmd is not running; its last error: fatal: no configuration",
        beta={
            "slurmd_runs": ["no"],
            "slurmd.journal": "Starting\nerror: fetch_config\nfatal: no configuration\nFailed",
        },
    ),
    case("slurmd", E, "beta", "slurmd is not running$", beta={"slurmd_runs": ["no"]}),
    case(
        "slurmd",
        E,
        "beta",
        "slurmd is not running; only root can read its log",
        beta={
            "slurmd_runs": ["no"],
            "slurmd_log_hidden": ["yes"],
            "slurmd.journal": "Started slurmd.service\nslurmd: error: of an earlier start\n"
            "Started slurmd.service - Slurm node daemon.\nslurmd.service: Main process exited",
        },
    ),
    case(
        "slurmd",
        E,
        "beta",
        "its last error: fatal: can't stat gres.conf",
        beta={
            "slurmd_runs": ["no"],
            "slurmd.log": "fatal: before\nslurmd version 22.05.8 started\nerror: pmix\n"
            "fatal: can't stat gres.conf",
            "slurmd.journal": "Started slurmd.service\nslurmd: error: no PMIx",
        },
    ),
    case(
        "slurmd",
        E,
        "beta",
        "its last error: slurmd.service .*ConditionPathExists",
        beta={
            "slurmd_runs": ["no"],
            "slurmd.log": "slurmd version 22.05.8 started\nerror: a job's",
            "slurmd.journal": "slurmd.service - Slurm node daemon was skipped because of an unmet "
            "condition check (ConditionPathExists=/etc/slurm/slurm.conf).",
        },
    ),
    case(
        "interface",
        E,
        "beta",
        "interface 'eno1' does not exist; the machine has eth0",
        beta={"interface": ["lo unknown -1", "eth0 up 1000"]},
    ),
    case("interface", E, "beta", "'eno1' is down", beta={"interface": ["eno1 down -1"]}),
    case(
        "packet size",
        W,
        "beta",
        "different MTU between the nodes: 1500 on gamma, alpha, 9000 on beta",
        beta={"mtu": ["lo 65536", "eno1 9000"]},
    ),
    case(
        "disks",
        E,
        "beta",
        "less than 100 MiB are free on /$",
        beta={"disks": replaced("2000000      98%", "90000     100%")},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_doctor_names_node_cause_and_fix(case: Case) -> None:
    assert_found(case)


def test_a_line_of_hosts_that_wins_is_named() -> None:
    changed = snapshot(
        beta={
            "resolves": ["alpha 10.0.0.9", "beta 10.0.0.2", "gamma 10.0.0.1"],
            "hosts_line": ["alpha 3 10.0.0.9 alpha alpha.lab"],
        }
    )
    (finding,) = errors_and_warnings(changed)
    assert "delete line 3 of /etc/hosts, which wins: 10.0.0.9 alpha" in finding.fix


def test_a_munge_key_that_only_root_sees_is_not_ok() -> None:
    hidden = {"munge_key": None, "munge_key_hidden": ["yes"]}
    (finding,) = [f for f in diagnose(snapshot(everywhere=hidden)) if f.check == "munge key"]
    assert finding.severity is Severity.SKIPPED


def test_types_of_gpus_without_a_type_in_slurm_are_not_compared() -> None:
    assert errors_and_warnings(snapshot(everywhere=nodes_text("gpu:2", "gpu:2(S:0)"))) == []
