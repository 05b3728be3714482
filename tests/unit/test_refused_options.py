"""Options that would break the plan or the job script, under each name that Slurm accepts."""

import os
import re
from pathlib import Path

import pytest

from ddp_slurm.errors import printable
from ddp_slurm.job.log_path import make_log_folder, with_log_path
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.job.sbatch_option import KEYS_OF_THE_PLAN, SbatchOption
from ddp_slurm.schema.fields import env_name

GOLDEN = Path(__file__).parent / "golden"

ACCEPTED = (
    "acctg-freq bb bbf begin cluster-constraint comment constraint container container-id context "
    "contiguous core-spec cores-per-socket cpu-freq deadline delay-boot dependency exclude "
    "exclusive extra extra-node-info get-user-env gpu-bind gpu-freq gres-flags hint hold "
    "ignore-pbs input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mincpus "
    "network nice no-kill ntasks-per-core oom-kill-step open-mode overcommit oversubscribe "
    "parsable prefer priority profile propagate quiet reboot reservation resv-ports segment "
    "sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp "
    "tres-bind use-min-nodes verbose wait-all-nodes wckey"
)
"""The other long options of sbatch 20.11 to 24.11."""


@pytest.mark.parametrize("name", ACCEPTED.split())
def test_sbatch_options_beside_the_plan_are_accepted(name: str) -> None:
    assert str(SbatchOption.read(f"1:{name}=x")) == f"1:{name}=x"


@pytest.mark.parametrize(
    "text",
    [
        "tasks-per-node=1",
        "ntasks-per-socket=1",
        "gpus-per-socket=1",
        "tres-per-task=gres/gpu:1",
        "export-file=x",
        "uid=0",
        "cluster=c",
        "packjob",
        "--test-only",
        "0:help",
        "nodefile=x",
    ],
)
def test_sbatch_options_of_the_plan_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be set here: "):
        SbatchOption.read(text)


def test_beginnings_of_refused_options_are_refused() -> None:
    """getopt_long accepts ``nodel`` for ``nodelist``."""
    for name in KEYS_OF_THE_PLAN:
        for end in range(1, len(name)):
            with pytest.raises(ValueError, match=r"cannot be set here|the option's whole name"):
                SbatchOption.read(f"{name[:end]}=x")
    with pytest.raises(ValueError, match=r"'nodel'.* sbatch would take this for 'nodelist'"):
        SbatchOption.read("nodel=gamma")


NAMES_OF_SLURM = re.compile(r"\bSLURMD?_[A-Z_]+\b")
OPTIONS_OF_CLIENTS = {"SLURM_TIME_FORMAT"}


def test_env_refuses_what_the_job_script_reads_and_sets() -> None:
    script = "".join(path.read_text() for path in GOLDEN.glob("*.sbatch"))
    code = re.sub(r"^ *#.*", "", script, flags=re.MULTILINE)
    names = set(NAMES_OF_SLURM.findall(code)) - OPTIONS_OF_CLIENTS
    names = {f"{name}0" if name.endswith("_") else name for name in names}
    names |= set(re.findall(r"\b_ddp_\w+", code)) | set(re.findall(r"\bDDP_SLURM_\w+", code))
    assert len(names) > 60
    for name in sorted(names):
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            env_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SLURM_PROCID", "is set by Slurm, and the ranks find their places by it"),
        ("SLURM_EXPORT_ENV", "is set by Slurm"),
        ("DDP_SLURM_SHARES", "is set from the plan; use the options of submit"),
        ("DDP_SLURM_ANYTHING", "is set from the plan"),
        ("_ddp_status", "is a name of the job script, all of which begin with '_ddp_'"),
        ("IFS", "changes how bash reads the job script"),
        ("SECONDS", "is set by bash and cannot be changed"),
    ],
)
def test_env_names_the_reason_of_a_refusal(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' {re.escape(reason)}"):
        env_name(name)


@pytest.mark.parametrize(
    "name", ["SLURM_CPU_BIND", "SLURM_UNBUFFEREDIO", "MASTER_PORT", "BASH_ENV", "ddp", "PATH"]
)
def test_env_accepts_options_of_programs(name: str) -> None:
    assert env_name(name) == name


def test_output_refuses_a_backslash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm 22.05 writes a\\%j.out to a%j.out, and fails a job in a folder with a backslash."""
    with pytest.raises(OptionsError, match=r"--output: 'a\\\\%j.out' has a backslash, with which"):
        with_log_path(JobOptions.read({"output": "a\\%j.out"}), "lab")
    folder = tmp_path / "a\\b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(OptionsError, match="give an absolute path in another folder"):
        make_log_folder(JobOptions.read({"output": "x.out"}))
    make_log_folder(JobOptions.read({"output": os.fspath(tmp_path / "x.out")}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é\ttext\n", "plain é\ttext\n"),
        ("\x1b[31m\r\b\x7f\x00", "\\x1b[31m\\r\\x08\\x7f\\x00"),
        ("\x9b2J\x85", "\\x9b2J\\x85"),
        ("\u202etxt.exe\u2066\u2028", "\\u202etxt.exe\\u2066\\u2028"),
    ],
)
def test_printable_escapes_what_changes_the_screen(text: str, shown: str) -> None:
    assert printable(text) == shown
