"""Noticing that a file was edited."""

from __future__ import annotations

from pathlib import Path

import trio

INTERVAL = 1.0
"""Seconds between two looks at a file."""

Stamp = tuple[int, int, int] | None


async def stamp_of(path: Path) -> Stamp:
    """What changes with every edit, also one that replaces the file (editors and Kubernetes do). None where there is no
    such file: between two renames, say."""
    try:
        stat = await trio.Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def edited(path: Path, seen: Stamp) -> Stamp:
    """Wait until `path` is no longer as it was `seen`, or has gone: how it is now."""
    while True:
        await trio.sleep(INTERVAL)
        stamp = await stamp_of(path)
        if stamp != seen:
            return stamp
