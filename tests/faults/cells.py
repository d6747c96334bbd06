"""One cell of the fault matrix: a stack with one fault, one request, and what the tables say of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest
import trio

from tests.faults.client import Client, End, Got, connected, request
from tests.faults.table import Tables
from trio_pdproxy.config import rules
from trio_pdproxy.engines import connections
from trio_pdproxy.exchange import dispatch
from trio_pdproxy.sim import Fault, SeenRequest, SimEngine, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig
from trio_pdproxy.testing.waiting import until

TOKENS = 6
PROMPT = "one cell"

Whose = Literal["text", "part", "part+done", "text+error", "engine", "proxy"]
"""The client's body: all of the text; the beginning of a stream and an error event; the same after the engine's own
[DONE]; a stream that the engine itself ended with an error; an engine's error verbatim; the proxy's own error."""


@dataclass(frozen=True, slots=True)
class Out:
    """What has to come of a cell."""

    status: int
    body: Whose
    end: End = "complete"
    rescue: str | None = None
    stranded: int = 0
    held: int = 0
    """How many of the stranded really hold blocks: a push may have come although nobody could see it."""

    def __str__(self) -> str:
        note = f"+{self.stranded}s" if self.stranded else ""
        return f"{self.status if self.end == 'complete' else self.end}{note}"


@dataclass(frozen=True, slots=True)
class Cell:
    """`mode`: how often the fault strikes, and whether there is another pair of engines; see the tables."""

    party: Literal["P", "D"]
    where: str
    what: str
    mode: str
    stream: bool
    out: Out

    def __str__(self) -> str:
        return "-".join((self.party, self.where, self.what, self.mode, "stream" if self.stream else "whole"))

    @property
    def other(self) -> bool:
        """There is a second pair."""
        return "other" in self.mode

    @property
    def always(self) -> bool:
        return "always" in self.mode or self.other

    @property
    def reused(self) -> bool:
        """The legs go out on kept-alive connections."""
        return "reused" in self.mode

    @property
    def spoken(self) -> bool:
        """The prefill engine's fault strikes only once the client has the whole answer."""
        return "spoken" in self.mode


@dataclass(slots=True)
class Stage:
    """What a running cell is made of."""

    cell: Cell
    rig: Rig
    released: trio.Event = field(default_factory=trio.Event)
    """The decode engines may speak."""
    answered: trio.Event = field(default_factory=trio.Event)
    """The client has its answer."""
    broken: list[SimEngine] = field(default_factory=list)
    """The engine that has the fault: the first of its role that sees the request."""

    @property
    def engines(self) -> list[SimEngine]:
        return self.rig.cluster.prefill if self.cell.party == "P" else self.rig.cluster.decode

    def match(self, engine: SimEngine) -> Callable[[SeenRequest], bool]:
        def matches(seen: SeenRequest) -> bool:
            if PROMPT not in seen.body["prompt"]:
                return False
            if not self.broken:
                self.broken.append(engine)
            return self.broken[0] is engine

        return matches

    def legs(self, engine: SimEngine) -> list[SeenRequest]:
        return [seen for seen in engine.requests if seen.body["prompt"] == PROMPT]

    def plant(self) -> None:
        """The cell's fault, and what it takes for the other engine to come before or after it."""
        cell = self.cell
        for engine in self.engines:
            engine.faults.add(planted(cell, self.match(engine), self.answered if cell.spoken else None))
        if cell.party == "P" and not cell.spoken:
            for engine in self.rig.cluster.decode:
                engine.faults.add(Fault("before_head", "slow", after_work=True, until=self.released, times=None))

    async def release(self) -> None:
        """Let decode speak once nothing that the prefill engine still has to do wrong could be outrun by it."""
        cell = self.cell
        while True:
            await trio.sleep(0.001)
            if not self.broken:
                continue
            elsewhere = any(self.legs(engine) for engine in self.engines if engine is not self.broken[0])
            at_broken = self.legs(self.broken[0])
            served = at_broken and at_broken[-1].how == "complete"
            if elsewhere or served or cell.what in ("slow", "extra") or cell.where == "after_body":
                self.released.set()
                return


