"""`trio-pdproxy launch SCRIPT.yaml`: the engines of a script and the proxy in front, owned until they end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

from trio_pdproxy.config import ConfigError
from trio_pdproxy.core.errors import only

if TYPE_CHECKING:
    from trio_pdproxy.launch import EngineCommand, EngineEvent, EngineSet, LaunchPlan, Script
    from trio_pdproxy.web.app import ProxyApp

log = logging.getLogger("trio_pdproxy.launch")

READY_TIMEOUT = 120.0
"""Seconds from the engines' readiness to the first pair's first transfer."""
LAST_WORDS = 1.0
"""Seconds for an orderly end after the second signal."""


@click.command()
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.option("--dry-run", is_flag=True, help="Print the exact commands and environment, ready to paste, and end.")
@click.option("--schema", is_flag=True, help="Print the script's JSON schema, for editors, and end.")
@click.option("--follow", is_flag=True, help="Show the engines' logs as they come, each line after its engine's name.")
@click.option("--bind", metavar="HOST:PORT", help="Where the proxy listens, over what the script says.")
@click.option(
    "--torch-index",
    metavar="URL",
    help="cpu preset, first time: an extra package index with torch's +cpu wheels (see `engines install`).",
)
def launch(
    *, script: Path | None, dry_run: bool, schema: bool, follow: bool, bind: str | None, torch_index: str | None
) -> None:
    """Start the engines of SCRIPT (YAML) and the proxy in front, and own them until they end.

    The first SIGINT or SIGTERM stops gracefully: the proxy finishes what it has, then the engines end. The second ends
    everything at once. Whatever ends this command, SIGKILL included, no engine process survives it.

    Exit code 0: asked to stop; 1: failed, the last line says what failed first; 2: the script is wrong; 130 or 143:
    ended by the second signal.
    """
    from trio_pdproxy.launch import LaunchError, load_script, make_plan
    from trio_pdproxy.launch.dry_run import commands
    from trio_pdproxy.launch.script import json_schema
    from trio_pdproxy.serve import ServerError

    if schema:
        click.echo(json.dumps(json_schema(), indent=1))
        return
    if script is None:
        raise click.UsageError("name a script (see the folder examples/), or ask for --schema")
    flags = {"bind": bind}
    try:
        wanted = load_script(script)
        if dry_run:
            click.echo(commands(make_plan(wanted, name=script.stem, flags=flags)), nl=False)
            return
        sys.exit(trio.run(_Launch(wanted, script.stem, flags, follow, torch_index).run))
    except* ConfigError as group:
        _fail(only(group, ConfigError) or group, 2)
    except* (LaunchError, ServerError) as group:
        _fail(only(group, LaunchError) or only(group, ServerError) or group, 1)
    except* KeyboardInterrupt:
        sys.exit(130)


def _fail(error: BaseException, code: int) -> None:
    """Print the error; what failed first is the last line."""
    from trio_pdproxy.launch import EngineError

    text = str(error)
    if isinstance(error, EngineError):
        click.echo(text, err=True)
        text = f"what failed first: {error.what}" + (f": {error.cause}" if error.cause else "")
    click.echo(f"trio-pdproxy launch: {text}", err=True)
    sys.exit(code)


@dataclass
class _Launch:
    """One run of the command."""

    script: Script
    name: str
    flags: dict[str, Any]
    follow: bool
    torch_index: str | None
    stop: trio.Event = field(default_factory=trio.Event)
    """Set by the first signal, or by what cannot be recovered from."""
    killed_by: int = 0
    engines: EngineSet | None = None
    app: ProxyApp | None = None

    async def run(self) -> int:
        """Everything, until it ends. Returns the exit code."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals, nursery.cancel_scope)
            async with trio.open_nursery() as serving:
                serving.start_soon(self._cancel_at_stop, serving.cancel_scope)
                await self._prepare_and_serve()
                serving.cancel_scope.cancel("done")
            nursery.cancel_scope.cancel("done")
        if self.killed_by:
            return 128 + self.killed_by
        if self.engines is not None and self.engines.failure is not None and self.engines.failed.is_set():
            raise self.engines.failure
        return 0

    async def _watch_signals(self, everything: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if not self.stop.is_set():
                    click.echo("stopping: running requests may finish; a second signal ends everything", err=True)
                    self.stop.set()
                    continue
                self.killed_by = int(number)
                # Whatever hangs in here, the kernel then closes the guards' pipes and no engine is left.
                threading.Thread(target=_exit_soon, args=(128 + number,), daemon=True).start()
                if self.app is not None:
                    self.app.pool.abandon()
                if self.engines is not None:
                    self.engines.kill_all()
                everything.cancel("second signal")
                return

    async def _cancel_at_stop(self, starting: trio.CancelScope) -> None:
        """A signal while nothing serves yet: there is nothing to finish."""
        await self.stop.wait()
        if self.app is None:
            starting.cancel("asked to stop")

    async def _prepare_and_serve(self) -> None:
        from rich.console import Console

        from trio_pdproxy.cli.board import Board
        from trio_pdproxy.cli.engines import shown
        from trio_pdproxy.launch import make_plan, prepare, run_plan
        from trio_pdproxy.launch.notify import notify
        from trio_pdproxy.observe.log import configure

        with shown() as progress:
            await prepare(self.script, torch_index=self.torch_index, progress=progress)
        plan = await trio.to_thread.run_sync(lambda: make_plan(self.script, name=self.name, flags=self.flags))
        settings = plan.settings
        configure(settings.log_level if settings else "info", settings.log_format if settings else "text")
        board = Board(plan, Console(stderr=True))
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            if self.follow:
                nursery.start_soon(_follow, plan)
            with ExitStack() as showing:
                if not self.follow:
                    showing.enter_context(board.show())
                also_free = [settings.bind] if settings and settings.bind.port else []
                opened = run_plan(plan, tell=[board.tell], also_free=also_free, end_on_failure=False)
                async with opened as self.engines, self._proxy(plan, board) as url:
                    self.engines.on_event(_log_event)
                    showing.close()
                    notify("READY=1")
                    board.over = True
                    click.echo(await _summary(plan, url, trio.current_time() - begun))
                    await self._until_over()
                    notify("STOPPING=1")
            nursery.cancel_scope.cancel("done")

    @asynccontextmanager
    async def _proxy(self, plan: LaunchPlan, board: Any) -> AsyncIterator[str | None]:
        """The proxy, ready to serve, if the script wants one; told about its engines for as long as it serves."""
        from trio_pdproxy.launch import keep_told, restart_stranded
        from trio_pdproxy.serve import serving
        from trio_pdproxy.web import collector
        from trio_pdproxy.web.app import create_app

        if plan.settings is None:
            yield None
            return
        assert self.engines is not None
        collector.spare()
        app = create_app(plan.settings)
        board.say("the engines are ready; the proxy waits for the first transfer of each pair")
        async with serving(app, plan.settings) as url, trio.open_nursery() as nursery:
            nursery.start_soon(keep_told, self.engines, app.pool)
            if plan.restart.stranded:
                nursery.start_soon(restart_stranded, self.engines, app.pool, plan.restart.stranded)
            await self._until_ready(app, plan)
            self.app = app
            yield url
            nursery.cancel_scope.cancel("asked to stop")

    async def _until_ready(self, app: ProxyApp, plan: LaunchPlan) -> None:
        from trio_pdproxy.launch import LaunchError

        assert self.engines is not None
        with trio.move_on_after(READY_TIMEOUT):
            while app.missing() and not self.engines.failed.is_set():  # noqa: ASYNC110  many engines' state
                await trio.sleep(0.05)
            return
        missing = "; ".join(app.missing())
        if not any(plan.external.values()):
            raise LaunchError(f"the engines are ready, but no pair could serve within {READY_TIMEOUT:g} s: {missing}")
        click.echo(
            f"not ready yet, and serving all the same, for engines elsewhere may still come: {missing}", err=True
        )

    async def _until_over(self) -> None:
        """Until a signal, or until a role has no engine left."""
        assert self.engines is not None
        failed = self.engines.failed

        async def stop_at_failure() -> None:
            await failed.wait()
            self.stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_at_failure)
            await self.stop.wait()
            nursery.cancel_scope.cancel("over")


