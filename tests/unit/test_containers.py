"""Containers: docker without Slurm, pyxis and apptainer under it."""

import os
import pwd
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.job.checks import combination_errors
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job_env import REQUEUE_MARKER
from ddp_slurm.render import RenderError, containers, render_sbatch
from ddp_slurm.render.containers import GPU_OPTIONS
from ddp_slurm.render.torchrun import TorchrunError, network_commands, render_torchrun

from .recording import ENV, VALUES, WORDS, Stubs, bash, plan_of, segments


def test_docker_gets_options_variables_and_command(
    stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "GPU_OPTIONS", "")  # those depend on this machine
    stubs.add("docker")
    plan = plan_of(
        command=["python", "t.py", *WORDS],
        env=ENV,
        container="docker:torch:2",
        mount=["/da ta:/mnt:ro", "/x"],
    )
    command = render_torchrun(plan, str(tmp_path), "/not/used/python")[0]
    assert bash(command.line, stubs, tmp_path).returncode == 0
    assert bash(command.clean_up, stubs, tmp_path).returncode == 0
    (_, argv, environ, _), (_, clean_up, _, _) = stubs.calls()
    image = argv.index("torch:2")
    name = next(text for text in argv if text.startswith("--name=")).removeprefix("--name=")
    assert argv[image + 1 : image + 3] == ["python", "-m"]
    assert argv[-len(WORDS) :] == WORDS
    assert {name: environ[name] for name in VALUES} == VALUES
    passed = {"DDP_SLURM_WORLD_SIZE", "NCCL_SOCKET_IFNAME", *VALUES}
    names = [word for word in argv[:image] if re.fullmatch("--env=[A-Z0-9_]+", word)]
    assert {f"--env={name}" for name in passed} <= set(names)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert [word for word in argv[:image] if word not in names] == [
        "run",
        "--rm",
        "--init",
        f"--name={name}",
        "--network=host",
        "--ipc=host",
        f"--user={os.getuid()}:{os.getgid()}",
        "--env=HOME=/tmp",
        f"--env=USER={user}",
        f"--mount=type=bind,source={tmp_path},target={tmp_path}",
        "--mount=type=bind,source=/da ta,target=/mnt,readonly",
        "--mount=type=bind,source=/x,target=/x",
        f"--workdir={tmp_path}",
    ]
    assert clean_up == ["rm", "--force", name]


@pytest.mark.parametrize("device", ["/proc/driver/nvidia", "/dev/dxg"])
def test_docker_gets_gpus_only_where_a_driver_is(tmp_path: Path, device: str) -> None:
    text = GPU_OPTIONS.replace("/proc/driver/nvidia", f"{tmp_path}/a").replace(
        "/dev/dxg", f"{tmp_path}/b"
    )

    def options() -> list[str]:
        command = ["bash", "-euc", f"echo docker {text}"]
        return subprocess.check_output(command, text=True).split()[1:]

    assert options() == []
    (tmp_path / ("a" if "nvidia" in device else "b")).touch()
    assert options() == ["--gpus=all", "--ulimit=memlock=-1", "--ulimit=stack=67108864"]


