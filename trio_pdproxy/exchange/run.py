"""One exchange: THE nursery.

    async with trio.open_nursery() as legs:        opened by `run_exchange`, in the task that writes the response
        for each pair that is tried:
            dispatch.open(legs)                    prefill leg on the wire, decode leg right after; the prefill
                                                   leg's back goes on as a child of `legs`
            dispatch.wait(legs)                    decode's first word, or a verdict without it
            relay / answer / next pair             here, by direct calls to the sink: back-pressure for free
            dispatch.leave()                       the decode leg is closed; the debt goes on in `legs`
    the nursery closes when the last debt is paid or stranded: nothing outlives it

Why the exchange owns the client's status as well as its bytes: it is held until the decode engine's first body byte.
That engine answers 200 at once, long before it has any KV, so its head means nothing; its first byte means that
the transfer worked. Until then every failure is an honest status, and another pair may be tried; after it
("the commit") the client's stream can only go on or visibly break.

Cancellation is the client's leaving. It ends the front of every dispatch at its next checkpoint; the backs are
shielded and bounded (see dispatch.py), so the nursery always ends, at the latest after
prefill_timeout + 2 settle_timeout and what the connects take.

What this guarantees (the tests are named after these):
  I1 no leg outlives its request             I2 a response is closed before its engine's place is returned
  I3 one response start at most              I4 a truncated body never looks complete
  I5 the verdict knows no order              I6 every dispatch has its own id; only a rescue repeats it
  I7 no wait without a deadline              I8 every debt is paid or counted
  I9 a stream's bytes are not changed, but for what is the engines' own in it and for how much of a prompt was cached,
     which only prefill knows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from os import urandom
from random import random

import trio

from trio_pdproxy.core import sse
from trio_pdproxy.core.errors import Fault, ProxyError, as_event
from trio_pdproxy.core.health import back_off
from trio_pdproxy.core.plan import Kind, Plan, shown_answer, shown_block, tokens_in
from trio_pdproxy.core.report import Report
from trio_pdproxy.core.verdict import Decode, Instead, Prefill, Step, Verdict
from trio_pdproxy.engines.pool import Pool, Taken, Want
from trio_pdproxy.exchange.dispatch import Dispatch
from trio_pdproxy.exchange.legs import Answer
from trio_pdproxy.exchange.relay import Relay
from trio_pdproxy.exchange.sink import Sink

ANSWER_PIECE = 256 * 1024
"""Bytes of a whole answer in one write: each has a deadline of its own, so that a slow client is no dead one."""


_PING = b": ping\n\n"
_SSE_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")


def new_dispatch_id() -> str:
    """Unguessable, and never used twice: two live requests of one id get each other's KV."""
    return urandom(16).hex()


async def run_exchange(
    plan: Plan,
    pool: Pool,
    sink: Sink,
    report: Report,
    *,
    new_id: Callable[[], str] = new_dispatch_id,
    begun: Callable[[trio.CancelScope], object] | None = None,
) -> Report:
    """Serve `plan` with engines of `pool`, answer into `sink`, fill in `report` (and return it).

    Returns when the client has its answer and no debt is left. Raises nothing an engine or a client can cause;
    a cancellation from outside is the client's leaving and is passed on once the debts are settled. Whoever hears of
    that elsewhere than in a task may cancel the scope that `begun` is called with, before anything else is done.
    """
    try:
        async with trio.open_nursery() as legs:
            if begun is not None:
                begun(legs.cancel_scope)
            await _Exchange(plan, pool, sink, report, new_id).serve(legs)
    finally:
        report.ended = trio.current_time()
    return report


