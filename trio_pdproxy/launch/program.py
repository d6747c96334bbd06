"""Is a command's program there? Looked for as exec would, before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from .errors import MissingProgramError


def require_program(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise `MissingProgramError` if `argv[0]` cannot be executed with the PATH of `env`."""
    program = argv[0]
    if shutil.which(program, path=env.get("PATH", os.defpath)) is not None:
        return
    if os.sep in program:
        why = "is there but cannot be executed" if os.path.exists(program) else "does not exist"
        raise MissingProgramError(f"the program {program} {why}")
    advice = "activate the environment it is installed in, or name its path in the script (vllm: /path/to/vllm serve)"
    raise MissingProgramError(f"there is no program {program} in PATH: {advice}")
