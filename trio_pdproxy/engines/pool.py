"""The engines of this proxy and who may use them: places, and the queue in front of them.

Requests wait here, not at the engines: a decode leg that queues at its engine beyond the prefill engine's lease
finds its KV gone and hangs there. So each engine takes `max_inflight` at once, and the rest stand in one fair,
bounded queue with a deadline.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from random import getrandbits
from typing import Protocol
from weakref import WeakSet

import trio

from trio_pdproxy.config import EngineSpec, Role, Settings
from trio_pdproxy.core import routing
from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.core.health import RetryBudget
from trio_pdproxy.engines.connections import Dial
from trio_pdproxy.engines.coordinates import SideChannel, ZmqSideChannel
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.hub import Hub
from trio_pdproxy.engines.monitor import watch
from trio_pdproxy.engines.roster import Roster

log = logging.getLogger("trio_pdproxy.pool")

Taken = tuple[Engine, ...]
"""(prefill, decode), or (engine,) where one is enough."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a request asks of the pool."""

    pair: bool = True
    """A prefill and a decode engine; else a decode engine alone."""
    prefix: bytes = b""
    """The prompt's beginning, for prefix_affinity."""
    session: bytes | None = None
    """The client's session header, for session_affinity."""
    avoid: frozenset[str] = frozenset()
    """Names of engines that failed this request already."""


class _Waiter:
    __slots__ = ("event", "number", "refused", "taken", "want")

    def __init__(self, want: Want, number: int) -> None:
        self.want = want
        self.number = number
        self.event = trio.Event()
        self.taken: Taken | None = None
        self.refused = False


_Wish = tuple[bool, frozenset[str]]
"""(pair, avoid): of those who wish for the same, the first is served or none is."""
_ANY_PAIR: _Wish = (True, frozenset())
_ANY_ONE: _Wish = (False, frozenset())


class Front(Protocol):
    """Who streams to a client, as the pool's watchdog sees it."""

    blocked_since: float | None
    """When the write began that the client has not taken yet; None between writes."""

    async def leave(self, why: str) -> None: ...


