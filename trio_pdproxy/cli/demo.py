"""`trio-pdproxy demo`: one prefill engine, one decode engine, the proxy, and a chat through it.

The quickest way to see prefill and decode at work together, and the smoke test of an installation.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from statistics import median, quantiles
from typing import Any, Protocol

import click
import msgspec
import trio
from rich.console import Console

from trio_pdproxy.config import EngineSpec, Settings
from trio_pdproxy.core import sse
from trio_pdproxy.core.errors import only
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.web.app import ProxyApp, create_app

QUESTION = "What does a prefill engine do?"
QUICK_REQUESTS = 200
READY_TIMEOUT = 60.0


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@click.command()
@click.option(
    "--engines",
    type=click.Choice(["sim", "vllm"]),
    default="sim",
    show_default=True,
    help="Simulated engines, or real vLLM on this machine's CPU (prepared first if need be: 1.8 GB).",
)
@click.option(
    "--bind", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT", help="Where the proxy listens."
)
@click.option("--once", is_flag=True, help="Stop after the measurement instead of serving until Ctrl-C.")
def demo(engines: str, bind: str, once: bool) -> None:
    """Start a prefill and a decode engine and the proxy in front; send a chat through; measure.

    Exit code 0 when all of it worked; 1 with the reason on stderr when not.
    """
    from trio_pdproxy.launch.errors import LaunchError
    from trio_pdproxy.serve import ServerError

    try:
        trio.run(_demo, engines, bind, once, Console(highlight=False))
    except BaseExceptionGroup as group:
        if only(group, KeyboardInterrupt) is not None:
            sys.exit(130)
        for kind in (DemoError, ServerError, LaunchError):
            if (error := only(group, kind)) is not None:
                click.echo(f"trio-pdproxy demo: {error}", err=True)
                sys.exit(1)
        raise


async def _demo(engines: str, bind: str, once: bool, console: Console) -> None:
    from trio_pdproxy.observe.log import configure
    from trio_pdproxy.serve import serving

    configure("error", "text")
    async with _open_engines(engines, console) as (prefill, decode, model):
        settings = Settings(prefill=[prefill], decode=[decode], bind=bind)
        app = create_app(settings)
        async with serving(app, settings) as url:
            await _until_ready(app)
            console.print(f"[bold]engines[/]   prefill {prefill.url}, decode {decode.url} ({engines})")
            console.print(f"[bold]proxy[/]     {url}\n")
            await _chat(url, model, console)
            _draw((await _reports(app, 1))[0], console)
            await _measure(url, model, app, console)
            _how_to_go_on(url, model, console)
            if not once:
                console.print("\nServing until Ctrl-C.")
                await _until_interrupted()


@asynccontextmanager
async def _open_engines(which: str, console: Console) -> AsyncIterator[tuple[EngineSpec, EngineSpec, str]]:
    """One prefill and one decode engine, and the name of their model."""
    if which == "sim":
        from trio_pdproxy.sim import SimSettings, open_cluster

        # Slow enough to see the two legs side by side, quick enough for many requests.
        settings = SimSettings(prefill_base=0.001, prefill_per_token=0.0004, itl=0.01, remember=100)
        async with open_cluster(settings=settings) as cluster:
            yield _spec(cluster.prefill[0]), _spec(cluster.decode[0]), cluster.prefill[0].settings.model
        return
    from trio_pdproxy.cli.engines import shown
    from trio_pdproxy.launch.pair import open_vllm

    with ExitStack() as stack:
        progress = stack.enter_context(shown())
        async with open_vllm(progress=progress) as running:
            stack.close()  # the engines are there: the bar goes
            yield _spec(running.prefill[0]), _spec(running.decode[0]), running.model


class _Located(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def side_channel(self) -> str: ...


def _spec(engine: _Located) -> EngineSpec:
    return EngineSpec(url=engine.url, side_channel=engine.side_channel)


async def _until_ready(app: ProxyApp) -> None:
    with trio.move_on_after(READY_TIMEOUT):
        while app.missing():  # noqa: ASYNC110  readiness is many engines' state, it sets no event
            await trio.sleep(0.02)
        return
    raise DemoError("not ready: " + "; ".join(app.missing()))


async def _reports(app: ProxyApp, count: int) -> list[Report]:
    """The reports of the last `count` exchanges. The last one comes a moment after its client has its answer."""
    with trio.move_on_after(10):
        while len(app.recent) < count:  # noqa: ASYNC110
            await trio.sleep(0.001)
        return list(app.recent)
    raise DemoError(f"only {len(app.recent)} of {count} exchanges ended")


def _body(model: str, content: str = QUESTION, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 24, **more}


async def _chat(url: str, model: str, console: Console) -> None:
    """One streamed chat, printed as it comes."""
    console.print(f"[bold]you[/]       {QUESTION}")
    console.print("[bold]answer[/]   ", end="")
    framer = sse.EventFramer()
    async with (
        open_client(url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=_body(model, stream=True)) as response,
    ):
        if response.status_code != 200:
            raise DemoError(f"the chat was answered {response.status_code}: {(await response.aread()).decode()}")
        async for data in response.aiter_raw():
            for event in sse.events(framer.feed(data)):
                if event != b"[DONE]":
                    delta = msgspec.json.decode(event)["choices"][0]["delta"]
                    console.print(delta.get("content") or "", end="", markup=False, soft_wrap=True)
    console.print("\n")


def _draw(report: Report, console: Console) -> None:
    """Both legs of one exchange on one axis."""
    dispatch = report.dispatches[-1]
    p, d = dispatch.prefill, dispatch.decode
    assert p is not None and p.sent is not None and p.end is not None  # noqa: PT018
    assert d.sent is not None and d.first is not None and d.end is not None  # noqa: PT018
    start, width = p.sent, 52
    scale = width / max(d.end - start, p.end - start, 1e-9)

    def bar(begin: float, end: float, style: str, mark: float | None = None) -> str:
        a, b = round((begin - start) * scale), max(round((end - start) * scale), 1)
        cells = [" "] * width
        cells[a:b] = ["━"] * (b - a)
        if mark is not None:
            cells[min(round((mark - start) * scale), width - 1)] = "◆"
        return f"[{style}]{''.join(cells)}[/]"

    console.print(f"prefill leg {bar(p.sent, p.end, 'cyan')} {1000 * (p.end - start):7.1f} ms")
    console.print(f"decode leg  {bar(d.sent, d.end, 'magenta', d.first)} {1000 * (d.end - start):7.1f} ms")
    assert dispatch.gap is not None
    console.print(
        f"            ◆ first token after {1000 * (d.first - start):.1f} ms; "
        f"decode-start gap {1000 * dispatch.gap:.3f} ms\n"
    )


async def _measure(url: str, model: str, app: ProxyApp, console: Console) -> None:
    """The decode-start gap over many quick requests, one after the other."""
    app.recent.clear()
    async with open_client(url, timeout=60) as client:
        for _ in range(QUICK_REQUESTS):
            response = await client.post("/v1/chat/completions", json={**_body(model, "hi"), "max_tokens": 1})
            if response.status_code != 200:
                raise DemoError(f"a quick request was answered {response.status_code}: {response.text}")
    reports = await _reports(app, QUICK_REQUESTS)
    gaps = [1000 * gap for report in reports if (gap := report.dispatches[-1].gap) is not None]
    p99 = quantiles(gaps, n=100)[98]
    console.print(f"decode-start gap over {len(gaps)} quick requests: median {median(gaps):.3f} ms, p99 {p99:.3f} ms")


def _how_to_go_on(url: str, model: str, console: Console) -> None:
    body = msgspec.json.encode(_body(model, stream=True)).decode()
    console.print(
        f"\nTry it:\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\", soft_wrap=True
    )
    console.print(f"    -d '{body}'", soft_wrap=True, markup=False)


async def _until_interrupted() -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return
