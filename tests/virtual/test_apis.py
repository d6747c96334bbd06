"""The verdict table holds for every API: what comes of a row does not depend on how its engines speak."""

from __future__ import annotations

from typing import Any

import pytest

from tests.virtual.rows import CASES, Row
from trio_pdproxy.testing import Outcome, Visit, one_outcome, open_memory_rig, outcome_of

SEEDS = range(2)
SLOW_SEEDS = range(12)
CONTENT = "x" * 78
"""With the chat template as many tokens as the rows' prompt: 100."""
SAID = [{"role": "user", "content": CONTENT}]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": SAID},
    "/v1/messages": {"messages": SAID},
}


def applies(row: Row) -> bool:
    """Not to rows that count a stream's events, ask for what the others do not have, or say what they do not say."""
    return not set(row.body) & {"n", "echo", "prompt", "logprobs"} and not row.want.says and not row.whole.get("says")


ROWS = [(name, row, stream) for name, row, stream in CASES if applies(row)]

# Where other streams tell their engine's own error, /v1/responses is cut: nothing is proven then, and the client gets a
# 502 of the proxy's.
TOLD_BY_DECODE = ("decode cannot shake hands", "its first event is an error")


async def _play(row: Row, path: str, stream: bool) -> tuple[Outcome, Visit]:
    async with open_memory_rig(*row.pairs, sim=row.sim, warm=row.warm, jitter=3, **row.settings) as rig:
        if row.prepare is not None:
            await row.prepare(rig)
        row.arrange(rig)
        most = row.body.get("max_tokens", 4)
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {**row.body, **BODIES[path], limit: most, "stream": stream}
        visit = await rig.visit(path, leave_after=row.leave_after, **body)
        await rig.ended()
        outcome = outcome_of(rig, visit)
        if row.raced:
            outcome.engines["decode-0"] = row.wanted(stream).d
        return outcome, visit


def _check(row: Row, path: str, stream: bool, seeds: range) -> None:
    visits: list[Visit] = []

    async def play() -> Outcome:
        outcome, visit = await _play(row, path, stream)
        visits.append(visit)
        return outcome

    got = one_outcome(play, seeds)
    want = row.wanted(stream)
    assert (got.status, got.end, got.outcome) == (want.status, want.end, want.outcome), got
    assert got.dispatches == want.dispatches, got
    assert (got.engines["prefill-0"], got.engines["decode-0"]) == (want.p, want.d), got
    assert (got.stranded, got.held) == (want.stranded, want.held), got
    for visit in visits:
        assert want.seconds[0] - 0.001 <= visit.seconds <= want.seconds[1] + 0.02
        assert b"transfer_params" not in visit.raw
        if visit.end == "cut":
            assert b"error" in visit.raw
            assert b"[DONE]" not in visit.raw


CUT = [(n, r, s) for n, r, s in ROWS if not (s and any(told in n for told in TOLD_BY_DECODE))]


@pytest.mark.parametrize(("row", "stream"), [(r, s) for _, r, s in CUT], ids=[name for name, _, _ in CUT])
def test_a_row_of_responses_has_the_outcome_of_completions(row: Row, stream: bool) -> None:
    _check(row, "/v1/responses", stream, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("row", "stream"), [(r, s) for _, r, s in ROWS], ids=[name for name, _, _ in ROWS])
def test_and_so_it_has_on_every_schedule(row: Row, stream: bool, path: str) -> None:
    _check(row, path, stream, SLOW_SEEDS)
