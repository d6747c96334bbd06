"""A load on an OpenAI-style endpoint, and what its clients saw.

The requests are read with the proxy's own client for engines, which costs less CPU than a general one: the load
generator shares the machine with what it measures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import trio

from trio_pdproxy.bench.prompts import characters_for, random_text
from trio_pdproxy.core import sse
from trio_pdproxy.engines.connections import Connections, Origin
from trio_pdproxy.engines.wire import BrokenError, Connection, EngineError, request_bytes

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
T = TypeVar("T")

ANSWER_LIMIT = 64 * 1024 * 1024


class BenchError(Exception):
    """The measurement cannot go on; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked. Times in seconds, lengths in tokens."""

    num_prompts: int = 100
    input_len: int = 512
    output_len: int = 64
    endpoint: Literal["completions", "chat"] = "completions"
    request_rate: float = inf
    """Requests a second; infinite: all at once, as far as `max_concurrency` lets them."""
    burstiness: float = 1.0
    """1: a Poisson process; less: more in bursts; more: more evenly."""
    max_concurrency: int | None = None
    stream: bool = True
    ignore_eos: bool = True
    seed: int = 0
    timeout: float = 600.0


@dataclass(slots=True)
class Seen:
    """One request, as its client saw it. Seconds."""

    started: float = 0.0
    success: bool = False
    error: str = ""
    latency: float = 0.0
    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    """Between two pieces of a stream."""
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a load."""

    load: Load
    model: str
    duration: float
    peak: int
    """Requests under way at once, at the most."""
    requests: list[Seen]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None


