"""The figures for people (tables in a terminal) and for programs (JSON)."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench.bars import bars
from tests.bench.figures import Results
from tests.bench.peers import ABOUT, BASELINE, DIRECT, OURS, ROUTER
from tests.bench.processes import Cores

# Of a load's values, the one that peers are compared by.
MAIN = {
    "ttft": "added_ttft_p50_ms",
    "paced": "cpu_us_per_event",
    "burst": "cpu_us_per_event",
    "short": "cpu_us_per_request",
    "body": "cpu_ms_per_request",
    "idle": "kib_per_stream",
    "abort": "cpu_us_per_request",
    "workers": "cpu_us_per_request",
}
_PACKAGES = ("trio-pdproxy", "trio", "hypercorn", "uvicorn", "uvloop", "fastapi", "aiohttp", "httptools")


def show(results: Results, skipped: dict[str, str], console: Console) -> None:
    """All tables."""
    for load in results.loads:
        console.print(_table(results, load))
    console.print(_bars(results))
    for peer, why in skipped.items():
        console.print(f"{peer} was skipped: {why}", style="yellow")
    for figures in results.wrong():
        where = f"{figures.peer}, {figures.load}, repetition {figures.repetition + 1}"
        console.print(f"{where}: {figures.wrong} wrong answers: {figures.why}", style="red", markup=False)


def _table(results: Results, load: str) -> Table:
    main = MAIN[load.partition(" ")[0]]
    names = [
        name for name in results.names(load) if any(results.value(p, load, name) is not None for p in results.peers)
    ]
    table = Table(title=load, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("peer")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for against in (BASELINE, ROUTER):
        table.add_column(f"of {against}", justify="right")
    for peer in results.peers:
        if not results.of(peer, load):
            continue
        cells = [number(results.value(peer, load, name)) for name in names]
        mine = results.value(peer, load, main)
        for against in (BASELINE, ROUTER):
            other = results.value(against, load, main)
            cells.append("" if mine is None or not other or other <= 0 else f"{mine / other:.2f}x")
        table.add_row(peer, *cells, style="bold" if peer == OURS else "dim" if peer == DIRECT else "")
    table.caption = f"the last two columns: {main.replace('_', ' ')}, of that peer's"
    table.caption_justify = "left"
    return table


def _bars(results: Results) -> Table:
    table = Table(title="what it has to show", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    for name in ("value", "bar", ""):
        table.add_column(name, justify="right")
    for bar in bars():
        limit = f"{'>=' if bar.at_least else '<='} {bar.limit:g}{bar.unit}"
        value = bar.value(results)
        if value is None:
            table.add_row(bar.what, "", limit, "not measured", style="dim")
        else:
            met = bar.met(value)
            table.add_row(
                bar.what, f"{value:.2f}{bar.unit}", limit, "met" if met else "missed", style="" if met else "red"
            )
    return table


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def as_json(results: Results, skipped: dict[str, str], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, medians and single figures."""
    judged = []
    for bar in bars():
        value = bar.value(results)
        met = None if value is None else bar.met(value)
        judged.append({"what": bar.what, "value": value, "limit": bar.limit, "at_least": bar.at_least, "met": met})
    return {
        "about": {**machine(), **about},
        "peers": {peer: ABOUT[peer] for peer in results.peers},
        "skipped": skipped,
        "medians": results.medians(),
        "bars": judged,
        "figures": results.plain(),
    }


def machine() -> dict[str, Any]:
    """Where it was measured, and on which versions."""
    cores = Cores()
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(cores.all),
        "proxy_on_a_core_of_its_own": cores.apart,
        "load_average_before": os.getloadavg()[0],
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
