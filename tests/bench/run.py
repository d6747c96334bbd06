"""One interleaved run: every peer under one load after the other, several times over, so that a disturbance of the
machine meets all of them."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import Figures, Results
from tests.bench.loads import FRESH, LOADS, Lab, Outcome, quiet, warm
from tests.bench.loop import run as run_loop
from tests.bench.peers import BASELINE, DIRECT, FALLBACK, NGINX, OURS, ROUTER, TWO, Engines, Peer, SkippedError, start
from tests.bench.processes import ROOT, Cores, pinned

SIZES: dict[str, tuple[int, ...]] = {
    "ttft": (1, 16, 128, 512),
    "paced": (1, 16, 128, 512, 1000),
    "burst": (1, 16, 128),
    "short": (16, 128, 1000),
    "body": (1,),
    "idle": (100, 1000),
    "abort": (64,),
    "workers": (128,),
}
QUICK: dict[str, tuple[int, ...]] = {
    "ttft": (1, 16),
    "paced": (1, 16),
    "burst": (1, 16),
    "short": (16,),
    "body": (1,),
    "idle": (100,),
    "abort": (16,),
}
PEERS = (DIRECT, NGINX, ROUTER, BASELINE, OURS, FALLBACK)
LOAD_LIMIT = 240.0
"""Seconds for one load at one peer, whatever goes wrong."""


@dataclass(frozen=True, slots=True)
class What:
    """What a run measures."""

    peers: tuple[str, ...]
    loads: tuple[tuple[str, int], ...]
    repetitions: int
    seconds: float
    install: bool


class BenchError(Exception):
    """The run cannot go on; the text says why."""


def read_loads(text: str | None, *, quick: bool) -> tuple[tuple[str, int], ...]:
    """`paced,short:16` -> every size of paced, and short with 16 clients. Raises `ValueError`."""
    sizes = QUICK if quick else SIZES
    if text is None:
        return tuple((name, n) for name, each in sizes.items() for n in each)
    found: list[tuple[str, int]] = []
    for word in text.split(","):
        name, _, n = word.strip().partition(":")
        if name not in LOADS:
            raise ValueError(f"there is no load {name!r}; there are {', '.join(LOADS)}")
        if n and not (n.isdigit() and int(n)):
            raise ValueError(f"{word!r}: the number of clients must be a number from 1 on")
        found.extend((name, int(n)) for n in ((n,) if n else map(str, sizes.get(name) or SIZES[name])))
    return tuple(dict.fromkeys(found))


def run(what: What, folder: Path, tell: Callable[[str], None]) -> tuple[Results, dict[str, str]]:
    """Measure it all. Logs go to `folder`, progress to `tell`. Returns the figures and the peers that were skipped,
    with why. Raises `BenchError`."""
    cores = Cores()
    with ExitStack() as stack:
        stack.enter_context(pinned(cores.load))
        engines = stack.enter_context(_engines(folder))
        skipped: dict[str, str] = {}
        started: dict[str, Peer] = {}
        two = any(load == "workers" for load, _ in what.loads)
        for name in (*what.peers, *((TWO,) if two and FALLBACK in what.peers else ())):
            try:
                peer = start(name, engines, cores, folder, install=what.install)
            except SkippedError as error:
                skipped[name] = str(error)
                tell(f"{name} is skipped: {error}")
                continue
            if peer.started is not None:
                stack.callback(peer.started.stop)
            started[name] = peer
        lab = Lab(engines, what.seconds)
        results = run_loop(_all(what, lab, started, skipped, tell))
    if DIRECT in started:
        results.add_differences(DIRECT)
    return results, skipped


async def _all(
    what: What, lab: Lab, started: dict[str, Peer], skipped: dict[str, str], tell: Callable[[str], None]
) -> Results:
    results = Results()
    for name, peer in list(started.items()):
        if why := await warm(lab, peer):
            skipped[name] = why
            tell(f"{name} is skipped: {why}")
            del started[name]
    for repetition in range(what.repetitions):
        for load, n in what.loads:
            for name in _order(load, list(started), repetition):
                tell(f"repetition {repetition + 1} of {what.repetitions}: {load} {n}: {name}")
                got = await _one(lab, started[name], load, n)
                results.figures.append(Figures(name, f"{load} {n}", repetition, got.values, got.wrong, got.why))
                if got.why:
                    tell(f"  {name}, {load} {n}: {got.wrong} wrong answers; {got.why[:300]}")
    return results


def _order(load: str, names: Sequence[str], repetition: int) -> list[str]:
    """Another one goes first each time; the one with two workers only where it is asked for, against one worker."""
    mine = [name for name in names if (name in (FALLBACK, TWO) if load == "workers" else name != TWO)]
    turn = repetition % max(1, len(mine))
    return mine[turn:] + mine[:turn]


async def _one(lab: Lab, peer: Peer, load: str, n: int) -> Outcome:
    gc.collect()
    gc.disable()  # a collection in the middle would be a proxy's latency
    fresh: Peer | None = None
    try:
        async with asyncio.timeout(LOAD_LIMIT):
            if load in FRESH and peer.started is not None:
                fresh = peer.again()
                if why := await warm(lab, fresh):
                    return Outcome({}, why=why)
            return await LOADS[load](lab, fresh or peer, n)
    except (OSError, TimeoutError) as error:
        return Outcome({}, why=f"{type(error).__name__}: {error}")
    except BaseExceptionGroup as group:
        rest = group.split((OSError, TimeoutError))[1]
        if rest is not None:
            raise
        return Outcome({}, why="; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in group.exceptions)))
    finally:
        gc.enable()
        if fresh is not None and fresh.started is not None:
            fresh.started.stop()
        await quiet(lab)


@contextmanager
def _engines(folder: Path) -> Iterator[Engines]:
    """The engines, in a process of their own on this process's cores."""
    with (folder / "engines.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.engines"], stdout=subprocess.PIPE, stderr=log, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError(f"the benchmark's engines did not start:\n{(folder / 'engines.log').read_text()[-2000:]}")
        yield Engines(**json.loads(line))
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
