"""`trio-pdproxy bench --compare`: the legs in sequence against both at once, on the same engines.

This is the before and after of https://github.com/vllm-project/vllm/pull/55088 in one command. Before: the prefill
engine's answer is read to its end, then the decode engine is asked. After: both are asked at the same time.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from trio_pdproxy.bench.load import BenchError, Load, Measured, Target, run_load
from trio_pdproxy.bench.result import result_of
from trio_pdproxy.cli.bench import How, bar, prepare, tell_failures
from trio_pdproxy.cli.demo import open_engines, until_ready
from trio_pdproxy.config import load_settings
from trio_pdproxy.observe.page import figures, html_page
from trio_pdproxy.observe.timeline import Spread, Timeline, read_timelines
from trio_pdproxy.web.app import ProxyApp, create_app

PERCENTILES = (50.0, 90.0, 99.0)
WIDTH = 64

TURNS = 6

PATIENT = {"health_timeout": 15, "health_interval": 15}
"""For real engines on this machine's CPU: under load they answer probes late, and are fit all the same."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Which engines: the named ones, else `own` ones (sim or vllm)."""

    own: str
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()


async def compare_modes(
    modes: Sequence[str], how: How, engines: Engines, html: Path | None
) -> tuple[int, dict[str, Any]]:
    """Measure each mode, print them side by side; how many requests failed, and the figures for JSON."""
    from trio_pdproxy.observe.log import configure
    from trio_pdproxy.serve import serving

    configure("error", "text")
    async with _opened(engines, how.console) as (given, model), AsyncExitStack() as stack:
        how = replace(how, model=how.model or model)
        lanes: list[_Lane] = []
        for mode in modes:
            mine: dict[str, object] = {"bind": "127.0.0.1:0", "legs": mode, "timelines": how.load.num_prompts}
            settings = load_settings(
                environ=os.environ, flags=given | mine | (PATIENT if engines.own == "vllm" else {})
            )
            app = create_app(settings)
            url = await stack.enter_async_context(serving(app, settings))
            await until_ready(app)
            lanes.append(_Lane(mode, app, await stack.enter_async_context(Target(url))))
        await _take_turns(lanes, how)
    failed = sum(tell_failures(lane.measured, how.console) for lane in lanes)
    timelines = {lane.mode: read_timelines(lane.app.timelines()) for lane in lanes}
    results = {lane.mode: result_of(lane.measured, PERCENTILES) for lane in lanes}
    how.console.print(_table(how.load, timelines, results))
    _draw(timelines, how.console)
    if html is not None:
        try:
            html.write_bytes(html_page(timelines))
        except OSError as error:
            raise BenchError(f"cannot write {html}: {error.strerror}") from None
        how.console.print(f"\nThe picture: {html}", soft_wrap=True)
    for mode, lines in timelines.items():
        results[mode]["proxy_saw_ms"] = {name: _ms(spread) for name, spread in figures(lines).items()}
    return failed, results


@asynccontextmanager
async def _opened(engines: Engines, console: Console) -> AsyncIterator[tuple[dict[str, object], str | None]]:
    """The engines as settings, and their model where it is known."""
    if engines.prefill:
        yield {"prefill": engines.prefill, "decode": engines.decode}, None
        return
    async with open_engines(engines.own, console) as (prefill, decode, model):
        yield {"prefill": [prefill], "decode": [decode]}, model


@dataclass(slots=True)
class _Lane:
    """One mode under measurement."""

    mode: str
    app: ProxyApp
    target: Target
    measured: Measured = field(default_factory=lambda: Measured(Load(), "", 0.0, 0, []))


async def _take_turns(lanes: list[_Lane], how: How) -> None:
    """Measure each mode in `TURNS` parts, by turns: what the machine does besides then hits all of them alike."""
    ready = [(lane, await prepare(lane.target, how, lane.mode)) for lane in lanes]
    load = how.load
    with bar("requests", load.num_prompts * len(lanes), how.bars) as advance:
        for turn in range(TURNS):
            # The share of this turn, the remainder spread over the first ones.
            count = load.num_prompts // TURNS + (turn < load.num_prompts % TURNS)
            part = replace(load, num_prompts=count, seed=load.seed + turn)
            for lane, (model, characters) in ready if turn % 2 == 0 else reversed(ready):
                made = await run_load(
                    lane.target, part, model, characters, salt=f"{lane.mode} {turn}", on_done=lambda _: advance()
                )
                await _until_over(lane.app)
                before = lane.measured
                lane.measured = Measured(
                    load,
                    model,
                    before.duration + made.duration,
                    max(before.peak, made.peak),
                    before.requests + made.requests,
                )
    for lane in lanes:
        if not any(seen.success for seen in lane.measured.requests):
            tell_failures(lane.measured, how.console)
            raise BenchError(f"{lane.mode}: no request was answered")


