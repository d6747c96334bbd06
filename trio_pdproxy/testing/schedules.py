"""One scenario on many schedules: trio shuffles what may run next, and the seed says how.

A verdict that depends on which of two tasks was scheduled first is a bug that a run in ten thousand shows. Here
it shows in a dozen: each seed is another order, replayable, and all of them have to have one outcome (I5).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from trio_pdproxy.core.errors import only
from trio_pdproxy.core.report import DispatchReport
from trio_pdproxy.sim import SeenRequest
from trio_pdproxy.testing.memory import MemoryRig, Visit

T = TypeVar("T")

SEEDS = range(12)


def run_seeded(
    scenario: Callable[[], Awaitable[T]], seed: int, *, instruments: Sequence[trio.abc.Instrument] = ()
) -> T:
    """`scenario` on virtual time, its tasks scheduled in the order that `seed` stands for; the same one every time.

    An AssertionError that comes in a group of its own is raised as itself.
    """
    runner: Any = trio._core._run
    before, state = runner._ALLOW_DETERMINISTIC_SCHEDULING, runner._r.getstate()
    runner._ALLOW_DETERMINISTIC_SCHEDULING = True
    runner._r.seed(seed)
    try:
        return trio.run(scenario, clock=MockClock(autojump_threshold=0), instruments=instruments)
    except BaseExceptionGroup as group:
        if (error := only(group, AssertionError)) is None:
            raise
        raise error from None
    finally:
        runner._ALLOW_DETERMINISTIC_SCHEDULING = before
        runner._r.setstate(state)


def one_outcome(scenario: Callable[[], Awaitable[T]], seeds: Iterable[int] = SEEDS) -> T:
    """What `scenario` returns, which has to be the same on every seed."""
    first: tuple[int, T] | None = None
    for seed in seeds:
        outcome = run_seeded(scenario, seed)
        if first is None:
            first = (seed, outcome)
        assert outcome == first[1], f"seed {seed} differs from seed {first[0]}:\n{outcome}\n{first[1]}"
    assert first is not None, "no seeds"
    return first[1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that must not depend on the schedule, ids masked."""

    status: int | None
    end: str
    raw: bytes
    outcome: str
    dispatches: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    """What each engine saw, per generation request: how it ended, its status."""
    stranded: int
    held: int
    """Blocks still held by decode engines."""
    metrics: tuple[str, ...]


def outcome_of(rig: MemoryRig, visit: Visit) -> Outcome:
    """The outcome of the request that ended last. Ask once the rig is quiet."""
    report = rig.report
    return Outcome(
        status=visit.status,
        end=visit.end,
        raw=masked(visit.raw),
        outcome=report.outcome,
        dispatches=tuple(_dispatch(d) for d in report.dispatches),
        engines={
            e.name: tuple(f"{r.how} {r.status}" for r in e.requests if not _is_probe(r)) for e in rig.cluster.engines
        },
        stranded=sum(e.stranded for e in rig.app.pool.decode),
        held=sum(e.blocks_held for e in rig.cluster.decode),
        metrics=_counters(rig),
    )


_RANDOM = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}")
_CREATED = re.compile(rb'"created(_at)?":\d+')


def masked(raw: bytes) -> bytes:
    """`raw` without what differs between two runs: ids and times of day."""
    return _CREATED.sub(b'"created":0', _RANDOM.sub(b"<id>", raw))


def _is_probe(seen: SeenRequest) -> bool:
    """The proxy's own one-token question to a prefill engine: no leg, no transfer id."""
    transfer = seen.transfer or {}
    return bool(transfer.get("do_remote_decode")) and "transfer_id" not in transfer


def _dispatch(d: DispatchReport) -> str:
    rescue = f" rescue={d.rescue}:{d.rescue_paid}" if d.rescue else ""
    settled = f" settled={d.settled}" if d.settled else ""
    return f"debt={d.debt.value}{rescue}{settled}"


# Not those of legs: a leg that is cancelled the moment before it fails did not fail.
_METRICS = tuple(
    f"pdproxy_{name}_total" for name in ("requests", "client_disconnects", "rescues", "settled", "stranded")
)


def _counters(rig: MemoryRig) -> tuple[str, ...]:
    """Every counter that must not depend on the schedule and is not 0."""
    return tuple(
        f"{sample.name}{sorted(sample.labels.items())} {sample.value:g}"
        for name in _METRICS
        for family in rig.app.metrics.registry.restricted_registry([name]).collect()
        for sample in family.samples
        if sample.value
    )
