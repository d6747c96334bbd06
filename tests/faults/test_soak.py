"""Mixed traffic with faults and departures, for as long as SOAK_SECONDS says (20).

What each request must come to is known from the fault it was given: a served one has exactly its own text, a cut one
the beginning of it. At the end nothing is held but what was counted, and nothing has grown.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.faults.cells import Out, leftovers, shorten_waits
from tests.faults.client import Got, connected, request
from tests.faults.table import Tables
from trio_pdproxy.sim import Fault, SeenRequest, SimEngine, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
CLIENTS = 16
WARM_UP = 0.4
"""The part of the time after which nothing grows any more."""
GROWTH = 16 * 2**20
"""Bytes the process may have grown since: allocators and this test's own counters."""

# At which engine, what, where, how often; and what the client gets. There is always another pair.
FAULTS: tuple[tuple[str, str, str, bool, frozenset[str]], ...] = (
    ("prefill", "reset", "before_head", False, frozenset({"ok"})),
    ("prefill", "garbage", "before_head", False, frozenset({"ok"})),
    ("prefill", "status", "before_head", False, frozenset({"ok"})),
    ("prefill", "slow", "mid_body", False, frozenset({"ok"})),
    ("prefill", "fin", "mid_body", False, frozenset({"ok"})),
    ("prefill", "status", "before_head", True, frozenset({"502"})),  # stranded, on every pair that is tried
    ("decode", "reset", "before_head", False, frozenset({"ok"})),
    ("decode", "status", "before_head", False, frozenset({"ok"})),
    ("decode", "garbage", "after_head", False, frozenset({"ok"})),
    ("decode", "reset", "after_head", True, frozenset({"502"})),
    ("decode", "fin", "mid_body", False, frozenset({"ok", "cut"})),  # a stream is cut, a whole answer tried again
    ("decode", "slow", "mid_body", False, frozenset({"ok"})),
    ("decode", "extra", "after_body", False, frozenset({"ok"})),
)


