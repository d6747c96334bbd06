"""Real engines for the tests of this folder: one prefill and one decode engine for the whole session."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from outcome import Outcome, capture

from trio_pdproxy.launch import SupervisedEngine, open_vllm

from . import hand
from .harness import heal

# Short, so that tests of what happens after it need not wait for vLLM's 30 s.
LEASE = 12
# Making the environment is included, should nobody have done it before.
START_SECONDS = 900
RESTART_SECONDS = 180
STOP_SECONDS = 60
LOGS_SO_FAR = pytest.StashKey[list[tuple[Path, int]]]()
"""Each engine's log, and how much of it was there when the test began."""
TOLD = re.compile(r"WARNING|ERROR|POST /v1/\S+ HTTP/1.1\" 5")
TOLD_LINES = 40


@dataclass(frozen=True, slots=True)
class Engine:
    """What a test needs of an engine."""

    name: str
    url: str
    side_channel: str
    log_path: Path


class VllmPair:
    """One prefill and one decode engine, running in another thread's trio.

    pytest-trio makes a new event loop for each test, so nothing async can live as long as the session:
    the launcher gets a loop and a thread of its own. Methods block; call them from a test through
    `trio.to_thread.run_sync`.
    """

    def __init__(self, log_dir: Path) -> None:
        self.lease = LEASE
        self._log_dir = log_dir
        # None: ready. An outcome: the launcher is over, and how.
        self._news: queue.SimpleQueue[Outcome[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if (over := self._news.get(timeout=START_SECONDS)) is not None:
            over.unwrap()
        self.prefill, self.decode = _view(self._set.prefill[0]), _view(self._set.decode[0])

    def stop(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(self._over.set, trio_token=self._token)
        self._thread.join(STOP_SECONDS)
        assert not self._thread.is_alive(), "the engines did not stop"
        over = self._news.get_nowait()
        assert over is not None
        over.unwrap()

    def kill(self, engine: Engine) -> None:
        """SIGKILL everything of one engine. It stays down until `restart`."""
        trio.from_thread.run_sync(self._set.kill, engine.name, trio_token=self._token)

    def signal(self, engine: Engine, number: signal.Signals) -> None:
        """Send a signal to everything of one engine: SIGSTOP and SIGCONT make it stand still for a while."""
        running = next(running for running in self._set.all if running.name == engine.name)
        assert running.process.group is not None
        trio.from_thread.run_sync(running.process.group.signal, number, trio_token=self._token)

    def restart(self, engine: Engine) -> None:
        """Kill it if it runs; return when it is ready again, on the same ports, with a new engine id."""

        async def bounded() -> None:
            with trio.fail_after(RESTART_SECONDS):
                await self._set.restart(engine.name)

        trio.from_thread.run(bounded, trio_token=self._token)

    def _run(self) -> None:
        self._news.put(capture(trio.run, self._main))

    async def _main(self) -> None:
        async with open_vllm(lease=LEASE, log_dir=self._log_dir, exit_ok=True) as self._set:
            self._token = trio.lowlevel.current_trio_token()
            self._over = trio.Event()
            # The first request of a pair does its handshakes; no test should measure those.
            p = await hand.learn(self._set.prefill[0].side_channel)
            with trio.fail_after(120):
                await hand.pair(
                    self._set.prefill[0].url, self._set.decode[0].url, p, "warm up " * 8, again_after=LEASE + 2
                )
            self._news.put(None)
            await self._over.wait()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kills: ends an engine of the pair and starts it again; runs last")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What brings engines of its own comes before the pair is started, or four would share this machine's cores. What
    ends an engine comes last, whatever order the rest was shuffled into: it starts the engines anew, and a test that
    fails half-way leaves none to the others."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("kills") is not None, "vllm_pair" in getattr(item, "fixturenames", ())

    items.sort(key=place)


def _view(running: SupervisedEngine) -> Engine:
    return Engine(running.name, running.url, running.side_channel, running.log_path)


@pytest.fixture(scope="session")
def vllm_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
    """Started once, warmed up, stopped at the end of the session. Logs: `.prefill.log_path` and so on."""
    engines = VllmPair(tmp_path_factory.mktemp("engines"))
    engines.start()
    try:
        yield engines
    finally:
        engines.stop()


@pytest.fixture
async def vllm_pair(vllm_engines: VllmPair, request: pytest.FixtureRequest) -> VllmPair:
    """The engines, holding nothing of an earlier test; where this one fails, what they logged meanwhile is told."""
    await heal(vllm_engines)
    engines = (vllm_engines.prefill, vllm_engines.decode)
    request.node.stash[LOGS_SO_FAR] = [(engine.log_path, engine.log_path.stat().st_size) for engine in engines]
    return vllm_engines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for path, before in item.stash.get(LOGS_SO_FAR, ()):
            with path.open("rb") as log:
                log.seek(before)
                told = [line for line in log.read().decode(errors="replace").splitlines() if TOLD.search(line)]
            report.sections.append((f"warnings and errors in {path.name}", "\n".join(told[-TOLD_LINES:])))
    return report
