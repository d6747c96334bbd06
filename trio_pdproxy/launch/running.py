"""The engines of a script, all of them ready, for as long as a block lasts.

async with open_engines(script) as engines:
    engines.prefill[0].url, engines.prefill[0].side_channel, engines.decode[0].url
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.core.errors import only

from . import presets
from .environment import ensure_environment
from .errors import LaunchError, SetupError
from .logs import put_away
from .model import ensure_model
from .plan import LaunchPlan, make_plan
from .ports import require_free
from .program import require_program
from .progress import Progress, Step, silent
from .script import Mode, Script
from .supervise import EngineEvent, State, SupervisedEngine, Tell


class EngineSet:
    """The engines of a plan while they run. Made by `run_plan` and `open_engines`; engines of a role are alike."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self.failure: LaunchError | None = None
        """What failed first among the engines without which the set cannot serve."""
        self.failed = trio.Event()
        """Set when a role has no engine left that runs or will be restarted."""
        self._tells: list[Tell] = []
        self.all: tuple[SupervisedEngine, ...] = tuple(
            SupervisedEngine(
                command,
                log_path=plan.logs / f"{command.name}.log",
                secrets=plan.secrets,
                nice=plan.nice,
                ready_timeout=plan.ready_timeout,
                stop_grace=plan.stop_grace,
                restart=plan.restart,
                tell=self._told,
            )
            for command in plan.engines
        )

    @property
    def prefill(self) -> list[SupervisedEngine]:
        return [engine for engine in self.all if engine.role == "prefill"]

    @property
    def decode(self) -> list[SupervisedEngine]:
        return [engine for engine in self.all if engine.role == "decode"]

    @property
    def model(self) -> str:
        """What clients call it."""
        return self.plan.model

    @property
    def settings(self) -> Settings:
        """The settings of a proxy for these engines. Raises `LaunchError` where the script wants none."""
        if self.plan.settings is None:
            raise LaunchError("the script says `proxy: false`: it has no settings for one")
        return self.plan.settings

    def on_event(self, tell: Tell) -> None:
        """Have `tell` called, in the engine's own task, with everything that happens to an engine from now on. It must
        not block, and not raise."""
        self._tells.append(tell)

    def off_event(self, tell: Tell) -> None:
        """Have it called no more."""
        self._tells.remove(tell)

    def named(self, name: str) -> SupervisedEngine:
        for engine in self.all:
            if engine.name == name:
                return engine
        raise KeyError(f"no engine {name!r}; there are {', '.join(engine.name for engine in self.all)}")

    def kill(self, name: str) -> None:
        """SIGKILL an engine's whole group. What becomes of it then is the restart policy's."""
        self.named(name).kill()

    async def restart(self, name: str) -> None:
        """End an engine if it runs, start it again on the same ports with a new engine id, return when it is ready."""
        await self.named(name).restart()

    def kill_all(self) -> None:
        """SIGKILL all engines at once: no grace for anything. For who has no time left; the set must end after it."""
        for engine in self.all:
            engine.kill()

    def _told(self, event: EngineEvent) -> None:
        if event.state is State.GIVEN_UP:
            alike = [engine for engine in self.all if engine.role == event.role]
            left = [engine for engine in alike if engine.state is not State.GIVEN_UP]
            self.failure = self.failure or event.error
            if not left and not self.plan.external[event.role]:
                self.failed.set()
        for tell in list(self._tells):
            tell(event)


def _check_model(script: Script) -> None:
    """vLLM takes half a minute to say it, and then talks of repositories."""
    model = script.model or ""
    if script.preset == "sim" or not model.startswith(("/", "./", "../", "~")):
        return
    if model.startswith("~"):
        raise SetupError(f"the model {model}: nothing replaces the ~ here, write the whole path")
    if not Path(model).exists():
        raise SetupError(f"the model {model} does not exist (from the folder {Path.cwd()})")


async def prepare(script: Script, *, torch_index: str | None = None, progress: Progress = silent) -> None:
    """Make what the cpu preset needs and is not there: engine environment, test model. Raises `SetupError`, also where
    the script's model is a folder that is not there."""
    _check_model(script)
    if not presets.own_vllm(script) and not presets.own_model(script):
        return
    found = await ensure_environment(torch_index=torch_index, progress=progress)
    if presets.own_model(script):
        await ensure_model(found, progress=progress)


