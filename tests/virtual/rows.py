"""The verdict table as situations: what the engines and the client do, and what must come of it, seed or no seed.

`stream` and `whole` (an answer in one piece) say where the two differ; everything else is said once.
Deadlines are the defaults': prefill 120 s, first byte 150 s, idle 60 s, settle 120 s, lease 30 s and 2 s more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import trio

from trio_pdproxy.engines.pool import Want as PoolWant
from trio_pdproxy.sim import Fault, SimSettings
from trio_pdproxy.sim.faults import What
from trio_pdproxy.testing import MemoryRig

P400 = b'{"error": {"message": "prefill says no"}}'
D400 = b'{"error": {"message": "decode says no"}}'
PROMPT = "x" * 100
BLOCKS = 7
"""Of one PROMPT: 100 tokens of 16 to the block."""

OK = ("debt=paid",)
FREE = ("debt=none",)


@dataclass(frozen=True, slots=True)
class Want:
    """What must come of it. Lists are per engine and per generation request, in order of arrival."""

    status: int | None = 200
    end: str = "complete"
    outcome: str = "ok"
    dispatches: tuple[str, ...] = OK
    p: tuple[str, ...] = ("complete 200",)
    d: tuple[str, ...] = ("complete 200",)
    stranded: int = 0
    held: int = 0
    says: bytes = b""
    """Somewhere in the body."""
    seconds: tuple[float, float] = (0, 1)
    """How long the client was kept: at least and at most."""
    headers: frozenset[tuple[bytes, bytes]] = frozenset()


PLAIN = SimSettings()

Arrange = Callable[[MemoryRig], None]
Prepare = Callable[[MemoryRig], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    arrange: Arrange
    want: Want
    whole: dict[str, Any] = field(default_factory=dict)
    """Where `want` differs for an answer in one piece."""
    modes: tuple[bool, ...] = (True, False)
    """stream, whole."""
    pairs: tuple[int, int] = (1, 1)
    sim: SimSettings = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    leave_after: float = inf
    prepare: Prepare | None = None
    raced: bool = False
    """Whether decode had said all when its leg was closed is not looked at."""
    warm: bool = False
    """The engines' connections have served before."""

    def wanted(self, stream: bool) -> Want:
        return self.want if stream else replace(self.want, **self.whole)


def p(*faults: Fault, engine: int = 0) -> Arrange:
    return lambda rig: rig.cluster.prefill[engine].faults.faults.extend(_copies(faults))


def d(*faults: Fault, engine: int = 0) -> Arrange:
    return lambda rig: rig.cluster.decode[engine].faults.faults.extend(_copies(faults))


def both(*arrangements: Arrange) -> Arrange:
    def arrange(rig: MemoryRig) -> None:
        for one in arrangements:
            one(rig)

    return arrange


def _copies(faults: tuple[Fault, ...]) -> Iterator[Fault]:
    return (replace(fault, hits=0) for fault in faults)  # each run has a count of its own


def nothing(rig: MemoryRig) -> None:
    pass


def says(status: int, body: bytes | None = None, **more: Any) -> Fault:
    return Fault("before_head", "status", status=status, body=body, **more)


def breaks(what: What, **more: Any) -> Fault:
    return Fault("before_head", what, **more)


def unreachable(role: str, number: int = 0) -> Arrange:
    return lambda rig: rig.network.refusing.add(getattr(rig.cluster, role)[number].port)


def silent(role: str, number: int = 0) -> Arrange:
    return lambda rig: rig.network.silent.add(getattr(rig.cluster, role)[number].port)


async def p_restarts(rig: MemoryRig) -> None:
    """After the decode engine has met it, and nobody has told the proxy."""
    for _ in rig.cluster.prefill:
        await rig.visit(prompt="hello", max_tokens=1)
        await rig.quiet()
    await rig.p.restart()


async def p_restarts_unmet(rig: MemoryRig) -> None:
    await rig.p.restart()


async def side_channel_breaks(rig: MemoryRig) -> None:  # noqa: ASYNC124  one of several
    """Decode's first contact with prefill takes 5 s to fail, and is its own error then."""
    rig.p.core.side_channel_broken.set()


