"""The configuration file, watched: engines that appear in it are added, those that go are drained and removed.

A file is validated as a whole before anything of it is applied; one that is wrong changes nothing and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import trio

from trio_pdproxy.config import ROLES, ConfigError, Settings
from trio_pdproxy.config.edits import edited, stamp_of
from trio_pdproxy.engines.discovery.source import Found, Tell

log = logging.getLogger("trio_pdproxy.discovery")


class FileSource:
    """The engines of the YAML file `path`. `load` reads the settings anew, from all their sources.

    Only the engines are changed while serving; another setting that was edited is named in the log and waits for a
    restart. A replaced engine (same name, something else changed) is drained before its successor comes.
    """

    def __init__(self, settings: Settings, path: Path, load: Callable[[], Settings]) -> None:
        self.name = str(path)
        self.trouble: str | None = None
        self._settings = settings
        self._path = path
        self._load = load

    @property
    def current(self) -> list[Found]:
        """The engines as the file had them last."""
        settings = self._settings
        return [
            Found(role, spec) for role in ROLES for spec in (settings.prefill if role == "prefill" else settings.decode)
        ]

    async def watch(self, tell: Tell) -> None:
        seen = await stamp_of(self._path)
        while True:
            seen = await edited(self._path, seen)
            try:
                wanted = await trio.to_thread.run_sync(self._load)
            except ConfigError as error:
                self.trouble = str(error)
                log.error("%s was edited and is not used, the running engines stay: %s", self._path, error)
                continue
            self.trouble = None
            _say_what_waits(self._settings, wanted)
            self._settings = wanted
            tell(self.current)


def _say_what_waits(current: Settings, wanted: Settings) -> None:
    names = [
        name for name in Settings.model_fields if name not in ROLES and getattr(current, name) != getattr(wanted, name)
    ]
    if names:
        log.warning("edited, but only used after a restart: %s", ", ".join(names))
