"""Cancelling at every step: what a request leaves behind must not depend on where it was when its client left.

A step is one run of one of the request's tasks between two waits. `StepTrap` counts them and does a deed at the n-th,
either just after it (the task is blocked, and is taken out of its wait) or just before it (what it waited for has
come, and it gets to know of the cancellation at its next wait). Between them these are all the places where a
cancellation can be delivered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import trio

from trio_pdproxy.core.report import DispatchReport
from trio_pdproxy.core.verdict import Debt
from trio_pdproxy.testing.memory import MemoryRig
from trio_pdproxy.testing.tasks import Tree, grown

When = Literal["blocked", "woken"]
Root = Callable[[trio.lowlevel.Task], bool]

LIMIT = 2000
"""Steps no request of a test takes: a sweep that gets here never ends."""


class StepTrap(trio.abc.Instrument):
    """Does `deed` at the n-th step of the tasks below a root. Set with `arm`, for one request at a time."""

    def __init__(self, when: When) -> None:
        self.when = when
        self.sprung = False
        self.failure: BaseException | None = None
        """What the deed raised: trio would drop it, and the instrument with it."""
        self._deed: Callable[[], None] | None = None
        self._left = 0
        self._below: Root = lambda task: False
        self._known: dict[trio.lowlevel.Task, bool] = {}

    def arm(self, below: Root, step: int, deed: Callable[[], None]) -> None:
        """`below` says of a task once whether it is one of the request's."""
        self._below, self._left, self._deed = below, step, deed
        self._known = {}
        self.sprung = False

    def disarm(self) -> bool:
        """Whether that step was reached."""
        self._deed = None
        if self.failure is not None:
            raise self.failure
        return self.sprung

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._deed is None:
            return
        if task not in self._known:
            self._known[task] = self._below(task)
        if self.when == "woken":
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._deed is not None and self.when == "blocked":
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if not self._known.get(task, False):
            return
        self._left -= 1
        if self._left == 0 and self._deed is not None:
            deed, self._deed, self.sprung = self._deed, None, True
            try:
                deed()
            except BaseException as error:  # noqa: ASYNC103  nothing can be cancelled in here
                self.failure = error


@dataclass(slots=True)
class Swept:
    """What a sweep did."""

    injected: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each leftover, with the step at which the cancellation came."""


Cut = Callable[[MemoryRig, StepTrap, int], Awaitable[None]]
"""Make one request, with the trap armed for that step; returns when the client's side of it is over."""


async def sweep(
    rig: MemoryRig,
    trap: StepTrap,
    cut: Cut,
    *,
    prepare: Callable[[MemoryRig], Awaitable[None]],
    strands: bool = False,
) -> Swept:
    """Cancel a request at its first step, at its second, ... until one ends before its step is reached.

    `prepare` sets the scene before each, and leaves nothing busy that is not part of it. `strands`: its debt
    may be beyond paying; else none may be left.
    """
    swept = Swept()
    for step in range(1, LIMIT):
        await prepare(rig)
        scene = _Scene(rig)
        await cut(rig, trap, step)
        reached = trap.disarm()
        try:
            await rig.ended()
        except AssertionError as error:
            swept.wrong.append(f"step {step}: {error}")
            return swept
        swept.wrong += [f"step {step}: {what}" for what in scene.left_behind(strands)]
        if not reached:
            return swept
        swept.injected += 1
    raise AssertionError("a request without end")


class _Scene:
    """What there was before a request, to be compared with what there is after it."""

    def __init__(self, rig: MemoryRig) -> None:
        self._rig = rig
        self._tasks: Tree = rig.tasks()
        self._requests = [len(engine.requests) for engine in rig.cluster.engines]
        self._held = _held(rig)
        self._stranded = _stranded(rig)
        self._last = rig.app.recent[-1] if rig.app.recent else None

    def left_behind(self, strands: bool) -> list[str]:
        rig = self._rig
        wrong = [f"task {path}" for path in grown(self._tasks, rig.tasks())]
        for engine, seen in zip(rig.cluster.engines, self._requests, strict=True):
            wrong += [
                f"{engine.name} does not know that its request is over"
                for request in engine.requests[seen:]
                if request.how == "running"
            ]
        report = rig.app.recent[-1] if rig.app.recent else None
        dispatches = report.dispatches if report is not None and report is not self._last else []
        stranded = {d.id for d in dispatches if d.debt is Debt.STRANDED}
        held = {_dispatch_of(name, dispatches) for name in _held(rig) - self._held}
        if held - stranded:
            wrong.append(f"blocks of {held - stranded}, which nobody counted as stranded")
        known = {r.id for e in rig.cluster.decode for r in e.requests}
        if (stranded & known) - held:
            wrong.append(f"{(stranded & known) - held} counted as stranded, but nothing is held")
        if stranded and not strands:
            wrong.append(f"stranded: {[d.reason for d in dispatches]}")
        if _stranded(rig) - self._stranded != len(stranded):
            wrong.append(f"{_stranded(rig) - self._stranded} counted as stranded, {len(stranded)} reported")
        if report is not None and report is not self._last and report.ended is None:
            wrong.append("a report without an end")
        return wrong


def _held(rig: MemoryRig) -> set[str]:
    return {name for engine in rig.cluster.decode if engine.blocks_held for name in engine.core.pool.held}


def _stranded(rig: MemoryRig) -> int:
    return sum(engine.stranded for engine in rig.app.pool.decode)


def _dispatch_of(name: str, dispatches: list[DispatchReport]) -> str:
    """An engine's own request id holds the dispatch's."""
    return next((d.id for d in dispatches if d.id in name), name)
