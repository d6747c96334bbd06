"""What can be seen of running engines from where the proxy would run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec
import trio
from prometheus_client.parser import text_string_to_metric_families

from trio_pdproxy.config import ROLES, EngineSpec, Role, Settings
from trio_pdproxy.core.plan import transfer_params_in
from trio_pdproxy.engines.connections import KEEPALIVE
from trio_pdproxy.engines.coordinates import Meta, SideChannel, SideChannelError, ZmqSideChannel
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.wire import EngineError

BETWEEN_SAMPLES = 1.0
"""Seconds between two looks at an engine's load: what is held at both is not in passing."""
IDLE_MARGIN = 0.5
PROBE_TIMEOUT = 30.0
ANSWER_TIMEOUT = 10.0
"""More patient than the proxy's own probes: one that is slow is not yet one that is wrong."""


class Told(msgspec.Struct, frozen=True):
    """What a prefill engine says of itself in the answer to a one-token probe."""

    remote_engine_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    transfer_mode: str = "pull"


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's metrics at one moment. `queued`: (upper bound in seconds, requests up to it), as in a histogram."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    """0 to 1."""
    ranks: int = 1
    queued: tuple[tuple[float, float], ...] = ()

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


@dataclass(slots=True)
class EngineFacts:
    """One engine. What could not be learned is None."""

    role: Role
    spec: EngineSpec
    unreachable: str | None = None
    """Why it cannot be asked anything."""
    health: int | None = None
    version: str | None = None
    models_status: int | None = None
    model: str | None = None
    max_model_len: int | None = None
    meta: Meta | None = None
    no_meta: str | None = None
    """Why its side channel says nothing."""
    told: Told | None = None
    probe: str | None = None
    """Prefill engines: what went wrong with the one-token probe."""
    closes_early: bool | None = None
    """Whether it closes an idle connection while the proxy would still use it."""
    loads: list[Load] = field(default_factory=list)
    """Two, `BETWEEN_SAMPLES` apart."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def host(self) -> str:
        return self.spec.address.host


class _Version(msgspec.Struct):
    version: str | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def gather(settings: Settings, *, side_channel: SideChannel | None = None) -> list[EngineFacts]:
    """Ask every engine of `settings`, all at once; takes about as long as the proxy keeps idle connections (3 s)."""
    asked = side_channel or ZmqSideChannel(max(settings.health_timeout, 5.0))
    facts = [
        EngineFacts(role, spec)
        for role in ROLES
        for spec in (settings.prefill if role == "prefill" else settings.decode)
    ]
    async with trio.open_nursery() as nursery:
        for one in facts:
            nursery.start_soon(_ask, one, settings, asked)
    return facts


async def _ask(facts: EngineFacts, settings: Settings, side_channel: SideChannel) -> None:
    engine = Engine(facts.role, facts.spec, settings)
    try:
        facts.health = (await engine.call("GET", "/health", within=ANSWER_TIMEOUT)).status_code
    except EngineError as error:
        facts.unreachable = str(error).partition(": ")[2] or str(error)
        return
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask_meta, facts, engine, side_channel)
            nursery.start_soon(_sample, facts, engine)
            nursery.start_soon(_hold_idle, facts)
            await _ask_about(facts, engine)
            if facts.role == "prefill" and facts.model is not None:
                await _probe(facts, engine)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await engine.connections.shut()


async def _ask_about(facts: EngineFacts, engine: Engine) -> None:
    try:
        version = await engine.call("GET", "/version", within=ANSWER_TIMEOUT)
        facts.version = msgspec.json.decode(version.content, type=_Version).version
    except (EngineError, msgspec.DecodeError):
        pass
    try:
        models = await engine.call("GET", "/v1/models", within=ANSWER_TIMEOUT)
        facts.models_status = models.status_code
        first = msgspec.json.decode(models.content, type=_Models).data[0]
        facts.model, facts.max_model_len = first.id, first.max_model_len
    except (EngineError, msgspec.DecodeError, IndexError):
        pass


async def _ask_meta(facts: EngineFacts, engine: Engine, side_channel: SideChannel) -> None:
    try:
        facts.meta = await side_channel.ask(*engine.side_channel)
    except SideChannelError as error:
        facts.no_meta = str(error)


async def _probe(facts: EngineFacts, engine: Engine) -> None:
    body = {"model": facts.model, "prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    headers = {"content-type": "application/json", "x-request-id": uuid4().hex}
    content = msgspec.json.encode(body)
    try:
        answer = await engine.call("POST", "/v1/completions", content=content, headers=headers, within=PROBE_TIMEOUT)
    except EngineError as error:
        facts.probe = str(error)
        return
    if answer.status_code != 200:
        facts.probe = f"answered {answer.status_code}: {answer.text[:200]}"
    elif (params := transfer_params_in(answer.content)) is not None:
        try:
            facts.told = msgspec.json.decode(params, type=Told)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            facts.probe = f"its kv_transfer_params are no NIXL connector's: {error}"


async def _hold_idle(facts: EngineFacts) -> None:
    """Keep a used connection idle for as long as the proxy would, and see whether the engine closes it."""
    if facts.spec.tls:
        return
    host, port = facts.spec.address
    answered = False
    with trio.move_on_after(ANSWER_TIMEOUT + KEEPALIVE + IDLE_MARGIN):
        try:
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(b"GET /health HTTP/1.1\r\nHost: check\r\n\r\n")
                head = await stream.receive_some(65536)
                if not head:
                    return
                answered = True
                with trio.move_on_after(KEEPALIVE + IDLE_MARGIN):
                    while await stream.receive_some(65536):  # the rest of the answer, should it come in pieces
                        pass
                    facts.closes_early = True
                    return
                facts.closes_early = False
        except (OSError, trio.BrokenResourceError):
            facts.closes_early = True if answered else None


async def _sample(facts: EngineFacts, engine: Engine) -> None:
    for number in range(2):
        if number:
            await trio.sleep(BETWEEN_SAMPLES)
        try:
            answer = await engine.call("GET", "/metrics", within=ANSWER_TIMEOUT)
        except EngineError:
            continue
        if answer.status_code == 200 and (load := read_load(answer.text)) is not None:
            facts.loads.append(load)


def read_load(text: str) -> Load | None:
    """A page of vLLM's /metrics, ranks taken together; None where it is none."""
    sums: dict[str, float] = {}
    ranks: set[str] = set()
    usages: list[float] = []
    buckets: dict[float, float] = {}
    try:
        for name, labels, value in _samples(text):
            if name == "vllm:kv_cache_usage_perc":
                usages.append(value)
                ranks.add(labels.get("engine", "0"))
            elif name == "vllm:request_queue_time_seconds_bucket":
                bound = float(labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
            else:
                sums[name] = sums.get(name, 0.0) + value
    except (ValueError, KeyError):
        return None
    if not usages:
        return None
    return Load(
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        kv_usage=max(usages),
        ranks=len(ranks),
        queued=tuple(sorted(buckets.items())),
    )


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        if family.name.startswith("vllm:"):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
