"""The Quart-Trio application."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
from quart_trio import QuartTrio

from trio_pdproxy.config import Settings, engine_context, load_settings
from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.core.plan import Plan
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.connections import Dial
from trio_pdproxy.engines.coordinates import SideChannel
from trio_pdproxy.engines.discovery import Follower, followers
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.observe.log import configure, log_exchange
from trio_pdproxy.observe.metrics import CONTENT_TYPE, EngineState, Metrics, merged
from trio_pdproxy.observe.timeline import Timeline, Timelines, read_timelines, timelines_of
from trio_pdproxy.web import collector
from trio_pdproxy.web.auth import Gate
from trio_pdproxy.web.connection import ProxyConnection
from trio_pdproxy.web.lifespan import Lifespan
from trio_pdproxy.web.routes import routes
from trio_pdproxy.web.siblings import Siblings, find_siblings

if TYPE_CHECKING:
    from trio_pdproxy.observe.tracing import Tracing

log = logging.getLogger("trio_pdproxy.web")

Watched = tuple[Path, Callable[[], Settings]]


class ProxyApp(QuartTrio):
    """The proxy as an ASGI application. Made by `create_app`.

    `pool` and `settings` are there from lifespan startup on; before it (and after its core task has died) every
    request is answered with 503.
    """

    # Quart takes any callables of this shape; its own annotation is narrower.
    asgi_http_class = ProxyConnection  # type: ignore[assignment]
    asgi_lifespan_class = Lifespan  # type: ignore[assignment]
    settings: Settings
    pool: Pool
    followers: list[Follower]
    """Of each source that engines are found in while serving, who brings the pool to what it says."""

    def __init__(
        self,
        settings: Settings | None,
        *,
        side_channel: SideChannel | None = None,
        dial: Dial | None = None,
        ssl_context: ssl.SSLContext | None = None,
        watched: Watched | None = None,
    ) -> None:
        super().__init__("trio_pdproxy")
        # Bounds of ours are kept elsewhere, per leg and per write; Quart's would cut every stream after a minute.
        self.config["RESPONSE_TIMEOUT"] = None
        self.config["BODY_TIMEOUT"] = 60
        self.config["MAX_CONTENT_LENGTH"] = 1024 * 1024
        self._given = settings
        self._side_channel = side_channel
        self._dial = dial
        self._ssl_context = ssl_context
        self._configured = False
        self.watched = watched
        """The configuration file, and how to read it again."""
        self.gate: Gate | None = None
        """Who may ask; there from lifespan startup on."""
        self.started = trio.Event()
        self.metrics = Metrics(
            self._engine_states,
            lambda: self.pool.waiting if self._configured else 0,
            lambda: not self.missing(),
        )
        self.tracing: Tracing | None = None
        self.siblings: Siblings | None = None
        self.quiescing = False
        """Asked to stop: running requests go on, /ready says 503."""
        self.failure: str | None = None
        """Why the core task died."""
        self.core_died = trio.Event()
        self.started_at = 0.0
        self.active = 0
        """Relay requests in hand, debts they left included."""
        self.recent: deque[Report] = deque(maxlen=256)
        """The last exchanges, newest last; as many as the setting `timelines` says."""
        self.register_blueprint(routes)

    def configure(self, environ: Mapping[str, str]) -> None:
        """Read the settings (unless they were given) and make the pool. Raises `ConfigError`."""
        self.settings = self._given or load_settings(environ=environ)
        if self._given is None and environ.get("PDPROXY_CONFIG"):
            self.watched = Path(environ["PDPROXY_CONFIG"]), partial(load_settings, environ=environ)
        if self._given is None:
            # Started by a server's own command: nobody else has set up our log records.
            configure(self.settings.log_level, self.settings.log_format)
            collector.spare()
        self.recent = deque(self.recent, maxlen=self.settings.timelines)
        self.gate = Gate(self.settings)
        self.pool = Pool(
            self.settings,
            side_channel=self._side_channel,
            dial=self._dial,
            ssl_context=self._ssl_context or engine_context(self.settings),
        )
        self.followers = followers(self.pool, self.watched)
        self.tracing = _tracing(self.settings)
        if self._given is None:
            # One of several workers, maybe, of a server's own command.
            answers = {"metrics": lambda: self.metrics.render()[0], "timelines": self.timelines}
            self.siblings = find_siblings(self.settings, answers)
        if self.settings.legs == "serial":
            log.warning("legs: serial is for measurements only: each answer waits for the whole prefill leg")
        self.started_at = trio.current_time()
        self.failure = None
        self._configured = True
        self.started.set()

    def core_failed(self, why: str) -> None:
        self.failure = why
        self.core_died.set()

    def usable_pool(self) -> Pool | None:
        return self.pool if self._configured and self.failure is None and not self.quiescing else None

    def not_serving(self) -> ProxyError:
        """Why there is no usable pool."""
        why = self.failure or ("the proxy is stopping" if self.quiescing else "the proxy has not started yet")
        return ProxyError(why, status=503, fault=Fault.PROXY, code="not_serving", retry_after=5)

    def observe(self, report: Report) -> None:
        """The one place where a finished exchange is handed to whoever looks on."""
        if report.ended is None:
            report.ended = trio.current_time()
        self.recent.append(report)
        self.metrics.observe(report)
        if self.tracing is not None:
            self.tracing.observe(report, _wall())
        log_exchange(report)

    def timelines(self) -> bytes:
        """The last exchanges of this process as JSON, oldest first."""
        return msgspec.json.encode(Timelines(timelines_of(self.recent, _wall())))

    async def all_timelines(self, last: int | None = None) -> bytes:
        """The last exchanges (the last `last` of them), those of all workers. Raises `ProxyError` (503)."""
        answers = await self.siblings.ask("timelines") if self.siblings else [self.timelines()]
        lines = sorted((line for answer in answers for line in read_timelines(answer)), key=_arrival)
        return msgspec.json.encode(Timelines(lines[-last:] if last and last > 0 else lines))

    async def metrics_text(self) -> tuple[bytes, str]:
        """What Prometheus is told, of all workers, and its content type. Raises `ProxyError` (503)."""
        if self.siblings is None:
            return self.metrics.render()
        return merged(await self.siblings.ask("metrics")), CONTENT_TYPE

    def traced(self, plan: Plan, report: Report, headers: Iterable[tuple[bytes, bytes]]) -> Plan:
        """The plan as a part of a trace, where there is tracing."""
        if self.tracing is None:
            return plan
        report.trace = self.tracing.begin(plan, headers)
        return plan.traced(report.trace)

    def missing(self) -> list[str]:
        """Why the proxy is not ready, one sentence each; empty if it is."""
        if self.usable_pool() is None:
            return [self.not_serving().message]
        missing = self.pool.missing()
        if missing:
            # What is not found may be missing because whoever should name it does not answer.
            missing += [f"{f.source.name}: {f.source.trouble}" for f in self.followers if f.source.trouble]
        return missing

    def status(self) -> dict[str, object]:
        """For /status."""
        return {
            "version": version("trio-pdproxy"),
            "uptime": trio.current_time() - self.started_at,
            "pid": os.getpid(),
            "workers": self.siblings.count if self.siblings else 1,
            "ready": not self.missing(),
            "missing": self.missing(),
            "policy": {"prefill": self.settings.prefill_policy, "decode": self.settings.decode_policy},
            "active": self.active,
            "waiting": self.pool.waiting,
            "discovery": [follower.status() for follower in self.followers],
            "engines": [engine.status() for engine in self.pool.engines],
        }

    def _engine_states(self) -> Iterator[EngineState]:
        if not self._configured:
            return
        for engine in self.pool.engines:
            yield EngineState(
                name=engine.name,
                role=engine.role,
                up=engine.usable,
                inflight=engine.inflight,
                debts=engine.debts,
                stranded=engine.stranded,
                circuit=engine.breaker.circuit.value,
            )


def _tracing(settings: Settings) -> Tracing | None:
    if settings.otlp_traces_endpoint is None:
        return None
    from trio_pdproxy.observe.tracing import Tracing  # the extra [otel]: only where it is asked for

    return Tracing(settings.otlp_traces_endpoint)


def _wall() -> float:
    """What to add to trio's clock to get seconds since 1970."""
    return time.time() - trio.current_time()


def _arrival(line: Timeline) -> float:
    return line.at


def create_app(
    settings: Settings | None = None,
    *,
    side_channel: SideChannel | None = None,
    dial: Dial | None = None,
    ssl_context: ssl.SSLContext | None = None,
    watched: Watched | None = None,
) -> ProxyApp:
    """The proxy as an ASGI app for Hypercorn's trio worker.

    Without `settings` they are read at startup from the environment and the file it names. `side_channel` and `dial`
    replace how engines are asked and reached (tests); `ssl_context` is for https engines. `watched`: a
    configuration file whose edits are applied while serving, and how the settings are read again from it.
    """
    return ProxyApp(settings, side_channel=side_channel, dial=dial, ssl_context=ssl_context, watched=watched)