def planted(cell: Cell, match: Callable[[SeenRequest], bool], until: trio.Event | None) -> Fault:
    times = None if cell.always else 1
    if cell.what.isdigit():
        headers = [("retry-after", "1")] if cell.what in ("429", "503") else []
        return Fault(
            "before_head",
            "status",
            status=int(cell.what),
            body=engine_error(cell),
            headers=headers,
            times=times,
            match=match,
        )
    return Fault(
        cell.where if cell.where != "any" else "after_body",  # type: ignore[arg-type]
        cell.what,  # type: ignore[arg-type]
        times=times,
        match=match,
        delay=0.05 if cell.what == "slow" else 0,
        after=2,
        until=until,
    )


def engine_error(cell: Cell) -> bytes:
    return b'{"error": {"message": "no", "type": "T", "param": null, "code": %b}}' % cell.what.encode()


def bounds(cell: Cell) -> dict[str, Any]:
    """Only the deadline that the cell is about is short: a slow machine must not meet the others."""
    found: dict[str, Any] = {"health_interval": 3600, "health_timeout": 10, "drain_grace": 30, "shutdown_grace": 1}
    if cell.what != "hang" or (cell.where == "after_body" and not (cell.party == "D" and cell.stream)):
        return found
    if cell.party == "P":
        if cell.spoken:
            return found | {"drain_grace": 0.2}
        return found | {"connect_timeout": 1, "prefill_timeout": 1.2, "settle_timeout": 2, "drain_grace": 2}
    if cell.stream and cell.where in ("mid_body", "after_body"):
        return found | {"idle_timeout": 1.5}
    found |= {"connect_timeout": 1, "lease": 1.6, "queue_timeout": 1, "first_byte_timeout": 3}
    if cell.stream:
        return found
    return found | {"prefill_timeout": 3, "request_timeout": 3.5, "settle_timeout": 30}


def shorten_waits(monkeypatch: pytest.MonkeyPatch, *, reused: bool) -> None:
    """Waits that only cost the tests time; and kept-alive connections: all of them, or none."""
    monkeypatch.setattr(dispatch, "REFUSAL_WAIT", 0.05)
    monkeypatch.setattr(dispatch, "BUSY_WAIT", 0.05)
    monkeypatch.setattr(dispatch, "LONGEST_BUSY_WAIT", 0.05)
    for module in (dispatch, rules):
        monkeypatch.setattr(module, "RESCUE_MARGIN", 0.1)
    monkeypatch.setattr(connections, "KEEPALIVE", 600.0 if reused else 0.0)


def asked(prompt: str, *, stream: bool) -> bytes:
    return request({"model": "sim", "prompt": prompt, "max_tokens": TOKENS, "stream": stream})


async def play(cell: Cell, tables: Tables, one_at_a_time: trio.Lock | None = None) -> None:
    """Where cells run together they are still set up one by one: their deadlines are for what comes after."""
    count = 2 if cell.other else 1
    sim = SimSettings(keep_alive=600)
    async with AsyncExitStack() as stack:
        async with one_at_a_time or trio.Lock():
            rig = await stack.enter_async_context(
                open_rig(prefill=count, decode=count, sim=sim, ready=False, **bounds(cell))
            )
            client = await stack.enter_async_context(connected(rig.url))
            await ready(rig)
            await follow_up(client, rig, count)  # every engine has met every other, and has a connection
        stage = Stage(cell, rig)
        stage.plant()
        with trio.fail_after(60):
            got = await ask(client, stage)
        check_body(got, cell)
        left = await settle(rig, cell.out)
        title = f"faults of {cell.party}: {'stream' if cell.stream else 'whole answer'}"
        place = f"{PLACES.index(cell.where)} {cell.where}"
        tables.cell(title, f"{cell.what} {cell.mode}", place, str(seen_out(got, rig)))
        tables.leftovers += bool(left)
        assert left == {}
        check_report(rig, cell.out)
        for engine in rig.cluster.engines:
            engine.faults.clear()
        await ready(rig)
        if got.end != "complete":
            client = await stack.enter_async_context(connected(rig.url))
        await follow_up(client, rig, 1)
        assert await settle(rig, cell.out) == {}


PLACES = ["before_head", "in_head", "after_head", "mid_body", "after_body", "any"]


