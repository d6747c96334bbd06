"""One engine kept running: started, restarted with a growing delay when it ends by itself, given up at a cap.

Every start is a new process group with a new NIXL engine id. What happens is told as `EngineEvent`s, which whoever
shows it or routes by it reads; nothing here prints or knows a proxy.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import trio

from trio_pdproxy.config import Role

from .errors import LaunchError
from .plan import EngineCommand
from .process import EngineProcess
from .script import Restart


class State(Enum):
    """Where an engine is. The value is the word that is shown."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "restarts soon"
    """It ended by itself, and is started again after a delay."""
    GIVEN_UP = "given up"
    """It ended by itself, and is not started again (but see `SupervisedEngine.restart`)."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """An engine has come into a state, at `at` (trio's clock). `error`: of an end, why. `delay`: until the restart."""

    name: str
    role: Role
    state: State
    at: float
    error: LaunchError | None = None
    delay: float = 0.0


Tell = Callable[[EngineEvent], None]


class Backoff:
    """When to restart: pure state, the time handed in."""

    def __init__(self, policy: Restart) -> None:
        self.policy = policy
        self._restarts: deque[float] = deque()

    def next(self, now: float) -> float | None:
        """Seconds until the restart after an end at `now`; None where the engine is to be given up."""
        while self._restarts and self._restarts[0] <= now - self.policy.within:
            self._restarts.popleft()
        if len(self._restarts) >= self.policy.attempts:
            return None
        delay: float = min(self.policy.delay * 2.0 ** len(self._restarts), self.policy.max_delay)
        self._restarts.append(now)
        return delay

    @property
    def restarts(self) -> int:
        """Within the time that counts, as of the last end."""
        return len(self._restarts)


class SupervisedEngine:
    """An engine of a running set: what it is, how it is doing."""

    def __init__(
        self,
        command: EngineCommand,
        *,
        log_path: Path,
        secrets: Mapping[str, str],
        nice: int,
        ready_timeout: float,
        stop_grace: float,
        restart: Restart,
        tell: Tell,
    ) -> None:
        self.command = command
        self.log_path = log_path
        self.state = State.WAITING
        self.since = 0.0
        """When it came into its state, on trio's clock."""
        self.starts = 0
        self.error: LaunchError | None = None
        """Why it ended the last time, if it did by itself."""
        self._secrets = secrets
        self._nice = nice
        self._ready_timeout = ready_timeout
        self._stop_grace = stop_grace
        self._backoff = Backoff(restart)
        self._tell = tell
        self._again = trio.Event()
        self._news = trio.Event()
        self._asked = False
        self.process = self._make()
        """The process of the current start, or of the last one."""

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def role(self) -> Role:
        return self.command.role

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def side_channel(self) -> str:
        """host:port; rank 0's if there are several."""
        return str(self.command.spec.side_channel)

    def kill(self) -> None:
        """SIGKILL its whole group, as a crash would. Does nothing when it is not running."""
        self.process.kill()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep it running until cancelled; started once it is ready for the first time.

        Raises what its first start fails with (see `EngineProcess.run`). Afterwards it raises nothing: how it ends is
        told, and it is restarted or given up.
        """
        started = False

        def ready() -> None:
            nonlocal started
            self._enter(State.READY)
            if not started:
                started = True
                task_status.started()

        try:
            while True:
                error = await self._run_once(ready)
                if not started:
                    raise error
                await self._wait_for_the_next(error)
        finally:
            if self.state is not State.GIVEN_UP:
                self._enter(State.STOPPED)

    async def restart(self) -> None:
        """End it if it runs, start it again now, return when it is ready. Raises what the start fails with."""
        starts = self.starts
        self._asked = True
        self.kill()
        self._again.set()
        while not (self.starts > starts and self.state is State.READY):
            if self.starts > starts and self.state in (State.GIVEN_UP, State.BACKING_OFF) and self.error is not None:
                raise self.error
            if self.state is State.STOPPED:
                raise LaunchError(f"engine {self.name} is not restarted: its set is being stopped")
            await self._news.wait()

    async def wait_down(self) -> None:
        """Return when it is not running."""
        while self.state in (State.STARTING, State.READY):
            await self._news.wait()

    async def _run_once(self, ready: Callable[[], None]) -> LaunchError:
        """One process from its start to its end by itself, and why it ended."""
        self.process = self._make()
        self._again = trio.Event()
        self.starts += 1
        self._enter(State.STARTING)
        try:
            await self.process.run(on_ready=ready)
        except LaunchError as error:
            self.error = error
            return error
        raise AssertionError("a process does not end quietly")

    async def _wait_for_the_next(self, error: LaunchError) -> None:
        if self._asked:  # to be restarted: it did not fail
            self._asked = False
            self._enter(State.BACKING_OFF)
            return
        delay = self._backoff.next(trio.current_time())
        if delay is None:
            self._enter(State.GIVEN_UP, error)
            await self._again.wait()
        else:
            self._enter(State.BACKING_OFF, error, delay)
            with trio.move_on_after(delay):
                await self._again.wait()
        self._asked = False

    def _make(self) -> EngineProcess:
        places = self.command.fresh()
        return EngineProcess(
            self.name,
            self.command.argv(places),
            env=self.command.environ({**os.environ, **self._secrets}, places),
            log_path=self.log_path,
            ready_url=self.url,
            ports=self.command.addresses,
            nice=self._nice,
            ready_timeout=self._ready_timeout,
            stop_grace=self._stop_grace,
        )

    def _enter(self, state: State, error: LaunchError | None = None, delay: float = 0.0) -> None:
        self.state = state
        self.since = trio.current_time()
        self._tell(EngineEvent(self.name, self.role, state, self.since, error, delay))
        self._news.set()
        self._news = trio.Event()