@dataclass(frozen=True, slots=True)
class _Pinging:
    """Comments are sent while a stream waits: until its first event, or another answer."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    turn: trio.Lock = field(default_factory=trio.Lock)
    """Whose it is to write to the client."""


class _Exchange:
    def __init__(self, plan: Plan, pool: Pool, sink: Sink, report: Report, new_id: Callable[[], str]) -> None:
        self.plan = plan
        self.pool = pool
        self.sink = sink
        self.report = report
        self.new_id = new_id
        self._pinging: _Pinging | None = None
        self.deadline = trio.current_time() + pool.settings.request_timeout
        report.kind = plan.kind.value
        report.stream = plan.stream
        report.dropped = plan.dropped

    async def serve(self, legs: trio.Nursery) -> None:
        # What only a cancellation leaves standing. It cannot be caught by its name: whoever opens a nursery (connecting
        # does) may hand it on in a group.
        self.report.outcome = "disconnect"
        if self.plan.stream and self.pool.settings.ping_interval:
            self._pinging = _Pinging()
            legs.start_soon(self._ping, self._pinging, legs.cancel_scope)
        try:
            await self._try_pairs(legs)
        except ProxyError as error:
            await self._answer_error(error)
        except Exception:
            self.report.outcome = "error"
            raise
        finally:
            if self._pinging is not None:
                self._pinging.scope.cancel("the exchange is over")
            self.report.last_byte = trio.current_time()

    async def _ping(self, pinging: _Pinging, exchange: trio.CancelScope) -> None:
        """Comments for whoever closes silent connections. The first one commits the status; other pairs may still be
        tried after it, for nothing has been said."""
        settings = self.pool.settings
        with pinging.scope:
            while True:
                await trio.sleep(settings.ping_interval)
                async with pinging.turn:
                    with trio.move_on_after(settings.write_timeout) as taken:
                        if not self.sink.started:
                            await self._start_response(200, [_SSE_TYPE])
                        await self.sink.write(_PING)
                if taken.cancelled_caught:
                    exchange.cancel("the client stopped reading")  # its debts are shielded from that
                    return

    async def _try_pairs(self, legs: trio.Nursery) -> None:
        """Try pairs until one has a verdict that is not to try another; raises `ProxyError` where that is ours."""
        avoid: frozenset[str] = frozenset()
        shun: frozenset[str] = frozenset()
        failure: ProxyError | Answer | None = None
        budget = self.pool.retry_budget
        budget.earn()
        tried = 0
        while True:
            try:
                dispatch = await self._lease(avoid, shun)
            except ProxyError as error:
                failure = failure or error  # no pair left: what the last one said is the better answer
                break
            settled_as = "disconnect"  # what only a cancellation leaves standing
            try:
                await dispatch.open(legs)
                verdict = await dispatch.wait(legs)
                settled_as = _settled_as(verdict, dispatch)
                if verdict.step is Step.RELAY:
                    await self._relay(dispatch)
                    return
                # Its engines are let go before the client is told: however slowly that reads, it holds none of them.
                await dispatch.leave(settled_as)
                if verdict.step is not Step.ANOTHER_PAIR:
                    await self._conclude(dispatch, verdict)
                    return
                failure = self._instead(dispatch, verdict)
            finally:
                await dispatch.leave(settled_as)  # noqa: ASYNC102  shielded inside, and waits for nobody
            avoid |= _at_fault(dispatch)
            if dispatch.refused:
                continue  # nothing was sent: it cost nobody anything, and that engine is not asked again
            tried += 1
            if dispatch.stale:
                shun |= {dispatch.decode.name}
            if tried == self.pool.settings.attempts or not budget.spend():
                break
            await trio.sleep(back_off(tried, random()))
        assert failure is not None
        if isinstance(failure, ProxyError):
            raise failure
        await self._answer(failure, self._outcome_of(failure.status))

    async def _lease(self, avoid: frozenset[str], shun: frozenset[str]) -> Dispatch:
        """A place at the next pair; at a decode engine alone where the plan says so, or where it must. Never at one to
        `avoid`; at one to `shun` only where there is no other."""
        plan = self.plan
        try:
            taken = await self._take(plan.kind is Kind.PUSH, avoid, shun)
        except ProxyError as error:
            if error.status != 503 or plan.kind is not Kind.PUSH or self.pool.settings.fallback != "decode_only":
                raise
            plan = plan.alone("no usable prefill engine")
            taken = await self._take(False, avoid, shun)
        if len(taken) == 2 and plan.several and taken[0].about.mode == "pull":
            # A pulling decode engine dies of more than one prompt's transfers in one request (vLLM 0.32).
            self.pool.give_back(taken[0])
            taken, plan = taken[1:], plan.alone("several sequences in pull mode")
        if self.report.leased is None:
            self.report.leased = trio.current_time()
        prefill, decode = taken if len(taken) == 2 else (None, taken[0])
        dispatch = Dispatch(plan, self.new_id(), prefill, decode, self.pool, request_deadline=self.deadline)
        self.report.kind = "pull" if dispatch.pull else plan.kind.value
        self.report.dispatches.append(dispatch.report)
        return dispatch

    async def _take(self, pair: bool, avoid: frozenset[str], shun: frozenset[str]) -> Taken:
        plan = self.plan
        want = Want(pair=pair, prefix=plan.prefix, session=plan.session, avoid=avoid | shun)
        if shun and not self.pool.possible(pair, want.avoid):
            want = replace(want, avoid=avoid)
        return await self.pool.take(want)

    # -- what the client gets --------------------------------------------------------------------

    async def _conclude(self, dispatch: Dispatch, verdict: Verdict) -> None:
        match verdict.step:
            case Step.END:
                await self._answer_whole(dispatch)
            case Step.DECODE_ANSWER:
                assert dispatch.decode_leg is not None and dispatch.decode_leg.answer is not None  # noqa: PT018
                await self._answer(dispatch.decode_leg.answer, "client_error")
            case Step.PREFILL_ANSWER:
                assert dispatch.prefill_answer is not None
                await self._answer(dispatch.prefill_answer, "client_error")
            case _:
                failure = self._instead(dispatch, verdict)
                if isinstance(failure, ProxyError):
                    raise failure
                await self._answer(failure, self._outcome_of(failure.status))

    async def _relay(self, dispatch: Dispatch) -> None:
        """The commit, the stream after it, and its end."""
        leg = dispatch.decode_leg
        assert leg is not None and leg.head is not None and leg.framer is not None  # noqa: PT018
        await self._stop_pinging()
        if not self.sink.started:
            await self._start_response(leg.head.status, leg.passed_headers)
        show = partial(self._shown, dispatch)
        relay = Relay(dispatch, self.sink, self.report, self.plan.api, self.pool, deadline=self.deadline, show=show)
        with self.pool.streaming(dispatch):
            await relay.run()
        if dispatch.left or dispatch.blocked_since is not None:
            await self._client_stopped_reading(dispatch)
        elif relay.broken is not None:
            await self._cut(dispatch, relay.broken, relay.last)
        else:
            if leg.framer.tail:
                await self._write(leg.framer.tail)
            await self._finish(dispatch)
            self.report.outcome = "decode_error" if leg.error_seen else "ok"

    async def _cut(self, dispatch: Dispatch, broken: str, last: bytes) -> None:
        """The visible break of a stream whose decode engine's broke: an error event after `last`, and no end."""
        dispatch.end_stream(complete=False, blame=broken)
        self.report.outcome = "cut"
        cut = ProxyError(
            f"the decode engine's stream broke off: {broken}",
            status=502,
            fault=Fault.DECODE,
            code="stream_broken",
        )
        with trio.move_on_after(self.pool.settings.write_timeout):
            await self._write(cut.event(self.plan.api.dialect, after=last))
        await self.sink.cut()

    async def _shown(self, dispatch: Dispatch, block: bytes) -> bytes:
        """Events as the client may see them: one at a stream's end for most APIs, so this may cost something."""
        if b'"usage":{' in block:
            await dispatch.hear_prefill()
        for event in sse.events(block):
            self._note_tokens(event, dispatch)
        return shown_block(self.plan.api, block, dispatch.prefill_said.cache)

    def _note_tokens(self, answer: bytes, dispatch: Dispatch) -> None:
        prompt, generated = tokens_in(self.plan.api, answer)
        said = dispatch.prefill_said
        self.report.prompt_tokens = prompt if said.prompt_tokens is None else said.prompt_tokens
        self.report.cached_tokens = said.cached_tokens
        if generated is not None:
            self.report.completion_tokens = generated

    async def _client_stopped_reading(self, dispatch: Dispatch) -> None:
        """Nothing can be told to it any more; not finishing the response is what it will find."""
        dispatch.end_stream(complete=False, reason="the client stopped reading")
        self.report.outcome = "disconnect"
        await self.sink.cut()

    async def _answer_whole(self, dispatch: Dispatch) -> None:
        leg = dispatch.decode_leg
        assert leg is not None and leg.answer is not None  # noqa: PT018
        answer = leg.answer
        if not self.plan.api.alone:
            await dispatch.hear_prefill()
            self._note_tokens(answer.body, dispatch)
        shown = shown_answer(answer.body, dispatch.prefill_said.cache)
        await self._answer(Answer(answer.status, answer.headers, shown), "ok")

    async def _answer(self, answer: Answer, outcome: str) -> None:
        """An engine's answer, verbatim. A client that takes no piece of it within `write_timeout` gets no more."""
        patience = self.pool.settings.write_timeout
        await self._stop_pinging()
        if self.sink.started:
            self.report.outcome = outcome
            with trio.move_on_after(patience):
                # No end after it: what has begun as a stream must not look complete.
                await self._write(as_event(answer.body, self.plan.api.dialect))
            await self.sink.cut()
            return
        with trio.CancelScope(deadline=trio.current_time() + patience) as scope:
            length = (b"content-length", str(len(answer.body)).encode())
            await self._start_response(answer.status, [*answer.headers, length])
            for start in range(0, len(answer.body), ANSWER_PIECE):
                if start:
                    scope.deadline = trio.current_time() + patience
                await self._write(answer.body[start : start + ANSWER_PIECE])
            await self.sink.finish()
        self.report.outcome = "cut" if scope.cancelled_caught else outcome

    async def _answer_error(self, error: ProxyError) -> None:
        """What the proxy itself has to say."""
        body = error.body(self.plan.api.dialect)
        await self._answer(Answer(error.status, error.headers(), body), _OUTCOMES[error.fault])
        if error.status == 504:
            self.report.outcome = "timeout"

    async def _stop_pinging(self) -> None:
        """From here on nobody else writes to the client."""
        if self._pinging is not None:
            async with self._pinging.turn:
                self._pinging.scope.cancel("the answer has begun")

    async def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.report.status = status
        await self.sink.start(status, [*headers, (b"x-request-id", self.report.request_id.encode())])

    async def _write(self, block: bytes) -> None:
        self.report.handed(trio.current_time())
        await self.sink.write(block)

    async def _finish(self, dispatch: Dispatch) -> None:
        """The clean end, at once: whatever is left of the prefill leg, the client does not wait for it."""
        dispatch.end_stream(complete=True)
        with trio.move_on_after(self.pool.settings.write_timeout):
            await self.sink.finish()

    # -- failures in words -----------------------------------------------------------------------

    def _instead(self, dispatch: Dispatch, verdict: Verdict) -> ProxyError | Answer:
        """What is said where no other pair is tried."""
        reason = dispatch.report.reason or "it failed"
        match verdict.instead:
            case Instead.PREFILL_SAID if (answer := dispatch.prefill_answer) and answer.status in (429, 503):
                return answer
            case Instead.DECODE_SAID if leg := dispatch.decode_leg:
                return leg.answer if leg.answer and leg.answer.status >= 400 else _bad_gateway(Fault.DECODE, reason)
            case Instead.TIMEOUT:
                fault = Fault.PREFILL if dispatch.outcomes[0] is Prefill.LATE else Fault.DECODE
                return ProxyError(reason, status=504, fault=fault, code="timeout")
            case _:
                fault = Fault.PREFILL if _at_fault(dispatch) == {_name(dispatch)} else Fault.DECODE
                return _bad_gateway(fault, reason)

    @staticmethod
    def _outcome_of(status: int) -> str:
        return "overloaded" if status in (429, 503) else "decode_error"