class Target:
    """An endpoint under load. Use as `async with`; its connections are closed at the end."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._connections = Connections(Origin.of(self.url), connect_timeout=10)
        self._base = urlsplit(self.url).path.removesuffix("/v1").encode()
        self._headers = [(b"host", self._connections.origin.authority.encode()), (b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))

    async def __aenter__(self) -> Target:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await self._connections.shut()

    async def model(self) -> str:
        """The first model the endpoint serves. Raises `BenchError`."""

        async def read(connection: Connection) -> bytes:
            head = await connection.receive_head()
            body = await connection.receive_all(ANSWER_LIMIT)
            if head.status != 200:
                raise BenchError(f"{self.url}/v1/models answered {head.status}: {body[:200].decode(errors='replace')}")
            return body

        try:
            with trio.fail_after(30):
                body = await self._call(b"GET", "/v1/models", b"", read)
            return msgspec.json.decode(body, type=_Models).data[0].id
        except trio.TooSlowError:
            raise BenchError(f"{self.url} does not answer within 30 s") from None
        except EngineError as error:
            raise BenchError(f"{self.url} does not answer: {error}") from None
        except (msgspec.DecodeError, IndexError):
            raise BenchError(f"{self.url}/v1/models names no model: give --model") from None

    async def ask(self, load: Load, model: str, prompt: str) -> Seen:
        """One request. What goes wrong is in the result, never raised."""
        seen = Seen(started=trio.current_time())
        body = msgspec.json.encode(_body(load, model, prompt))
        try:
            with trio.fail_after(load.timeout):
                await self._call(b"POST", ENDPOINTS[load.endpoint], body, lambda c: _read(c, seen))
        except trio.TooSlowError:
            seen.error = f"not over within {load.timeout:g} s"
        except (EngineError, sse.EventTooLongError, msgspec.DecodeError) as error:
            seen.error = str(error)
        seen.latency = trio.current_time() - seen.started
        seen.success = not seen.error
        return seen

    async def _call(self, method: bytes, path: str, body: bytes, read: Callable[[Connection], Awaitable[T]]) -> T:
        request = request_bytes(method, self._base + path.encode(), self._headers, body)
        connection = await self._connections.take()
        try:
            try:
                await connection.send(request)
                return await read(connection)
            except BrokenError:
                if not connection.served or connection.received:
                    raise
                # A kept-alive connection that the server closed as we wrote to it: it has seen nothing.
                await self._connections.close(connection)
                connection = await self._connections.take(fresh=True)
                await connection.send(request)
                return await read(connection)
        finally:
            with trio.CancelScope(shield=True):
                await self._connections.give_back(connection)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _body(load: Load, model: str, prompt: str) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "max_tokens": load.output_len, "temperature": 0, "stream": load.stream}
    if load.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    return body


async def _read(connection: Connection, seen: Seen) -> None:
    head = await connection.receive_head()
    if head.status != 200 or not (head.get(b"content-type") or b"").startswith(b"text/event-stream"):
        body = await connection.receive_all(ANSWER_LIMIT)
        if head.status != 200:
            seen.error = f"answered {head.status}: {body[:200].decode(errors='replace')}"
            return
        _count(msgspec.json.decode(body, type=_Chunk).usage, seen)
        return
    framer, last, pieces, done = sse.EventFramer(), None, 0, False
    while data := await connection.receive_body():
        now = trio.current_time()
        for event in sse.events(framer.feed(data)):
            if event == b"[DONE]":
                done = True
                continue
            if error := sse.error_event(event):
                seen.error = f"an error in the stream ({error.get('code')}): {error.get('message')}"
                continue
            chunk = msgspec.json.decode(event, type=_Chunk)
            _count(chunk.usage, seen)
            if not chunk.choices:
                continue
            pieces += 1
            if last is None:
                seen.ttft = now - seen.started
            else:
                seen.itl.append(now - last)
            last = now
    seen.output_tokens = seen.output_tokens or pieces
    if not done and not seen.error:
        seen.error = "the stream ended without [DONE]"


def _count(usage: _Usage | None, seen: Seen) -> None:
    if usage is not None:
        seen.input_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens


# -- the load ------------------------------------------------------------------------------------


async def calibrate(target: Target, load: Load, model: str) -> int:
    """How many characters make a prompt of `load.input_len` tokens there. Raises `BenchError`."""
    random = Random(f"calibrate {load.seed}")
    one = replace(load, stream=False, output_len=1)
    counted: list[tuple[int, int]] = []
    for length in (64, 512):
        seen = await target.ask(one, model, random_text(random, length))
        if not seen.success:
            raise BenchError(f"the first request to {target.url} failed: {seen.error}")
        counted.append((length, seen.input_tokens))
    if counted[1][1] <= counted[0][1]:
        raise BenchError(f"{target.url} does not say how many tokens a prompt has (`usage` in its answers)")
    return characters_for(load.input_len, *counted)


async def run_load(
    target: Target,
    load: Load,
    model: str,
    characters: int,
    *,
    salt: str = "",
    on_done: Callable[[Seen], None] = lambda seen: None,
) -> Measured:
    """Send the load, wait for all of it. `salt`: other prompts of the same lengths at the same times."""
    random = Random(f"prompts {load.seed} {salt}")
    prompts = [random_text(random, characters) for _ in range(load.num_prompts)]
    arrivals = _arrivals(load)
    limit = trio.CapacityLimiter(load.max_concurrency or inf)
    requests: list[Seen] = []
    under_way = peak = 0

    async def one(prompt: str) -> None:
        nonlocal under_way, peak
        async with limit:
            under_way += 1
            peak = max(peak, under_way)
            seen = await target.ask(load, model, prompt)
            under_way -= 1
        requests.append(seen)
        on_done(seen)

    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            await trio.sleep_until(begun + arrival)
            nursery.start_soon(one, prompt)
    return Measured(load, model, trio.current_time() - begun, peak, requests)


def _arrivals(load: Load) -> list[float]:
    """When each request starts, in seconds after the first; the same for the same seed."""
    if load.request_rate == inf:
        return [0.0] * load.num_prompts
    random = Random(f"arrivals {load.seed}")
    scale = 1 / (load.request_rate * load.burstiness)
    times, now = [], 0.0
    for _ in range(load.num_prompts):
        times.append(now)
        now += random.gammavariate(load.burstiness, scale)
    return times