@asynccontextmanager
async def run_plan(
    plan: LaunchPlan,
    *,
    tell: Sequence[Tell] = (),
    also_free: Sequence[tuple[str, int]] = (),
    end_on_failure: bool = True,
    keep_logs: bool = True,
) -> AsyncIterator[EngineSet]:
    """Start every engine of `plan` at once; yield when all are ready; on leaving, every process of theirs is gone.

    tell -- called with each `EngineEvent`
    also_free -- addresses that must be free, too, before anything is started
    end_on_failure -- a role with no engine left (see `EngineSet.failed`) ends the block with what failed first
    keep_logs -- an earlier run's logs are kept as NAME.log.1

    Raises PortInUseError, MissingProgramError, or EngineStartError of the engine that failed first. Errors of engines
    arrive as themselves, not in a group.
    """
    await trio.to_thread.run_sync(require_free, [*plan.addresses, *also_free])
    for command in plan.engines:
        require_program(command.argv(), command.environ(os.environ))
    if keep_logs:
        await trio.to_thread.run_sync(put_away, plan.logs, [engine.name for engine in plan.engines])
    engines = EngineSet(plan)
    for one in tell:
        engines.on_event(one)
    try:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for engine in engines.all:
                    starting.start_soon(nursery.start, engine.run)
            if end_on_failure:
                nursery.start_soon(_raise_failure, engines)
            yield engines
            nursery.cancel_scope.cancel("the engines are no longer needed")
    except BaseExceptionGroup as group:
        if (error := only(group, LaunchError)) is None:
            raise
        raise error from None


async def _raise_failure(engines: EngineSet) -> None:
    await engines.failed.wait()
    assert engines.failure is not None
    raise engines.failure


@asynccontextmanager
async def open_engines(
    script: Script,
    *,
    name: str = "launch",
    environ: Mapping[str, str] = os.environ,
    torch_index: str | None = None,
    progress: Progress = silent,
    tell: Sequence[Tell] = (),
    end_on_failure: bool = True,
) -> AsyncIterator[EngineSet]:
    """All of it: make what is missing, plan, start, yield when every engine is ready. See `make_plan`, `run_plan`."""
    await prepare(script, torch_index=torch_index, progress=progress)
    plan = make_plan(script, name=name, environ=environ)
    async with run_plan(plan, tell=[_counting(plan, progress), *tell], end_on_failure=end_on_failure) as engines:
        yield engines


def _counting(plan: LaunchPlan, progress: Progress) -> Callable[[EngineEvent], None]:
    ready: set[str] = set()
    total = len(plan.engines)
    progress(Step("starting engines", 0, total))

    def count(event: EngineEvent) -> None:
        if event.state is State.READY and event.name not in ready:
            ready.add(event.name)
            progress(Step("starting engines", len(ready), total))

    return count


def open_vllm(
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
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> AbstractAsyncContextManager[EngineSet]:
    """`open_engines` for real vLLM on this machine's CPU with the test model, on free ports: for tests and the demo.

    `log_dir` gets one NAME.log per engine; by default a new temporary folder that is kept.
    `dp_size` is each P's (a D has one rank). Nothing is restarted by itself: an engine that ends, ends the block with
    EngineExitedError, unless `exit_ok`; then it stays down until `EngineSet.restart`.
    """
    free: dict[str, Any] = {"port": "auto", "side_channel_port": "auto"}
    ranks = {"data-parallel-size": dp_size} if dp_size > 1 else {}
    script = Script.model_validate(
        {
            "preset": "cpu",
            "mode": mode,
            "lease": lease,
            "ready_timeout": ready_timeout,
            "restart": "never",
            "flags": dict(flags or {}),
            "env": dict(env or {}),
            "logs": log_dir or Path(tempfile.mkdtemp(prefix="pdproxy-engines-")),
            "prefill": {"count": prefill, "flags": ranks, **free},
            "decode": {"count": decode, **free},
            "proxy": False,
        }
    )
    return open_engines(script, name="vllm", torch_index=torch_index, progress=progress, end_on_failure=not exit_ok)
