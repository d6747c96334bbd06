"""The loads. Each is a function of a peer and a number of clients that returns named values.

CPU is that of the proxy's whole process tree within a window in which nothing starts or ends that is not itself
measured. Events are written one by one at their times (paced) or all at once (bursts), each as an HTTP chunk of its
own, as an engine writes them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.bench import peers
from tests.bench.client import Client, Connection, Times, get, get_json, open_client
from tests.bench.figures import histogram_quantile, quantile
from tests.bench.peers import Engines, Peer
from tests.bench.processes import cpu_seconds, spent
from tests.bench.words import Ask

TAGS = count(1)
PATIENCE = 60.0
"""Seconds for what must come at all; far beyond what any peer needs."""

BURST = 2000
"""Events of a burst: enough that the request's own cost is a small part of theirs."""

BODY = 5_000_000
"""Bytes of a large body: a few images in a chat."""


@dataclass(slots=True)
class Lab:
    """What a load needs beside its peer."""

    engines: Engines
    seconds: float
    """The window in which CPU is counted."""

    async def stats(self) -> Any:
        """What the engines have seen since the last call."""
        return await get_json(self.engines.decode, "/bench/stats")

    async def seen(self) -> list[float]:
        """The gaps between the legs of each transfer since the last call, in seconds, as the engines saw them."""
        return [abs(gap) for gap in (await self.stats())["gaps"]]


@dataclass(slots=True)
class Outcome:
    """What a load gave."""

    values: dict[str, float]
    wrong: int = 0
    why: str = ""


Load = Callable[[Lab, Peer, int], Awaitable[Outcome]]


@dataclass(slots=True)
class Window:
    """What happened between two instants."""

    wall: float
    cpu: float
    by_process: list[float]
    events: int
    answers: int


def interval(n: int) -> int:
    """Milliseconds between two events of each of `n` streams: at most some 4,000 events a second in all, which every
    proxy here can still relay one by one. Beyond it they fall behind, and events that have queued up are cheap."""
    return 20 if n <= 32 else 50 if n <= 200 else 150 if n <= 600 else 250


# -- streams -------------------------------------------------------------------------------------


