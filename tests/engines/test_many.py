"""Two prefill and two decode engines of real vLLM on one small machine: a rough day, compressed. In full runs only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.launch import EngineSet, open_vllm
from trio_pdproxy.serve import serving
from trio_pdproxy.testing import until
from trio_pdproxy.web.app import ProxyApp, create_app

from .harness import CHAT, COMPLETIONS, ask, ask_single, over
from .metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LEASE = 12
DEADLINE = 120
REQUESTS = 200


class Load:
    """Mixed requests in front of a proxy, and what became of each."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.texts: dict[tuple[str, str], str] = {}
        self.failures: Counter[str] = Counter()
        self.slowest = 0.0

    async def one(self, number: int, limit: trio.CapacityLimiter) -> None:
        path = CHAT if number % 2 else COMPLETIONS
        prompt = f"request {number} of many: the quick brown fox jumps over the lazy dog"
        async with limit:
            begun = trio.current_time()
            try:
                self.texts[path, prompt] = await ask(self.client, path, prompt, stream=number % 4 < 2)
            except (AssertionError, httpx.HTTPError) as error:
                self.failures[str(error)[:90]] += 1
            self.slowest = max(self.slowest, trio.current_time() - begun)

    async def run(self, numbers: range, *, at_once: int = 8) -> None:
        limit = trio.CapacityLimiter(at_once)
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(self.one, number, limit)


async def test_two_and_two_serve_through_a_kill_a_restart_and_a_drain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(words: str) -> None:
        with capsys.disabled():
            print(f"\n2P+2D: {words}")

    begun = trio.current_time()
    async with open_vllm(2, 2, lease=LEASE, log_dir=tmp_path, exit_ok=True, ready_timeout=600) as engines:
        say(f"four engines ready in {trio.current_time() - begun:.0f} s")
        settings = Settings(
            prefill=[f"{p.url};side_channel={p.side_channel};name={p.name}" for p in engines.prefill],
            decode=[f"{d.url};side_channel={d.side_channel};name={d.name}" for d in engines.decode],
            bind="127.0.0.1:0",
            lease=LEASE,
            prefill_timeout=60,
            first_byte_timeout=90,
            request_timeout=DEADLINE,
            health_interval=2,
            health_timeout=2,
        )
        app = create_app(settings)
        async with serving(app, settings) as url, open_client(url, timeout=150) as client:
            begun = trio.current_time()
            await until(lambda: len(app.pool.roster.pairs) == 2 and not app.pool.roster.cold, 180, step=0.1)
            say(f"all four pairs warm after {trio.current_time() - begun:.1f} s")

            load = Load(client)
            await load.run(range(REQUESTS))
            say(f"failures {dict(load.failures)}; slowest {load.slowest:.1f} s")
            await over(app, 150)
            pushed = [(await read_metrics(p.url)).transfers for p in engines.prefill]
            say(f"{len(load.texts)} of {REQUESTS} answered, slowest {load.slowest:.1f} s, pushes {pushed}")
            assert not load.failures
            assert all(count >= REQUESTS / 4 for count in pushed)

            await _kill_and_restart(app, load, engines, say)

            before = Counter(load.failures)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.run, range(1000, 1060))
                await trio.sleep(0.5)
                nursery.start_soon(app.pool.remove, "d1")
            assert [engine.name for engine in app.pool.decode] == ["d0"]
            assert load.failures == before
            say("a decode engine drained and removed under load: 0 failures")

            async with open_client(engines.prefill[1].url, timeout=60) as single:
                wrong = [key for key, text in load.texts.items() if text != await ask_single(single, *key)]
            say(f"{len(load.texts)} texts compared with one engine alone: {len(wrong)} wrong")
            assert not wrong


async def _kill_and_restart(app: ProxyApp, load: Load, engines: EngineSet, say: Callable[[str], None]) -> None:
    load.slowest = 0.0
    old = app.pool.prefill[0].coordinates
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run, range(500, 600))
        await trio.sleep(1)
        engines.kill("p0")
        await trio.sleep(2)
        await engines.restart("p0")
    await over(app, 150)
    stranded = sum(engine.stranded for engine in app.pool.decode)
    say(
        f"a prefill engine killed and restarted under load: {100 - sum(load.failures.values())} of 100 answered, "
        f"slowest {load.slowest:.1f} s, stranded {stranded}, failures {dict(load.failures)}"
    )
    # What failed failed honestly: an answer had begun, both tries met the dying engine, or that died between its 200
    # and its push, and a decode engine that owes a whole answer tells nothing of that: its client waits in vain.
    assert load.slowest < DEADLINE + 5
    assert sum(load.failures.values()) <= 5
    await until(lambda: app.pool.prefill[0].usable and app.pool.prefill[0].coordinates not in (old, None), 90, step=0.1)
    before = (await read_metrics(engines.prefill[0].url)).transfers
    await load.run(range(700, 720))
    await over(app)
    assert (await read_metrics(engines.prefill[0].url)).transfers > before
    say("traffic returned to it by itself")
