"""What becomes of a request: the verdict as a table over what both legs have done.

The exchange keeps the facts of a dispatch (`Facts`) and asks `decide` whenever one has changed. The answer has
two halves: the `Step` for the client and the `Debt` towards the decode engine. Both are functions of the set of
facts, never of the order in which they came, so every schedule gives the same outcome.

The debt. From the moment a decode engine has accepted a decode leg until the prefill engine's push arrives, it
holds KV blocks that nothing but the push releases (measured on vLLM 0.32: neither closing its connection nor a
timeout of its own does). So a prefill leg is carried to its 200 whoever has left and whatever has failed, unless
the decode engine is proven to hold nothing: no byte of its leg was sent, it refused the connection, it answered
4xx or 5xx itself, or its first event was its own error. A reset or a timeout proves nothing.
A prefill leg that failed is sent once more with the same ids (the rescue): any 200 makes the push happen. What
cannot be paid so is stranded, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple


class _Word(Enum):
    """Enum's own hash is Python's, of the name; a member is one of a kind, and every request looks some up."""

    __hash__ = object.__hash__


class Prefill(_Word):
    """What the prefill leg has come to."""

    UNSENT = "unsent"
    """Nothing is on the wire, and it did not fail: the other leg's connection was asked for first."""
    REFUSED = "refused"
    """The engine did not accept a connection: nothing was sent."""
    PENDING = "pending"
    """Sent (or being sent again), no answer yet."""
    LATE = "late"
    """Still no answer at its deadline; the leg is carried on."""
    OK = "ok"
    """200 with the coordinates the decode engine was given: the push happens or has happened."""
    FOREIGN = "foreign"
    """200 with other coordinates, or none: this engine will never push."""
    REJECTED = "rejected"
    """4xx but 429: the engine finds the request itself wrong."""
    BUSY = "busy"
    """429 or 503."""
    FAILED = "failed"
    """Any other status, a reset, a broken answer, or no answer at the last deadline."""


class Decode(_Word):
    """What the decode leg has come to."""

    UNSENT = "unsent"
    REFUSED = "refused"
    WAITING = "waiting"
    """Sent (one byte is enough); nothing of its body has come."""
    REJECTED = "rejected"
    """4xx."""
    FAILED = "failed"
    """5xx or another status that is no answer, or its first event is its own error."""
    BROKEN = "broken"
    """Reset, end of stream, no HTTP, or a gateway's 5xx, before the first body byte."""
    LATE = "late"
    """Silent at the first-byte deadline."""
    SPEAKING = "speaking"
    """Its first body byte is there."""
    CUT = "cut"
    """Broken after its first body byte."""
    DONE = "done"


class Step(_Word):
    """What the client gets."""

    WAIT = "wait"
    """Nothing yet: the decode engine may still speak."""
    RELAY = "relay"
    """The decode engine's bytes."""
    END = "end"
    """The clean end of them."""
    DECODE_ANSWER = "decode_answer"
    """The decode engine's refusal, verbatim."""
    PREFILL_ANSWER = "prefill_answer"
    """The prefill engine's refusal, verbatim."""
    ANOTHER_PAIR = "another_pair"
    """The same from another pair with fresh ids, or what `Verdict.instead` says when there is none."""
    FAIL = "fail"
    """What `Verdict.instead` says."""
    CUT = "cut"
    """A stream that visibly does not end: an error event if it is SSE, then no clean end."""


class Debt(_Word):
    """What is owed to the decode engine."""

    NONE = "none"
    """Nothing, proven: the prefill leg may end at once."""
    PAID = "paid"
    """Nothing any more: the push has come, or surely comes."""
    CARRY = "carry"
    """The prefill leg is carried on to its answer."""
    RESCUE = "rescue"
    """The prefill leg has to be sent again."""
    STRANDED = "stranded"
    """It can no longer be paid."""


class Instead(Enum):
    """The error that stands where no other pair is left; the value is its status where we name it."""

    PREFILL_SAID = "prefill_said"
    """The prefill engine's own 429 or 503, with its Retry-After; 502 for its other failures."""
    DECODE_SAID = "decode_said"
    """The decode engine's own 5xx; 502 where it named none."""
    BAD_GATEWAY = "502"
    TIMEOUT = "504"
    UNAVAILABLE = "503"


