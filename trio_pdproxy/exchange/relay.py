"""The stream after the commit, in whole events.

Most of a stream is plain: events that nothing has to be done about, and that the client's connection takes at once.
Those are passed on in the hub's task (see there), without waking the exchange's own; where a read brings exactly one
chunk of them, as it does when events are sparse, in the engine's own framing. The exchange wakes for the rest: events
that are shown otherwise or end the stream, a client that does not take what is sent, a stream that breaks or ends.
Where there is no hub, or either connection is no plain socket, it reads every event itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf

import trio

from trio_pdproxy.core.plan import Api
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.engines.wire import BrokenError
from trio_pdproxy.exchange.dispatch import Dispatch
from trio_pdproxy.exchange.legs import DecodeLeg
from trio_pdproxy.exchange.sink import Sink


class Relay:
    """One stream. `run` it once; `last` and `broken` then say how it went.

    deadline -- of the whole request, on trio's clock
    show -- what a block with the API's mark in it looks like to the client
    """

    def __init__(
        self,
        dispatch: Dispatch,
        sink: Sink,
        report: Report,
        api: Api,
        pool: Pool,
        *,
        deadline: float,
        show: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        assert dispatch.decode_leg is not None
        self.last = b""
        """The events handed to the client last; maybe in the frame of a chunk, whose lines are no fields of theirs."""
        self.broken: str | None = None
        """Why the stream has no proper end; None where it has one."""
        self._dispatch = dispatch
        self._leg: DecodeLeg = dispatch.decode_leg
        self._sink = sink
        self._report = report
        self._api = api
        self._hub = pool.hub
        self._settings = pool.settings
        self._deadline = deadline
        self._show = show
        self._scope = trio.CancelScope()
        # Moving a deadline costs more than an event does: it is moved now and then, and by so much more.
        self._slack = pool.settings.idle_timeout / 64
        self._due = -inf
        self._clock = trio.lowlevel.current_clock().current_time
        # What the hub's task leaves to ours.
        self._woken: trio.Event
        self._fd = -1
        self._block = b""
        self._stuck = False
        self._failed: Exception | None = None

    async def run(self) -> None:
        """Until the stream's end, its break, or a deadline. Cancelled where the client leaves."""
        block, self._leg.opening = self._leg.opening, b""
        # The first token, before anything is made ready for the others.
        plain = self._api.mark not in block
        told = plain and self._hand(block, self._sink.write_now)
        with self._scope:
            try:
                if not plain:
                    await self._tell(block)
                elif not told:
                    await self._flush()
                while block:
                    if self._api.end in block and not self._leg.error_seen:
                        self._report.outcome = "ok"  # which stands if the client does not wait for the body's end
                    if block := await self._next():
                        await self._tell(block)
            except BrokenError as error:
                self.broken = str(error)
            self._scope.deadline = inf
        if self._scope.cancelled_caught:
            in_time = trio.current_time() < self._deadline
            self.broken = "the stream stood still for too long" if in_time else "out of time"

    # -- to the client ---------------------------------------------------------------------------

    async def _tell(self, block: bytes) -> None:
        """Hand `block` to the client as it may see it, however long it takes."""
        if self._api.mark in block:
            block = await self._show(block)
        if not self._hand(block, self._sink.write_now):
            await self._flush()

    def _hand(self, block: bytes, write: Callable[[bytes], bool]) -> bool:
        """Hand `block` to the client by `write`. False: it is to be flushed."""
        now = self._clock()
        self.last = block
        self._report.handed(now)
        if not write(block):
            return False
        if now >= self._due:
            self._heard(now)
        return True

    async def _flush(self) -> None:
        """Wait for a client that does not take what it is sent."""
        if self._scope.cancel_called:  # another deadline has passed: not this client's, whom this need not wait for
            await trio.lowlevel.checkpoint_if_cancelled()
        self._dispatch.blocked_since = now = trio.current_time()
        self._scope.deadline = now + self._settings.write_timeout
        await self._sink.flush()
        if self._scope.cancel_called:  # a server may shield its sends: this one has come back too late
            await trio.lowlevel.checkpoint_if_cancelled()
        self._dispatch.blocked_since = None
        self._heard(trio.current_time())

    def _heard(self, now: float) -> None:
        """The engine has said something: it has `idle_timeout` for the next."""
        self._due = now + self._slack
        self._dispatch.decode.heard = now
        self._scope.deadline = min(self._due + self._settings.idle_timeout, self._deadline)

    # -- from the engine -------------------------------------------------------------------------

    async def _next(self) -> bytes:
        """The next events that are not plain, those before them passed on; `b""` at the end. Raises `BrokenError`."""
        if not self._sink.takes_at_once:
            return await self._leg.more()
        while self._hub.running and (fd := self._leg.connection.waiting_for) is not None:
            await self._passed_on(fd)
            if self._failed is not None:
                raise self._failed
            if self._block:
                block, self._block = self._block, b""
                return block
            if not self._stuck:
                break  # an end, a break, or the hub's end: to be found by reading on
            self._stuck = False
            await self._flush()
        return await self._leg.more()

    async def _passed_on(self, fd: int) -> None:
        """Let the hub pass on what is plain, until something is not."""
        self._woken = trio.Event()
        self._fd = fd
        self._hub.add(fd, self)
        try:
            await self._woken.wait()
        finally:
            self._hub.remove(fd)

    def came(self, data: bytes) -> None:
        """For the hub."""
        try:
            if self._leg.passes(data):
                if self._hand(data, self._sink.pass_on):
                    return
                self._stuck = True
            elif not (block := self._leg.more_in(data)):
                if block is not None:
                    return
                # Else an end or a break: found by reading on.
            elif self._api.mark in block or self._api.end in block:
                self._block = block
            elif self._hand(block, self._sink.write_now):
                return
            else:
                self._stuck = True
        except Exception as error:  # a BrokenError, or a fault of ours: raised by whoever waits, not by the hub
            self._failed = error
        self._wake()

    def failed(self, error: OSError) -> None:
        """For the hub."""
        self._leg.connection.lost(error)
        self._wake()

    def _wake(self) -> None:
        self._hub.remove(self._fd)
        self._woken.set()

    def stopped(self) -> None:
        """For the hub."""
        self._woken.set()
