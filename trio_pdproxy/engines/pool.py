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
from typing import Protocol

import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.core import routing
from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.engines.connections import Dial
from trio_pdproxy.engines.coordinates import SideChannel, ZmqSideChannel
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.monitor import watch

log = logging.getLogger("trio_pdproxy.pool")

Taken = tuple[Engine, ...]
"""(prefill, decode), or (engine,) where one is enough."""


_Wish = tuple[bool, frozenset[str]]
"""(pair, avoid): what a request waits for."""

_ANY_PAIR: _Wish = (True, frozenset())
_ANY_ONE: _Wish = (False, frozenset())


class _Waiter:
    __slots__ = ("avoid", "event", "pair", "refused", "taken", "wish")

    def __init__(self, pair: bool, avoid: Collection[str]) -> None:
        self.pair = pair
        self.avoid = avoid
        self.wish: _Wish = (pair, frozenset(avoid))
        self.event = trio.Event()
        self.taken: Taken | None = None
        self.refused = False


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
        self.prefill = [
            Engine("prefill", spec, settings, ssl_context=ssl_context, dial=dial) for spec in settings.prefill
        ]
        self.decode = [Engine("decode", spec, settings, ssl_context=ssl_context, dial=dial) for spec in settings.decode]
        self._side_channel = side_channel or ZmqSideChannel(settings.health_timeout)
        self._waiters: dict[_Waiter, None] = {}  # in order of arrival
        self._backs: set[trio.CancelScope] = set()
        self._fronts: set[Front] = set()
        self._turns = {True: 0, False: 0}  # pairs and single engines take turns each for themselves

    # -- life ------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch every engine until cancelled; started once each has been looked at for the first time."""
        try:
            async with trio.open_nursery() as nursery:
                async with trio.open_nursery() as first:
                    for engine in self.engines:
                        first.start_soon(nursery.start, watch, engine, self._side_channel, self.settings, self.changed)
                task_status.started()
                nursery.start_soon(self._watch_fronts)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                for engine in self.engines:
                    await engine.connections.shut()

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    def changed(self) -> None:
        """An engine has become usable, or is no longer: waiting requests are looked at again."""
        for waiter in list(self._waiters):
            if not self._possible(waiter.pair, waiter.avoid):
                waiter.refused = True
                waiter.event.set()
                del self._waiters[waiter]
        self._serve_waiters()

    # -- places ----------------------------------------------------------------------------------

    async def take(self, *, pair: bool, avoid: Collection[str] = ()) -> Taken:
        """A place at a usable pair (or at one decode engine), waiting for it in the queue if need be.

        Who takes gives back: `give_back(engine)` for each, once. Raises `ProxyError` 503 where no engine
        could serve however long one waits, 429 where the queue is full or its deadline has passed.
        """
        if self._waiters:
            self._serve_waiters()
        # Who still waits then waits for something else than what is free: no reason to stand behind it.
        if taken := self._choose(pair, avoid):
            return taken
        if not self._possible(pair, avoid):
            raise self.unavailable(pair)
        if len(self._waiters) >= self.settings.queue_size:
            raise _overloaded("all engines are busy and the queue is full", "queue_full")
        waiter = _Waiter(pair, avoid)
        self._waiters[waiter] = None
        try:
            with trio.move_on_after(self.settings.queue_timeout):
                await waiter.event.wait()
        except BaseException:
            for engine in waiter.taken or ():
                self.give_back(engine)
            raise
        finally:
            self._waiters.pop(waiter, None)
        if waiter.taken is not None:
            return waiter.taken
        if waiter.refused:
            raise self.unavailable(pair)
        raise _overloaded(f"no engine became free within {self.settings.queue_timeout:g} s", "queue_timeout")

    @contextmanager
    def place(self, engine: Engine) -> Iterator[None]:
        """One more place at `engine`, whatever its cap: for a rescue, which frees more than it takes."""
        engine.inflight += 1
        try:
            yield
        finally:
            self.give_back(engine)

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

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """For what pays a debt: shielded from whoever leaves, ended by `abandon` alone. Bring deadlines of your own."""
        with trio.CancelScope(shield=True) as scope:
            self._backs.add(scope)
            try:
                yield
            finally:
                self._backs.discard(scope)

    def abandon(self) -> None:
        """End what is shielded: the process has to go now, and what is owed stays owed."""
        for scope in self._backs:
            scope.cancel("the process ends")

    def give_back(self, engine: Engine) -> None:
        engine.inflight -= 1
        assert engine.inflight >= 0, f"a place at {engine.name} was given back twice"
        if self._waiters:
            self._serve_waiters()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiters)

    def _choose(self, pair: bool, avoid: Collection[str]) -> Taken | None:
        taken: Taken | None
        if pair:
            taken = routing.choose_pair(self.prefill, self.decode, self._turns[pair], avoid)
        else:
            one = routing.choose_one(self.decode, self._turns[pair], avoid)
            taken = None if one is None else (one,)
        if taken is not None:
            self._turns[pair] += 1
            for engine in taken:
                engine.inflight += 1
        return taken

    def _possible(self, pair: bool, avoid: Collection[str]) -> bool:
        if pair:
            return routing.any_pair(self.prefill, self.decode, avoid)
        return routing.any_one(self.decode, avoid)

    def _serve_waiters(self) -> None:
        stuck: set[_Wish] = set()  # the same wish behind one that cannot be served
        for waiter in list(self._waiters):
            if waiter.wish in stuck or (waiter.pair and _ANY_PAIR in stuck):
                continue
            waiter.taken = self._choose(waiter.pair, waiter.avoid)
            if waiter.taken is None:
                if waiter.wish == _ANY_ONE:
                    break  # no decode engine has a place: nobody can be served
                stuck.add(waiter.wish)
                continue
            del self._waiters[waiter]
            waiter.event.set()

    # -- what can be said of it ------------------------------------------------------------------

    def missing(self, pair: bool = True) -> list[str]:
        """Why no pair (or, not `pair`, no decode engine) is usable, one sentence each; empty if one is."""
        if self._possible(pair, ()):
            return []
        reasons = []
        for role, engines in (("prefill", self.prefill), ("decode", self.decode)):
            if role == "prefill" and not pair:
                continue
            if not any(e.usable for e in engines):
                each = "; ".join(f"{e.name}: {e.why}" for e in engines)
                reasons.append(f"no usable {role} engine ({each})")
        if not reasons:
            reasons.append(self._incompatible())
        return reasons

    def _incompatible(self) -> str:
        p = next(e for e in self.prefill if e.usable)
        d = next(e for e in self.decode if e.usable)
        return (
            f"prefill engine {p.name} ({p.about.words()}) and decode engine {d.name} ({d.about.words()}) cannot pair: "
            "their NIXL compatibility hashes differ. Start both with the same vLLM version, the same --model text, "
            "the same KV cache dtype, layout and attention backend, and both with NixlPushConnector"
        )

    def unavailable(self, pair: bool) -> ProxyError:
        return ProxyError(
            "; ".join(self.missing(pair)) or "no engine left to try",
            status=503,
            fault=Fault.PROXY,
            code="no_usable_engine",
            retry_after=max(1, round(self.settings.health_interval)),
        )


def _overloaded(message: str, code: str) -> ProxyError:
    return ProxyError(message, status=429, fault=Fault.BUSY, code=code, retry_after=1)
