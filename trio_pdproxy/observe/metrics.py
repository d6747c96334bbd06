"""What Prometheus is told, at /metrics.

Two sources. What has happened is read from the `Report` of each exchange once it is over, debts included. What is the
case right now (places taken, engines up) is asked for when somebody scrapes, so it cannot drift from the truth.

Names and bucket edges are vLLM's wherever it has them, so that one dashboard shows both sides of the proxy. No label
holds a client's text: every label is an engine's configured name, one of our routes, or a word from a set fixed here
or in `core`, and the fixed ones are there from the start, at 0, so that the first event is already an increase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from trio_pdproxy.core.health import Circuit
from trio_pdproxy.core.report import DispatchReport, LegReport, Report
from trio_pdproxy.core.verdict import Debt, Decode, Prefill

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OUTCOMES = (
    "ok",
    "client_error",
    "prefill_error",
    "decode_error",
    "proxy_error",
    "timeout",
    "cut",
    "disconnect",
    "overloaded",
    "error",
)
SETTLED = ("disconnect", "decode_failed", "prefill_failed", "timeout", "drain")
OTHER = "other"
"""For a word that is in none of the sets: a series too many is a smaller fault than an event not counted."""

# vLLM's edges (v1/metrics/buckets.py), in seconds.
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# Ours: the two legs leave some tenths of a millisecond apart, or something is wrong.
GAP_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

_PREFILL_ERRORS = frozenset(
    {Prefill.REFUSED, Prefill.LATE, Prefill.FOREIGN, Prefill.REJECTED, Prefill.BUSY, Prefill.FAILED}
)
_DECODE_ERRORS = frozenset({Decode.REFUSED, Decode.REJECTED, Decode.FAILED, Decode.BROKEN, Decode.LATE, Decode.CUT})
_LEG_ERRORS = (
    *(("prefill", p.value) for p in Prefill if p in _PREFILL_ERRORS),
    *(("decode", d.value) for d in Decode if d in _DECODE_ERRORS),
)
_RETRIES = tuple(f"{leg}_{reason}" for leg, reason in _LEG_ERRORS)
_RESCUES = ("refused", "rejected", "busy", "failed", "lapsed")
_RESULTS = ("paid", "stranded", "unneeded")


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine at the instant of a scrape."""

    name: str
    role: str
    """prefill or decode."""
    up: bool
    """Usable: it gets requests."""
    inflight: int
    debts: int = 0
    stranded: int = 0
    """Since the start; never smaller than at the scrape before."""
    circuit: str = Circuit.CLOSED.value