class Facts(NamedTuple):
    """All that the verdict depends on."""

    prefill: Prefill
    decode: Decode
    rescued: bool = False
    """The one rescue of this dispatch is spent (running: prefill is PENDING again)."""
    lapsed: bool = False
    """The prefill engine's lease may have ended before the decode engine asked: its 200 is older than lease
    and margin, and the decode engine is silent. A rescue that answers 200 clears it; one that fails leaves
    prefill OK, for a decode engine may be silent just because it is at work (non-stream)."""
    several: bool = False
    """More than one transfer belongs to the dispatch: the first body byte does not prove the last push, and
    one sequence's error proves nothing of the others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    step: Step
    debt: Debt
    instead: Instead | None = None


# The client's half: prefill x decode, before anything was committed, decode leg still silent.
_SILENT: dict[Prefill, tuple[Step, Instead | None]] = {
    Prefill.UNSENT: (Step.WAIT, None),
    Prefill.REFUSED: (Step.ANOTHER_PAIR, Instead.BAD_GATEWAY),
    Prefill.PENDING: (Step.WAIT, None),
    Prefill.LATE: (Step.FAIL, Instead.TIMEOUT),
    Prefill.OK: (Step.WAIT, None),
    Prefill.FOREIGN: (Step.ANOTHER_PAIR, Instead.BAD_GATEWAY),
    Prefill.REJECTED: (Step.PREFILL_ANSWER, None),
    Prefill.BUSY: (Step.ANOTHER_PAIR, Instead.PREFILL_SAID),
    Prefill.FAILED: (Step.ANOTHER_PAIR, Instead.PREFILL_SAID),
}

# The client's half once the decode leg has come to something. A client's fault (either engine's 4xx) is ranked above
# every failure: no other pair would judge it otherwise. The decode engine's 4xx is preferred to the prefill engine's
# because it judged the request as the client wrote it, and because it needs no waiting for the other.
_DECIDED: dict[Decode, tuple[Step, Instead | None]] = {
    Decode.REFUSED: (Step.ANOTHER_PAIR, Instead.BAD_GATEWAY),
    Decode.REJECTED: (Step.DECODE_ANSWER, None),
    Decode.FAILED: (Step.ANOTHER_PAIR, Instead.DECODE_SAID),
    Decode.BROKEN: (Step.ANOTHER_PAIR, Instead.BAD_GATEWAY),
    Decode.LATE: (Step.FAIL, Instead.TIMEOUT),
    Decode.SPEAKING: (Step.RELAY, None),
    Decode.CUT: (Step.CUT, None),
    Decode.DONE: (Step.END, None),
}

# What failed before the first body byte and is outranked by the prefill engine's word on the request itself.
_OUTRANKED = frozenset({Decode.REFUSED, Decode.FAILED, Decode.BROKEN, Decode.LATE})

# The decode engine holds nothing, proven. With several sequences a 5xx speaks for one of them only.
_PROOF = frozenset({Decode.UNSENT, Decode.REFUSED, Decode.REJECTED})

# A failed leg that a second one with the same ids may still make good.
_RESCUABLE = frozenset({Prefill.REFUSED, Prefill.REJECTED, Prefill.BUSY, Prefill.FAILED})


@cache
def decide(facts: Facts) -> Verdict:
    """The verdict on these facts. Total: every combination has one, of some hundreds."""
    debt = _debt(facts)
    step, instead = _step(facts)
    # While a rescue can still bring the decode engine's answer, that is what the client waits for.
    if debt is Debt.RESCUE and facts.decode is Decode.WAITING:
        return Verdict(Step.WAIT, debt)
    return Verdict(step, debt, instead)


def _step(facts: Facts) -> tuple[Step, Instead | None]:
    if facts.decode in (Decode.UNSENT, Decode.WAITING):
        return _SILENT[facts.prefill]
    if facts.prefill is Prefill.REJECTED and facts.decode in _OUTRANKED:
        return Step.PREFILL_ANSWER, None
    return _DECIDED[facts.decode]


def _debt(facts: Facts) -> Debt:  # noqa: PLR0911 -- one line a rule
    if facts.decode in _PROOF or (facts.decode is Decode.FAILED and not facts.several):
        return Debt.NONE
    if facts.decode is Decode.DONE or (facts.decode in (Decode.SPEAKING, Decode.CUT) and not facts.several):
        return Debt.PAID  # it cannot speak before its KV has come
    match facts.prefill:
        case Prefill.OK:
            if not facts.lapsed:
                return Debt.PAID
            return Debt.STRANDED if facts.rescued else Debt.RESCUE
        case Prefill.UNSENT | Prefill.PENDING | Prefill.LATE:
            return Debt.CARRY
        case Prefill.FOREIGN:
            return Debt.STRANDED
        case _:
            return Debt.STRANDED if facts.rescued else Debt.RESCUE