async def paced(lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` open streams, each with one event every so often, none of which begins or ends in the window."""
    every = interval(n)
    asks = [Ask(next(TAGS), count=0, every=every) for _ in range(n)]
    await lab.stats()
    async with open_client(peer.port) as client:
        connections = await connected(client, n)
        ends = await opened(client, connections, asks)
        window = await watched(lab, peer, client)
        await get(lab.engines.decode, "/bench/finish")
        await asyncio.wait_for(asyncio.gather(*ends), PATIENCE)
        values = {"events_per_s": window.events / window.wall, "offered_per_s": n * 1000 / every}
        if peer.started is not None and window.events:
            values["cpu_us_per_event"] = 1e6 * window.cpu / window.events
        sent = (await lab.stats())["events"] + n  # what ends a stream looks like an event
        if not client.count.wrong and sent != client.count.events:
            return Outcome({}, why=f"{sent} events were sent and {client.count.events} came")
        return outcome(client, values)


async def burst(lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` clients with one stream after the other, whose events all come at once."""
    async with open_client(peer.port) as client:
        window, _ = await closed_loop(lab, peer, client, [Ask(next(TAGS), count=BURST) for _ in range(n)])
        values = {"events_per_s": window.events / window.wall}
        if peer.started is not None and window.events:
            values["cpu_us_per_event"] = 1e6 * window.cpu / window.events
        return outcome(client, values)


async def idle(_lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` streams that have begun and say nothing more, at a fresh process: what each holds in memory."""
    if peer.started is None:
        return Outcome({})
    async with open_client(peer.port) as client:
        before = peer.started.memory()
        connections = await connected(client, n)
        await opened(client, connections, [Ask(next(TAGS), count=2, every=3_600_000) for _ in range(n)])
        return outcome(client, {"kib_per_stream": (peer.started.memory() - before) / 1024 / n})


# -- requests ------------------------------------------------------------------------------------


async def short(lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` clients with one short non-stream request after the other."""
    async with open_client(peer.port) as client:
        asks = [Ask(next(TAGS), stream=False) for _ in range(n)]
        window, times = await closed_loop(lab, peer, client, asks)
        values = {"requests_per_s": window.answers / window.wall}
        if times:
            values["latency_p50_ms"] = 1000 * quantile([t.whole for t in times], 0.5)
            values["latency_p99_ms"] = 1000 * quantile([t.whole for t in times], 0.99)
        if peer.started is not None and window.answers:
            values["cpu_us_per_request"] = 1e6 * window.cpu / window.answers
        return outcome(client, values)


async def workers(lab: Lab, peer: Peer, n: int) -> Outcome:
    """Short requests again, for one worker against two: also how evenly the workers are used."""
    async with open_client(peer.port) as client:
        asks = [Ask(next(TAGS), stream=False) for _ in range(n)]
        window, _ = await closed_loop(lab, peer, client, asks)
        values = {"requests_per_s": window.answers / window.wall}
        if window.answers:
            # What one request costs the busiest process: it is what bounds a server with cores enough.
            values["busiest_us_per_request"] = 1e6 * max(window.by_process) / window.answers
            values["cpu_us_per_request"] = 1e6 * window.cpu / window.answers
        return outcome(client, values)


async def body(lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` clients with one large request body after the other."""
    async with open_client(peer.port) as client:
        asks = [Ask(next(TAGS), stream=False, pad=BODY) for _ in range(n)]
        window, times = await closed_loop(lab, peer, client, asks)
        values = {"requests_per_s": window.answers / window.wall}
        if times:
            values["latency_p50_ms"] = 1000 * quantile([t.whole for t in times], 0.5)
        if peer.started is not None and window.answers:
            values["cpu_ms_per_request"] = 1e3 * window.cpu / window.answers
        return outcome(client, values)


async def ttft(lab: Lab, peer: Peer, n: int) -> Outcome:
    """The time to the first token while `n` clients come and go at a steady rate that leaves every proxy air, most of
    them inside a paced stream. The engines need no time for a prompt: what is seen is the way there and back."""
    rate = 100.0 if n <= 200 else 200.0
    cycle = max(0.004, n / rate)
    every = interval(n)
    pause = 0.003 if n == 1 else 0.5 * cycle
    ask_count = 1 if n == 1 else max(2, round(750 * cycle / every))
    lead = min(cycle, 1.0)
    await lab.seen()
    before = await reported(peer)
    begun = time.perf_counter() + lead
    end = begun + 2 * lab.seconds
    taken: list[Times] = []

    async def one(client: Client, connection: Connection) -> None:
        ask = Ask(next(TAGS), count=ask_count, every=every)
        payload = client.payload(ask)
        await asyncio.sleep(random.uniform(0, lead))
        while time.perf_counter() < end:
            if not connection.usable:
                connection = await client.connect()
            right = await asyncio.wait_for(connection.send(ask, payload), PATIENCE)
            if right and connection.times.sent >= begun:
                taken.append(connection.times)
            await asyncio.sleep(random.uniform(0, 2 * pause))

    async with open_client(peer.port) as client:
        connections = await connected(client, n)
        await asyncio.gather(*(one(client, connection) for connection in connections))
        values = {}
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            if taken:
                values[f"ttft_{name}_ms"] = 1000 * quantile([t.ttft for t in taken], q)
        gaps = await lab.seen()
        after = await reported(peer)
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            if gaps:
                values[f"gap_{name}_ms"] = 1000 * quantile(gaps, q)
            grown = [(edge, seen - before.get(edge, 0.0)) for edge, seen in sorted(after.items())]
            if (told := histogram_quantile(grown, q)) is not None:
                values[f"reported_gap_{name}_ms"] = 1000 * told
        return outcome(client, values)


async def abort(lab: Lab, peer: Peer, n: int) -> Outcome:
    """`n` clients that leave at any point of a stream, one after the other; then, what is left of them."""
    left = time.perf_counter() + lab.seconds
    requests = 0

    async def one(client: Client) -> None:
        nonlocal requests
        while time.perf_counter() < left:
            connection = await client.connect()
            ask = Ask(next(TAGS), count=40, every=5, prefill=30)
            connection.send(ask, client.payload(ask))
            requests += 1
            await asyncio.sleep(random.uniform(0, 0.15))
            connection.abort()
            client.forget(connection)

    held = (await get_json(lab.engines.decode, "/bench/busy"))["held"]
    cpu = _cpu(peer)
    async with open_client(peer.port) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(n)))
        window = _window(peer, cpu, begun, 0, requests)
    over = time.perf_counter()
    while (leftover := await _left(lab, peer)) and time.perf_counter() < over + 10:
        await asyncio.sleep(0.05)
    values = {
        "requests_per_s": requests / window.wall,
        "gone_after_s": time.perf_counter() - over,
        "left": float(leftover),
        "held_kv": float((await get_json(lab.engines.decode, "/bench/busy"))["held"] - held),
    }
    if peer.started is not None and requests:
        values["cpu_us_per_request"] = 1e6 * window.cpu / requests
    return Outcome(values)


async def _left(lab: Lab, peer: Peer) -> int:
    """Legs at the engines, client connections at the proxy, and (ours) places and debts in its own books."""
    busy = (await get_json(lab.engines.decode, "/bench/busy"))["busy"]
    left = sum(busy.values())
    if peer.started is not None:
        left += _accepted(peer.port)
    if peer.tells_gap:
        status = await get_json(peer.port, "/status")
        left += sum(engine.get("inflight", 0) + engine.get("debts", 0) for engine in status["engines"])
    return int(left)


async def quiet(lab: Lab) -> None:
    """Wait until the engines have nothing in hand: what a load has left must not meet the next one."""
    await get(lab.engines.decode, "/bench/finish")
    until = time.perf_counter() + 10
    while any((await get_json(lab.engines.decode, "/bench/busy"))["busy"].values()) and time.perf_counter() < until:
        await asyncio.sleep(0.02)


def _accepted(port: int) -> int:
    """Connections accepted at `port` that are not closed on the proxy's side."""
    wanted = f":{port:04X}"
    gone = {"06", "0A"}  # TIME_WAIT holds nothing, LISTEN is no connection
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(fields[1].endswith(wanted) and fields[3] not in gone for fields in map(str.split, lines))


# -- what they share -----------------------------------------------------------------------------


async def connected(client: Client, n: int) -> list[Connection]:
    return list(await asyncio.gather(*(client.connect() for _ in range(n))))


async def opened(client: Client, connections: list[Connection], asks: list[Ask]) -> list[asyncio.Future[bool]]:
    """A stream on each connection, opened over a while and not all in one instant, so that their events are spread as
    well. Returns once the last has begun; the futures are those of `Connection.send`."""
    ends = []
    for i, (connection, ask) in enumerate(zip(connections, asks, strict=True)):
        ends.append(connection.send(ask, client.payload(ask)))
        if i % 8 == 7:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENCE):
        for connection in connections:
            await connection.first.wait()
    await asyncio.sleep(0.3)
    return ends


async def closed_loop(lab: Lab, peer: Peer, client: Client, asks: list[Ask]) -> tuple[Window, list[Times]]:
    """One client an ask, each sends its own again as soon as it is answered; watched once they are all at it."""
    stop = asyncio.Event()
    taken: list[Times] = []

    async def one(connection: Connection, ask: Ask) -> None:
        payload = client.payload(ask)
        while not stop.is_set():
            if not connection.usable:
                connection = await client.connect()
            if await asyncio.wait_for(connection.send(ask, payload), PATIENCE):
                taken.append(connection.times)
            elif client.count.wrong > 100:
                return

    connections = await connected(client, len(asks))
    async with asyncio.TaskGroup() as group:
        for connection, ask in zip(connections, asks, strict=True):
            group.create_task(one(connection, ask))
        await asyncio.sleep(0.2 + 0.001 * len(asks))
        taken.clear()
        window = await watched(lab, peer, client)
        within = list(taken)
        stop.set()
    return window, within


async def watched(lab: Lab, peer: Peer, client: Client) -> Window:
    """The window itself."""
    before = _cpu(peer)
    events, answers, begun = client.count.events, client.count.answers, time.perf_counter()
    await asyncio.sleep(lab.seconds)
    return _window(peer, before, begun, client.count.events - events, client.count.answers - answers)


def _cpu(peer: Peer) -> dict[int, float]:
    """CPU seconds so far, by process."""
    return {} if peer.started is None else cpu_seconds(peer.started.pids)


def _window(peer: Peer, before: dict[int, float], begun: float, events: int, answers: int) -> Window:
    after = {} if peer.started is None else cpu_seconds(before)
    wall = time.perf_counter() - begun
    each = [seconds - before[pid] for pid, seconds in after.items()]
    return Window(wall, spent(before, after), each or [0.0], events, answers)


def outcome(client: Client, values: dict[str, float]) -> Outcome:
    return Outcome(values, client.count.wrong, client.count.why)


async def reported(peer: Peer) -> dict[float, float]:
    """The proxy's own histogram of the gap: cumulative counts by upper edge in seconds; empty where it has none."""
    if not peer.tells_gap:
        return {}
    _, text = await get(peer.port, "/metrics")
    found = {}
    for line in text.decode().splitlines():
        if line.startswith("pdproxy_decode_start_gap_seconds_bucket{"):
            edge = line.partition('le="')[2].partition('"')[0]
            found[float(edge)] = float(line.rpartition(" ")[2])
    return found


async def warm(lab: Lab, peer: Peer) -> str:
    """Until a peer serves, and where it has two legs, sends both at once. Returns what is wrong, or nothing."""
    until = time.perf_counter() + PATIENCE
    why = "it did not answer"
    while time.perf_counter() < until:
        if peer.started is not None and peer.started.process.poll() is not None:
            return f"it ended by itself (exit code {peer.started.process.returncode}):\n{peer.started.last_words()}"
        try:
            if peer.ready_path is not None and (await get(peer.port, peer.ready_path))[0] != 200:
                why = f"{peer.ready_path} did not become 200"
            elif not (why := await _warm_up(lab, peer)):
                return ""
        except (OSError, TimeoutError, json.JSONDecodeError) as error:
            why = str(error) or type(error).__name__
        await asyncio.sleep(0.05)
    return f"{why}\n{peer.started.last_words() if peer.started else ''}"


async def _warm_up(lab: Lab, peer: Peer) -> str:
    async with open_client(peer.port) as client:
        for number in range(peer.warm_ups):
            await lab.seen()
            connection = await client.connect()
            ask = Ask(next(TAGS), count=4, every=2, prefill=60, stream=bool(number % 2))
            await asyncio.wait_for(connection.send(ask, client.payload(ask)), PATIENCE)
        gaps = await lab.seen()
        if client.count.wrong:
            return client.count.why
    if peer.name in (peers.DIRECT, peers.NGINX, peers.FLOOR):
        return ""
    # vllm-router sends its first request's legs one after the other: from then on it knows that P pushes.
    return "" if gaps and max(gaps) < 0.03 else "its legs do not go out together"


LOADS: dict[str, Load] = {
    "paced": paced,
    "ttft": ttft,
    "burst": burst,
    "short": short,
    "body": body,
    "idle": idle,
    "abort": abort,
    "workers": workers,
}
FRESH = frozenset({"idle"})
"""Loads that need a process nobody has used."""
