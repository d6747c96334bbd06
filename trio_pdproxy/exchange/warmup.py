"""The first transfer of each pair of engines, before any client's.

NIXL's handshake between two engines costs seconds, and whether a pair can transfer at all (network, memory, versions)
is only seen by doing it. So a pair gets requests once a tiny one of ours has gone through it: one token in, one out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio

from trio_pdproxy.core.plan import APIS, read_plan
from trio_pdproxy.core.verdict import Step, Verdict
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.exchange.dispatch import Dispatch
from trio_pdproxy.exchange.run import new_dispatch_id

log = logging.getLogger("trio_pdproxy.warmup")

AT_ONCE = 8
"""Warm-ups under way at the same time, at different pairs."""

LONGEST_PAUSE = 60.0
"""Seconds between two tries at a pair that fails: each failure may cost the decode engine blocks."""


async def keep_warm(pool: Pool, *, new_id: Callable[[], str] = new_dispatch_id) -> None:
    """Warm every pair that needs it, as engines come and come back, until cancelled."""
    under_way: set[tuple[Engine, Engine]] = set()
    limit = trio.CapacityLimiter(AT_ONCE)

    async def warm(pair: tuple[Engine, Engine]) -> None:
        try:
            async with limit:
                await _until_warm(pool, pair, new_id)
        finally:
            under_way.discard(pair)

    async with trio.open_nursery() as nursery:
        while True:
            news = pool.roster.news
            for pair in pool.roster.cold:
                if pair not in under_way:
                    under_way.add(pair)
                    nursery.start_soon(warm, pair)
            await news.wait()


async def _until_warm(pool: Pool, pair: tuple[Engine, Engine], new_id: Callable[[], str]) -> None:
    """Try until it works or the pair is no longer cold (one of the two has gone)."""
    pause = 1.0
    while pair in pool.roster.cold:
        begun = trio.current_time()
        verdict, reason = await _transfer(pool, pair, new_id())
        p, d = pair
        if verdict.step is Step.END:
            log.info("%s and %s are warm: first transfer in %.2f s", p.name, d.name, trio.current_time() - begun)
            pool.roster.warmed(p, d)
            return
        log.warning("%s and %s: the first transfer failed: %s; again in %.0f s", p.name, d.name, reason, pause)
        pool.roster.failed_to_warm(p, d)
        await trio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _transfer(pool: Pool, pair: tuple[Engine, Engine], dispatch_id: str) -> tuple[Verdict, str]:
    prefill, decode = pair
    body = {"model": prefill.about.model, "prompt": "a", "max_tokens": 1}
    plan = read_plan(APIS["/v1/completions"], msgspec.json.encode(body), [(b"content-type", b"application/json")])
    pool.claim(prefill, decode)
    # As long as a stream's first byte may take: it is one token, and must not hang where a decode engine does.
    deadline = trio.current_time() + pool.settings.first_byte_timeout
    dispatch = Dispatch(plan, dispatch_id, prefill, decode, pool, request_deadline=deadline)
    async with trio.open_nursery() as legs:
        try:
            await dispatch.open(legs)
            verdict = await dispatch.wait(legs)
        finally:
            await dispatch.leave("warm_up")  # noqa: ASYNC102  shielded inside, and waits for nobody
    return verdict, dispatch.report.reason or verdict.step.value
