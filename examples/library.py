"""Engines, exchange and a policy of one's own, in one program and without an HTTP server in front.

    python examples/library.py [SCRIPT.yaml]

Starts the engines of a launch script (examples/sim-2p2d.yaml by default), sends a few prompts through the exchange
itself, all at once, and prints the answers and which pair served each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from trio_pdproxy import Pool, Report, Settings, run_exchange
from trio_pdproxy.core.plan import APIS, read_plan
from trio_pdproxy.core.routing import POLICIES, C, Wish
from trio_pdproxy.exchange import keep_warm
from trio_pdproxy.launch import EngineEvent, keep_told, load_script, open_engines

PROMPTS = ("The first prompt.", "A second, somewhat longer prompt.", "And a third.")
API = APIS["/v1/completions"]


def most_free(candidates: Sequence[C], wish: Wish) -> C:
    """The engine with the most free places: what suits engines of different sizes."""
    return max(candidates, key=lambda engine: (engine.max_inflight - engine.inflight, engine.name))


class Collected:
    """A sink that keeps the answer: where a server would write to its client."""

    def __init__(self) -> None:
        self.started = False
        self.status = 0
        self.body = b""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes) -> None:
        self.body += data

    async def finish(self) -> None:
        pass


async def ask(pool: Pool, model: str, prompt: str) -> None:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8}).encode()
    plan = read_plan(API, body, [(b"content-type", b"application/json")])
    report = Report(request_id=prompt, route=API.path, stream=plan.stream, accepted=trio.current_time())
    sink = Collected()
    await run_exchange(plan, pool, sink, report)
    answer = json.loads(sink.body)
    if sink.status != 200:
        raise SystemExit(f"{prompt!r} was answered {sink.status}: {answer}")
    legs = report.dispatches[-1]
    assert legs.prefill is not None
    print(f"{legs.prefill.engine} -> {legs.decode.engine}: {prompt!r} -> {answer['choices'][0]['text']!r}")


def say(event: EngineEvent) -> None:
    print(f"{event.name}: {event.state.value}")


async def main(script: Path) -> None:
    POLICIES["most_free"] = most_free  # before the settings that name it
    async with open_engines(load_script(script), tell=[say]) as engines:
        settings = Settings.model_validate({**dict(engines.settings), "decode_policy": "most_free"})
        pool = Pool(settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            nursery.start_soon(keep_warm, pool)
            nursery.start_soon(keep_told, engines, pool)
            with trio.fail_after(60):
                while pool.missing() or pool.roster.cold:  # until each pair has had its first transfer
                    await pool.roster.news.wait()
            async with trio.open_nursery() as requests:
                for prompt in PROMPTS:
                    requests.start_soon(ask, pool, engines.model, prompt)
            nursery.cancel_scope.cancel("done")


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("sim-2p2d.yaml"))
