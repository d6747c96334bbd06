"""The model the test engines serve: made on this machine by `make_model.py`, nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from . import diagnose
from .cache import cache_home, foreign_environ, making, read_stamp, write_stamp
from .environment import EngineEnvironment
from .errors import SetupError
from .group import open_group
from .progress import Progress, Step, silent

SCRIPT = Path(__file__).with_name("make_model.py")


def model_folder() -> Path:
    """Where the model of this script is, or will be. Both engines must get the very same string: the
    model's path is part of NIXL's compatibility check.
    """
    digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    return cache_home() / f"model-{digest[:12]}"


async def ensure_model(environment: EngineEnvironment, *, progress: Progress = silent) -> Path:
    """The model's folder, made if need be (ten seconds or so). Raises SetupError with the script's words."""
    folder = model_folder()
    if read_stamp(folder) is not None:
        return folder
    async with making(folder, progress) as missing:
        if missing:
            progress(Step("making the test model"))
            await _make(folder, environment)
            write_stamp(folder, {"script": SCRIPT.name})
    return folder


async def _make(folder: Path, environment: EngineEnvironment) -> None:
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    env = foreign_environ(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    async with open_group([str(environment.python), str(SCRIPT), str(folder)], env=env, log_path=log) as group:
        await group.wait_exit()
        returncode = await group.finish()
    if returncode != 0:
        lines = "".join(f"\n  | {line}" for line in diagnose.tail(log))
        raise SetupError(f"making the test model failed ({diagnose.describe_exit(returncode)}), log {log}{lines}")
