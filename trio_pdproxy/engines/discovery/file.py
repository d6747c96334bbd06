"""The configuration file, watched: engines that appear in it are added, those that go are drained and removed.

A file is validated as a whole before anything of it is applied; one that is wrong changes nothing and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from trio_pdproxy.config import ROLES, ConfigError, EngineSpec, Role, Settings
from trio_pdproxy.engines.pool import Pool

log = logging.getLogger("trio_pdproxy.discovery")

INTERVAL = 1.0
"""Seconds between two looks at the file."""

Stamp = tuple[int, int, int] | None


async def watch_file(pool: Pool, path: Path, load: Callable[[], Settings]) -> None:
    """Apply every edit of `path` to `pool` until cancelled. `load` reads the settings anew, from all their sources.

    Only the engines are changed while serving; another setting that was edited is named in the log and waits for a
    restart. A replaced engine (same name, something else changed) is drained before its successor comes.
    """
    current = pool.settings
    seen = await _stamp(path)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(INTERVAL)
            stamp = await _stamp(path)
            if stamp == seen:
                continue
            seen = stamp
            try:
                wanted = await trio.to_thread.run_sync(load)
            except ConfigError as error:
                log.error("%s was edited and is not used, the running engines stay: %s", path, error)
                continue
            _say_what_waits(current, wanted)
            for role in ROLES:
                _apply(pool, nursery, role, _specs(current, role), _specs(wanted, role))
            current = wanted


async def _stamp(path: Path) -> Stamp:
    """What changes with every edit, also one that replaces the file (editors and Kubernetes do)."""
    try:
        stat = await trio.Path(path).stat()
    except OSError:
        return None  # between two renames; a file that stays away is no edit
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _specs(settings: Settings, role: Role) -> Mapping[str, EngineSpec]:
    return {spec.name: spec for spec in (settings.prefill if role == "prefill" else settings.decode)}


def _apply(
    pool: Pool,
    nursery: trio.Nursery,
    role: Role,
    before: Mapping[str, EngineSpec],
    after: Mapping[str, EngineSpec],
) -> None:
    for name in before.keys() - after.keys():
        nursery.start_soon(_replace, pool, role, name, None)
    for name in after.keys() - before.keys():
        nursery.start_soon(_replace, pool, role, None, after[name])
    for name in after.keys() & before.keys():
        if after[name] != before[name]:
            nursery.start_soon(_replace, pool, role, name, after[name])


async def _replace(pool: Pool, role: Role, old: str | None, new: EngineSpec | None) -> None:
    try:
        if old is not None:
            await pool.remove(old)
        if new is not None:
            pool.add(role, new)
    except KeyError:
        log.warning("engine %s had gone already", old)
    except ValueError as error:
        log.error("engine %s is not added: %s", new.name if new else old, error)


def _say_what_waits(current: Settings, wanted: Settings) -> None:
    names = [
        name for name in Settings.model_fields if name not in ROLES and getattr(current, name) != getattr(wanted, name)
    ]
    if names:
        log.warning("edited, but only used after a restart: %s", ", ".join(names))
