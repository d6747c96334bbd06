"""One pair tried for a request: both legs, what has become of them, and the debt between them.

A dispatch has two hands. The *front* is the task that writes the client's response: it puts both legs on the wire,
waits for what the decode engine says first, relays it, and is gone when the client is. The *back* carries the
prefill leg to its end; it is shielded from the front's cancellation and bounded by deadlines of its own, because
an abandoned prefill leg leaves the decode engine's KV blocks held for good. Both change the facts and ask
`verdict.decide`; neither decides by itself.

    front:  connections -> prefill's first send -> decode's send -> wait -> (relay) -> leave
    back:                          the rest of it -> answer -> [rescue] -> end

The decode engine's place is returned when both hands have ended: a debt keeps it.
"""

from __future__ import annotations

import logging
from math import inf

import msgspec
import trio

from trio_pdproxy.config import RESCUE_MARGIN
from trio_pdproxy.core.plan import NOTHING_SAID, Plan, read_prefill_answer, transfer_params_in
from trio_pdproxy.core.report import DispatchReport, LegReport
from trio_pdproxy.core.verdict import Debt, Decode, Facts, Prefill, Step, Verdict, decide
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.engines.wire import BrokenError, Connection, RefusedError, request_bytes
from trio_pdproxy.exchange.legs import Answer, Body, DecodeLeg, judge_prefill
from trio_pdproxy.exchange.sending import send_at_once, send_first, send_or_hear

log = logging.getLogger("trio_pdproxy.debt")

TIE = 0.01
"""Seconds the other leg is given when one has failed: what happens at the same instant is judged together."""

REFUSAL_WAIT = 1.0
"""Seconds the decode engine is given to refuse what the prefill engine refused, before a rescue is tried."""

BUSY_WAIT = 1.0
"""Seconds before a rescue where the prefill engine said it was busy and not for how long."""

LONGEST_BUSY_WAIT = 5.0


