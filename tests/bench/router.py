"""vllm-router from PyPI, in an environment of its own: its pins are not ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENT = "vllm-router==0.1.17"


def cache() -> Path:
    """Where it is kept between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "trio-pdproxy" / "bench" / REQUIREMENT.replace("==", "-")


def find(*, install: bool) -> Path | str:
    """The command's path, or why there is none."""
    command = cache() / "bin" / "vllm-router"
    if command.exists():
        return command
    if not install:
        return f"{REQUIREMENT} is not installed (`python -m tests.bench` without --no-install does it)"
    venv.create(cache(), with_pip=True, clear=True)
    done = subprocess.run(
        [cache() / "bin" / "python", "-m", "pip", "install", "--quiet", REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode or not command.exists():
        shutil.rmtree(cache(), ignore_errors=True)
        why = done.stderr.strip().splitlines()
        return f"pip cannot install {REQUIREMENT} for {sys.platform}: {why[-1] if why else done.returncode}"
    return command
