"""`python -m tests.bench`: see docs/performance.md."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from tests.bench.peers import ABOUT, TWO
from tests.bench.plot import svg
from tests.bench.report import as_json, show
from tests.bench.run import PEERS, BenchError, What, read_loads, run


@click.command()
@click.option("--quick", is_flag=True, help="Small loads and short windows: to see that it works, not to quote.")
@click.option("--only", metavar="PEER,...", help=f"Only these peers, of {', '.join(PEERS)}.")
@click.option("--loads", metavar="LOAD[:N],...", help="Only these loads, of paced, ttft, burst, short, body, idle, ...")
@click.option("--repeat", type=click.IntRange(1), help="Repetitions (default 3; with --quick 1).")
@click.option("--seconds", type=click.FloatRange(0.1), help="Of one window (default 3; with --quick 0.5).")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture there (SVG).")
@click.option("--install/--no-install", default=True, help="Whether vllm-router may be installed into a cache folder.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep what the proxies write there.")
def main(
    *,
    quick: bool,
    only: str | None,
    loads: str | None,
    repeat: int | None,
    seconds: float | None,
    json_path: Path | None,
    plot: Path | None,
    install: bool,
    logs: Path | None,
) -> None:
    """Measure the proxy and its peers side by side on this machine.

    Exit code 0: measured, every answer right; 1: some were wrong or a load failed (the tables say which);
    2: wrong usage.
    """
    peers = tuple(only.split(",")) if only else PEERS
    if unknown := [peer for peer in peers if peer not in ABOUT or peer == TWO]:
        raise click.UsageError(f"there is no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    try:
        chosen = read_loads(loads, quick=quick)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    what = What(peers, chosen, repeat or (1 if quick else 3), seconds or (0.5 if quick else 3.0), install)
    _raise_file_limit()
    noise, tables = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 160)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch) if logs is None else logs
        folder.mkdir(parents=True, exist_ok=True)
        try:
            results, skipped = run(what, folder, lambda line: noise.print(line, markup=False, highlight=False))
        except BenchError as error:
            raise click.ClickException(str(error)) from None
    show(results, skipped, tables)
    about = {"repetitions": what.repetitions, "window_s": what.seconds, "took_s": time.monotonic() - begun}
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(results, skipped, about), indent=1) + "\n")
    if plot is not None:
        plot.write_text(svg(results))
    sys.exit(1 if results.wrong() or not results.figures else 0)


def _raise_file_limit() -> None:
    """A thousand streams are three thousand sockets at a proxy; what is started inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 20_000 if hard == resource.RLIM_INFINITY else min(hard, 20_000)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
