"""One engine: its address and connections, what was learned of it, and what it has in hand."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import httpx
import trio

from trio_pdproxy.config import EngineSpec, Role, Settings
from trio_pdproxy.core.health import Breaker, Circuit
from trio_pdproxy.core.plan import Coordinates
from trio_pdproxy.core.routing import stable_hash
from trio_pdproxy.engines.connections import Connections, Dial, Origin
from trio_pdproxy.engines.coordinates import Meta
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.engines.wire import EngineError, SilentError


@dataclass(frozen=True, slots=True)
class About:
    """What can be seen of an engine: the ground on which two are paired or refused."""

    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    meta: Meta | None = None
    """None where its side channel does not answer."""
    mode: str | None = None
    """push or pull, as a prefill engine's answer says; None where it was not asked."""

    def words(self) -> str:
        """For the message that compares two engines."""
        meta = self.meta
        parts = [
            f"version {self.version or 'unknown'}",
            f"model {self.model or 'unknown'}",
            f"max_model_len {self.max_model_len or 'unknown'}",
            f"block size {(meta and meta.block_size) or 'unknown'}",
        ]
        if self.mode is not None:
            parts.append(f"{self.mode} mode")
        return ", ".join(parts)


class Engine:
    """An engine of the pool. Its counters are the proxy's own: an engine's /metrics lag behind.

    A prefill engine with data parallelism is several of these, one a rank. `inflight` counts the places taken: running
    legs and unpaid debts. `debts` counts dispatches whose KV on this (decode) engine waits for a push that nobody waits
    for; `stranded` those whose push can never come.
    """

    def __init__(
        self,
        role: Role,
        spec: EngineSpec,
        settings: Settings,
        *,
        rank: int | None = None,
        ssl_context: ssl.SSLContext | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.role = role
        self.spec = spec
        self.rank = rank
        """Of a prefill engine with data parallelism: sent with each leg, or the engine would choose one itself."""
        self.name = spec.name if rank is None else f"{spec.name}-dp{rank}"
        self.seed = stable_hash(self.name.encode())
        self.origin = Origin.of(spec.url)
        self.host_header = self.origin.authority.encode()
        host, port = spec.side_channel
        self.side_channel = (host, port + (rank or 0))
        self.max_inflight = self.cap = settings.max_inflight_of(role, spec)
        self.lease_seconds = settings.lease_of(spec)
        self.connections = Connections(
            self.origin,
            connect_timeout=settings.connect_timeout,
            ssl_context=ssl_context,
            dial=dial,
        )
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self.authorization = f"Bearer {key}".encode() if key else None
        self.client: httpx.AsyncClient = open_client(
            spec.url,
            timeout=settings.health_timeout,
            connections=self.connections,
            headers={"authorization": f"Bearer {key}"} if key else None,
        )
        self.inflight = 0
        self.debts = 0
        self.stranded = 0
        self.up = False
        self.why = "not asked yet"
        """Why it is not used, in words, while it is not usable."""
        self.about = About()
        self.coordinates: Coordinates | None = None
        """Prefill engines: what decode engines are told. None until learned."""
        self.poked = trio.Event()
        """Set to have it looked at now instead of at the next interval."""
        self.looked = False
        """It has been asked who it is, whatever came of it."""
        self.misses = 0
        """Probes in a row that it did not answer in time."""
        self.heard = -inf
        """When it last answered a request, or sent a piece of a stream; on trio's clock."""
        self.doubts = 0
        self.doubts_settled = 0
        self.breaker = Breaker(settings.eject_after, settings.eject_time)
        self.draining = False
        """It gets no new requests; those it has may finish."""
        self.idle = trio.Event()
        """Set once it is draining and has nothing in hand."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when it may have become usable, or no longer be."""

    @property
    def compatibility(self) -> str | None:
        """NIXL's hash over what two engines must have in common; None while not known."""
        return self.about.meta.compatibility_hash if self.about.meta else None

    @property
    def known(self) -> bool:
        """It answers, and what must be known of it is known."""
        return (
            self.up
            and not self.doubted
            and not self.draining
            and (self.role == "decode" or self.coordinates is not None)
        )

    @property
    def usable(self) -> bool:
        return self.known and self.breaker.circuit is not Circuit.OPEN

    @property
    def doubted(self) -> bool:
        """What was learned may be wrong (it answered with other coordinates): not used until learned again."""
        return self.doubts > self.doubts_settled

    @property
    def being_asked(self) -> bool:
        """Who it is and whether it can serve is just being asked, for the first time or once more: soon it is known."""
        return not self.draining and (not self.looked or (self.up and self.doubted))

    def doubt(self, why: str) -> None:
        """Take it out of use until it has been asked again who it is."""
        self.doubts += 1
        self.why = why
        self.poked.set()
        self.on_change()

    # -- outcomes of requests --------------------------------------------------------------------

    def failed(self, why: str) -> None:
        """A leg to it failed, and not by the client's fault."""
        self.poked.set()
        if self.breaker.failed(trio.current_time()):
            self.why = f"failed {self.breaker.failures} times in a row, the last time because {why}"
            # Who fails may have been restarted: it is asked again who it is before it is tried.
            self.doubt(self.why)

    def succeeded(self) -> None:
        """A leg to it did what it should."""
        self.heard = trio.current_time()
        if self.breaker.failures and self.breaker.succeeded():
            self.max_inflight = self.cap
            self.on_change()

    def tick(self) -> None:
        """Let an ejected one that has rested be tried, one request at a time."""
        if self.breaker.tick(trio.current_time()):
            self.max_inflight = 1
            self.on_change()

    # -- one-engine calls ------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        within: float | None = None,
    ) -> httpx.Response:
        """One small call, answered by this engine alone, read to its end. `within`: seconds for each of its steps
        (default: health_timeout). Raises `EngineError`."""
        try:
            return await self.client.request(
                method, path, content=content, headers=headers, timeout=within or httpx.USE_CLIENT_DEFAULT
            )
        except httpx.TimeoutException as error:
            raise SilentError(f"{method} {path}: {error}") from None
        except httpx.HTTPError as error:
            raise EngineError(f"{method} {path}: {error}") from None

    def status(self) -> dict[str, object]:
        """For /status."""
        meta = self.about.meta
        shown: dict[str, object] = {
            "name": self.name,
            "role": self.role,
            "url": self.spec.url,
            "side_channel": f"{self.spec.side_channel.host}:{self.side_channel[1]}",
            "usable": self.usable,
            "why": "" if self.usable else self.why,
            "draining": self.draining,
            "circuit": self.breaker.circuit.value,
            "version": self.about.version,
            "model": self.about.model,
            "max_model_len": self.about.max_model_len,
            "engine_id": meta.engine_id if meta else None,
            "compatibility_hash": meta.compatibility_hash if meta else None,
            "inflight": self.inflight,
            "max_inflight": self.max_inflight,
            "debts": self.debts,
            "stranded": self.stranded,
            "connections": self.connections.open,
            "idle_connections": self.connections.idle,
        }
        if self.role == "prefill":
            shown["lease"] = self.lease_seconds
            shown["mode"] = self.about.mode
            shown["rank"] = self.rank
            if self.coordinates is not None:
                shown["tp_size"] = self.coordinates.tp_size
                shown["pp_size"] = self.coordinates.pp_size
        return shown
