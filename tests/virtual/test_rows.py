"""The verdict table on virtual time: every row has one outcome on every schedule, and it is the right one (I5)."""

from __future__ import annotations

import pytest

from tests.virtual.conftest import TALLY
from tests.virtual.rows import CASES, PROMPT, Row
from trio_pdproxy.testing import Outcome, Visit, grown, one_outcome, open_memory_rig, outcome_of

SEEDS = range(12)
JITTER = 3
"""Enough for either of two things of one instant to come first."""


async def _play(row: Row, stream: bool) -> tuple[Outcome, Visit]:
    async with open_memory_rig(*row.pairs, sim=row.sim, warm=row.warm, jitter=JITTER, **row.settings) as rig:
        if row.prepare is not None:
            await row.prepare(rig)
        row.arrange(rig)
        before = rig.tasks()
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": stream, **row.body}
        visit = await rig.visit(leave_after=row.leave_after, **body)
        await rig.ended()
        outcome = outcome_of(rig, visit)
        if row.raced:
            outcome.engines["decode-0"] = row.wanted(stream).d
        left = {name: count for name, count in rig.leftovers().items() if name not in _STRANDED}
        assert not left
        left_tasks = grown(before, rig.tasks())
        assert not left_tasks, left_tasks
        return outcome, visit


# Blocks a row may leave: how many is in its outcome.
_STRANDED = {f"decode-{n} blocks" for n in range(2)}


@pytest.mark.parametrize(("row", "stream"), [(row, stream) for _, row, stream in CASES], ids=[c[0] for c in CASES])
def test_a_row_has_one_outcome_and_the_right_one(row: Row, stream: bool) -> None:
    TALLY.rows += 1
    visits: list[Visit] = []

    async def play() -> Outcome:
        outcome, visit = await _play(row, stream)
        visits.append(visit)
        TALLY.schedules += 1
        return outcome

    got = one_outcome(play, SEEDS)
    want = row.wanted(stream)
    assert (got.status, got.end, got.outcome) == (want.status, want.end, want.outcome), got
    assert got.dispatches == want.dispatches, got
    assert (got.engines["prefill-0"], got.engines["decode-0"]) == (want.p, want.d), got
    assert (got.stranded, got.held) == (want.stranded, want.held), got
    assert want.says in got.raw
    for visit in visits:
        assert want.seconds[0] - 0.001 <= visit.seconds <= want.seconds[1] + 0.001
