"""One engine as a supervised process group: started, watched until ready, watched while it serves, stopped.

    async with trio.open_nursery() as nursery:
        engine = EngineProcess("p0", argv, env=env, log_path=log, ready_url="http://127.0.0.1:8100")
        await nursery.start(engine.run)       # returns when GET /health answers 200
        ...
        nursery.cancel_scope.cancel()         # nothing of the engine is left when the block ends

An engine that ends by itself raises out of `run`, so it takes its nursery down with it: whoever started
it decides what that means (see `supervise.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from . import diagnose
from .errors import EngineExitedError, EngineStartError
from .group import ProcessGroup, open_group
from .ports import Address, require_free
from .program import require_program
from .ready import probe_health

POLL_SECONDS = 0.25
START_GRACE = 2.0
"""Until SIGKILL for an engine that is stopped while it starts: vLLM does not listen then, and has nothing in hand."""
NOTE_SECONDS = 2.0
"""Between two looks at what a starting engine has in /dev/shm."""

Probe = Callable[[str], Awaitable[bool]]


class EngineProcess:
    """An engine that can be run, any number of times, one run at a time.

    argv, env -- the command and its whole environment
    log_path -- its output is appended there
    ready_url -- base URL; ready means that GET `ready_url`/health answered 200 while the process lived
    ports -- addresses it will listen on, checked before the start
    nice -- added to the niceness (0 to 19)
    ready_timeout, stop_grace -- seconds
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        ready_url: str,
        ports: Sequence[Address] = (),
        nice: int = 0,
        ready_timeout: float = 300.0,
        stop_grace: float = 10.0,
        probe: Probe = probe_health,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.env = dict(env)
        self.log_path = log_path
        self.ready_url = ready_url
        self.ports = tuple(ports)
        self.nice = nice
        self.ready_timeout = ready_timeout
        self.stop_grace = stop_grace
        self.returncode: int | None = None
        """How the last run ended; None before that."""
        self.ready_after: float | None = None
        """Seconds from start to ready in the last run; None until ready."""
        self.group: ProcessGroup | None = None
        """The process group while it runs."""
        self._probe = probe
        self._log_begin = 0

    async def run(
        self,
        *,
        on_ready: Callable[[], None] | None = None,
        task_status: trio.TaskStatus[EngineProcess] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Start the engine, tell readiness by `on_ready` and `task_status`, stay until it ends or is cancelled.

        Raises PortInUseError or MissingProgramError before anything is started, EngineStartError until it is ready,
        EngineExitedError afterwards. On cancellation the group is stopped: SIGTERM,
        `stop_grace`, SIGKILL.
        """
        if self.group is not None:
            raise RuntimeError(f"{self.name} is running already")
        await trio.to_thread.run_sync(require_free, self.ports)
        await trio.to_thread.run_sync(require_program, self.argv, self.env)
        self.returncode = self.ready_after = None
        self._log_begin = diagnose.size(self.log_path)
        begun = trio.current_time()
        open_it = partial(open_group, env=self.env, log_path=self.log_path, nice=self.nice, grace=self.stop_grace)
        try:
            async with open_it(self.argv) as self.group:
                self.group.grace = min(self.stop_grace, START_GRACE)
                await self._become_ready(self.group)
                self.group.grace = self.stop_grace
                self.ready_after = trio.current_time() - begun
                if on_ready is not None:
                    on_ready()
                task_status.started(self)
                await self.group.wait_exit()
                self.returncode = await self.group.finish()
        finally:
            self.group = None
        raise self._error(EngineExitedError, "ended while it was serving")

    def kill(self) -> None:
        """SIGKILL the whole group, as a crash of the machine would. Does nothing when it is not running."""
        if self.group is not None:
            self.group.kill()

    async def _become_ready(self, group: ProcessGroup) -> None:
        """Race readiness against exit and the deadline, in one nursery. Exit outranks an answer: it may
        have come from somebody else's server on that port.
        """
        ready = exited = False

        async def watch_exit() -> None:
            nonlocal exited
            await group.wait_exit()
            exited = True
            race.cancel_scope.cancel("the engine exited before it was ready")

        with trio.move_on_after(self.ready_timeout):
            async with trio.open_nursery() as race:
                race.start_soon(watch_exit)
                race.start_soon(_note_shared_memory, group)
                while True:
                    ready = await self._probe(self.ready_url)
                    if ready:
                        break
                    await trio.sleep(POLL_SECONDS)
                await trio.lowlevel.checkpoint()
                race.cancel_scope.cancel("the engine is ready")
        group.note_shared_memory()
        if exited:
            self.returncode = await group.finish()
            raise self._error(EngineStartError, "ended before it was ready")
        if not ready:
            raise self._error(EngineStartError, f"was not ready after {self.ready_timeout:g} s")

    def _error(self, kind: type[EngineStartError | EngineExitedError], what: str) -> Exception:
        return kind(
            f"engine {self.name} {what} ({diagnose.describe_exit(self.returncode)})",
            name=self.name,
            returncode=self.returncode,
            cause=diagnose.likely_cause(self.returncode, self.log_path, since=self._log_begin),
            log_path=self.log_path,
            tail=diagnose.tail(self.log_path, since=self._log_begin),
        )


async def _note_shared_memory(group: ProcessGroup) -> None:
    while True:
        await trio.sleep(NOTE_SECONDS)
        group.note_shared_memory()
