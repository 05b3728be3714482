"""The command line: what is typed, what is printed where, and the exit status."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Command, Stub

SBATCH = 'cat > "$RECORD"; env > "$RECORD.env"; echo "${STUB_SAYS-4711}"; exit "${STUB_STATUS:-0}"'


def test_stdout_is_the_job_id_alone(
    uneven: Path, submit: Command, stub: Stub, tmp_path: Path
) -> None:
    stub("sbatch", SBATCH)
    stale = {
        "SLURM_JOB_ID": "1",
        "SLURM_GRES": "gpu:x:9",
        "SBATCH_ACCOUNT": "old",
        "SLURM_CONF": "/etc/x",
        "HOME": "/h",
    }
    done = submit(
        "--name",
        "run",
        "--output",
        "logs/a b/%x.out",
        "--",
        "python",
        "train.py",
        env={"RECORD": str(tmp_path / "script"), **stale},
    )
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    assert "the log is logs/a b/run.out" in done.stderr
    assert "not used: SBATCH_ACCOUNT; give submit's own options instead\n" in done.stderr
    assert (tmp_path / "logs/a b").is_dir()
    assert '#SBATCH --output="logs/a b/%x.out"' in (tmp_path / "script").read_text()
    env = (tmp_path / "script.env").read_text()
    assert "SLURM_CONF=/etc/x" in env
    assert not any(f"\n{name}=" in env for name in ("SLURM_JOB_ID", "SLURM_GRES", "SBATCH_ACCOUNT"))


def test_sbatch_id_of_several_clusters_and_a_refusal(
    uneven: Path, submit: Command, stub: Stub, tmp_path: Path
) -> None:
    stub("sbatch", SBATCH + "\n")
    record = {"RECORD": str(tmp_path / "script")}
    assert submit("--", "x", env={**record, "STUB_SAYS": "48;north"}).stdout == "48\n"
    stub(
        "sbatch",
        "echo $'sbatch: error: Invalid generic resource (gres) sp\\xe9cification' >&2; exit 1",
    )
    done = submit("--", "x", env=record)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: sbatch refused the job: sbatch: error: Invalid generic resource" in done.stderr


def test_dry_run_prints_the_script_and_nothing_else(uneven: Path, submit: Command) -> None:
    done = submit("--backend", "sbatch", "--dry-run", "--output", "new/x.out", "--", "train.py")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "_ddp_command=(python3 train.py)" in done.stdout
    assert not Path(uneven.parent, "new").exists()
    again = submit("--backend", "sbatch", "--dry-run", "--output", "new/x.out", "--", "train.py")
    assert again.stdout == done.stdout


def test_script_is_written_whole_and_executable(
    uneven: Path, submit: Command, hostile_folder: Path
) -> None:
    path = hostile_folder / "test.sh"
    done = submit("--script", str(path), "--", "python", "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert os.access(path, os.X_OK)
    assert [p.name for p in hostile_folder.iterdir()] == ["test.sh"]
    assert path.stat().st_mode & 0o777 == 0o755
    assert f"start it with: {shlex.join(['sbatch', str(path)])}\n" in done.stderr
    link = hostile_folder / "link"
    link.symlink_to("test.sh")
    assert submit("--script", str(link), "--env", "A=secret", "--", "other").returncode == 0
    assert path.stat().st_mode & 0o777 == 0o700
    assert link.is_symlink()
    assert "command=(other)" in path.read_text()
    done = submit("--script", str(hostile_folder / "no" / "test.sh"), "--", "x")
    assert done.returncode == 2
    assert "cannot be written: No such file or directory" in done.stderr


def test_script_is_started_without_sbatchs_variables(
    uneven: Path, submit: Command, tmp_path: Path, stub: Stub
) -> None:
    stub("sbatch", 'test -z "${SBATCH_MEM_PER_NODE+x}${SBATCH_PARTITION+x}" && echo "$@"')
    environ = {"SBATCH_PARTITION": "old", "SBATCH_MEM_PER_NODE": "100M"}
    done = submit("--script", "a b.sh", "--", "x", env=environ)
    line = done.stderr.partition("start it with: ")[2].strip()
    assert line == "env -u SBATCH_MEM_PER_NODE -u SBATCH_PARTITION sbatch 'a b.sh'"
    started = subprocess.run(
        ["bash", "-c", line], env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert started.stdout == "a b.sh\n"


def test_script_never_overwrites_a_users_file(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("train.py", "--script train.py: already exists and was not made by ddp-slurm"),
        ("pipe", "pipe: cannot be written: it is not a regular file"),
        ("-", "--script - is not a file; --dry-run prints the script"),
        ("/dev/stdout", "--script /dev/stdout is not a file"),
    ):
        done = submit("--script", name, "--", "train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    assert (tmp_path / "train.py").read_text() == "import torch\n"
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "empty").touch()
    assert submit("--script", "empty", "--", "train.py").returncode == 0


def test_script_with_dry_run_is_printed_and_not_followed(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    done = submit("--script", "s.sh", "--dry-run", "--output", "new/x.out", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert not {"s.sh", "new"} & {path.name for path in tmp_path.iterdir()}
    done = submit("--script", "s.sh", "--follow", "--", "train.py")
    assert done.returncode == 2
    assert "--script submits nothing; it cannot be combined with --follow" in done.stderr


def test_command_line_wins_over_the_job_file(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "time: 10:00\ncpus-per-task: 3\nenv: {A: 1, B: 2}\n"
        "setup: |\n  module load a\ncommand: >\n  python\n  'my train.py'\n"
    )
    done = submit(
        "--job",
        "job.yaml",
        "--backend",
        "sbatch",
        "--dry-run",
        "--time",
        "2-00",
        "--env",
        "B=3",
        "--setup",
        "b",
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "#SBATCH --time=2-00",
        "#SBATCH --cpus-per-task=3",
        "export A=1",
        "export B=3",
        "module load a\nb\n",
        "_ddp_command=(python 'my train.py')",
    ):
        assert line in done.stdout


def test_log_path_expands_home_and_variables(uneven: Path, submit: Command) -> None:
    done = submit(
        "--backend",
        "sbatch",
        "--dry-run",
        "--output",
        "~/$WHO/%x-%j.out",
        "--",
        "x",
        env={"HOME": "/h", "WHO": "me"},
    )
    assert "#SBATCH --output=/h/me/%x-%j.out\n" in done.stdout


def test_log_folder_with_the_jobs_name_is_made(
    uneven: Path, submit: Command, stub: Stub, tmp_path: Path
) -> None:
    stub("sbatch", SBATCH)
    done = submit(
        "--name",
        "5%j",
        "--output",
        "logs/%x/%j.out",
        "--",
        "x",
        env={"RECORD": str(tmp_path / "script")},
    )
    assert (tmp_path / "logs/5%j/ddp_slurm_runs/4711").is_dir(), done.stderr
    assert "#SBATCH --output=logs/5%%j/%j.out\n" in (tmp_path / "script").read_text()
    assert "the log is logs/5%j/4711.out\n" in done.stderr


def test_log_path_escapes_a_percent_of_the_folder(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    """Slurm would write the log to another folder, which is not there (seen on 22.05)."""
    folder = tmp_path / "100%j"
    folder.mkdir()
    done = submit(
        "--backend", "sbatch", "--dry-run", "--cluster", str(uneven), "--", "x", cwd=folder
    )
    assert f"#SBATCH --output={tmp_path}/100%%j/%x-%j.out\n" in done.stdout
    assert f"_ddp_runs_folder={folder}/ddp_slurm_runs\n" in done.stdout


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("-- train.py --time 3 -- x", "python3 train.py --time 3 -- x"),
        ("train.py --time 3 --env A=1", "python3 train.py --time 3 --env A=1"),
        ("-- python -m train", "python -m train"),
    ],
)
def test_command_keeps_words_that_look_like_options(
    uneven: Path, submit: Command, typed: str, command: str
) -> None:
    done = submit("--backend", "sbatch", "--dry-run", *typed.split())
    assert f"\n_ddp_command=({command})\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--python", "~/p"], "_ddp_command=(/h/p train.py)"),
        (["--python", "~nobody-here/p"], "_ddp_command=('~nobody-here/p' train.py)"),
        (["--venv", "~/v"], "export VIRTUAL_ENV=/h/v"),
        (["--conda-env", "~/c"], "conda activate /h/c"),
        (["--conda-env", "~"], "conda activate '~'"),
    ],
)
def test_interpreter_path_expands_home(
    uneven: Path, submit: Command, options: list[str], line: str
) -> None:
    done = submit(
        "--backend", "sbatch", "--dry-run", *options, "--", "python", "train.py", env={"HOME": "/h"}
    )
    assert f"{line}\n" in done.stdout, done.stderr


def test_time_of_0_is_no_limit(uneven: Path, submit: Command) -> None:
    done = submit(
        "--backend", "sbatch", "--dry-run", "--time", "0", "--signal-seconds", "60", "--", "x"
    )
    assert "#SBATCH --time=0\n" in done.stdout, done.stderr


def test_command_that_begins_with_an_option_is_refused(uneven: Path, submit: Command) -> None:
    done = submit("--backend", "sbatch", "--dry-run", "--", "-m", "train")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "the command begins with '-m', which srun would take for an option of its own"
        in done.stderr
    )


def test_python_option_replaces_the_interpreter(uneven: Path, submit: Command) -> None:
    done = submit(
        "--backend", "sbatch", "--dry-run", "--python", "/opt/my python", "--", "python", "-m", "x"
    )
    assert "_ddp_command=('/opt/my python' -m x)" in done.stdout


BAD = {
    "time": (["--time", "12h"], "--time: '12h' is not a time limit in Slurm's format"),
    "time of too many digits": (
        ["--time", "9" * 5000, "--signal-seconds", "60"],
        "is not a time limit in Slurm's format",
    ),
    "memory": (["--memory", "2.5G"], "--memory: '2.5G' is not a memory size"),
    "memory in Gi": (["--memory", "64Gi"], "--memory: '64Gi' is not a memory size"),
    "memory for each CPU": (["--memory", "4/cpu"], "--memory: '4' is not a memory size"),
    "memory for each CPU, as sbatch has it": (
        ["--sbatch", "mem-per-cpu=4G"],
        "'mem-per-cpu' cannot be set here: use --memory SIZE/cpu, such as 4G/cpu",
    ),
    "newline in a name": (["--name", "a\nb"], "--name: 'a\\nb' has a newline"),
    "command in a name": (["--name", "$(id)"], "--name: '$(id)' has a command substitution"),
    "slash in a name": (["--name", "a/b"], "--name: 'a/b' is not a job name"),
    "nothing as a path": (
        ["--output", " "],
        "--output: ' ' is blank; give a value, or leave the key out",
    ),
    "nothing as an interpreter": (["--python="], "--python: '' is blank"),
    "command in a path": (["--output", "`id`"], "--output: '`id`' has a command substitution"),
    "command in an env value": (
        ["--env", "A=$(id)"],
        "--env.A: '$(id)' has a command substitution",
    ),
    "newline in an env value": (["--env", "A=x\ny"], "has a newline"),
    "env of a rank": (["--env", "CUDA_VISIBLE_DEVICES=0"], "--env.CUDA_VISIBLE_DEVICES"),
    "env of bash": (["--env", "UID=0"], "--env.UID: 'UID' is set by bash and cannot be changed"),
    "env that adds": (
        ["--env", "PATH=/opt/bin:$PATH"],
        "--env.PATH: '/opt/bin:$PATH' is not expanded; "
        "to extend a variable: --setup 'export PATH=/opt/bin:$PATH'",
    ),
    "env that adds in braces": (["--env", "A=${A:+$A:}x"], "is not expanded"),
    "env without =": (["--env", "A"], "--env: 'A' is not NAME=VALUE"),
    "unset variable": (["--output", "$NOT_THERE/x"], "the variable $NOT_THERE is not set"),
    "array": (
        ["--sbatch", "array=1-3"],
        "'array' cannot be set here: Slurm refuses arrays of heterogeneous jobs",
    ),
    "pattern in a folder": (
        ["--output", "l/%x/%j/x.out"],
        "'l/%x/%j/x.out': Slurm makes no folder, and in a folder's name only %x and %u",
    ),
    "slash at the end": (
        ["--output", "logs/"],
        "--output: 'logs/' is a folder; name a file, as in 'logs/%x-%j.out'",
    ),
    "folder as a log": (["--output", "."], "--output: '.' is a folder"),
    "order of the ranks": (
        ["--sbatch", "distribution=cyclic"],
        "'distribution' cannot be set here: the shares are",
    ),
    "own key": (["--sbatch", "gres=gpu:1"], "'gres' cannot be set here"),
    "sbatch form": (["--sbatch", "a b"], "'a b' is not KEY=VALUE"),
    "gpus": (["--gpus", "0"], "--gpus: 0 is too few"),
    "nodes": (["--nodes", "gamma,delta"], "--nodes: 'delta' is not a node"),
    "two environments": (
        ["--python", "p", "--venv", "v"],
        "--python and --venv cannot be combined: each names the interpreter",
    ),
    "balance misspelt": (
        ["--balance", "eqal"],
        "--balance: the file 'eqal' does not exist; did you mean 'equal'?",
    ),
    "speeds in nobody's home": (
        ["--balance", "~nobody-here/x", "--global-batch-size", "8"],
        "~nobody-here/x: no such file",
    ),
    "setup with an open quote": (
        ["--setup", 'cd "foo'],
        "--setup: bash cannot parse these lines: line 1: unexpected EOF",
    ),
    "setup with a backslash": (
        ["--setup", "a b \\"],
        "ends in a backslash, which would join it with the next line",
    ),
    "signal before the start": (
        ["--signal-seconds", "120", "--time", "2:00"],
        "--signal-seconds 120: the signal would come before the job begins; "
        "--time 2:00 is 120 seconds",
    ),
    "signal without a time": (["--signal-seconds", "60"], "--signal-seconds needs --time"),
    "no such option": (["--mem", "3G"], "no such option: --mem; did you mean '--memory'?"),
    "an option without its value": (["--time"], "argument --time: expected one argument"),
    "no such backend": (["--backend", "slurm"], "argument --backend: invalid choice: 'slurm'"),
    "no such job file": (["--job", "no.yaml"], "no.yaml: no such file"),
    "no such cluster file": (["--cluster", "no.yaml"], "no.yaml: no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_message_and_status_2(case: str, uneven: Path, submit: Command) -> None:
    args, words = BAD[case]
    done = submit("--backend", "sbatch", "--dry-run", *args, "--", "python", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_of_all_sources_are_one_report(
    uneven: Path, submit: Command, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("nodes:\n  - {name: a, gpus: 1, cpsu: 3}\n")
    (tmp_path / "job.yaml").write_text("tiem: 10\nmemory: 3\nbalance: speeds.yaml\n")
    (tmp_path / "speeds.yaml").write_text("titan: {beta: 1}\nv100: {beta: -1}\n")
    typed = "--cluster bad.yaml --job job.yaml --time 12h --mem=3G --python p --venv v"
    done = submit(*typed.split(), "--output", "$NOT_SET/x", "--setup", 'cd "foo')
    assert (done.returncode, done.stdout) == (2, "")
    for words in (
        "no such option: --mem; did you mean '--memory'?",
        "job.yaml:1: tiem: unknown key; did you mean 'time'?",
        "job.yaml:2: memory",
        "job.yaml:3: balance: speeds.yaml:2: v100.beta: '-1'",
        "--time: '12h'",
        "--python and --venv cannot be combined",
        "bad.yaml:2: nodes[0].cpsu",
        "--output: '$NOT_SET/x': the variable $NOT_SET is not set here",
        "no command: put what every rank runs after --",
        "--setup: bash cannot parse these lines",
    ):
        assert words in done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("error: ")] == [
        "no sbatch on PATH: the ranks run on this machine (--backend local)"
    ]


def test_errors_of_the_plan_come_with_the_others(uneven: Path, submit: Command) -> None:
    done = submit("--dry-run", "--backend", "sbatch", "--nodes", "alhpa", "--time", "12h")
    assert done.returncode == 2
    for words in ("'alhpa' is not a node of cluster 'lab'", "--time: '12h'", "no command"):
        assert words in done.stderr


def test_rules_over_unreadable_options_are_not_checked(uneven: Path, submit: Command) -> None:
    done = submit("--time", "12h", "--signal-seconds", "60", "--balance", "no.yaml", "--", "x")
    assert done.returncode == 2
    assert "--time: '12h'" in done.stderr
    assert "--balance: no.yaml: no such file" in done.stderr
    assert "needs" not in done.stderr


def test_speeds_need_a_global_batch(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "speeds.yaml").write_text("titan: {beta: 1}\n")
    done = submit("--balance", "speeds.yaml", "--", "x")
    assert done.returncode == 2
    assert "--balance speeds.yaml needs --global-batch-size" in done.stderr


def test_submit_without_a_command_or_slurm(uneven: Path, submit: Command) -> None:
    done = submit("--backend", "sbatch", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no command: put what every rank runs after --" in done.stderr
    done = submit("--backend", "sbatch", "--", "true")
    assert done.returncode == 2
    assert "no sbatch on PATH" in done.stderr
    done = submit("--gpus", "1", "--", "true")
    assert done.returncode == 0
    assert "no sbatch on PATH: the ranks run on this machine" in done.stderr


def test_dry_run_loads_neither_torch_nor_what_keeps_runs(uneven: Path) -> None:
    code = (
        "import sys\nfrom ddp_slurm import submit\n"
        "sys.argv = ['submit', '--backend', 'sbatch', '--dry-run', '--', 'x']\n"
        "try:\n    submit.main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=uneven.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    unwanted = {"torch", "numpy", "submitit", "rich", "asyncio", "ddp_slurm.runs"}
    assert not unwanted & set(done.stderr.split())


def test_help_names_every_key_of_a_job(submit: Command) -> None:
    from ddp_slurm.job.options import JobOptions
    from ddp_slurm.schema.schema import keys_of

    text = submit("--help", env={"COLUMNS": "200"}).stdout
    for name in keys_of(JobOptions):
        assert name == "command" or f"--{name.replace('_', '-')} " in text
