"""What the figures have to show: each bar with its value, its limit, and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.bench.figures import Results
from tests.bench.peers import BASELINE, FALLBACK, OURS, ROUTER, TWO

Value = Callable[[Results], float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """`value` must be at most (or at least) `limit`; None: not measured in this run."""

    what: str
    value: Value
    limit: float
    at_least: bool = False
    unit: str = "x"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def bars() -> Iterator[Bar]:
    """All of them. Ratios are to the asyncio baseline unless said."""
    for n, name, limit in ((128, "p50", 0.3), (128, "p99", 1.0), (512, "p99", 2.0)):
        for whose, key in (("as the engines see it", "gap"), ("as the proxy reports it", "reported_gap")):
            what = f"decode-start gap {name}, {n} streams, {whose}"
            yield Bar(what, plain(OURS, f"ttft {n}", f"{key}_{name}_ms"), limit, unit=" ms")
    for name, limits in (("p50", (0.6, 0.3, 0.5)), ("p99", (0.7, 0.5, 0.25))):
        for n, limit in zip((1, 16, 128), limits, strict=True):
            yield Bar(f"added TTFT {name}, {n} clients", ratio(f"ttft {n}", f"added_ttft_{name}_ms"), limit)
    for (peer, limits), label in (
        ((OURS, (1.0, 1.2, 1.2)), ""),
        ((FALLBACK, (0.5, 0.75, 0.8)), ", public sends"),
    ):
        for n, limit in zip((16, 128, 512), limits, strict=True):
            what = f"paced events per CPU second, {n} streams{label}"
            yield Bar(what, speed(f"paced {n}", "cpu_us_per_event", peer=peer), limit, at_least=True)
    for against, limits in ((BASELINE, (3.0, 2.5, 1.4)), (ROUTER, (5.0, 4.0, 2.0))):
        for n, limit in zip((1, 16, 128), limits, strict=True):
            what = f"burst events per CPU second, {n} clients" + (f", to {ROUTER}" if against == ROUTER else "")
            yield Bar(what, speed(f"burst {n}", "cpu_us_per_event", against=against), limit, at_least=True)
    for n, limit in ((16, 1.6), (128, 2.0)):
        what = f"short requests per CPU second, {n} clients"
        yield Bar(what, speed(f"short {n}", "cpu_us_per_request"), limit, at_least=True)
    yield Bar("KiB per open stream, 1000 streams", ratio("idle 1000", "kib_per_stream"), 0.8)
    yield Bar("CPU of a request with 5 MB", ratio("body 1", "cpu_ms_per_request"), 0.5)
    for n, name, limit in ((1, "p50", 1.5), (128, "p50", 2.0), (1, "p99", 1.0), (128, "p99", 1.0)):
        what = f"added TTFT {name}, {n} clients, to {ROUTER}"
        yield Bar(what, ratio(f"ttft {n}", f"added_ttft_{name}_ms", against=ROUTER), limit)
    yield Bar("CPU of a short request, 1000 clients to 128", grown("short", 128, 1000, "cpu_us_per_request"), 1.5)
    yield Bar("KiB per open stream, 1000 streams to 100", grown("idle", 100, 1000, "kib_per_stream"), 1.25)
    what = "two workers to one: short requests per CPU second of the busiest process"
    yield Bar(what, speed("workers 128", "busiest_us_per_request", peer=TWO, against=FALLBACK), 1.6, at_least=True)
    for name, what in (("left", "legs, places and connections"), ("held_kv", "decode legs' KV held for good")):
        yield Bar(f"{what} left by leaving clients", plain(OURS, "abort 64", name), 0, unit="")


def plain(peer: str, load: str, name: str) -> Value:
    return lambda results: results.value(peer, load, name)


def ratio(load: str, name: str, *, peer: str = OURS, against: str = BASELINE) -> Value:
    """What a peer's value is of another's."""

    def value(results: Results) -> float | None:
        mine, other = results.value(peer, load, name), results.value(against, load, name)
        # A difference to direct may come out at nothing or less: then there is nothing to compare with.
        return None if mine is None or other is None or other <= 0 else mine / other

    return value


def speed(load: str, name: str, *, peer: str = OURS, against: str = BASELINE) -> Value:
    """How many times as fast a peer is as another, by what a unit of work costs each."""
    return ratio(load, name, peer=against, against=peer)


def grown(load: str, few: int, many: int, name: str) -> Value:
    """What ours costs with many clients, of what it costs with few."""

    def value(results: Results) -> float | None:
        one, other = results.value(OURS, f"{load} {many}", name), results.value(OURS, f"{load} {few}", name)
        return None if one is None or not other or other <= 0 else one / other

    return value
