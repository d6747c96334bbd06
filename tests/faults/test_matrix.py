"""Every fault at every place of an answer, at either engine, for a stream and for a whole answer.

The tables say what has to come of it. They follow from two rules (trio_pdproxy/core/verdict.py), not from runs:
the client gets an honest status until the decode engine's first byte and a visible cut after it; and what the
decode engine holds is paid by the prefill engine's 200, or counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.faults.cells import Cell, Out, play, shorten_waits
from tests.faults.table import Tables

CUTS = ("reset", "fin", "garbage")

Faults = dict[str, tuple[Out, ...]]
"""What happens -> what comes of it, mode by mode."""


def whole(rescue: str | None = None) -> Out:
    return Out(200, "text", rescue=rescue)


def elsewhere(rescue: str, *, held: int = 1) -> Out:
    """Answered by the other pair; the first one's debt could not be paid."""
    return Out(200, "text", rescue=rescue, stranded=1, held=held)


def engine(status: int, rescue: str | None = None, *, stranded: int = 0) -> Out:
    """An engine's answer verbatim. Where one is stranded, its decode engine does hold blocks."""
    return Out(status, "engine", rescue=rescue, stranded=stranded, held=stranded)


def proxy(status: int, rescue: str | None = None, *, stranded: int = 0, held: int | None = None) -> Out:
    return Out(status, "proxy", rescue=rescue, stranded=stranded, held=stranded if held is None else held)


# The prefill engine fails before it has computed anything: nothing but the rescue frees the decode engine.
#   once: the rescue is served      always: it fails too      other: the same, and there is another pair
# An engine's refusal of the request itself is final; its other failures are another pair's chance.
PREFILL_BEFORE: dict[str, tuple[Out, Out, Out]] = {
    "400": (whole("rejected"), engine(400, "rejected", stranded=1), engine(400, "rejected", stranded=1)),
    "429": (whole("busy"), engine(429, "busy", stranded=1), elsewhere("busy")),
    "500": (whole("failed"), proxy(502, "failed", stranded=1), elsewhere("failed")),
    "503": (whole("busy"), engine(503, "busy", stranded=1), elsewhere("busy")),
    "reset": (whole("failed"), proxy(502, "failed", stranded=1), elsewhere("failed")),
    "fin": (whole("failed"), proxy(502, "failed", stranded=1), elsewhere("failed")),
    "garbage": (whole("failed"), proxy(502, "failed", stranded=1), elsewhere("failed")),
    "hang": (proxy(504, "failed"), proxy(504, "failed", stranded=1), proxy(504, "failed", stranded=1)),
    "slow": (whole(), whole(), whole()),
}

# It fails after it has pushed, and the decode engine has not spoken: the same, but what is counted as stranded holds
# nothing (which nobody but the decode engine can know).
PREFILL_PUSHED: dict[str, tuple[Out, Out, Out]] = {
    **dict.fromkeys(CUTS, (whole("failed"), proxy(502, "failed", stranded=1, held=0), elsewhere("failed", held=0))),
    "hang": (
        proxy(504, "failed"),
        proxy(504, "failed", stranded=1, held=0),
        proxy(504, "failed", stranded=1, held=0),
    ),
    "slow": (whole(), whole(), whole()),
}

# The answer is complete and tells other coordinates, or none: that engine will never push what was asked for.
PREFILL_FOREIGN = Out(502, "proxy", stranded=1)