SLOW_P = SimSettings(prefill_base=2.0)
SLOW_D = SimSettings(itl=0.1)

CLIENT_LEAVES = [
    Row(
        "before the decode leg is out",
        silent("decode"),
        Want(None, "left", "disconnect", FREE, (), (), seconds=(1, 1)),
        leave_after=1,
    ),
    Row(
        "before the KV has come",
        nothing,
        Want(None, "left", "disconnect", ("debt=paid settled=disconnect",), d=("aborted 200",), seconds=(1, 1)),
        whole={"d": ("aborted None",)},
        sim=SLOW_P,
        leave_after=1,
    ),
    Row(
        "before the KV of n=2 has come",
        nothing,
        Want(None, "left", "disconnect", ("debt=paid settled=disconnect",), d=("aborted 200",), seconds=(1, 1)),
        whole={"d": ("aborted None",)},
        sim=SLOW_P,
        body={"n": 2},
        leave_after=1,
    ),
    Row(
        "in mid-stream",
        nothing,
        Want(200, "left", "disconnect", OK, d=("aborted 200",), seconds=(1, 1)),
        whole={"status": None, "d": ("aborted None",)},
        sim=SLOW_D,
        body={"max_tokens": 50},
        leave_after=1,
    ),
    Row(
        "while prefill hangs",
        p(breaks("hang")),
        Want(
            None,
            "left",
            "disconnect",
            ("debt=paid rescue=failed:True settled=disconnect",),
            p=("fault None", "complete 200"),
            d=("aborted 200",),
            seconds=(1, 1),
        ),
        whole={"d": ("aborted None",)},
        leave_after=1,
    ),
    Row(
        "while prefill hangs for good",
        p(breaks("hang", times=None)),
        Want(
            None,
            "left",
            "disconnect",
            ("debt=stranded rescue=failed:False settled=disconnect",),
            p=("fault None", "fault None"),
            d=("aborted 200",),
            stranded=1,
            held=BLOCKS,
            seconds=(1, 1),
        ),
        whole={"d": ("aborted None",)},
        leave_after=1,
    ),
]

# The answers of prefill that may be another the next time.
PASSING: list[tuple[str, Fault, str]] = [
    ("429", says(429, P400), "busy"),
    ("503", says(503, P400), "busy"),
    ("500", says(500), "failed"),
    ("302", says(302, P400), "failed"),
    ("a reset", breaks("reset"), "failed"),
    ("garbage", breaks("garbage"), "failed"),
    ("half a head", Fault("in_head", "fin", after_work=True), "failed"),
]


def _seen(fault: Fault) -> str:
    status = fault.status if fault.what == "status" else 200 if fault.where == "in_head" else None
    return f"fault {status}"


def _passing() -> Iterator[Row]:
    for name, fault, why in PASSING:
        if fault.where == "in_head":
            continue  # it has pushed
        seen = _seen(fault)
        seconds = (1.0, 2.0) if why == "busy" else (0.0, 0.1)
        yield Row(
            f"{name} once",
            p(fault),
            Want(dispatches=(f"debt=paid rescue={why}:True",), p=(seen, "complete 200"), seconds=seconds),
        )
        status = fault.status if fault.status in (429, 503) else 502
        stranded = f"debt=stranded rescue={why}:False"
        yield Row(
            f"{name} for good",
            p(replace(fault, times=None)),
            Want(
                status,
                outcome="overloaded" if status in (429, 503) else "prefill_error",
                dispatches=(stranded,),
                p=(seen, seen),
                d=("aborted 200",),
                stranded=1,
                held=BLOCKS,
                seconds=seconds,
                says=P400 if status in (429, 503) else b'"code":"prefill_failed"',
            ),
            whole={"d": ("aborted None",)},
        )
        yield Row(
            f"{name} for good, and another pair",
            p(replace(fault, times=None)),
            Want(
                dispatches=(stranded, *OK), p=(seen, seen), d=("aborted 200",), stranded=1, held=BLOCKS, seconds=seconds
            ),
            whole={"d": ("aborted None",)},
            pairs=(2, 2),
        )


