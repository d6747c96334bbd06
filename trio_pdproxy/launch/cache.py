"""The folder for what is expensive to make (engine environment, test model): made once, whole or not at all.

A thing is complete when its stamp file is there, which is written last. What has no stamp is a leftover
of a try that was killed: it is removed and made again. One maker at a time, by a lock the kernel drops
when its holder dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from .errors import SetupError
from .progress import Progress, Step

HOME_VARIABLE = "PDPROXY_ENGINES_HOME"
STAMP = "complete.json"

# Not handed down to another interpreter: they belong to the launcher's own Python. DONTWRITEBYTECODE above
# all: the environment is installed uncompiled, and every start would compile its thousands of modules again.
PYTHON_VARIABLES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONWARNINGS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
    "VIRTUAL_ENV",
    "__PYVENV_LAUNCHER__",
)


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """$PDPROXY_ENGINES_HOME, else trio-pdproxy in the user's cache folder (XDG). Not created here."""
    if chosen := environ.get(HOME_VARIABLE):
        return Path(chosen).expanduser().absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path(environ.get("HOME") or Path.home(), ".cache")
    return base / "trio-pdproxy"


def foreign_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a program of the engine environment: without what is meant for our own Python."""
    return {name: value for name, value in environ.items() if name not in PYTHON_VARIABLES}


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """What was noted when `folder` was completed; None when it is not complete."""
    try:
        noted = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return noted if isinstance(noted, dict) else None


def write_stamp(folder: Path, noted: Mapping[str, Any]) -> None:
    """Declare `folder` complete. Everything in it reaches the disk's order before the stamp does."""
    write_atomically(folder / STAMP, json.dumps(dict(noted), indent=1) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@asynccontextmanager
async def making(folder: Path, progress: Progress) -> AsyncIterator[bool]:
    """Hold the right to make `folder`; yields False when it is complete (maybe made while we waited).

    When True is yielded, nothing is left at `folder`; the block makes it and calls `write_stamp`.
    """
    lock = await trio.to_thread.run_sync(_open_lock, folder)
    try:
        waited = False
        while not _try_lock(lock):
            if not waited:
                progress(Step(f"waiting for another process that makes {folder}"))
                waited = True
            await trio.sleep(0.2)
        missing = read_stamp(folder) is None
        if missing and folder.exists():
            progress(Step(f"removing an unfinished {folder}"))
            await trio.to_thread.run_sync(shutil.rmtree, folder)
        yield missing
    finally:
        os.close(lock)  # drops the lock; the file stays, for removing it would let two in


def _open_lock(folder: Path) -> int:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SetupError(
            f"cannot write to {folder.parent}: {error.strerror}. Set {HOME_VARIABLE} to a folder that can be written."
        ) from error


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
