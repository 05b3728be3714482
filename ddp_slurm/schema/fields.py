"""The kinds of value in cluster.yaml, job.yaml and on the command line, checked as they are read.

Every value ends in a shell script, an #SBATCH line, slurm.conf or an ssh command. So each kind
defines what it accepts, and refuses everything else with the value and an example.
"""

import re
from typing import Any

from ddp_slurm.errors import quoted
from ddp_slurm.schema.schema import Error, Invalid, Reader, mapping_of, short

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")


def _matching(pattern: str, wanted: str) -> Reader[str]:
    compiled = re.compile(pattern)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected {wanted}, got {short(value)}")
        if not compiled.fullmatch(value):
            raise ValueError(f"{quoted(value)} is not {wanted}")
        return value

    return check


def one_of(*words: str) -> Reader[str]:
    """Reader of one of a few words."""

    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"expected {' or '.join(words)}, got {short(value)}")
        return str(value)

    return check


def one_line(value: Any) -> str:
    """Text without control characters: a newline would begin another directive or command."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {short(value)}")
    if CONTROL_CHARACTERS.search(value):
        raise ValueError(
            f"{quoted(value)} has a newline or another control character in it; it must be one line"
        )
    return value


def plain_text(value: Any) -> str:
    """One line without command substitution: it would be kept, or run on another machine."""
    text = one_line(value)
    if "$(" in text or "`" in text:
        raise ValueError(
            f"{quoted(text)} has a command substitution in it, which would not be run here; "
            "write its result, or use setup"
        )
    return text


def filled_text(value: Any) -> str:
    """Plain text that is not blank: the name of a file or of an environment."""
    text = plain_text(value)
    if not text.strip():
        raise ValueError(f"{text!r} is blank; give a value, or leave the key out")
    return text


SET_BY_BASH = re.compile(
    "_|BASHOPTS|BASHPID|BASH_(ARGC|ARGV|COMMAND|LINENO|REMATCH|SOURCE|SUBSHELL|VERSINFO)|DIRSTACK"
    "|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTARG|OPTIND|PIPESTATUS|PPID"
    "|RANDOM|REPLY|SECONDS|SHELLOPTS|SRANDOM|UID"
)
CHANGES_BASH = re.compile("GLOBIGNORE|IFS|POSIXLY_CORRECT|TMOUT")
SET_BY_SLURM = re.compile(
    "SLURM_(JOB_?ID|JOB_(NODELIST|NUM_NODES|CPUS_PER_NODE).*|RESTART_COUNT|HET_.*|STEP.*|PROCID"
    "|LOCALID|NODEID|GTIDS|NTASKS.*|NPROCS|TASKS_PER_NODE.*|CPUS_PER_TASK|TRES_PER_TASK|NNODES"
    "|NODELIST|MEM_PER_NODE|EXPORT_ENV)|SLURMD_NODENAME"
)
"""What the job script and the ranks read of Slurm; other SLURM_* names are options of srun."""


def env_name(value: Any) -> str:
    """The name of a variable that the launcher, the job script and bash do not use themselves."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            f"{short(value)} is not a variable's name; letters, digits and _ are accepted"
        )
    if value in ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        raise ValueError(f"{value!r} differs from rank to rank; the launcher sets it")
    if SET_BY_BASH.fullmatch(value):
        raise ValueError(f"{value!r} is set by bash and cannot be changed")
    if CHANGES_BASH.fullmatch(value):
        raise ValueError(f"{value!r} changes how bash reads the job script")
    if value.startswith("_ddp_"):
        raise ValueError(f"{value!r} is a name of the job script, all of which begin with '_ddp_'")
    if value.startswith("DDP_SLURM_"):
        raise ValueError(f"{value!r} is set from the plan; use the options of submit")
    if SET_BY_SLURM.fullmatch(value):
        raise ValueError(f"{value!r} is set by Slurm, and the ranks find their places by it")
    return value


_read_env = mapping_of(env_name, plain_text)


def env(value: Any) -> dict[str, str]:
    """Variables for the ranks. Their values are not expanded, so none can extend its old one."""
    variables = _read_env(value)
    errors: list[Error] = []
    for name, text in variables.items():
        if re.search(rf"\$(\{{{name}\b|{name}\b)", text):
            message = (
                f"{quoted(text)} is not expanded; to extend a variable: "
                f"--setup 'export {name}={text}'"
            )
            errors.append(((name,), message))
    if errors:
        raise Invalid(errors)
    return variables


def whole_number(value: Any) -> int:
    """An int >= 0 in plain digits; ``int()`` also accepts 1_0, +4 and other alphabets' digits."""
    if _is_int(value) and value >= 0:
        return int(value)
    if not (isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value)):
        raise ValueError(f"{short(value)} is not a whole number, such as 4")
    return int(value)