class Dispatch:
    """See the module. Use: `open`, `wait`, the decode leg's stream and `end_stream`, and `leave` in any case."""

    def __init__(
        self,
        plan: Plan,
        dispatch_id: str,
        prefill: Engine | None,
        decode: Engine,
        pool: Pool,
        *,
        request_deadline: float,
    ) -> None:
        self.plan = plan
        self.id = dispatch_id
        self.prefill = prefill
        self.decode = decode
        self.report = DispatchReport(
            id=dispatch_id,
            prefill=LegReport(prefill.name) if prefill else None,
            decode=LegReport(decode.name),
        )
        self.decode_leg: DecodeLeg | None = None
        self.prefill_answer: Answer | None = None
        self.prefill_said = NOTHING_SAID
        """Of the prompt, once its 200 is there."""
        self.blocked_since: float | None = None
        """When the relay's present write to the client began."""
        self._pool = pool
        self._settings = pool.settings
        self._request_deadline = request_deadline
        self._coordinates = prefill.coordinates if prefill else None
        self.pull = prefill is not None and prefill.about.mode == "pull"
        self._transfer_params: msgspec.Raw | None = None
        # The facts. Where one engine does it all, the prefill leg is one that has nothing left to do.
        self._prefill = Prefill.UNSENT if prefill else Prefill.OK
        self._decode = Decode.UNSENT
        self._rescued = False
        self._lapsed = False
        self._reasons: dict[str, str] = {}
        """What each leg's last failure was, in words."""
        self._verdict: Verdict | None = None
        """On the facts as they are; None where they have changed since."""
        self._moved: trio.Event | None = None
        """Set at the next change of a fact, where somebody waits for it."""
        self._waiting: trio.CancelScope | None = None
        # On trio's clock: when prefill's answer is late, and when it came.
        self._prefill_deadline = inf
        self._prefill_answered = inf
        # Who is still here.
        self._leaving = False
        self._left = False
        self._back_runs = False
        self._back_scope: trio.CancelScope | None = None
        self._back_deadline = inf
        """When the back has to be over, once nothing is owed any more."""
        self._nothing_owed = False
        self._owed = False
        self._holds_prefill = prefill is not None

    # -- the facts -------------------------------------------------------------------------------

    @property
    def verdict(self) -> Verdict:
        if self._verdict is None:
            self._verdict = decide(
                Facts(
                    prefill=self._prefill,
                    decode=self._decode,
                    rescued=self._rescued,
                    lapsed=self._lapsed,
                    several=self.plan.several,
                )
            )
        return self._verdict

    @property
    def outcomes(self) -> tuple[Prefill, Decode]:
        return self._prefill, self._decode

    def _move(self, *, prefill: Prefill | None = None, decode: Decode | None = None, reason: str | None = None) -> None:
        """Change a fact and wake whoever waits for one.

        Prefill's 200 stands. The leg that is sent again because it may have come too early can confirm it; its failure
        proves nothing, and the decode engine may have been at work all the time.
        """
        if prefill is not None and self._prefill is not Prefill.OK:
            self._prefill = self.report.prefill_outcome = prefill
        if decode is not None:
            self._decode = self.report.decode_outcome = decode
        if reason:
            self._reasons["decode" if prefill is None else "prefill"] = reason
            # One order, whichever came first: the client may be told.
            self.report.reason = "; ".join(self._reasons[leg] for leg in ("prefill", "decode") if leg in self._reasons)
        self._verdict = None
        if self._moved is not None:
            self._moved.set()
            self._moved = None
        if self._waiting is None:
            return
        if self.verdict.step is Step.WAIT and self.verdict.debt is not Debt.RESCUE:
            # Prefill's 200, as a rule: there is nothing to do about it but to wait by another deadline.
            self._waiting.deadline = min(self._deadlines())
        else:
            self._waiting.cancel("a fact has changed")

    async def _a_move(self) -> None:
        if self._moved is None:
            self._moved = trio.Event()
        await self._moved.wait()

    # -- the front: onto the wire ----------------------------------------------------------------

    async def open(self, legs: trio.Nursery) -> None:
        """Put both legs on the wire, prefill's bytes first and decode's right after; the back goes on in `legs`.

        Both connections are had before a byte is sent, so a refused one costs nothing. What an engine does wrong
        is in the facts, never raised.
        """
        if self.prefill is None:
            if (connection := await self._take_decode()) is not None:
                await self._send_decode(connection, self._request(self.decode, self.plan.alone_body()))
            return
        if self.pull or self._settings.legs == "serial":
            await self._open_serial(self.prefill)
            return
        prefill, decode = await self._take_prefill(), None
        try:
            if prefill is None or (decode := await self._take_decode()) is None:
                return
            assert self._coordinates is not None
            prefill_request = self._request(self.prefill, self.plan.prefill_body(self.id))
            decode_request = self._request(self.decode, self.plan.decode_body(self.id, self._coordinates))
            prefill, sent = await self._send_prefill(prefill, prefill_request)
            if prefill is None:
                return
            # From prefill's first bytes to decode's there is no checkpoint where the kernel takes them at once, and
            # little else: however many requests are in hand, none of them comes between the two legs of this one.
            decode_sent = self._decode_first_send(decode, decode_request)
            self._back_runs = True
            legs.start_soon(self._carry, prefill, prefill_request[sent:], prefill_request)
            prefill = None
            decode_connection, decode = decode, None
            await self._send_decode(decode_connection, decode_request, decode_sent)
        finally:
            if prefill is not None:
                await self.prefill.connections.close(prefill)  # noqa: ASYNC102  shielded inside, waits for nobody
            if decode is not None:
                await self.decode.connections.close(decode)  # noqa: ASYNC102

    async def _open_serial(self, engine: Engine) -> None:
        """The legs one after the other, for engines in pull mode (and for measurements of the other way): the decode
        engine is handed what the prefill engine says, and fetches; or it registers, and the prefill engine pushes what
        it has kept. It holds nothing before that, so nothing is owed to it: whoever leaves ends both legs."""
        connection = await self._take_prefill()
        if connection is None:
            return
        request = self._request(engine, self.plan.prefill_body(self.id))
        connection, sent = await self._send_prefill(connection, request)
        if connection is None:
            return
        with trio.CancelScope(deadline=min(self._prefill_deadline, self._request_deadline)) as scope:
            await self._prefill_leg(connection, request[sent:], request)
        self._return_prefill()
        if scope.cancelled_caught:
            self._prefill_failed(Prefill.LATE, f"no answer within {self._settings.prefill_timeout:g} s")
        if self._prefill is not Prefill.OK:
            return
        if not self.pull:
            assert self._coordinates is not None
            body = self.plan.decode_body(self.id, self._coordinates)
        elif self._transfer_params is not None:
            body = self.plan.pull_body(self._transfer_params)
        else:
            return
        # At once: the engine keeps the blocks for its lease only, and what is fetched after that may be another's.
        if (decode := await self._take_decode()) is not None:
            await self._send_decode(decode, self._request(self.decode, body))

    async def _take_prefill(self) -> Connection | None:
        assert self.prefill is not None
        try:
            return await self.prefill.connections.take()
        except RefusedError as error:
            self._prefill_failed(Prefill.REFUSED, str(error))
            return None

    async def _take_decode(self) -> Connection | None:
        try:
            return await self.decode.connections.take()
        except RefusedError as error:
            self.decode.failed(str(error))
            self._move(decode=Decode.REFUSED, reason=f"decode engine {self.decode.name}: {error}")
            return None

    async def _send_prefill(self, connection: Connection, data: memoryview) -> tuple[Connection | None, int]:
        """Send the prefill leg's first piece, which is what "on the wire" means: the connection it went out on, and
        the number of bytes. A kept-alive one that turns out dead is replaced, once: nothing else has been sent yet.
        No connection where that failed."""
        assert self.prefill is not None and self.report.prefill is not None  # noqa: PT018
        leg = self.report.prefill
        leg.reused = connection.served > 0
        if sent := send_at_once(connection, data):
            self._prefill_is_out(leg)
            return connection, sent
        with trio.move_on_after(self._settings.prefill_timeout):
            try:
                try:
                    sent = await send_first(connection, data)
                except BrokenError:
                    await self.prefill.connections.close(connection)
                    connection = await self.prefill.connections.take(fresh=True)
                    leg.reused = False
                    sent = await send_first(connection, data)
            except (BrokenError, RefusedError) as error:
                await self.prefill.connections.close(connection)
                self._prefill_failed(Prefill.FAILED, str(error))
                return None, 0
            except BaseException:
                await self.prefill.connections.close(connection)  # noqa: ASYNC102  our caller knows only the first one
                raise
            self._prefill_is_out(leg)
            return connection, sent
        await self.prefill.connections.close(connection)
        self._prefill_failed(Prefill.LATE, "it did not take the request in time")
        return None, 0

    def _prefill_is_out(self, leg: LegReport) -> None:
        leg.sent = trio.current_time()
        self._prefill_deadline = leg.sent + self._settings.prefill_timeout
        self._move(prefill=Prefill.PENDING)

    def _decode_first_send(self, connection: Connection, data: memoryview) -> int:
        """What goes out of the decode leg without waiting, in bytes: from the first one on the engine may hold KV. The
        rest, 0 sent or not, is `_send_decode`'s, before anything else may happen."""
        leg = self.report.decode
        leg.reused = connection.served > 0
        if sent := send_at_once(connection, data):
            leg.sent = trio.current_time()
        return sent

    async def _send_decode(self, connection: Connection, data: memoryview, sent: int | None = None) -> None:
        """Send the decode leg; `sent` is what its first send took, where that has been. Whatever becomes of the rest,
        the engine may hold KV."""
        if sent is None:
            sent = self._decode_first_send(connection, data)
        leg = self.report.decode
        self.decode_leg = DecodeLeg(connection, leg, self.plan.api, several=self.plan.several)
        self._move(decode=Decode.WAITING)
        if sent == len(data):
            return
        outcome: Decode | None = Decode.BROKEN
        why = "it did not take the request in time"
        with trio.move_on_after(self._settings.first_byte_timeout):
            try:
                if not sent:
                    sent = await send_first(connection, data)
                    leg.sent = trio.current_time()
                outcome = await send_or_hear(connection, data[sent:], self.decode_leg.speak)
            except BrokenError as error:
                why = str(error)
        if outcome is None:
            return
        if outcome is Decode.BROKEN:
            connection.spoiled = True
            self.decode_leg.reason = self.decode_leg.reason or why
        self._spoke(outcome)

    def _request(self, engine: Engine, body: bytes) -> memoryview:
        headers = [
            (b"host", engine.host_header),
            (b"content-type", b"application/json"),
            (b"x-request-id", self.id.encode()),
            *self.plan.leg_headers(self.id, engine.role),
        ]
        if engine.rank is not None:
            headers.append((b"x-data-parallel-rank", str(engine.rank).encode()))
        # Where clients' keys are passed on, one who brings none does not get in with ours.
        if engine.authorization is not None and self._settings.auth != "pass_through" and not _brings_key(headers):
            headers.append((b"authorization", engine.authorization))
        return memoryview(request_bytes(b"POST", self.plan.api.path.encode(), headers, body))

    # -- the front: waiting ----------------------------------------------------------------------

    async def wait(self, legs: trio.Nursery) -> Verdict:
        """Wait until there is a verdict for the client. A rescue that a lapsed lease calls for starts in `legs`."""
        while True:
            verdict = self.verdict
            if verdict.debt is Debt.RESCUE and self._lapsed:
                self._rescued, self._verdict = True, None
                self._back_runs = True
                legs.start_soon(self._rescue_lapsed)
            elif verdict.step is not Step.WAIT:
                return await self._tie(verdict)
            await self._wait_for_a_move()

    async def _wait_for_a_move(self) -> None:
        """Until a fact has changed: by the decode engine's word, by the back, or by the clock."""
        assert self.decode_leg is not None
        outcome: Decode | None = None
        with trio.CancelScope(deadline=min(self._deadlines())) as self._waiting:
            outcome = await self.decode_leg.speak()
        self._waiting = None
        if outcome is not None:
            self._spoke(outcome)
            return
        now = trio.current_time()
        silent, late, lapse = self._deadlines()
        if now >= silent:
            self.decode.failed("it was silent for too long")
            self._move(decode=Decode.LATE, reason=f"decode engine {self.decode.name} was silent for too long")
        elif now >= late and self._prefill is Prefill.PENDING:  # else it came in the same instant
            self._prefill_failed(Prefill.LATE, f"no answer within {self._settings.prefill_timeout:g} s")
        elif now >= lapse:
            self._lapsed, self._verdict = True, None

    def _deadlines(self) -> tuple[float, float, float]:
        """When the decode engine has been silent for too long, prefill's answer is late, its lease has lapsed."""
        silent = self._request_deadline
        if self.plan.stream and self.report.decode.sent is not None:
            # Not for an answer in one piece: its engine is silent until all of it is done.
            silent = min(silent, self.report.decode.sent + self._settings.first_byte_timeout)
        late = self._prefill_deadline if self._prefill is Prefill.PENDING else inf
        lapse = inf
        # An answer in one piece is silent for as long as it is made: after one rescue that means nothing any more.
        watched = self.plan.stream or not self._rescued
        if self.prefill is not None and self._prefill is Prefill.OK and watched and not self._lapsed:
            lapse = self._prefill_answered + self.prefill.lease_seconds + RESCUE_MARGIN
        return silent, late, lapse

    def _spoke(self, outcome: Decode) -> None:
        assert self.decode_leg is not None
        reason = self.decode_leg.reason
        if outcome in (Decode.SPEAKING, Decode.DONE):
            self.decode.succeeded()
        elif outcome is Decode.FAILED or (outcome is Decode.BROKEN and not self._died_unasked):
            self.decode.failed(reason)
        self._move(decode=outcome, reason=f"decode engine {self.decode.name}: {reason}" if reason else None)

    async def _tie(self, verdict: Verdict) -> Verdict:
        """Judge together what happens at the same instant: a decode leg that failed may have outrun the prefill
        engine's word on the request by nothing but scheduling, and the other way round."""
        if self._decode in (Decode.FAILED, Decode.BROKEN) and self._prefill is Prefill.PENDING:
            with trio.move_on_after(TIE):
                while self._prefill is Prefill.PENDING:
                    await self._a_move()
        elif self._decode is Decode.WAITING and self._prefill is Prefill.FOREIGN:
            # Whom the prefill engine does not know, the decode engine may not either, and says so.
            assert self.decode_leg is not None
            with trio.move_on_after(TIE):
                self._spoke(await self.decode_leg.speak())
        else:
            return verdict
        return self.verdict

    @property
    def stale(self) -> bool:
        """The decode leg went out on a kept-alive connection that died under it: that says nothing of the engine."""
        return self._decode is Decode.BROKEN and self._died_unasked

    @property
    def _died_unasked(self) -> bool:
        return self.report.decode.reused and self.report.decode.head is None

    @property
    def refused(self) -> bool:
        """It ended before anything was on the wire to either engine."""
        prefill = self.report.prefill
        return self.decode_leg is None and (prefill is None or prefill.sent is None)

    @property
    def left(self) -> bool:
        return self._leaving

    def end_stream(self, *, complete: bool, reason: str | None = None, blame: str | None = None) -> None:
        """The relayed stream has ended: properly, or not."""
        if blame is not None:
            self.decode.failed(blame)
            reason = f"decode engine {self.decode.name}: {blame}"
        self._move(decode=Decode.DONE if complete else Decode.CUT, reason=reason)

    async def hear_prefill(self) -> None:
        """Let the prefill engine's answer come, which tells how much of the prompt was cached. Its push has come, so it
        is there or about to be; what comes at the same instant must not depend on which is read first."""
        if self._prefill is Prefill.OK:
            return
        with trio.move_on_after(TIE):
            while self._prefill is Prefill.PENDING and self._back_runs:
                await self._a_move()

    # -- the front: leaving ----------------------------------------------------------------------

    async def leave(self, why: str) -> None:
        """Nobody waits here any more: the decode leg ends, the prefill leg goes on as far as the debt demands.

        `why` is what a settling leg is counted under. To be called however the front ends; the second call
        does nothing. Never raises and never waits for an engine, also not when cancelled.
        """
        if self._leaving:
            return
        self._leaving = True
        if self.decode_leg is not None and not self.decode.connections.keep(self.decode_leg.connection):
            await self.decode.connections.close(self.decode_leg.connection)
        # No checkpoint from here on: the back ends either before this and leaves the rest to us, or after it.
        self._left = True
        if self._back_runs:
            self._bound_back(self.verdict.debt, why)
        else:
            self._finish()

    def _bound_back(self, debt: Debt, why: str) -> None:
        """How much longer the back may take, now that nobody waits for it."""
        now = trio.current_time()
        if debt in (Debt.NONE, Debt.PAID):
            # Of a paid one only the answer is left: it gets a moment, for the connection's sake.
            self._nothing_owed = True
            self._back_deadline = now + (self._settings.drain_grace if debt is Debt.PAID else 0)
            self._limit_back(self._back_deadline)
        else:
            self._owed = True
            self.decode.debts += 1
            self.report.settled = why
            self._limit_back(now + self._settings.settle_timeout)

    def _limit_back(self, deadline: float) -> None:
        if self._back_scope is not None:  # else it has not come to its first step yet
            self._back_scope.deadline = min(self._back_scope.deadline, deadline)

    def _finish(self) -> None:
        """Both hands have ended: what the debt has come to, and the places go back."""
        debt = self.verdict.debt
        if debt in (Debt.CARRY, Debt.RESCUE):
            debt = Debt.STRANDED  # only a fault of ours ends the back early, and it must not hide a debt
        self.report.debt = debt
        self.report.settled_at = trio.current_time()
        if self._owed:
            self.decode.debts -= 1
        if debt is Debt.STRANDED:
            self.decode.stranded += 1
            self._tell_stranded()
        self._return_prefill()
        self._pool.give_back(self.decode)

    def _tell_stranded(self) -> None:
        assert self.prefill is not None
        log.error(
            "stranded: decode engine %s holds KV blocks of dispatch %s that prefill engine %s will never push (%s). "
            "They stay held until that decode engine is restarted: drain it and restart it when its "
            "vllm:kv_cache_usage_perc no longer returns to 0 while it is idle (%d stranded there so far)",
            self.decode.name,
            self.id,
            self.prefill.name,
            self.report.reason or "no reason known",
            self.decode.stranded,
        )

    def _return_prefill(self) -> None:
        if self._holds_prefill:
            self._holds_prefill = False
            assert self.prefill is not None
            self._pool.give_back(self.prefill)

    # -- the back --------------------------------------------------------------------------------

    async def _carry(self, connection: Connection, rest: memoryview, request: memoryview) -> None:
        """The prefill leg from its first send to its end, rescue included."""
        try:
            bound = self._settings.prefill_timeout + self._settings.settle_timeout
            await self._bounded(bound, connection, rest, request)
            await self._pay()
        finally:
            self._back_ended()

    async def _rescue_lapsed(self) -> None:
        """The back once more: the lease may have ended before the decode engine asked for its KV."""
        assert self.prefill is not None
        try:
            with self._pool.shielded(), self._pool.place(self.prefill):
                await self._rescue("lapsed")
        finally:
            self._back_ended()

    def _back_ended(self) -> None:
        self._back_runs = False
        self._return_prefill()
        if self._left:
            self._finish()

    async def _bounded(self, seconds: float, connection: Connection, rest: memoryview, request: memoryview) -> None:
        """One prefill leg within `seconds`, or what `leave` makes of them, whoever leaves: see the module."""
        if self._left:
            seconds = min(seconds, self._settings.settle_timeout)
        deadline = min(trio.current_time() + seconds, self._back_deadline)
        with self._pool.shielded(deadline) as self._back_scope:
            await self._prefill_leg(connection, rest, request)
        if self._back_scope.cancelled_caught and not self._nothing_owed:
            self._prefill_failed(Prefill.FAILED, "it never answered")
        self._back_scope = None

    async def _prefill_leg(self, connection: Connection, rest: memoryview, request: memoryview) -> None:
        """Send what is left of the request, read the answer, judge it."""
        assert self.prefill is not None and self.report.prefill is not None  # noqa: PT018
        leg = self.report.prefill
        try:
            try:
                answer = await self._converse(connection, leg, rest)
            except BrokenError:
                if not connection.served or connection.received:
                    raise
                # The engine closed a kept-alive connection as we wrote to it: it has seen nothing.
                await self.prefill.connections.close(connection)
                connection = await self.prefill.connections.take(fresh=True)
                leg.reused = False
                answer = await self._converse(connection, leg, request)
            await self._give_way()
            self._judge(answer)
        except (BrokenError, RefusedError) as error:
            self._prefill_failed(Prefill.FAILED, str(error))
        finally:
            if not self.prefill.connections.keep(connection):
                await self.prefill.connections.close(connection)  # noqa: ASYNC102  shielded inside, waits for nobody

    async def _converse(self, connection: Connection, leg: LegReport, data: memoryview) -> Answer:
        body = Body(connection, leg)
        return await send_or_hear(connection, data, body.read) or await body.read()

    async def _give_way(self) -> None:
        """Let the front read first what the decode engine has begun to say: its client waits for that, and for nothing
        that prefill's answer tells. Engines that have pushed and answered say both within a tenth of a millisecond."""
        for _ in range(2):  # once until the front is scheduled, and once more where its turn comes after ours
            if self.plan.stream and self._decode is Decode.WAITING and self.decode_leg is not None:
                if not self.decode_leg.connection.stale():
                    return
                await trio.lowlevel.cancel_shielded_checkpoint()  # the answer is here: it must not be lost

    def _judge(self, answer: Answer) -> None:
        assert self.prefill is not None and self._coordinates is not None  # noqa: PT018
        outcome = judge_prefill(answer, self._coordinates.engine_id)
        if outcome is Prefill.OK:
            self.prefill.succeeded()
            self.prefill_said = read_prefill_answer(self.plan.api, answer.body)
            self.report.prompt_tokens = self.prefill_said.prompt_tokens
            if self.pull:
                self._transfer_params = transfer_params_in(answer.body)
            else:
                self._prefill_answered = trio.current_time()
            self._lapsed, self._verdict = False, None
            self._move(prefill=Prefill.OK)
            return
        self.prefill_answer = answer
        if outcome is Prefill.FOREIGN:
            self.prefill.doubt("it answered with other coordinates than it was known by: it was restarted")
            self._prefill_failed(outcome, f"it is no longer {self._coordinates.engine_id}")
        else:
            self._prefill_failed(outcome, f"answered {answer.status}")

    def _prefill_failed(self, outcome: Prefill, why: str) -> None:
        assert self.prefill is not None
        if outcome in (Prefill.REFUSED, Prefill.FAILED, Prefill.FOREIGN, Prefill.LATE):
            self.prefill.failed(why)
        self._move(prefill=outcome, reason=f"prefill engine {self.prefill.name}: {why}")

    async def _pay(self) -> None:
        """Pay a debt that the prefill leg did not, by one rescue, unless the decode engine proves it holds nothing."""
        if self.verdict.debt is not Debt.RESCUE:
            return
        with self._pool.shielded():
            await self._wait_for_decode(self._rescue_delay())
            while self.verdict.debt is Debt.RESCUE:
                await self._rescue(self._prefill.value)

    def _rescue_delay(self) -> float:
        if self._prefill is Prefill.BUSY:
            told = self.prefill_answer.retry_after if self.prefill_answer else None
            return min(told or BUSY_WAIT, LONGEST_BUSY_WAIT)
        if self._left:
            return 0
        if self._decode is not Decode.WAITING:
            return TIE  # the front may be judging both just now, and a rescue would hide what it judges
        return REFUSAL_WAIT if self._prefill is Prefill.REJECTED else TIE

    async def _wait_for_decode(self, seconds: float) -> None:
        """Until the decode leg has come to something, for at most `seconds`."""
        before = self._decode
        with trio.move_on_after(seconds):
            while self._decode is before:
                await self._a_move()

    async def _rescue(self, why: str) -> None:
        """Send the prefill leg again: same ids, same prompt, same n, same engine. Any 200 makes the push happen."""
        assert self.prefill is not None
        self._rescued, self._verdict = True, None
        self.report.rescue = why
        self.report.rescued = trio.current_time()
        self._move(prefill=Prefill.PENDING)
        try:
            connection = await self.prefill.connections.take(fresh=True)
        except RefusedError as error:
            self._prefill_failed(Prefill.REFUSED, str(error))
        else:
            request = self._request(self.prefill, self.plan.prefill_body(self.id))
            await self._bounded(self._settings.settle_timeout, connection, request, request)
        self.report.rescue_paid = self._prefill is Prefill.OK and not self._lapsed


def _brings_key(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"authorization" for name, _ in headers)
