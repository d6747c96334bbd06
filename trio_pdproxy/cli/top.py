"""`trio-pdproxy top`: a proxy's engines and flows, live in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import msgspec
import trio
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TIMEOUT = 5.0


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, metavar="SECONDS", help="Between looks."
)
@click.option("--once", is_flag=True, help="Two looks, one picture, and out: for scripts.")
def top(url: str, interval: float, once: bool) -> None:
    """Watch the proxy at URL: its engines, what is in flight, and the flows since the last look. Ctrl-C ends.

    Rates and percentiles are of the time between two looks. Exit code 1 where the proxy does not answer at the start.
    """
    try:
        trio.run(_top, url.rstrip("/"), interval, once)
    except ConnectionError as error:
        click.echo(f"trio-pdproxy top: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(0)


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of /status and /metrics."""

    at: float
    status: dict[str, Any]
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = field(repr=False)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of a metric that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.values.items() if found == name and wanted <= has)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by the values of one label."""
        sums: dict[str, float] = {}
        for (found, labels), value in self.values.items():
            if found == name and (key := dict(labels).get(label)) is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums


async def _top(url: str, interval: float, once: bool) -> None:
    console = Console()
    before = await look(url)
    if once:
        await trio.sleep(interval)
        console.print(picture(url, before, await look(url)))
        return
    from rich.live import Live

    with Live(picture(url, before, before), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            await trio.sleep(interval)
            try:
                now = await look(url)
            except ConnectionError as error:
                live.update(Panel(Text(str(error), style="bold red"), title=url), refresh=True)
                continue
            live.update(picture(url, before, now), refresh=True)
            before = now


async def look(url: str) -> Look:
    """Read a proxy once. Raises `ConnectionError`."""
    from trio_pdproxy.engines.transport import fetch
    from trio_pdproxy.engines.wire import EngineError

    try:
        code, status = await fetch(url, "/status", within=TIMEOUT)
        code_2, metrics = await fetch(url, "/metrics", within=TIMEOUT)
    except EngineError as error:
        raise ConnectionError(f"{url} does not answer: {error}") from None
    if code != 200 or code_2 != 200:
        raise ConnectionError(f"{url} answered {code} to /status and {code_2} to /metrics: is it a trio-pdproxy?")
    values = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.decode())
        for sample in family.samples
    }
    try:
        return Look(trio.current_time(), msgspec.json.decode(status, type=dict[str, Any]), values)
    except msgspec.DecodeError:
        raise ConnectionError(f"{url} answers something else to /status: is it a trio-pdproxy?") from None


def quantile(before: Look, now: Look, name: str, share: float) -> float | None:
    """The quantile (`share` in 0..1) of a histogram's observations between two looks, interpolated within its bucket as
    Prometheus does; None where there were none."""
    edges: dict[float, float] = {}
    for reading, sign in ((now, 1), (before, -1)):
        for text, total in reading.by(f"{name}_bucket", "le").items():
            edges[float(text)] = edges.get(float(text), 0.0) + sign * total
    ordered = sorted(edges.items())
    if not ordered or ordered[-1][1] <= 0:
        return None
    rank, low, below = share * ordered[-1][1], 0.0, 0.0
    for edge, count in ordered:
        if count >= rank:
            if edge == float("inf"):
                return low
            return low + (edge - low) * (rank - below) / (count - below) if count > below else edge
        low, below = edge, count
    return low


# -- the picture ---------------------------------------------------------------------------------


def picture(url: str, before: Look, now: Look) -> RenderableType:
    """One frame."""
    status = now.status
    ready = Text("ready", style="bold green") if status.get("ready") else Text("NOT READY", style="bold red")
    head = Text.assemble(
        ("trio-pdproxy ", "bold"),
        f"{status.get('version', '')}  {url}  up {_span(float(status.get('uptime', 0)))}  ",
        ready,
    )
    return Group(head, _engines(now), _why_down(now), _flows(before, now))


def _engines(now: Look) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("engine", "role", "state", "in flight", "", "debts", "stranded", "mode, version"):
        right = heading in ("in flight", "debts", "stranded")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for engine in now.status.get("engines", ()):
        name, decode = engine["name"], engine["role"] == "decode"
        # From /metrics, which adds up the workers of a proxy that has several; /status is one worker's.
        inflight = now.total("pdproxy_inflight_requests", engine=name, leg=engine["role"])
        cap = engine["max_inflight"] * now.status.get("workers", 1)
        stranded = now.total("pdproxy_stranded_total", engine=name)
        table.add_row(
            name,
            engine["role"],
            _state(engine),
            f"{inflight:.0f}/{cap}",
            _bar(inflight / cap if cap else 0.0, 8),
            f"{now.total('pdproxy_debts', engine=name):.0f}" if decode else "",
            Text(f"{stranded:.0f}", style="bold red" if stranded else "") if decode else "",
            ", ".join(filter(None, (engine.get("mode"), engine.get("version")))),
        )
    return table


def _state(engine: Mapping[str, Any]) -> Text:
    if engine["draining"]:
        return Text("draining", style="yellow")
    circuit = "" if engine["circuit"] == "closed" else f", {engine['circuit']}"
    if engine["usable"]:
        return Text(f"up{circuit}", style="yellow" if circuit else "green")
    return Text(f"down{circuit}", style="bold red")


def _why_down(now: Look) -> Text:
    lines = (f"{e['name']}: {e['why']}" for e in now.status.get("engines", ()) if not e["usable"] and e["why"])
    return Text("\n".join(lines), style="red")


def _flows(before: Look, now: Look) -> Table:
    seconds = max(now.at - before.at, 1e-9)

    def rate(name: str, **labels: str) -> float:
        return (now.total(name, **labels) - before.total(name, **labels)) / seconds

    table = Table(title=f"flows, over the last {seconds:.1f} s", title_justify="left", box=None, show_header=False)
    for _ in range(3):
        table.add_column(min_width=22)
    outcomes = now.by("pdproxy_requests_total", "outcome")
    earlier = before.by("pdproxy_requests_total", "outcome")
    news = {name: count - earlier.get(name, 0) for name, count in outcomes.items() if count > earlier.get(name, 0)}
    failing = {name: count for name, count in news.items() if name != "ok"}
    table.add_row(
        f"[bold]{rate('pdproxy_requests_total'):.1f}[/] requests/s",
        f"{now.total('pdproxy_num_requests_waiting'):.0f} waiting in the queue",
        "not ok: " + (", ".join(f"{name} {count:.0f}" for name, count in sorted(failing.items())) or "none"),
    )
    for label, name in (
        ("time to first token", "pdproxy_time_to_first_token_seconds"),
        ("decode-start gap", "pdproxy_decode_start_gap_seconds"),
        ("whole request", "pdproxy_request_duration_seconds"),
    ):
        p50, p99 = quantile(before, now, name, 0.5), quantile(before, now, name, 0.99)
        table.add_row(f"{label}", f"p50 {_ms(p50)}", f"p99 {_ms(p99)}")
    table.add_row(
        f"{rate('pdproxy_leg_errors_total'):.2f} leg errors/s",
        f"{rate('pdproxy_retries_total'):.2f} retries/s",
        f"since the start: {now.total('pdproxy_settled_total'):.0f} settled,",
    )
    rescues, stranded = now.total("pdproxy_rescues_total"), now.total("pdproxy_stranded_total")
    table.add_row("", "", f"{rescues:.0f} rescues, {stranded:.0f} stranded")
    return table


def _bar(share: float, width: int) -> Text:
    filled = round(min(share, 1.0) * width)
    style = "green" if share < 0.7 else "yellow" if share < 0.95 else "red"
    return Text.assemble(("█" * filled, style), ("·" * (width - filled), "dim"))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g} ms"


def _span(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
