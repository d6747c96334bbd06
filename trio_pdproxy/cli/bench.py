"""`trio-pdproxy bench`: a load on an endpoint, and what its clients saw."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import trio
from rich.console import Console

from trio_pdproxy.bench.load import BenchError, Load, Measured, Target, calibrate, run_load
from trio_pdproxy.bench.result import block, result_of
from trio_pdproxy.core.errors import only


@dataclass(frozen=True, slots=True)
class How:
    """How a load is sent and shown."""

    load: Load
    model: str | None
    warmups: int
    console: Console
    bars: bool


def _rate(context: click.Context, option: click.Parameter, value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise click.BadParameter(f"{value!r} is no number of requests a second (more than 0), and not inf")
    return rate


def _percentiles(context: click.Context, option: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < percentile <= 100 for percentile in found):
        raise click.BadParameter(f"{value!r} is no list of percentiles like 50,90,99")
    return found


def _modes(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    modes = tuple(part.strip() for part in value.split(",")) if value is not None else ()
    if not set(modes) <= {"serial", "concurrent"} or len(set(modes)) < len(modes):
        raise click.BadParameter(f"{value!r}: give serial,concurrent")
    return modes


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--model", help="Default: the first one the endpoint serves.")
@click.option("--num-prompts", type=click.IntRange(1), default=100, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt, about.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of an answer.")
@click.option(
    "--request-rate",
    callback=_rate,
    default="inf",
    show_default=True,
    metavar="RATE",
    help="Requests a second (Poisson); inf: at once.",
)
@click.option(
    "--burstiness", type=click.FloatRange(0, min_open=True), default=1.0, help="1: Poisson; less: bursts; more: even."
)
@click.option("--max-concurrency", type=click.IntRange(1), help="Requests under way at once. With --compare: 1.")
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers of full length.")
@click.option("--seed", default=0, show_default=True, help="Prompts and arrivals are the same for the same seed.")
@click.option("--num-warmups", type=click.IntRange(0), default=3, show_default=True, help="Requests not counted.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds for one request.")
@click.option("--metric-percentiles", callback=_percentiles, default="99", show_default=True, metavar="P,...")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the result there.")
@click.option("--direct", metavar="URL", help="Send the load to this engine too, and show what the proxy costs.")
@click.option(
    "--compare",
    callback=_modes,
    metavar="serial,concurrent",
    help="Start proxies of our own instead, one that sends the legs in sequence and one that sends both at once.",
)
@click.option(
    "--engines",
    type=click.Choice(["sim", "vllm"]),
    default="sim",
    show_default=True,
    help="With --compare: simulated engines, or real vLLM on this machine's CPU.",
)
@click.option("--prefill", multiple=True, metavar="URL[;KEY=VALUE]...", help="With --compare: these instead.")
@click.option("--decode", multiple=True, metavar="URL[;KEY=VALUE]...", help="With --compare: these instead.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --compare: the picture, for a browser.",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def bench(
    *,
    url: str,
    model: str | None,
    endpoint: Literal["completions", "chat"],
    num_warmups: int,
    metric_percentiles: tuple[float, ...],
    json_file: Path | None,
    direct: str | None,
    compare: tuple[str, ...],
    engines: str,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    html: Path | None,
    quiet: bool,
    max_concurrency: int | None,
    **rest: Any,
) -> None:
    """Send a load to the OpenAI-style endpoint at URL, and print what its clients saw, as `vllm bench serve` does.

    An API key is taken from OPENAI_API_KEY. Exit code 0 when every request was answered, else 1.
    """
    if compare and direct:
        raise click.UsageError("--compare and --direct do not go together")
    if not compare and (prefill or decode or html):
        raise click.UsageError("--prefill, --decode and --html go with --compare")
    if bool(prefill) != bool(decode):
        raise click.UsageError("give both --prefill and --decode, or neither")
    load = Load(endpoint=endpoint, max_concurrency=max_concurrency, **rest)
    console = Console(highlight=False)
    bars = not quiet and sys.stderr.isatty()
    run: Any
    if compare:
        from trio_pdproxy.cli.bench_compare import Engines, compare_modes

        load = replace(load, max_concurrency=max_concurrency or 1)
        on = Engines(engines, prefill, decode)
        how = How(load, model, num_warmups, console, bars)
        run = partial(compare_modes, compare, how, on, html)
    else:
        run = partial(_measure, url, direct, How(load, model, num_warmups, console, bars), metric_percentiles)
    failed, result = _run(run)
    if json_file is not None:
        try:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        except OSError as error:
            raise click.ClickException(f"cannot write {json_file}: {error.strerror}") from None
    sys.exit(1 if failed else 0)


def _run(run: Any) -> tuple[int, object]:
    """Run it; what a user can do something about is told in words: exit code 1, or 2 for a wrong configuration."""
    from trio_pdproxy.cli.demo import DemoError
    from trio_pdproxy.config import ConfigError
    from trio_pdproxy.launch.errors import LaunchError
    from trio_pdproxy.serve import ServerError

    try:
        failed, result = trio.run(run)
    except Exception as error:
        # Bare, or in a group of one where it came out of a nursery.
        leaves = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
        if (wrong := only(leaves, ConfigError)) is not None:
            raise click.UsageError(str(wrong)) from error
        for kind in (BenchError, ServerError, LaunchError, DemoError):
            if (found := only(leaves, kind)) is not None:
                raise click.ClickException(str(found)) from error
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as group:
        if only(group, KeyboardInterrupt) is not None:
            sys.exit(130)
        raise
    return failed, result


async def _measure(url: str, direct: str | None, how: How, percentiles: tuple[float, ...]) -> tuple[int, object]:
    measured = await measure(url, how, "proxy" if direct else "")
    result = result_of(measured, percentiles)
    how.console.print(block(result, percentiles), markup=False)
    failed = tell_failures(measured, how.console)
    if direct is None:
        return failed, result
    alone = await measure(direct, how, "direct")
    failed += tell_failures(alone, how.console)
    direct_result = result_of(alone, percentiles)
    how.console.print(_beside(result, direct_result))
    return failed, {"proxy": result, "direct": direct_result}


async def measure(url: str, how: How, title: str) -> Measured:
    """One load on one endpoint, after its warm-up. Another `title`: other prompts of the same lengths, which no prefix
    cache has met. Raises `BenchError`."""
    async with Target(url, api_key=os.environ.get("OPENAI_API_KEY")) as target:
        model, characters = await prepare(target, how, title)
        with bar(title, how.load.num_prompts, how.bars) as advance:
            return await run_load(target, how.load, model, characters, salt=title, on_done=lambda _: advance())


async def prepare(target: Target, how: How, title: str) -> tuple[str, int]:
    """The warm-up: the model's name, and how many characters make a prompt. Raises `BenchError`."""
    model = how.model or await target.model()
    characters = await calibrate(target, how.load, model)
    for number in range(how.warmups):
        warm = replace(how.load, num_prompts=1, request_rate=inf)
        await run_load(target, warm, model, characters, salt=f"warm-up {title} {number}")
    return model, characters


@contextmanager
def bar(title: str, total: int, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title or "requests", total=total)
        yield lambda: progress.advance(task)


def tell_failures(measured: Measured, console: Console) -> int:
    """Print what failed, each kind once; how many requests that were."""
    errors: dict[str, int] = {}
    for seen in measured.requests:
        if seen.error:
            errors[seen.error] = errors.get(seen.error, 0) + 1
    for error, count in sorted(errors.items()):
        console.print(f"{count} failed: {error}", markup=False)
    return sum(errors.values())


def _beside(proxy: dict[str, Any], direct: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="Through the proxy, and the engine alone (which prefills and decodes itself)")
    for heading in ("", "proxy", "direct", "difference"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = [
        ("Request throughput (req/s)", "request_throughput"),
        ("Output token throughput (tok/s)", "output_throughput"),
        *(
            (f"{how.capitalize()} {short} (ms)", f"{how}_{key}_ms")
            for key, short in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2EL"))
            for how in ("median", "p99")
        ),
    ]
    for label, key in rows:
        a, b = proxy.get(key), direct.get(key)
        if a is not None and b is not None:
            table.add_row(label, f"{a:.2f}", f"{b:.2f}", f"{a - b:+.2f}")
    return table