# The decode engine fails; the prefill engine's 200 pays whatever it may hold.
#   alone: there is no other pair     reused: the same on a kept-alive connection
#   reused always: and it fails on a fresh one too     other: another pair
# What dies on a kept-alive connection before any of its head may have died of being kept alive: tried again.
_REFUSAL: Faults = {str(status): (engine(status),) * 4 for status in (400, 422, 429)}
_FAILURE: Faults = {str(status): (engine(status), engine(status), engine(status), whole()) for status in (500, 503)}
_HEADLESS: Faults = dict.fromkeys(CUTS, (proxy(502), whole(), proxy(502), whole()))
_HEADED: Faults = dict.fromkeys(CUTS, (proxy(502), proxy(502), proxy(502), whole()))
_SLOW: Faults = {"slow": (whole(),) * 4}
_SILENT: Faults = {"hang": (proxy(504, "lapsed"),) * 4}
DECODE_UNSAID: dict[str, Faults] = {
    "before_head": _REFUSAL | _FAILURE | _HEADLESS | _SLOW | _SILENT,
    "in_head": _HEADLESS | _SLOW | _SILENT,
    "after_head": _HEADED | _SLOW | _SILENT,
}
_CUT = Out(200, "part", "cut")
_CUT_AFTER_DONE = Out(200, "part+done", "cut")
DECODE_STREAM: dict[str, Faults] = {
    **DECODE_UNSAID,
    "after_head": DECODE_UNSAID["after_head"] | {"sse_error": (engine(500), engine(500), engine(500), whole())},
    "mid_body": dict.fromkeys((*CUTS, "hang"), (_CUT,) * 4) | _SLOW | {"sse_error": (Out(200, "text+error"),) * 4},
    # Its own [DONE] has come and is passed on; that the connection broke before the body's end shows all the same.
    "after_body": dict.fromkeys((*CUTS, "hang"), (_CUT_AFTER_DONE,) * 4) | _SLOW,
    "any": {"extra": (whole(),) * 4},
}
DECODE_WHOLE: dict[str, Faults] = {
    **DECODE_UNSAID,
    "mid_body": _HEADED | _SLOW | _SILENT,
    # Its length was declared, and that many bytes have come.
    "after_body": dict.fromkeys((*CUTS, "hang"), (whole(),) * 4) | _SLOW,
    "any": {"extra": (whole(),) * 4},
}


def prefill_cells() -> Iterator[Cell]:
    for stream in (True, False):
        for what, outs in PREFILL_BEFORE.items():
            for mode, out in zip(("once", "always", "other"), outs, strict=True):
                yield Cell("P", "before_head", what, mode, stream, out)
        for where in ("in_head", "after_head", "mid_body"):
            for what, outs in PREFILL_PUSHED.items():
                for mode, out in zip(("once", "always", "other"), outs, strict=True):
                    yield Cell("P", where, what, mode, stream, out)
                yield Cell("P", where, what, "spoken", stream, whole())
        for what in (*CUTS, "hang", "slow"):
            yield Cell("P", "after_body", what, "always", stream, whole())
        # A kept-alive connection that dies unanswered has carried nothing: the leg goes out again, which is no rescue.
        for what in ("reset", "fin"):
            yield Cell("P", "before_head", what, "reused once", stream, whole())
            yield Cell("P", "before_head", what, "reused always", stream, proxy(502, "failed", stranded=1))
            yield Cell("P", "in_head", what, "reused once", stream, whole("failed"))
        yield Cell("P", "before_head", "garbage", "reused once", stream, whole("failed"))
        for what in ("no_params", "other_params"):
            yield Cell("P", "any", what, "once", stream, PREFILL_FOREIGN)
            yield Cell("P", "any", what, "other", stream, Out(200, "text", stranded=1))
        yield Cell("P", "any", "extra", "reused always", stream, whole())


def decode_cells() -> Iterator[Cell]:
    for stream, table in ((True, DECODE_STREAM), (False, DECODE_WHOLE)):
        for where, faults in table.items():
            for what, outs in faults.items():
                for mode, out in zip(("alone", "reused", "reused always", "other"), outs, strict=True):
                    if what in ("hang", "slow", "extra") and "reused" in mode:
                        continue
                    yield Cell("D", where, what, mode, stream, out)


CELLS = [*prefill_cells(), *decode_cells()]
PATIENT = [cell for cell in CELLS if cell.what == "hang"]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in PATIENT], ids=str)
async def test_a_fault_has_one_outcome_and_leaves_nothing(
    cell: Cell, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch, reused=cell.reused)
    await play(cell, tables)


@pytest.mark.parametrize("party", ["P", "D"])
async def test_what_hangs_ends_at_its_deadline_and_leaves_nothing(
    party: str, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once: they have nothing to do but to wait, and so their deadlines need not be tight."""
    shorten_waits(monkeypatch, reused=False)

    one_at_a_time = trio.Lock()

    async def one(cell: Cell) -> None:
        try:
            await play(cell, tables, one_at_a_time)
        except BaseException as error:
            error.add_note(str(cell))
            raise

    async with trio.open_nursery() as nursery:
        for cell in PATIENT:
            if cell.party == party:
                nursery.start_soon(one, cell)