@dataclass(slots=True)
class Soak:
    rig: Rig
    random: random.Random
    ends: float
    numbers: count[int] = field(default_factory=count)
    came: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self) -> None:
        while trio.current_time() < self.ends and not self.wrong:
            async with connected(self.rig.url) as connection:
                for _ in range(self.random.randint(1, 20)):  # kept alive for that many
                    number = next(self.numbers)
                    prompt = f"prompt {number} " + "x" * self.random.randint(0, 200)
                    tokens = self.random.randint(1, 40)
                    stream = self.random.random() < 0.6
                    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": stream}
                    fate = self.random.random()
                    if fate < 0.05:
                        await connection.send(request(body))
                        with trio.move_on_after(self.random.random() * 0.02):
                            await connection.answer()
                        await connection.leave(self.random.choice(("close", "reset")))
                        self.came["left"] += 1
                        break
                    expected = frozenset({"ok"})
                    planted: list[tuple[SimEngine, Fault]] = []
                    if fate < 0.10:
                        expected = self.plant(prompt, planted)
                    await connection.send(request(body))
                    with trio.move_on_after(60):
                        got = await connection.answer()
                        self.judge(got, prompt, tokens, expected)
                    for engine, fault in planted:
                        engine.faults.faults.remove(fault)
                    if got.end != "complete":
                        break

    def plant(self, prompt: str, planted: list[tuple[SimEngine, Fault]]) -> frozenset[str]:
        role, what, where, always, expected = self.random.choice(FAULTS)
        engines = self.rig.cluster.prefill if role == "prefill" else self.rig.cluster.decode
        first: list[SimEngine] = []

        def match_at(engine: SimEngine) -> Callable[[SeenRequest], bool]:
            def matches(seen: SeenRequest) -> bool:
                if seen.body["prompt"] != prompt:
                    return False
                first.append(engine)
                return always or len(first) == 1

            return matches

        for engine in engines:
            more: dict[str, Any] = {"delay": 0.02} if what == "slow" else {}
            fault = Fault(where, what, match=match_at(engine), times=None, **more)  # type: ignore[arg-type]
            planted.append((engine, engine.faults.add(fault)))
        return expected

    def judge(self, got: Got, prompt: str, tokens: int, expected: frozenset[str]) -> None:
        whole = expected_text(prompt, tokens)
        if got.end == "complete" and got.status == 200:
            came = "ok"
            right = got.text == whole and (not got.is_stream or got.events[-1] == b"[DONE]")
        elif got.end == "cut" and got.status == 200:
            came = "cut"
            texts = [msgspec.json.decode(e)["choices"][0]["text"] for e in got.events[:-1] if e != b"[DONE]"]
            right = (
                whole.startswith("".join(texts)) and b"stream_broken" in got.events[-1] and b"[DONE]" not in got.body
            )
        else:
            came = str(got.status)
            right = got.end == "complete" and bool(got.error["message"])
        self.came[came] += 1
        if came not in expected or not right:
            self.wrong.append(f"{prompt[:20]!r} x {tokens}: wanted {sorted(expected)}, got {got}")

    async def watch(self, sizes: list[int]) -> None:
        """What the simulated engines remember of every request is no growth of the proxy's."""
        while True:
            await trio.sleep(0.5)
            for engine in self.rig.cluster.engines:
                engine.requests[:-1] = [seen for seen in engine.requests[:-1] if seen.how == "running"]
            sizes.append(memory())


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def living() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@pytest.mark.timeout(SECONDS + 120)
async def test_hours_of_traffic_in_small(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch, reused=False)
    monkeypatch.setattr("trio_pdproxy.engines.connections.KEEPALIVE", 3.0)
    # Each block of a simulated engine remembers what was in it: few, so that all of them have had something early.
    sim = SimSettings(itl=0.0005, num_blocks=4096)
    bounds: dict[str, Any] = {"health_interval": 3600, "health_timeout": 30, "shutdown_grace": 1}
    # So that there always is another pair: with this many faults engines would be left alone, and a fault of its own
    # and one that another request left in a kept-alive connection may meet in one request.
    bounds |= {"attempts": 3, "eject_after": 1_000_000}
    async with open_rig(prefill=2, decode=2, sim=sim, **bounds) as rig:
        soak = Soak(rig, random.Random(SEED), ends=trio.current_time() + SECONDS)
        sizes: list[int] = []
        tasks = living()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(soak.watch, sizes)
            async with trio.open_nursery() as clients:
                for _ in range(CLIENTS):
                    clients.start_soon(soak.client)
            nursery.cancel_scope.cancel()
        assert not soak.wrong, soak.wrong[0]
        stranded = sum(engine.stranded for engine in rig.app.pool.decode)
        # Each of those was refused for good by its prefill engine, with decode's blocks registered: all of them held.
        left = await what_is_left(rig, stranded)
        gc.collect()
        warm = sizes[int(len(sizes) * WARM_UP)] if sizes else memory()
        grown = memory() - warm
        tables.figure(
            f"soak of {SECONDS:g} s, seed {SEED}: {sum(soak.came.values())} requests {dict(soak.came)}, "
            f"{stranded} stranded, {grown / 2**20:+.1f} MiB since warm-up, {living() - tasks:+d} tasks"
        )
        assert left == {}
        assert soak.came["502"] or SECONDS < 10
        assert grown < GROWTH
        for engine in rig.app.pool.engines:
            assert engine.connections.open <= 2 * CLIENTS


async def what_is_left(rig: Rig, stranded: int) -> dict[str, int]:
    """Beyond that many orphans; their blocks are all that is held once nothing runs or waits."""
    left: dict[str, int] = {}
    with trio.move_on_after(30):
        while True:
            left = leftovers(rig, Out(0, "text", stranded=stranded, held=stranded))
            if stranded and left.get("blocks", 0) > 0:  # each holds one block or more
                del left["blocks"]
            if not left:
                break
            await trio.sleep(0.01)
    return left