PREFILL_REFUSES = [
    Row(
        "once",
        p(says(400, P400)),
        Want(dispatches=("debt=paid rescue=rejected:True",), p=("fault 400", "complete 200"), seconds=(1, 1.1)),
    ),
    Row(
        "for good",
        p(says(400, P400, times=None)),
        Want(
            400,
            outcome="client_error",
            dispatches=("debt=stranded rescue=rejected:False",),
            p=("fault 400", "fault 400"),
            d=("aborted 200",),
            stranded=1,
            held=BLOCKS,
            says=P400,
            seconds=(1, 1.1),
        ),
        whole={"d": ("aborted None",)},
    ),
    Row(
        "and decode half a second later",
        both(p(says(400, P400, times=None)), d(says(422, D400, delay=0.5))),
        Want(422, outcome="client_error", dispatches=FREE, p=("fault 400",), d=("fault 422",), says=D400),
    ),
]

_LATE = Want(
    504,
    outcome="timeout",
    dispatches=("debt=paid settled=timeout",),
    p=("fault 200",),
    d=("aborted 200",),
    seconds=(120, 120),
)

PREFILL_FAILS_LATER = [
    Row(
        "after its push",
        p(Fault("before_head", "reset", after_work=True, delay=0.5)),
        Want(dispatches=OK, p=("fault None",), seconds=(0.9, 1.1)),
        whole={"dispatches": ("debt=paid rescue=failed:True",), "p": ("fault None", "complete 200")},
        sim=SLOW_D,
        body={"max_tokens": 11},
    ),
    Row(
        "its connection is refused",
        unreachable("prefill"),
        Want(502, outcome="prefill_error", dispatches=FREE, p=(), d=(), says=b'"code":"prefill_failed"'),
    ),
    Row(
        "its connection is refused, and another pair",
        unreachable("prefill"),
        Want(dispatches=("debt=none", "debt=paid"), p=(), d=()),
        pairs=(2, 2),
    ),
    Row(
        "its connection never comes",
        silent("prefill"),
        Want(502, outcome="prefill_error", dispatches=FREE, p=(), d=(), seconds=(5, 5)),
    ),
    Row(
        "it hangs",
        p(breaks("hang")),
        Want(
            504,
            outcome="timeout",
            dispatches=("debt=paid rescue=failed:True settled=timeout",),
            p=("fault None", "complete 200"),
            d=("aborted 200",),
            seconds=(120, 120),
        ),
        whole={"d": ("aborted None",)},
    ),
    Row(
        "it hangs for good",
        p(breaks("hang", times=None)),
        Want(
            504,
            outcome="timeout",
            dispatches=("debt=stranded rescue=failed:False settled=timeout",),
            p=("fault None", "fault None"),
            d=("aborted 200",),
            stranded=1,
            held=BLOCKS,
            seconds=(120, 120),
        ),
        whole={"d": ("aborted None",)},
    ),
    Row("it answers late", p(breaks("slow", delay=150)), _LATE, whole={"d": ("aborted None",)}),
    Row("it answers in the instant it is late", p(breaks("slow", delay=120 - 0.002)), _LATE),
    Row(
        "it answers without coordinates, but pushes",
        p(Fault("before_head", "no_params")),
        Want(p=("fault 200",)),
        sim=SimSettings(itl=0.01),
        modes=(True,),
    ),
    Row(
        "it answers only after the answer is over",
        p(breaks("hang", after_work=True)),
        Want(p=("fault None",), seconds=(0, 0.1)),
    ),
    Row(
        "it was restarted",
        nothing,
        Want(
            502,
            outcome="prefill_error",
            dispatches=("debt=stranded",),
            p=("complete 200", "complete 200"),
            d=("complete 200", "aborted 200"),
            stranded=1,
            held=BLOCKS,
        ),
        whole={"d": ("complete 200", "aborted None")},
        prepare=p_restarts,
    ),
    Row(
        "it was restarted, and another pair",
        nothing,
        Want(
            dispatches=("debt=stranded", "debt=paid"),
            p=("complete 200", "complete 200"),
            d=("complete 200", "aborted 200"),
            stranded=1,
            held=BLOCKS,
        ),
        whole={"d": ("complete 200", "aborted None")},
        pairs=(2, 2),
        settings={"health_interval": 3600},
        prepare=p_restarts,
    ),
    Row(
        "it was restarted and decode cannot shake hands",
        nothing,
        Want(500, outcome="decode_error", dispatches=FREE),
        whole={"d": ("complete 500",)},
        prepare=p_restarts_unmet,
    ),
    Row(
        "it was restarted and decode cannot shake hands, in one instant",
        nothing,
        Want(500, outcome="decode_error", dispatches=FREE),
        whole={"d": ("complete 500",)},
        prepare=p_restarts_unmet,
        sim=SimSettings(prefill_base=0),
        raced=True,
    ),
    Row(
        "busy on a kept-alive connection, then resets",
        p(says(503, P400), breaks("reset", times=None)),
        Want(
            503,
            outcome="overloaded",
            dispatches=("debt=stranded rescue=busy:False",),
            p=("fault 503", "fault None"),
            d=("aborted 200",),
            stranded=1,
            held=BLOCKS,
            seconds=(1, 2),
        ),
        whole={"d": ("aborted None",)},
        warm=True,
    ),
]