async def ask(client: Client, stage: Stage) -> Got:
    async with trio.open_nursery() as nursery:
        if not stage.cell.spoken:
            nursery.start_soon(stage.release)
        await client.send(asked(PROMPT, stream=stage.cell.stream))
        got = await client.answer()
        stage.answered.set()
        nursery.cancel_scope.cancel()
    return got


async def follow_up(client: Client, rig: Rig, count: int) -> None:
    """The stack goes on as if nothing had been."""
    for number in range(count * count):
        prompt = f"and then {number}"
        await client.send(asked(prompt, stream=bool(number % 2)))
        got = await client.answer()
        assert (got.status, got.end) == (200, "complete"), got
        assert got.text == expected_text(prompt, TOKENS)


async def ready(rig: Rig) -> None:
    """Until every engine is usable; one that was not is looked at again, for a machine may have been too slow."""

    def usable() -> bool:
        missing = [engine for engine in rig.app.pool.engines if not engine.usable]
        for engine in missing:
            engine.poked.set()
        return not missing

    await until(usable, 60, step=0.02)


async def settle(rig: Rig, out: Out, seconds: float = 30.0) -> dict[str, int]:
    """Wait until nothing is left but what the table says; what is left then."""
    with suppress(AssertionError):
        await until(lambda: not leftovers(rig, out), seconds)
    return leftovers(rig, out)


def leftovers(rig: Rig, out: Out) -> dict[str, int]:
    found = {name: count for name, count in rig.leftovers().items() if not name.endswith(" blocks")}
    found["blocks"] = sum(engine.blocks_held for engine in rig.cluster.decode) - out.held
    found["orphans"] = sum(engine.orphans for engine in rig.cluster.decode) - out.held
    found["stranded"] = sum(engine.stranded for engine in rig.app.pool.decode) - out.stranded
    for sim in rig.cluster.prefill:
        found[f"{sim.name} running"] = sim.running + sim.waiting
    for engine in rig.app.pool.engines:
        found[f"{engine.name} busy connections"] = engine.connections.open - engine.connections.idle
    return {name: count for name, count in found.items() if count}


def check_body(got: Got, cell: Cell) -> None:
    out = cell.out
    assert (got.status, got.end) == (out.status, out.end), got
    assert got.rest == b""
    assert got.headers["x-request-id"]
    assert "kv_transfer_params" not in got.body.decode()
    assert got.framing == ("chunked" if got.is_stream else "length")
    assert got.is_stream == (cell.stream and out.body not in ("engine", "proxy"))
    match out.body:
        case "text":
            assert got.text == expected_text(PROMPT, TOKENS)
            if cell.stream:
                assert got.events.count(b"[DONE]") == 1
                assert got.events[-1] == b"[DONE]"
        case "part" | "part+done":
            assert b'"code":"stream_broken"' in got.events[-1]
            told = [e for e in got.events[:-1] if e != b"[DONE]"]
            text = "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in told)
            whole = expected_text(PROMPT, TOKENS)
            assert whole.startswith(text)
            assert text
            assert (text == whole) == (out.body == "part+done")
            assert got.events.count(b"[DONE]") == (out.body == "part+done")
        case "text+error":
            assert b'"error"' in got.events[-2]
            assert got.events[-1] == b"[DONE]"
        case "engine":
            assert "error" in msgspec.json.decode(got.body)
            if cell.what.isdigit():
                assert got.body == engine_error(cell)
            assert ("retry-after" in got.headers) == (out.status in (429, 503))
        case "proxy":
            assert set(got.error) == {"message", "type", "param", "code"}
            assert got.error["message"]
            engine = {"P": "prefill", "D": "decode"}[cell.party]
            assert got.error["type"] == f"{engine}_error"
            assert got.error["code"] == ("timeout" if got.status == 504 else f"{engine}_failed")


def check_report(rig: Rig, out: Out) -> None:
    report = next(r for r in reversed(rig.app.recent))
    assert report.status == out.status
    assert report.dispatches[0].rescue == out.rescue
    assert report.ended is not None
    assert len({dispatch.id for dispatch in report.dispatches}) == len(report.dispatches)


def seen_out(got: Got, rig: Rig) -> Out:
    """What came, for the table that is printed."""
    return Out(got.status, "text", got.end, stranded=sum(engine.stranded for engine in rig.app.pool.decode))
