"""Real prefill and decode engines on this machine, all of them ready, for as long as a block lasts.

async with open_vllm(prefill=1, decode=1, lease=12) as engines:
    engines.prefill[0].url, engines.prefill[0].side_channel, engines.decode[0].url
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from trio_pdproxy.core.errors import only

from .environment import EngineEnvironment, ensure_environment
from .errors import LaunchError, PortInUseError
from .model import ensure_model
from .ports import FIRST, LAST, is_free
from .process import EngineProcess
from .progress import Progress, Step, silent
from .vllm import NICE, SERVED_MODEL, Mode, Role, VllmEngine, vllm_argv, vllm_env


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """One engine of the set: where it is reached, and the process behind it."""

    engine: VllmEngine
    process: EngineProcess

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def side_channel(self) -> str:
        return self.engine.side_channel

    @property
    def log_path(self) -> Path:
        return self.process.log_path


@dataclass(frozen=True, slots=True)
class RunningSet:
    """Every engine of `open_vllm`. Engines of one role are interchangeable."""

    prefill: tuple[RunningEngine, ...]
    decode: tuple[RunningEngine, ...]
    model: str = SERVED_MODEL
    _nursery: trio.Nursery | None = field(default=None, repr=False)

    @property
    def all(self) -> tuple[RunningEngine, ...]:
        return self.prefill + self.decode

    def kill(self, name: str) -> None:
        """SIGKILL an engine's whole group. Needs `exit_ok=True`, or the set ends with it."""
        self._named(name).process.kill()

    async def restart(self, name: str) -> None:
        """Kill an engine if it runs, start it again on the same ports, return when it is ready.

        It comes back with a new NIXL engine id. Needs `exit_ok=True` if it is still running.
        """
        assert self._nursery is not None
        process = self._named(name).process
        process.kill()
        await process.wait_exited()
        await self._nursery.start(process.run)

    def _named(self, name: str) -> RunningEngine:
        for running in self.all:
            if running.name == name:
                return running
        raise KeyError(f"no engine {name!r}; there are {', '.join(running.name for running in self.all)}")


@asynccontextmanager
async def open_vllm(
    prefill: int = 1,
    decode: int = 1,
    *,
    mode: Mode = "push",
    dp_size: int = 1,
    lease: int = 30,
    log_dir: Path | None = None,
    ready_timeout: float = 300.0,
    exit_ok: bool = False,
    torch_index: str | None = None,
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> AsyncIterator[RunningSet]:
    """Start engines p0.. and d0.. together, on free ports of 127.0.0.1; yield once every one is ready.

    The environment and the model are made first if they are missing (a minute or more, the network is
    needed then). `mode` is every engine's, `dp_size` each P's (a D has one rank). `log_dir` gets one NAME.log
    per engine; by default a new temporary folder that is kept.
    Raises SetupError, PortInUseError, or EngineStartError of the engine that failed first; an engine that
    ends later ends the block with EngineExitedError (unless `exit_ok`). Errors of engines arrive as
    themselves, not in a group. On leaving, every group is gone.
    """
    environment = await ensure_environment(torch_index=torch_index, progress=progress)
    model = await ensure_model(environment, progress=progress)
    logs = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="pdproxy-engines-"))
    # For each engine its HTTP port, and as many for side channels as it has ranks.
    ports = iter(choose_runs([1, dp_size] * prefill + [1, 1] * decode))

    def make(role: Role, number: int) -> RunningEngine:
        engine = VllmEngine(
            f"{role[0]}{number}",
            role,
            model,
            next(ports),
            next(ports),
            lease=lease,
            mode=mode,
            dp_size=dp_size if role == "prefill" else 1,
            extra=extra_args,
        )
        process = _process(engine, environment, logs, ready_timeout=ready_timeout, exit_ok=exit_ok, extra_env=extra_env)
        return RunningEngine(engine, process)

    try:
        async with trio.open_nursery() as nursery:
            running = RunningSet(
                prefill=tuple(make("prefill", number) for number in range(prefill)),
                decode=tuple(make("decode", number) for number in range(decode)),
                _nursery=nursery,
            )
            await _start_all(running, nursery, progress)
            yield running
            nursery.cancel_scope.cancel("the engines are no longer needed")
    except BaseExceptionGroup as group:
        if (error := only(group, LaunchError)) is None:
            raise
        raise error from group


def choose_runs(lengths: Sequence[int], host: str = "127.0.0.1") -> list[int]:
    """The first port of a run of so many consecutive free ones, for each length; all at random, none twice."""
    chosen: list[int] = []
    taken: set[int] = set()
    for length in lengths:
        starts = range(FIRST, LAST - length + 1)
        for first in random.sample(starts, len(starts)):
            run = range(first, first + length)
            if taken.isdisjoint(run) and all(is_free(host, port) for port in run):
                break
        else:
            raise PortInUseError(f"no {length} consecutive free ports between {FIRST} and {LAST} on {host}")
        chosen.append(first)
        taken.update(run)
    return chosen


async def _start_all(running: RunningSet, nursery: trio.Nursery, progress: Progress) -> None:
    """Start every engine at once in `nursery`; return when all are ready."""
    total = len(running.all)
    ready = 0
    progress(Step("starting engines", 0, total))

    async def start(engine: RunningEngine) -> None:
        nonlocal ready
        await nursery.start(engine.process.run)
        ready += 1
        progress(Step("starting engines", ready, total))

    async with trio.open_nursery() as starting:
        for engine in running.all:
            starting.start_soon(start, engine)


def _process(
    engine: VllmEngine,
    environment: EngineEnvironment,
    logs: Path,
    *,
    ready_timeout: float,
    exit_ok: bool,
    extra_env: Mapping[str, str] | None,
) -> EngineProcess:
    return EngineProcess(
        engine.name,
        vllm_argv(engine, environment.python),
        env=vllm_env(engine, os.environ, gentle=environment.gentle, extra=extra_env),
        log_path=logs / f"{engine.name}.log",
        ready_url=engine.url,
        ports=[(engine.host, port) for port in (engine.port, *engine.side_channel_ports)],
        nice=NICE,
        ready_timeout=ready_timeout,
        exit_ok=exit_ok,
    )