def _second(fault: Fault) -> tuple[Fault, Fault]:
    """Nothing the first time, `fault` from then on."""
    return breaks("slow"), replace(fault, times=None)


AT_WORK = SimSettings(itl=10)

LEASE_LAPSES = [
    Row(
        "decode comes later",
        d(breaks("slow", delay=40)),
        Want(
            dispatches=("debt=paid rescue=lapsed:True",),
            p=("complete 200", "complete 200"),
            d=("fault 200",),
            seconds=(39, 41),
        ),
    ),
    Row(
        "decode never comes",
        d(breaks("hang")),
        Want(
            504,
            outcome="timeout",
            dispatches=("debt=stranded rescue=lapsed:True",),  # it may have come after the second lease
            p=("complete 200", "complete 200"),
            d=("fault None",),
            stranded=1,
            seconds=(150, 150),
        ),
        whole={"seconds": (3600, 3600), "dispatches": ("debt=paid rescue=lapsed:True",), "stranded": 0},
    ),
    Row(
        "decode comes later and the rescue fails",
        both(p(*_second(says(500))), d(breaks("slow", delay=40))),
        Want(
            504,
            outcome="timeout",
            dispatches=("debt=stranded rescue=lapsed:False",),
            p=("fault 200", "fault 500"),
            d=("fault 200",),
            stranded=1,
            held=BLOCKS,
            seconds=(150, 150),
        ),
        whole={"seconds": (3600, 3600), "d": ("fault None",)},
    ),
    Row(
        "decode comes after the rescue has lapsed too",
        d(breaks("slow", delay=70)),
        Want(
            504,
            outcome="timeout",
            dispatches=("debt=stranded rescue=lapsed:True",),
            p=("complete 200", "complete 200"),
            d=("fault 200",),
            stranded=1,
            held=BLOCKS,
            seconds=(150, 150),
        ),
        modes=(True,),
    ),
    Row(
        "decode is at work",
        nothing,
        Want(
            dispatches=("debt=paid rescue=lapsed:True",),
            p=("complete 200", "complete 200"),
            seconds=(189, 191),
        ),
        sim=AT_WORK,
        body={"max_tokens": 20},
        modes=(False,),
    ),
    Row(
        "decode is at work and the rescue fails",
        p(*_second(says(503))),
        Want(
            dispatches=("debt=paid rescue=lapsed:False",),
            p=("fault 200", "fault 503"),
            seconds=(189, 191),
        ),
        sim=AT_WORK,
        body={"max_tokens": 20},
        modes=(False,),
    ),
    Row(
        "decode is at work and the rescue hangs",
        p(*_second(breaks("hang"))),
        Want(
            dispatches=("debt=paid rescue=lapsed:False",),
            p=("fault 200", "fault None"),
            seconds=(189, 191),
        ),
        sim=AT_WORK,
        body={"max_tokens": 20},
        modes=(False,),
    ),
    Row(
        "decode is at work and the client leaves",
        nothing,
        Want(
            None,
            "left",
            "disconnect",
            dispatches=("debt=paid rescue=lapsed:True",),
            p=("complete 200", "complete 200"),
            d=("aborted None",),
            seconds=(150, 150),
        ),
        sim=AT_WORK,
        body={"max_tokens": 20},
        modes=(False,),
        leave_after=150,
    ),
]

