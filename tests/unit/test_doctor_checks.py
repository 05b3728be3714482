"""The doctor's checks of machines and Slurm: one error at a time on three healthy nodes."""

import pytest

from ddp_slurm.admin.doctor import Severity
from tests.doctor_facts import Case, assert_found, case, nodes_text, replaced

E, W = Severity.ERROR, Severity.WARNING

CASES = [
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
        beta={"cgroup_plugin": ["/usr/lib/slurm/cgroup_v1.so"]},
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
        "slurmd is not running; the last error in its journal: fatal: no configuration",
        beta={
            "slurmd_runs": ["no"],
            "slurmd.journal": "Starting\nerror: fetch_config\nfatal: no configuration\nFailed",
        },
    ),
    case("slurmd", E, "beta", "slurmd is not running$", beta={"slurmd_runs": ["no"]}),
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
