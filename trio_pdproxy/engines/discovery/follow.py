"""Bringing the pool to what a source says.

Engines that a source names are added; the pool looks at them (health, side channel, a probe, a first transfer) before
they get requests. Engines that go are drained: no new requests, what they have in hand finishes, then they are
forgotten. An engine that comes back while it drains is taken into use again.

Where a source says of all its engines of a role that they are not ready, those that are in the pool stay: then it is
more likely that whoever judges has lost sight of them (a cluster's control plane cut off from its nodes does), and
the pool's own health checks know better.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import trio

from trio_pdproxy.config import ROLES, EngineSpec, Role
from trio_pdproxy.engines.discovery.source import Found, Source
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.pool import Pool

log = logging.getLogger("trio_pdproxy.discovery")

RETRY = 1.0
"""Seconds until an engine whose place is taken is tried again: its predecessor may still be draining."""

_Member = tuple[Role, EngineSpec]


class Follower:
    """See the module. It changes only engines of its source; `present` are those of them that the pool has already."""

    def __init__(self, pool: Pool, source: Source, *, present: Iterable[Found] = ()) -> None:
        self.source = source
        self._pool = pool
        self._have: dict[str, _Member] = {found.spec.name: (found.role, found.spec) for found in present}
        self._wanted: Mapping[str, _Member] = dict(self._have)
        self._news = trio.Event()
        self._busy: set[str] = set()
        self._refused: dict[str, str] = {}
        self._nursery: trio.Nursery | None = None
        self._told = bool(self._have)

    async def run(self) -> None:
        """Follow the source until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self.source.watch(self._tell)

    def status(self) -> dict[str, object]:
        """For /status."""
        return {
            "source": self.source.name,
            "known": self._told,
            "engines": len(self._wanted),
            "trouble": self.source.trouble,
        }

    def _tell(self, found: Iterable[Found]) -> None:
        assert self._nursery is not None, "told while not running"
        self._told = True
        self._wanted = self._choose(list(found))
        self._news.set()
        self._news = trio.Event()
        for name in self._wanted.keys() | self._have.keys():
            if name not in self._busy and self._wanted.get(name) != self._have.get(name):
                self._busy.add(name)
                self._nursery.start_soon(self._bring, name)

    def _choose(self, found: list[Found]) -> Mapping[str, _Member]:
        chosen: dict[str, _Member] = {}
        for role in ROLES:
            ours = [one for one in found if one.role == role]
            ready = [one for one in ours if one.ready]
            if not ready and ours:
                ready = [one for one in ours if one.spec.name in self._have]
                if ready:
                    log.warning("%s calls no %s engine ready: those in use stay", self.source.name, role)
            chosen |= {one.spec.name: (role, one.spec) for one in ready}
        return chosen

    async def _bring(self, name: str) -> None:
        """Bring the engine of this name to what is wanted of it, which may change meanwhile."""
        try:
            while (wanted := self._wanted.get(name)) != (have := self._have.get(name)):
                if have is not None:
                    await self._take_away(name, have)
                elif wanted is not None and not self._add(name, wanted):
                    with trio.move_on_after(RETRY):
                        await self._news.wait()
        finally:
            self._busy.discard(name)

    def _add(self, name: str, wanted: _Member) -> bool:
        try:
            self._pool.add(*wanted)
        except ValueError as error:
            if self._refused.get(name) != str(error):
                log.warning("%s: engine %s is not added yet: %s", self.source.name, name, error)
            self._refused[name] = str(error)
            return False
        self._refused.pop(name, None)
        self._have[name] = wanted
        return True

    async def _take_away(self, name: str, have: _Member) -> None:
        """Drain it and forget it, or take it into use again when it is wanted as it was after all."""
        try:
            engines = self._pool.drain(name)
        except KeyError:
            log.warning("engine %s had gone already", name)
            del self._have[name]
            return
        while not all(engine.idle.is_set() for engine in engines):
            if self._wanted.get(name) == have:
                self._pool.resume(name)
                return
            await self._until_idle_or_news(engines)
        self._pool.forget(name)
        del self._have[name]

    async def _until_idle_or_news(self, engines: list[Engine]) -> None:
        async def idle() -> None:
            for engine in engines:
                await engine.idle.wait()
            nursery.cancel_scope.cancel("idle")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(idle)
            await self._news.wait()
            nursery.cancel_scope.cancel("news")