async def _until_over(app: ProxyApp) -> None:
    """Until every exchange has ended: its report comes a moment after its client has its answer."""
    with trio.move_on_after(10):
        while app.active:  # noqa: ASYNC110
            await trio.sleep(0.005)
        return
    raise BenchError("a request does not end")


def _ms(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: 1000 * getattr(spread, name) for name in ("mean", "p50", "p90", "p99", "max")} | {
        "count": spread.count
    }


def _table(load: Load, timelines: dict[str, list[Timeline]], results: dict[str, Any]) -> Table:
    at_once = "one at a time" if load.max_concurrency == 1 else f"{load.max_concurrency} at once"
    table = Table(
        title=f"{load.num_prompts} requests, {at_once}, prompts of about {load.input_len} tokens, "
        f"answers of {load.output_len}"
    )
    modes = list(timelines)
    table.add_column("ms")
    for mode in modes:
        table.add_column(mode, justify="right")
    if len(modes) > 1:
        table.add_column("change", justify="right")

    def add(label: str, values: list[float | None], unit: str = "") -> None:
        cells = ["-" if value is None else f"{value:.3f}{unit}" for value in values]
        first, last = values[0], values[-1]
        if len(values) > 1:
            cells.append("-" if first is None or last is None else _change(first, last))
        table.add_row(label, *cells)

    seen = {mode: figures(lines) for mode, lines in timelines.items()}
    for which in ("p50", "p99"):
        spreads = [seen[mode]["decode-start gap"] for mode in modes]
        add(f"decode-start gap {which}", [None if s is None else 1000 * getattr(s, which) for s in spreads])
    for key, label in (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "whole answer")):
        if all(f"median_{key}_ms" in results[mode] for mode in modes):
            for which, field in (("p50", "median"), ("p99", "p99")):
                add(f"{label} {which}", [results[mode].get(f"{field}_{key}_ms") for mode in modes])
    spreads = [seen[mode]["prefill leg"] for mode in modes]
    add("prefill leg p50", [None if s is None else 1000 * s.p50 for s in spreads])
    add("requests/s", [results[mode]["request_throughput"] for mode in modes])
    return table


def _change(before: float, after: float) -> str:
    change = after - before
    return f"{change:+.3f} ({100 * change / before:+.1f} %)" if before else f"{change:+.3f}"


# -- the picture in the terminal -----------------------------------------------------------------


def _draw(timelines: dict[str, list[Timeline]], console: Console) -> None:
    """The median request of each mode, all on one scale, from the prefill leg's request on the wire."""
    typical = {mode: found for mode, lines in timelines.items() if (found := _typical(lines)) is not None}
    if not typical:
        return
    span = 1.45 * max(_first(line) for line in typical.values())
    console.print(f"\nThe median request of each, {1000 * span:.0f} ms from left to right:")
    for mode, line in typical.items():
        tried = line.tries[-1]
        assert tried.prefill is not None and tried.prefill.sent is not None  # noqa: PT018
        zero = tried.prefill.sent

        def column(at: float | None, zero: float = zero) -> int:
            return WIDTH if at is None else max(0, min(WIDTH, round((at - zero) / span * WIDTH)))

        end, sent, first = column(tried.prefill.end), column(tried.decode.sent), column(tried.decode.first)
        done = column(tried.decode.end)
        prefill = f"{'━' * max(end, 1):<{WIDTH}}"
        decode = f"{'╌' * (first - sent):>{first}}◆{'━' * max(done - first - 1, 0)}"
        console.print(f"\n[bold]{mode}[/]")
        console.print(f"  prefill leg [cyan]{prefill}[/]", soft_wrap=True)
        console.print(f"  decode leg  [magenta]{decode:<{WIDTH}}[/]", soft_wrap=True)
        assert tried.gap is not None and tried.decode.first is not None  # noqa: PT018
        console.print(
            f"              decode-start gap {1000 * tried.gap:.3f} ms, ◆ first token after "
            f"{1000 * _first(line):.1f} ms",
            soft_wrap=True,
        )


def _first(line: Timeline) -> float:
    tried = line.tries[-1]
    assert tried.prefill is not None and tried.prefill.sent is not None and tried.decode.first is not None  # noqa: PT018
    return tried.decode.first - tried.prefill.sent


def _typical(lines: list[Timeline]) -> Timeline | None:
    whole = [
        line
        for line in lines
        if line.outcome == "ok"
        and line.tries[-1].prefill is not None
        and line.tries[-1].gap is not None
        and line.tries[-1].decode.first is not None
    ]
    return sorted(whole, key=_first)[(len(whole) - 1) // 2] if whole else None