class Metrics:
    """The metrics of one app. It has a registry of its own: several apps in one process do not meet.

    `engines`, `waiting` (requests in the queue) and `ready` are called at each `render`, in its thread.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineState]] = tuple,
        waiting: Callable[[], int] = int,
        ready: Callable[[], bool] = bool,
    ) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests that are over, by what became of them.", "route", "outcome"
        )
        self._request_duration = self._histogram(
            "request_duration_seconds",
            "From a request's head to the end of its answer; requests of outcome ok.",
            REQUEST_BUCKETS,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From a request's head to the first byte of the answer handed to the client; streams an engine answered.",
            TTFT_BUCKETS,
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds",
            "Mean time between two pieces of a stream, one observation a request; streams of outcome ok. "
            "A piece is what one read from the decode engine gave: one token, unless the client is slow.",
            ITL_BUCKETS,
        )
        self._gap = self._histogram(
            "decode_start_gap_seconds",
            "The decode leg's request on the wire minus the prefill leg's, one observation a pair tried.",
            GAP_BUCKETS,
        )
        self._overhead = self._histogram(
            "overhead_seconds",
            "From a request's head until its first legs are out, its wait in the queue not counted. "
            "Reading the client's body is in it.",
            GAP_BUCKETS,
        )
        leg_duration = self._histogram(
            "leg_duration_seconds", "From a leg's request on the wire to its end.", REQUEST_BUCKETS, "leg"
        )
        self._prefill_duration = leg_duration.labels("prefill")
        self._decode_duration = leg_duration.labels("decode")
        self._disconnects = self._counter("client_disconnects", "Clients that left before the end of their answer.")
        self._leg_errors = _Children(
            self._counter(
                "leg_errors", "Legs that failed, the first of two where one was sent again.", "leg", "reason"
            ),
            _LEG_ERRORS,
        )
        self._retries = _Children(
            self._counter("retries", "Another pair tried for a request, by what the one before failed of.", "reason"),
            ((reason,) for reason in (*_RETRIES, OTHER)),
        )
        self._rescues = _Children(
            self._counter(
                "rescues",
                "Prefill legs sent again for the decode engine's sake. unneeded: it was free without it.",
                "reason",
                "result",
            ),
            product(_RESCUES, _RESULTS),
        )
        self._settled = _Children(
            self._counter("settled", "Prefill legs carried on when nobody waited for them any more.", "reason"),
            ((reason,) for reason in (*SETTLED, OTHER)),
        )
        self._routes: dict[str, dict[str, Counter]] = {}
        self.registry.register(_Now(engines, waiting, ready))

    # -- what has happened -----------------------------------------------------------------------

    def observe(self, report: Report) -> None:
        """Count one exchange. To be called once for each, when it is over (`report.ended` is set)."""
        outcomes = self._routes.get(report.route) or self._route(report.route)
        outcome = report.outcome
        (outcomes.get(outcome) or outcomes["error"]).inc()
        if outcome == "disconnect":
            self._disconnects.inc()
        self._observe_times(report)
        last = None
        for dispatch in report.dispatches:
            if last is not None:
                self._retries.inc(_why_retried(last))
            last = dispatch
            self._observe_dispatch(dispatch)

    def _observe_times(self, report: Report) -> None:
        accepted, first, last = report.accepted, report.first_byte, report.last_byte
        done = report.outcome == "ok" and last is not None
        if done:
            assert last is not None
            self._request_duration.observe(last - accepted)
        if report.stream and report.status == 200 and first is not None:
            self._ttft.observe(first - accepted)
            if done and report.events > 1:
                assert last is not None
                self._itl.observe((last - first) / (report.events - 1))
        if report.dispatches and report.planned is not None and report.leased is not None:
            sent = report.dispatches[0].decode.sent
            if sent is not None:
                self._overhead.observe(sent - accepted - (report.leased - report.planned))

    def _observe_dispatch(self, dispatch: DispatchReport) -> None:
        if (gap := dispatch.gap) is not None:
            self._gap.observe(gap)
        if dispatch.prefill is not None:
            _observe_leg(self._prefill_duration, dispatch.prefill)
        _observe_leg(self._decode_duration, dispatch.decode)
        if dispatch.prefill_outcome in _PREFILL_ERRORS:
            self._leg_errors.inc("prefill", dispatch.prefill_outcome.value)
        if dispatch.decode_outcome in _DECODE_ERRORS:
            self._leg_errors.inc("decode", dispatch.decode_outcome.value)
        if dispatch.settled is not None:
            self._settled.inc(dispatch.settled if dispatch.settled in SETTLED else OTHER)
        if dispatch.rescue is not None:
            if dispatch.rescue != "lapsed":  # the leg that failed first: its outcome is overwritten by the second one's
                self._leg_errors.inc("prefill", dispatch.rescue)
            self._rescues.inc(dispatch.rescue, _result(dispatch))

    def _route(self, route: str) -> dict[str, Counter]:
        children = {outcome: self._requests.labels(route, outcome) for outcome in OUTCOMES}
        self._routes[route] = children
        return children

    # -- what Prometheus reads -------------------------------------------------------------------

    def render(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""
        return generate_latest(_WithoutCreated(self.registry)), CONTENT_TYPE

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdproxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"pdproxy_{name}", text, labels, buckets=buckets, registry=self.registry)


# What is true of the proxy only where it is true in each of its workers; everything else adds up.
_IN_EACH = frozenset({"pdproxy_engine_up", "pdproxy_ready"})
_IN_ANY = frozenset({"pdproxy_engine_circuit"})


def merged(texts: Iterable[bytes]) -> bytes:
    """The text of /metrics for several workers of one proxy, from the texts of each."""
    texts = list(texts)
    if len(texts) == 1:
        return texts[0]
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            add = min if family.name in _IN_EACH else max if family.name in _IN_ANY else float.__add__
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                known[key] = add(known[key], float(sample.value)) if key in known else float(sample.value)
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return generate_latest(_Families(list(families.values())))


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Children:
    """A counter's children by their labels: looking one up in prometheus_client takes longer than counting."""

    def __init__(self, counter: Counter, known: Iterable[tuple[str, ...]]) -> None:
        self._counter = counter
        self._children = {labels: counter.labels(*labels) for labels in known}

    def inc(self, *labels: str) -> None:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._counter.labels(*labels)
        child.inc()