class Pool:
    """See the module. `run` must be running (in a nursery that waits for it) while it is used."""

    def __init__(
        self,
        settings: Settings,
        *,
        side_channel: SideChannel | None = None,
        ssl_context: ssl.SSLContext | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.settings = settings
        self.roster = Roster(settings, self.changed, ssl_context=ssl_context, dial=dial)
        self.retry_budget = RetryBudget(settings.retry_budget)
        self._policies = (
            routing.POLICIES[settings.prefill_policy],
            routing.POLICIES[settings.decode_policy],
        )
        self._side_channel = side_channel or ZmqSideChannel(settings.health_timeout)
        # The queue: those of one wish in order of arrival, so that one who cannot be served holds up only its like.
        self._queue: dict[_Wish, dict[_Waiter, None]] = {}
        self._arrivals = 0
        self.waiting = 0
        """Requests in the queue."""
        self.hub = Hub()
        """Reads the decode engines' streams."""
        self._backs: WeakSet[trio.CancelScope] = WeakSet()
        self._abandoned = False
        self._fronts: set[Front] = set()
        self._turns = {True: 0, False: 0}  # pairs and single engines take turns each for themselves
        self._nursery: trio.Nursery | None = None
        self._watches: dict[Engine, trio.CancelScope] = {}

    @property
    def prefill(self) -> list[Engine]:
        return self.roster.prefill

    @property
    def decode(self) -> list[Engine]:
        return self.roster.decode

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    # -- life ------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch every engine until cancelled; started once each has been looked at for the first time."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.hub.run)
                async with trio.open_nursery() as first:
                    for engine in self.engines:
                        first.start_soon(self._nursery.start, self._watch, engine)
                task_status.started()
                self._nursery.start_soon(self._watch_fronts)
        finally:
            self._nursery = None
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                for engine in self.engines:
                    await engine.connections.shut()

    async def _watch(  # noqa: ASYNC114, ASYNC128  the status is handed on
        self, engine: Engine, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as scope:
            self._watches[engine] = scope
            try:
                await watch(engine, self._side_channel, self.settings, task_status)
            finally:
                del self._watches[engine]
        if scope.cancelled_caught:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await engine.connections.shut()

    def changed(self) -> None:
        """An engine or a pair has become usable, or is no longer: waiting requests are looked at again."""
        self.roster.refresh()
        for wish, waiters in list(self._queue.items()):
            if not self._may_become_possible(*wish):
                for waiter in list(waiters):
                    waiter.refused = True
                    self._dequeue(waiter)
        self._serve_waiters()

    # -- changing the set ------------------------------------------------------------------------

    def add(self, role: Role, spec: EngineSpec) -> list[Engine]:
        """Add an engine (all its ranks); it is used once it has been looked at and is found fit. Raises `ValueError`
        where its name or its address is taken."""
        assert self._nursery is not None, "the pool is not running"
        engines = self.roster.add(role, spec)
        for engine in engines:
            self._nursery.start_soon(self._watch, engine)
        log.info("%s engine %s is added", role, spec.name)
        return engines

    def drain(self, name: str) -> list[Engine]:
        """Give an engine (all its ranks) no new requests; what it has in hand, debts included, may finish. Raises
        `KeyError`. `engine.idle` is set once it has nothing any more."""
        engines = self.roster.named(name)
        for engine in engines:
            if not engine.draining:
                engine.draining = True
                engine.why = "it is draining"
                log.info("%s engine %s is draining: %d in hand", engine.role, engine.name, engine.inflight)
            self._note_idle(engine)
        self.changed()
        return engines

    def resume(self, name: str) -> None:
        """Take an engine (all its ranks) that was draining into use again. Raises `KeyError`."""
        for engine in self.roster.named(name):
            if engine.draining:
                engine.draining = False
                engine.idle = trio.Event()
                engine.poked.set()
                log.info("%s engine %s is in use again", engine.role, engine.name)
        self.changed()

    async def remove(self, name: str) -> None:
        """Drain an engine, wait until it has nothing in hand, forget it. Raises `KeyError`."""
        for engine in self.drain(name):
            await engine.idle.wait()
        self.forget(name)

    def forget(self, name: str) -> None:
        """Take an engine (all its ranks) that is drained out of the set. Raises `KeyError`."""
        for engine in self.roster.named(name):
            if engine in self._watches:
                self._watches[engine].cancel("removed")
            self.roster.discard(engine)
        log.info("engine %s is removed", name)

    def _note_idle(self, engine: Engine) -> None:
        if engine.draining and engine.inflight == 0:
            engine.idle.set()

    # -- places ----------------------------------------------------------------------------------

    async def take(self, want: Want) -> Taken:
        """A place at a usable pair (or at one decode engine), waiting for it in the queue if need be.

        Who takes gives back: `give_back(engine)` for each, once. Raises `ProxyError` 503 where no engine
        could serve however long one waits, 429 where the queue is full or its deadline has passed. While engines are
        just being asked who they are, that is not known yet, and one waits.
        """
        if self._queue:
            # Who still waits then waits for something else than what is free: no reason to stand behind it.
            self._serve_waiters()
        if taken := self._choose(want):
            return taken
        if not self._may_become_possible(want.pair, want.avoid):
            raise self.unavailable(want.pair)
        if self.waiting >= self.settings.queue_size:
            raise _overloaded("all engines are busy and the queue is full", "queue_full")
        waiter = self._enqueue(want)
        try:
            with trio.move_on_after(self.settings.queue_timeout):
                await waiter.event.wait()
        except BaseException:
            for engine in waiter.taken or ():
                self.give_back(engine)
            raise
        finally:
            self._dequeue(waiter)
        if waiter.taken is not None:
            return waiter.taken
        if waiter.refused or not self.possible(want.pair, want.avoid):
            raise self.unavailable(want.pair)
        raise _overloaded(f"no engine became free within {self.settings.queue_timeout:g} s", "queue_timeout")

    def _enqueue(self, want: Want) -> _Waiter:
        self._arrivals += 1
        waiter = _Waiter(want, self._arrivals)
        self._queue.setdefault((want.pair, want.avoid), {})[waiter] = None
        self.waiting += 1
        return waiter

    def _dequeue(self, waiter: _Waiter) -> None:
        """Take it out of the queue, if it is still there, and wake it."""
        wish = waiter.want.pair, waiter.want.avoid
        waiters = self._queue.get(wish, {})
        if waiter in waiters:
            del waiters[waiter]
            self.waiting -= 1
            if not waiters:
                del self._queue[wish]
            waiter.event.set()

    def _serve_waiters(self) -> None:
        """Give what is free to those who wait, the longest first."""
        stuck: set[_Wish] = set()
        while len(stuck) < len(self._queue):
            heads = [next(iter(waiters)) for wish, waiters in self._queue.items() if wish not in stuck]
            waiter = min(heads, key=_number)
            wish = waiter.want.pair, waiter.want.avoid
            # Nobody can be served where no decode engine has a place, no pair where none has places.
            if _ANY_ONE in stuck or (wish[0] and _ANY_PAIR in stuck) or (taken := self._choose(waiter.want)) is None:
                stuck.add(wish)
            else:
                waiter.taken = taken
                self._dequeue(waiter)

    def claim(self, *engines: Engine) -> None:
        """Take a place at each of these very engines, whatever its cap."""
        for engine in engines:
            engine.inflight += 1

    @contextmanager
    def place(self, engine: Engine) -> Iterator[None]:
        """One more place at `engine`, whatever its cap: for a rescue, which frees more than it takes."""
        self.claim(engine)
        try:
            yield
        finally:
            self.give_back(engine)

    def give_back(self, engine: Engine) -> None:
        engine.inflight -= 1
        assert engine.inflight >= 0, f"a place at {engine.name} was given back twice"
        self._note_idle(engine)
        if self._queue:
            self._serve_waiters()

    def _choose(self, want: Want) -> Taken | None:
        wish = routing.Wish(
            turn=self._turns[want.pair],
            prefix=want.prefix,
            session=want.session,
            draw=getrandbits(64),
        )
        taken: Taken | None
        if want.pair:
            taken = routing.choose_pair(self.roster.pairs, wish, want.avoid, policies=self._policies)
        else:
            one = routing.choose_one(self.roster.receivers, wish, want.avoid, policy=self._policies[1])
            taken = None if one is None else (one,)
        if taken is not None:
            self._turns[want.pair] += 1
            self.claim(*taken)
        return taken

    def possible(self, pair: bool, avoid: Collection[str] = ()) -> bool:
        """Whether someone could serve, now or once a place is free."""
        if pair:
            return routing.any_pair(self.roster.pairs, avoid)
        return routing.any_one(self.roster.receivers, avoid)

    def _may_become_possible(self, pair: bool, avoid: Collection[str] = ()) -> bool:
        return self.possible(pair, avoid) or self.roster.learning(pair, avoid)

    # -- who must not hold engines for ever ------------------------------------------------------

    @contextmanager
    def streaming(self, front: Front) -> Iterator[None]:
        """While `front` relays a stream: a client that stops reading must not hold two engines' places.

        A write that is not taken within `write_timeout` cannot always be cancelled (Hypercorn shields its own), so
        its engines are freed from here, by `front.leave`, while it still stands.
        """
        self._fronts.add(front)
        try:
            yield
        finally:
            self._fronts.discard(front)

    async def _watch_fronts(self) -> None:
        while True:
            await trio.sleep(min(1.0, self.settings.write_timeout / 4))
            overdue = trio.current_time() - self.settings.write_timeout
            for front in list(self._fronts):
                if front.blocked_since is not None and front.blocked_since < overdue:
                    await front.leave("write_timeout")

    def shielded(self, deadline: float = inf) -> trio.CancelScope:
        """For what pays a debt: shielded from whoever leaves, ended by `abandon` or at its deadline."""
        scope = trio.CancelScope(deadline=deadline, shield=True)
        if self._abandoned:
            scope.cancel("the process ends")
        self._backs.add(scope)
        return scope

    def abandon(self) -> None:
        """End what is shielded, and what will be: the process has to go now, and what is owed stays owed."""
        self._abandoned = True
        for scope in self._backs:
            scope.cancel("the process ends")

    # -- what can be said of it ------------------------------------------------------------------

    def missing(self, pair: bool = True) -> list[str]:
        """Why no pair (or, not `pair`, no decode engine) is usable, one sentence each; empty if one is."""
        if self.possible(pair):
            return []
        return self.roster.missing(pair)

    def unavailable(self, pair: bool) -> ProxyError:
        return ProxyError(
            "; ".join(self.missing(pair)) or "no engine left to try",
            status=503,
            fault=Fault.PROXY,
            code="no_usable_engine",
            retry_after=max(1, round(self.settings.health_interval)),
        )


_number = attrgetter("number")


def _overloaded(message: str, code: str) -> ProxyError:
    return ProxyError(message, status=429, fault=Fault.BUSY, code=code, retry_after=1)