def test_real_docker_client_accepts_the_options(stubs: Stubs, tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker client")
    plan = plan_of(
        container="docker:torch:2", mount=["/da ta:/mnt:ro"], **{"container-network": "ddp"}
    )
    stubs.environ["DOCKER_HOST"] = f"unix://{tmp_path}/no.sock"
    done = bash(render_torchrun(plan, str(tmp_path), "python3")[0].line, stubs, tmp_path)
    # it parses all options before it looks for the engine, which does not exist
    assert "no.sock" in done.stderr


def test_overlay_network_uses_container_names(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("docker")
    plan = plan_of(container="docker:torch", **{"container-network": "ddp"})
    for command in render_torchrun(plan, str(tmp_path), "python3"):
        bash(command.line, stubs, tmp_path)
    (_, first, environ, _), (_, second, _, _) = stubs.calls()
    alias = next(text for text in first if text.startswith("--network-alias=")).removeprefix(
        "--network-alias="
    )
    assert f"--master-addr={alias}" in first
    assert f"--master-addr={alias}" in second
    assert "NCCL_SOCKET_IFNAME" not in environ
    assert "--network=ddp" in first
    make, join, token = network_commands(plan)
    stubs.environ["TOKEN"] = "SWM TKN"
    for text in (make, join, token):
        bash(text.partition(": ")[2], stubs, tmp_path)
    assert [text.partition(": ")[0] for text in (make, join, token)] == [
        "on gamma",
        "on beta",
        "where TOKEN is what this prints on gamma",
    ]
    assert [argv for _, argv, _, _ in stubs.calls()[2:]] == [
        ["swarm", "init", "--advertise-addr", "192.0.2.1"],
        ["network", "create", "--driver", "overlay", "--attachable", "ddp"],
        ["swarm", "join", "--advertise-addr", "192.0.2.2", "--token", "SWM TKN", "192.0.2.1:2377"],
        ["swarm", "join-token", "--quiet", "worker"],
    ]
    assert network_commands(plan_of()) == []
    node = plan.machines[0]._replace(address="fd00::1")
    assert network_commands(replace(plan, machines=(node, *plan.machines[1:])))[1].endswith(
        " '[fd00::1]:2377'"
    )


def test_node_refuses_a_folder_that_cannot_be_mounted(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("apptainer")
    for name in ("a,b", "a:b", 'a"b', "a\\b"):
        folder = tmp_path / name
        folder.mkdir()
        done = bash(
            render_torchrun(plan_of(container="apptainer:/i.sif"), str(folder), "p")[0].line,
            stubs,
            tmp_path,
        )
        assert (done.returncode, "cannot be mounted" in done.stderr) == (2, True)
    assert not stubs.calls()


def test_pyxis_and_apptainer_get_options_and_command(stubs: Stubs, tmp_path: Path) -> None:
    common = {"command": ["python", "t.py", *WORDS], "env": ENV, "mount": ["/da ta:/mnt:ro"]}
    plan = plan_of(container="pyxis:nv#torch", **common)
    step = {"PYTHONUNBUFFERED", *plan.job_env().to_environ(), *VALUES}
    own = [("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), ("NODE",)]
    for index, segment in enumerate(segments(plan, stubs, tmp_path)):
        start = segment.index("--container-image=nv#torch")
        assert segment[start + 1 : start + 3] == [
            f"--container-mounts={tmp_path}:{tmp_path},/da ta:/mnt:ro",
            f"--container-workdir={tmp_path}",
        ]
        option, _, names = segment[start + 3].partition("=")
        # without a name here the image's own value of the variable would win
        assert (option, set(names.split(","))) == (
            "--container-env",
            step | set(own[index]),
        )
        exports = " ".join(f'{name}="$_ddp_env_{index}_{name}"' for name in own[index])
        with_env = ["sh", "-c", f'export {exports}; exec "$@"', "sh"]
        assert segment[start + 4 :] == [*with_env, "python", "t.py", *WORDS]
    stubs.log.unlink()
    for segment in segments(plan_of(container="apptainer:/i m.sif", **common), stubs, tmp_path):
        start = segment.index("apptainer")
        assert not [word for word in segment if word.startswith("--container")]
        assert segment[start:] == [
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            str(tmp_path),
            "--bind",
            "/da ta:/mnt:ro",
            "--pwd",
            str(tmp_path),
            "/i m.sif",
            "python",
            "t.py",
            *WORDS,
        ]


def test_requeue_marker_is_where_the_container_can_make_it(stubs: Stubs, tmp_path: Path) -> None:
    """Enroot gives a container a /tmp of its own."""
    segments(plan_of(container="pyxis:x", **{"max-restarts": 1}), stubs, tmp_path)
    (ranks,) = [environ for _, argv, environ, _ in stubs.calls() if ":" in argv]
    marker = Path(ranks[REQUEUE_MARKER])
    assert marker.parents[1] == tmp_path
    assert not marker.parent.exists()  # the script has ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"container": "docker"},
            "'docker' is not ENGINE:IMAGE; the engines are docker, apptainer, pyxis",
        ),
        ({"container": "podman:x"}, "is not ENGINE:IMAGE"),
        ({"container": "docker:--privileged"}, "is not a docker image"),
        ({"container": "docker:a b"}, "is not a docker image"),
        ({"container": "docker:$(id)"}, "command substitution"),
        ({"container": "docker:x", "mount": ["data"]}, "'data' is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a:/b:/c"]}, "is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a:b"]}, "is not SOURCE"),
        ({"container": "docker:x", "mount": ["/a,b"]}, "cannot be mounted"),
        ({"launcher": "mpirun"}, "expected srun or torchrun, got 'mpirun'"),
    ],
)
def test_options_refused_at_load(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        plan_of(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mount": ["/a"]}, "need --container"),
        ({"container": "pyxis:x", "container-network": "n"}, "is docker's"),
        ({"container": "docker:x", "venv": "/v"}, "its own Python"),
    ],
)
def test_options_that_cannot_be_combined(options: dict[str, object], words: str) -> None:
    (error,) = combination_errors(JobOptions.read(options))
    assert words in error


def test_container_engine_must_fit_the_backend() -> None:
    with pytest.raises(RenderError, match="under Slurm use pyxis"):
        render_sbatch(plan_of(container="docker:x"))
    with pytest.raises(TorchrunError, match="plug-in of Slurm"):
        render_torchrun(plan_of(container="pyxis:x"), "/", "python3")
    with pytest.raises(TorchrunError, match="valid on one link only"):
        render_torchrun(plan_of(env=["MASTER_ADDR=fe80::1%eth0"]), "/", "python3")