def _exit_soon(code: int) -> None:
    time.sleep(LAST_WORDS)
    os._exit(code)


async def _follow(plan: LaunchPlan) -> None:
    from trio_pdproxy.launch.logs import follow

    width = max(len(engine.name) for engine in plan.engines)
    logs = {engine.name: plan.logs / f"{engine.name}.log" for engine in plan.engines}
    await follow(logs, lambda name, line: click.echo(f"{name:{width}} | {line}"))


def _log_event(event: EngineEvent) -> None:
    """What happens to an engine once everything serves, among the proxy's own records."""
    from trio_pdproxy.launch import EngineError, State

    why = str(event.error).partition("\n")[0]
    if isinstance(event.error, EngineError):
        why += f": {event.error.cause}" if event.error.cause else ""
        why += f" (log: {event.error.log_path})"
    if event.state is State.BACKING_OFF and event.error is not None:
        log.warning("%s; restarted in %.1f s", why, event.delay)
    elif event.state is State.GIVEN_UP:
        log.error("%s; it is given up", why)
    else:
        log.info("%s engine %s: %s", event.role, event.name, event.state.value)


async def _summary(plan: LaunchPlan, url: str | None, seconds: float) -> str:
    """Where everything is, and how to send a request."""
    lines = [f"ready in {seconds:.1f} s"]
    if url is not None:
        lines.append(f"  proxy    {url}  (also /ready, /status, /metrics)")
    ids: dict[str, str] = {}
    async with trio.open_nursery() as nursery:
        for engine in plan.engines:
            nursery.start_soon(_ask_id, engine, ids)
    for engine in plan.engines:
        log_path = plan.logs / f"{engine.name}.log"
        lines.append(f"  {engine.role:8} {engine.name}  {engine.url}  side channel {engine.spec.side_channel}")
        lines.append(f"           engine id {ids[engine.name]}  log {log_path}")
    for role, specs in plan.external.items():
        lines += [f"  {role:8} {spec.name}  {spec.url}  (not started here)" for spec in specs]
    if url is not None:
        body = {"model": plan.model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        key = ' -H "authorization: Bearer $PDPROXY_API_KEY"' if plan.secrets else ""
        lines += [
            "try it:",
            f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} \\",
            f"    -d '{json.dumps(body)}'",
        ]
    return "\n".join(lines)


async def _ask_id(engine: EngineCommand, ids: dict[str, str]) -> None:
    from trio_pdproxy.engines.coordinates import SideChannelError, ZmqSideChannel

    try:
        ids[engine.name] = (await ZmqSideChannel(2.0).ask(*engine.spec.side_channel)).engine_id
    except SideChannelError:
        ids[engine.name] = "unknown (its side channel does not answer)"