def flag(value: Any) -> bool:
    """``true`` or ``false``."""
    if value in (True, "true"):
        return True
    if value in (False, "false"):
        return False
    raise ValueError(f"{short(value)} is neither true nor false")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def positive_number(value: Any) -> int:
    number = whole_number(value)
    if number == 0:
        raise ValueError("0 is too few; it must be 1 or more")
    return number


def port(value: Any) -> int:
    number = positive_number(value)
    if number > 65535:
        raise ValueError(f"{number} is not a port; the highest is 65535")
    return number


MAX_GPUS_OF_A_NODE = 1024
"""More are a typing error, or a plan that takes minutes."""


def gpu_count(value: Any) -> int:
    number = positive_number(value)
    if number > MAX_GPUS_OF_A_NODE:
        raise ValueError(
            f"{number} GPUs are more than a machine has; {MAX_GPUS_OF_A_NODE} at most are accepted"
        )
    return number


def seconds(value: Any) -> float:
    """A time >= 0, such as 0.004 or 4e-3."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]*\.?[0-9]+([eE]-?[0-9]{1,2})?", value):
        return float(value)
    raise ValueError(f"{short(value)} is not a number of seconds >= 0, such as 0.004")


MEMORY_FORM = "a whole number with K, M, G or T, such as 64G"
_KIB = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}


def memory_mb(value: Any) -> int:
    """Slurm's memory sizes in MiB. A unit is required: few people expect a number to be MiB."""
    if _is_int(value) and value > 0:
        return int(value)
    pattern = r"([0-9]{1,12})([KMGT])"
    match = re.fullmatch(pattern, value, re.IGNORECASE) if isinstance(value, str) else None
    megabytes = int(match[1]) * _KIB[match[2].upper()] // 1024 if match else 0
    if megabytes >= 1:
        return megabytes
    is_bare_number = str(value).isdecimal() and value != "0"
    hint = f"; write {MEMORY_FORM}"
    if is_bare_number:
        hint = f": Slurm reads it as MiB; write {value}M or {value}G"
    raise ValueError(f"{short(value)} is not a memory size{hint}")


def memory_text(megabytes: int) -> str:
    """The shortest exact form of a size in MiB that Slurm reads: ``30G``, ``1500M``."""
    return f"{megabytes // 1024}G" if megabytes % 1024 == 0 else f"{megabytes}M"


word = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*",
    "a plain word; letters, digits and _ . - + @ are accepted",
)
"""A partition, account, QOS or cluster name."""

partitions = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*",
    "a partition, or several with commas between them",
)
gpu_type = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
    "a gres type; letters, digits and _ . - are accepted, as in a100 or rtx_3090",
)
host_name = _matching(
    r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?",
    "a host name; letters, digits, - and . are accepted, as in gpu[01-04]",
)
address = _matching(
    r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?",
    "a host name or an IPv4 or IPv6 address",
)
interface_name = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.@:-]{0,14}",
    "a network interface's name, such as eno1",
)
feature = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.:=+@/%~-]*",
    "a feature of a node; letters, digits and _ . : = + @ / % ~ - are accepted",
)
constraint = _matching(
    r"[A-Za-z0-9_.:=+@/%~;#&|,!*(){}\[\]-]+",
    "a constraint in Slurm's syntax, such as volta&nvlink or GPU_MEM:80GB",
)
"""An expression of features. Slurm accepts more characters in a feature than ``feature`` does, and
slurm.conf would read ``#`` as a comment."""
user_name = _matching(r"[A-Za-z_][A-Za-z0-9_.-]*", "a user's name")
time_limit = _matching(
    r"[0-9]{1,9}(:[0-9]{1,6}){0,2}|[0-9]{1,9}-[0-9]{1,6}(:[0-9]{1,6}){0,2}|UNLIMITED|INFINITE",
    "a time limit in Slurm's format: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, "
    "such as 12:00:00 for twelve hours",
)


def limit_seconds(time_limit: str) -> int | None:
    """A checked time limit in seconds, None for one without an end.

    >>> [limit_seconds(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-00:30")]
    [5400, 90, 7200, 129600, 88200]
    >>> [limit_seconds(text) for text in ("UNLIMITED", "0", "0:240:0")]
    [None, None, 14400]
    """
    if not time_limit[0].isdecimal():
        return None
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    begins_with_hours = dash or len(parts) == 3
    units = (3600, 60, 1) if begins_with_hours else (60, 1)
    seconds_of_day = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * 86400 + seconds_of_day or None