DECODE_FAILS = [
    Row(
        "4xx",
        d(says(422, D400)),
        Want(422, outcome="client_error", dispatches=FREE, p=("aborted None",), d=("fault 422",), says=D400),
        sim=SLOW_P,
    ),
    Row(
        "5xx",
        d(says(500)),
        Want(500, outcome="decode_error", dispatches=FREE, p=("aborted None",), d=("fault 500",)),
        sim=SLOW_P,
    ),
    Row(
        "5xx, and another pair",
        d(says(500)),
        Want(dispatches=("debt=none", "debt=paid"), p=("aborted None",), d=("fault 500",), seconds=(2, 2.1)),
        sim=SLOW_P,
        pairs=(2, 2),
    ),
    Row(
        "its first event is an error",
        nothing,
        Want(500, outcome="decode_error", dispatches=FREE, p=("aborted None",), seconds=(5, 5.1)),
        whole={"d": ("complete 500",)},
        sim=SimSettings(prefill_base=9),
        prepare=side_channel_breaks,
    ),
    Row(
        "its connection is refused",
        unreachable("decode"),
        Want(502, outcome="decode_error", dispatches=FREE, p=(), d=(), says=b'"code":"decode_failed"'),
    ),
    Row(
        "its connection is refused, and another pair",
        unreachable("decode"),
        Want(dispatches=("debt=none", "debt=paid"), p=(), d=()),
        pairs=(2, 2),
    ),
    Row(
        "a stall in mid-stream",
        d(Fault("mid_body", "hang", after=2)),
        Want(
            200,
            "cut",
            "cut",
            d=("fault 200",),
            says=b'"code":"stream_broken"',
            seconds=(60, 61),
        ),
        modes=(True,),
    ),
    Row(
        "its own error in mid-stream",
        d(Fault("mid_body", "sse_error", after=2)),
        Want(200, outcome="decode_error", d=("fault 200",), says=b'"error"'),
        modes=(True,),
    ),
]

_DECODE_BREAKS: list[What] = ["reset", "fin", "garbage"]


def _decode_breaks() -> Iterator[Row]:
    for what in _DECODE_BREAKS:
        yield Row(
            f"{what} before an answer",
            d(breaks(what)),
            Want(
                502,
                outcome="decode_error",
                dispatches=("debt=paid settled=decode_failed",),
                d=("fault None",),
                says=b'"code":"decode_failed"',
            ),
            sim=SLOW_P,
        )
        yield Row(
            f"{what} before an answer, and another pair",
            d(breaks(what)),
            Want(
                dispatches=("debt=paid settled=decode_failed", "debt=paid"),
                d=("fault None",),
                seconds=(2, 2.1),
            ),
            sim=SLOW_P,
            pairs=(2, 2),
        )
        yield Row(
            f"{what} after its head",
            d(Fault("after_head", what)),
            Want(502, outcome="decode_error", dispatches=("debt=paid settled=decode_failed",), d=("fault 200",)),
            sim=SLOW_P,
            modes=(True,),
        )
        yield Row(
            f"{what} in mid-stream",
            d(Fault("mid_body", what, after=2)),
            Want(200, "cut", "cut", d=("fault 200",), says=b'"code":"stream_broken"'),
            whole={"status": 502, "end": "complete", "outcome": "decode_error", "says": b'"code":"decode_failed"'},
        )


_P_TIES: list[tuple[str, Fault]] = [
    ("400", says(400, P400, delay=0.5)),
    ("429", says(429, P400, delay=0.5)),
    ("503", says(503, P400, delay=0.5)),
    ("500", says(500, delay=0.5)),
    ("reset", breaks("reset", delay=0.5)),
]
_D_TIES: list[tuple[str, Fault]] = [
    ("422", says(422, D400, delay=0.5)),
    ("500", says(500, D400, delay=0.5)),
    ("reset", breaks("reset", delay=0.5)),
]


