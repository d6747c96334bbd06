"""Ways in which a request is given up, each at a given step of its tasks: for `sweep`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from trio_pdproxy.core.plan import APIS, read_plan
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.wire import Headers
from trio_pdproxy.exchange import run_exchange
from trio_pdproxy.testing.memory import HOST, PORT, MemoryRig
from trio_pdproxy.testing.sweep import Cut, StepTrap
from trio_pdproxy.testing.tasks import is_below


def client_closes(**body: object) -> Cut:
    """The client closes its connection; whichever task reads from it gets to know."""

    async def cut(rig: MemoryRig, trap: StepTrap, step: int) -> None:
        def close() -> None:
            rig.network.last[HOST, PORT].close_now()  # the one that is there by then

        trap.arm(_served_by(rig), step, close)
        await rig.visit(**body)  # type: ignore[arg-type]

    return cut


def server_cancels(**body: object) -> Cut:
    """The connection's task is cancelled, as at the end of a server's grace."""

    async def cut(rig: MemoryRig, trap: StepTrap, step: int) -> None:
        trap.arm(_served_by(rig), step, rig.cancel_connections)
        await rig.visit(**body)  # type: ignore[arg-type]

    return cut


def scope_cancelled(**body: object) -> Cut:
    """`run_exchange` as a library's user calls it, in a scope that is cancelled."""

    async def cut(rig: MemoryRig, trap: StepTrap, step: int) -> None:
        members = {"model": "sim", "prompt": "hello", **body}
        path = str(members.pop("path", "/v1/completions"))
        plan = read_plan(APIS[path], msgspec.json.encode(members), [(b"content-type", b"application/json")])
        report = Report(request_id="swept", route=plan.api.path, stream=plan.stream, accepted=trio.current_time())

        async def exchange() -> None:  # in a task of its own, so that nothing else is below it
            own = trio.lowlevel.current_task()
            with trio.CancelScope() as scope:
                trap.arm(lambda task: is_below(task, own), step, scope.cancel)
                await run_exchange(plan, rig.app.pool, MemorySink(), report)

        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  for the task
            nursery.start_soon(exchange)
        rig.app.recent.append(report)

    return cut


class MemorySink:
    """A sink that takes everything, and nothing twice: one start, nothing after the end (I3)."""

    takes_at_once = False

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self.status = 0
        self.headers: Headers = []
        self.raw = b""
        self._rest = b""

    async def start(self, status: int, headers: Headers) -> None:
        assert not self.started
        self.started = True
        self.status, self.headers = status, headers
        await trio.lowlevel.checkpoint()

    def write_now(self, data: bytes) -> bool:
        assert self.started
        assert not self.finished
        assert not self._rest
        self._rest = data
        return False

    def pass_on(self, framed: bytes) -> bool:
        raise AssertionError("nothing is taken at once here")

    async def flush(self) -> None:
        self.raw += self._rest
        self._rest = b""
        await trio.lowlevel.checkpoint()

    async def write(self, data: bytes) -> None:
        if not self.write_now(data):
            await self.flush()

    async def cut(self) -> None:
        await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        assert self.started
        assert not self.finished
        self.finished = True
        await trio.lowlevel.checkpoint()


def _served_by(rig: MemoryRig) -> Callable[[trio.lowlevel.Task], bool]:
    """Whether a task is one of a client connection's."""
    return lambda task: any(is_below(task, root) for root in rig.server.child_tasks)