_OUTCOMES = {
    Fault.CLIENT: "client_error",
    Fault.PREFILL: "prefill_error",
    Fault.DECODE: "decode_error",
    Fault.PROXY: "proxy_error",
    Fault.BUSY: "overloaded",
}


def _bad_gateway(fault: Fault, reason: str) -> ProxyError:
    return ProxyError(reason, status=502, fault=fault, code=f"{fault.name.lower()}_failed")


def _name(dispatch: Dispatch) -> str:
    return dispatch.prefill.name if dispatch.prefill else ""


def _at_fault(dispatch: Dispatch) -> set[str]:
    """The engine that another try had better do without."""
    prefill, decode = dispatch.outcomes
    if decode is Decode.BROKEN and dispatch.stale:
        return set()
    if decode in (Decode.REFUSED, Decode.FAILED, Decode.BROKEN):
        return {dispatch.decode.name}
    if prefill in (Prefill.REFUSED, Prefill.BUSY, Prefill.FAILED, Prefill.FOREIGN):
        return {_name(dispatch)}
    return set()


def _settled_as(verdict: Verdict, dispatch: Dispatch) -> str:
    """Under which name a prefill leg that is carried on is counted."""
    if verdict.step is Step.FAIL:
        return "timeout"
    if verdict.step in (Step.RELAY, Step.END):
        return "drain"
    return "decode_failed" if dispatch.outcomes[1] is not Decode.WAITING else "prefill_failed"