def _ties() -> Iterator[Row]:
    """Both fail in the same instant. The rank: decode's 4xx, prefill's 4xx, what decode failed of."""
    for pn, pf in _P_TIES:
        for dn, df in _D_TIES:
            rescue = {"400": "rejected", "429": "busy", "503": "busy"}.get(pn, "failed")
            rescued = dn == "reset"
            want = Want(
                422 if dn == "422" else 400 if pn == "400" else 500 if dn == "500" else 502,
                outcome="client_error" if dn == "422" or pn == "400" else "decode_error",
                dispatches=(f"debt=paid rescue={rescue}:True settled=decode_failed",) if rescued else FREE,
                p=(_seen(pf), "complete 200") if rescued else (_seen(pf),),
                d=(_seen(df),),
                says=D400
                if dn == "422"
                else P400
                if pn == "400"
                else D400
                if dn == "500"
                else b"decode engine decode-0",
            )
            yield Row(f"prefill {pn}, decode {dn}", both(p(pf), d(df)), want)


ONE_PLACE = {"prefill_max_inflight": 1, "decode_max_inflight": 1}

NOBODY = [
    Row(
        "prefill is down",
        nothing,
        Want(503, outcome="proxy_error", dispatches=(), p=(), d=(), says=b"no usable prefill engine"),
        prepare=lambda rig: _down(rig, "prefill"),
    ),
    Row(
        "decode is down",
        nothing,
        Want(503, outcome="proxy_error", dispatches=(), p=(), d=(), says=b"no usable decode engine"),
        prepare=lambda rig: _down(rig, "decode"),
    ),
    Row(
        "the queue is full",
        nothing,
        Want(429, outcome="overloaded", dispatches=(), p=(), d=(), says=b'"code":"queue_full"'),
        settings={**ONE_PLACE, "queue_size": 0},
        prepare=lambda rig: busy(rig, 1),
    ),
    Row(
        "no place comes free in time",
        nothing,
        Want(429, outcome="overloaded", dispatches=(), p=(), d=(), says=b'"code":"queue_timeout"', seconds=(30, 30)),
        settings=ONE_PLACE,
        prepare=lambda rig: busy(rig, 40),
    ),
    Row(
        "a place comes free in time",
        nothing,
        Want(seconds=(20, 21)),
        settings=ONE_PLACE,
        prepare=lambda rig: busy(rig, 20),
    ),
]


async def busy(rig: MemoryRig, seconds: float) -> None:
    """The only place is taken, and given back after `seconds`."""
    taken = await rig.app.pool.take(PoolWant(pair=True))

    async def give_back() -> None:
        await trio.sleep(seconds)
        for engine in taken:
            rig.app.pool.give_back(engine)

    rig.core.start_soon(give_back)


async def _down(rig: MemoryRig, role: str) -> None:
    engine = getattr(rig.cluster, role)[0]
    seen = getattr(rig.app.pool, role)[0]
    await engine.kill()
    seen.poked.set()
    await rig.until(lambda: not seen.usable)


TABLE: dict[str, list[Row]] = {
    "all is well": [Row("plain", nothing, Want()), Row("n=2", nothing, Want(), body={"n": 2})],
    "the client leaves": CLIENT_LEAVES,
    "prefill fails in passing": list(_passing()),
    "prefill refuses": PREFILL_REFUSES,
    "prefill fails": PREFILL_FAILS_LATER,
    "the lease lapses": LEASE_LAPSES,
    "decode fails": DECODE_FAILS,
    "decode breaks": list(_decode_breaks()),
    "both fail at once": list(_ties()),
    "nobody is there": NOBODY,
}

ROWS = [(f"{chapter}: {row.name}", row) for chapter, rows in TABLE.items() for row in rows]
CASES = [(f"{name}, {'stream' if s else 'whole'}", row, s) for name, row in ROWS for s in row.modes]
