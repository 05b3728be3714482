"""``python -m ddp_slurm.training.scripts SCRIPT|-m MODULE|-c CODE ...``: on uneven shares.

What ``python -m ddp_slurm.run --uneven`` becomes: as Python itself it runs a script, a module or a
text, in a process whose DataLoader and DistributedDataParallel know the shares.
"""

import atexit
import io
import os
import runpy
import sys
import types

from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.process_group.ending import let_gloo_rest
from ddp_slurm.training.scripts.errors import UnevenError
from ddp_slurm.training.scripts.install import install


def run(argv: list[str]) -> None:
    """Run what Python would run with these arguments. Raises what the script raises."""
    first, *rest = argv
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        code, file = rest[0].encode(), "<string>"
    else:
        sys.argv = argv
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        with io.open_code(os.path.abspath(first)) as source:
            code, file = source.read(), first
    # A module that stays: forked and spawned loader workers look for it.
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(code, file, "exec"), main.__dict__)


def main(argv: list[str]) -> int:
    try:
        ddp_modules = install()
        atexit.register(let_gloo_rest)
        run(argv)
        if ddp_modules is not None and not ddp_modules.has_any:
            raise UnevenError(
                "the script made no DistributedDataParallel module, so every rank worked by "
                "itself. Wrap the model in DistributedDataParallel, or choose it where the "
                "framework decides: Trainer(strategy='ddp'), Fabric(strategy='ddp')"
            )
    except DdpSlurmError as error:
        say(f"error: {error}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