def _observe_leg(histogram: Histogram, leg: LegReport) -> None:
    if leg.sent is not None and leg.end is not None:
        histogram.observe(leg.end - leg.sent)


def _why_retried(dispatch: DispatchReport) -> str:
    """The decode leg's failure first: where both failed, it is the one that made the pair useless for the client."""
    if dispatch.decode_outcome in _DECODE_ERRORS:
        return f"decode_{dispatch.decode_outcome.value}"
    if dispatch.prefill_outcome in _PREFILL_ERRORS:
        return f"prefill_{dispatch.prefill_outcome.value}"
    return OTHER


def _result(dispatch: DispatchReport) -> str:
    if dispatch.rescue_paid:
        return "paid"
    return "stranded" if dispatch.debt is Debt.STRANDED else "unneeded"


class _Now(Collector):
    """The state of the pool, asked for at each scrape."""

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineState]],
        waiting: Callable[[], int],
        ready: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._waiting = waiting
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily(
            "pdproxy_inflight_requests",
            "Places taken at an engine: running legs and unpaid debts.",
            labels=("leg", "engine"),
        )
        up = GaugeMetricFamily("pdproxy_engine_up", "1 while an engine gets requests.", labels=("engine", "role"))
        circuit = GaugeMetricFamily(
            "pdproxy_engine_circuit",
            "1 for the state of an engine's circuit breaker: closed (it gets requests), open (none), half_open (one).",
            labels=("engine", "role", "state"),
        )
        debts = GaugeMetricFamily(
            "pdproxy_debts",
            "Dispatches whose KV blocks on this decode engine wait for a push that no client waits for.",
            labels=("engine",),
        )
        stranded = CounterMetricFamily(
            "pdproxy_stranded",
            "Dispatches whose KV blocks on this decode engine stay held until it is restarted.",
            labels=("engine",),
        )
        for engine in self._engines():
            inflight.add_metric((engine.role, engine.name), engine.inflight)
            up.add_metric((engine.name, engine.role), engine.up)
            for state in Circuit:
                circuit.add_metric((engine.name, engine.role, state.value), state.value == engine.circuit)
            if engine.role == "decode":
                debts.add_metric((engine.name,), engine.debts)
                stranded.add_metric((engine.name,), engine.stranded)
        yield from (inflight, up, circuit, debts, stranded)
        yield GaugeMetricFamily("pdproxy_ready", "1 while a pair of engines is usable.", value=self._ready())
        yield GaugeMetricFamily(
            "pdproxy_num_requests_waiting", "Requests in the queue for a place at a pair.", value=self._waiting()
        )


class _WithoutCreated(Collector):
    """A registry less the `_created` series, which nobody reads and which nearly double the number of counters.

    prometheus_client can leave them out only for the whole process, which is not ours alone.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
