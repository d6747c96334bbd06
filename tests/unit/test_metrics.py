"""The metrics: every promised name, what each counts, and a text that parses."""

from __future__ import annotations

import math
import timeit

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from trio_pdproxy.core.report import DispatchReport, LegReport, Report
from trio_pdproxy.core.verdict import Debt, Decode, Prefill
from trio_pdproxy.observe.metrics import CONTENT_TYPE, GAP_BUCKETS, OUTCOMES, EngineState, Metrics

ROUTE = "/v1/completions"

PROMISED = {
    "requests_total": {"route", "outcome"},
    "request_duration_seconds": set(),
    "time_to_first_token_seconds": set(),
    "inter_token_latency_seconds": set(),
    "decode_start_gap_seconds": set(),
    "leg_duration_seconds": {"leg"},
    "leg_errors_total": {"leg", "reason"},
    "inflight_requests": {"leg", "engine"},
    "engine_up": {"engine", "role"},
    "client_disconnects_total": set(),
    "retries_total": {"reason"},
    "rescues_total": {"reason", "result"},
    "settled_total": {"reason"},
    "stranded_total": {"engine"},
    "debts": {"engine"},
    "engine_circuit": {"engine", "role", "state"},
    "ready": set(),
    "overhead_seconds": set(),
    "num_requests_waiting": set(),
}

POOL = (
    EngineState("p0", "prefill", up=True, inflight=2),
    EngineState("d0", "decode", up=False, inflight=3, debts=1, stranded=4),
)


def dispatch(
    prefill: Prefill = Prefill.OK,
    decode: Decode = Decode.DONE,
    *,
    debt: Debt = Debt.PAID,
    settled: str | None = None,
    rescue: str | None = None,
    rescue_paid: bool | None = None,
) -> DispatchReport:
    return DispatchReport(
        id="f" * 32,
        prefill=LegReport("p0", sent=10.01, head=10.1, first=10.1, end=10.11, status=200),
        decode=LegReport("d0", sent=10.0104, head=10.02, first=10.2, end=11.2, status=200),
        prefill_outcome=prefill,
        decode_outcome=decode,
        debt=debt,
        settled=settled,
        rescue=rescue,
        rescue_paid=rescue_paid,
    )


def report(outcome: str = "ok", *dispatches: DispatchReport, stream: bool = True, status: int | None = 200) -> Report:
    """A stream of 11 pieces, 100 ms apart; 5 ms of it were spent in the queue."""
    return Report(
        request_id="r",
        route=ROUTE,
        stream=stream,
        accepted=10.0,
        planned=10.001,
        leased=10.006,
        first_byte=10.2,
        last_byte=11.2,
        ended=11.3,
        status=status,
        outcome=outcome,
        events=11,
        dispatches=list(dispatches) or [dispatch()],
    )


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text, _ = metrics.render()
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"pdproxy_{name}", frozenset(labels.items())]


def counted(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The children of a counter that are not 0, by their labels' values in the labels' order by name."""
    return {
        tuple(v for _, v in sorted(labels)): number
        for (found, labels), number in samples(metrics).items()
        if found == f"pdproxy_{name}" and number
    }


# -- the text ------------------------------------------------------------------------------------


def test_every_promised_name_has_its_labels_after_one_exchange() -> None:
    metrics = Metrics(lambda: POOL, lambda: 7)
    metrics.observe(report())
    labels_of: dict[str, set[str]] = {}
    for name, labels in samples(metrics):
        for suffix in ("_bucket", "_sum", "_count"):
            name = name.removesuffix(suffix)  # noqa: PLW2901
        labels_of.setdefault(name, set()).update({label for label, _ in labels} - {"le"})
    assert labels_of == {f"pdproxy_{name}": labels for name, labels in PROMISED.items()}


def test_every_family_is_declared_before_anything_has_happened() -> None:
    text = Metrics().render()[0].decode()
    for name in PROMISED:
        assert f"# HELP pdproxy_{name} " in text
        assert f"# TYPE pdproxy_{name} " in text


def test_text_is_sane() -> None:
    """What promtool complains of: help, types, units in the names, counters' suffixes, buckets that add up."""
    metrics = Metrics(lambda: POOL)
    metrics.observe(report())
    text, content_type = metrics.render()
    assert content_type == CONTENT_TYPE
    assert text.endswith(b"\n")
    for family in text_string_to_metric_families(text.decode()):
        assert family.name.startswith("pdproxy_")
        assert family.documentation
        assert family.type in {"counter", "gauge", "histogram"}
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
            by_child: dict[str, list[float]] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    by_child.setdefault(sample.labels.get("leg", ""), []).append(sample.value)
                if sample.name.endswith("_count"):
                    assert by_child[sample.labels.get("leg", "")][-1] == sample.value
            assert all(values == sorted(values) for values in by_child.values())


def test_no_created_series() -> None:
    metrics = Metrics(lambda: POOL)
    metrics.observe(report())
    assert b"_created" not in metrics.render()[0]


def test_fixed_label_sets_start_at_zero() -> None:
    metrics = Metrics()
    assert value(metrics, "leg_errors_total", leg="decode", reason="cut") == 0
    assert value(metrics, "rescues_total", reason="lapsed", result="stranded") == 0
    assert value(metrics, "settled_total", reason="disconnect") == 0
    assert value(metrics, "retries_total", reason="prefill_busy") == 0


def test_two_apps_do_not_meet() -> None:
    one, other = Metrics(lambda: POOL), Metrics(lambda: POOL)
    one.observe(report())
    assert counted(one, "requests_total") == {("ok", ROUTE): 1}
    assert counted(other, "requests_total") == {}
    assert not [family for family in REGISTRY.collect() if family.name.startswith("pdproxy")]


def test_bucket_edges_are_vllms() -> None:
    edges: dict[str, list[float]] = {}
    for name, labels in samples(Metrics()):
        if name.endswith("_bucket") and ("leg", "prefill") not in labels:
            edges.setdefault(name, []).append(float(dict(labels)["le"]))
    ttft = edges["pdproxy_time_to_first_token_seconds_bucket"]
    itl = edges["pdproxy_inter_token_latency_seconds_bucket"]
    e2e = edges["pdproxy_request_duration_seconds_bucket"]
    assert (ttft[0], ttft[-2], len(ttft)) == (0.001, 2560, 23)
    assert (itl[0], itl[-2], len(itl)) == (0.01, 80, 20)
    assert (e2e[0], e2e[-2], len(e2e)) == (0.3, 7680, 22)
    assert edges["pdproxy_decode_start_gap_seconds_bucket"] == [*GAP_BUCKETS, math.inf]
    assert (GAP_BUCKETS[0], GAP_BUCKETS[-1]) == (0.0001, 1.0)
    assert all(found == sorted(set(found)) for found in edges.values())


# -- the pool ------------------------------------------------------------------------------------


def test_pool_is_asked_at_every_scrape() -> None:
    asked = [POOL, (EngineState("d1", "decode", up=True, inflight=0),)]
    metrics = Metrics(lambda: asked.pop(0), lambda: len(asked))
    first, second = samples(metrics), samples(metrics)
    assert first["pdproxy_inflight_requests", frozenset({("leg", "prefill"), ("engine", "p0")})] == 2
    assert first["pdproxy_inflight_requests", frozenset({("leg", "decode"), ("engine", "d0")})] == 3
    assert first["pdproxy_engine_up", frozenset({("engine", "p0"), ("role", "prefill")})] == 1
    assert first["pdproxy_engine_up", frozenset({("engine", "d0"), ("role", "decode")})] == 0
    assert first["pdproxy_debts", frozenset({("engine", "d0")})] == 1
    assert first["pdproxy_stranded_total", frozenset({("engine", "d0")})] == 4
    assert first["pdproxy_num_requests_waiting", frozenset()] == 1
    assert second["pdproxy_num_requests_waiting", frozenset()] == 0
    assert ("pdproxy_debts", frozenset({("engine", "d0")})) not in second
    assert second["pdproxy_engine_up", frozenset({("engine", "d1"), ("role", "decode")})] == 1


def test_only_decode_engines_have_debts() -> None:
    found = samples(Metrics(lambda: POOL))
    assert ("pdproxy_debts", frozenset({("engine", "p0")})) not in found
    assert ("pdproxy_stranded_total", frozenset({("engine", "p0")})) not in found


def test_pool_is_not_asked_before_the_first_scrape() -> None:
    def not_yet() -> tuple[EngineState, ...]:
        raise AssertionError

    Metrics(not_yet).observe(report())


# -- exchanges -----------------------------------------------------------------------------------


def test_times_of_a_stream() -> None:
    metrics = Metrics()
    metrics.observe(report())
    expected = {
        "request_duration_seconds": 1.2,
        "time_to_first_token_seconds": 0.2,
        "inter_token_latency_seconds": 0.1,
        "decode_start_gap_seconds": 0.0004,
        "overhead_seconds": 0.0054,
    }
    for name, seconds in expected.items():
        assert value(metrics, f"{name}_count") == 1
        assert value(metrics, f"{name}_sum") == pytest.approx(seconds)
    assert value(metrics, "leg_duration_seconds_sum", leg="prefill") == pytest.approx(0.1)
    assert value(metrics, "leg_duration_seconds_sum", leg="decode") == pytest.approx(1.1896)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.075") == 0


def test_answer_in_one_piece_has_no_token_times() -> None:
    metrics = Metrics()
    metrics.observe(report(stream=False))
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    assert value(metrics, "request_duration_seconds_count") == 1


def test_stream_of_one_piece_has_no_latency_between_pieces() -> None:
    metrics = Metrics()
    one = report()
    one.events = 1
    metrics.observe(one)
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 1


def test_refusal_is_no_first_token() -> None:
    metrics = Metrics()
    metrics.observe(report("client_error", dispatch(decode=Decode.REJECTED), status=400))
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    assert value(metrics, "request_duration_seconds_count") == 0
    assert counted(metrics, "requests_total") == {("client_error", ROUTE): 1}


@pytest.mark.parametrize("outcome", ["cut", "disconnect"])
def test_broken_stream_has_a_first_token_and_no_more(outcome: str) -> None:
    metrics = Metrics()
    metrics.observe(report(outcome))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    assert value(metrics, "request_duration_seconds_count") == 0


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcomes(outcome: str) -> None:
    metrics = Metrics()
    metrics.observe(report(outcome))
    metrics.observe(report(outcome))
    assert counted(metrics, "requests_total") == {(outcome, ROUTE): 2}
    assert value(metrics, "client_disconnects_total") == (2 if outcome == "disconnect" else 0)


def test_unknown_outcome_makes_no_series_of_its_own() -> None:
    metrics = Metrics()
    metrics.observe(report("nobody knows"))
    assert counted(metrics, "requests_total") == {("error", ROUTE): 1}


def test_request_that_got_nowhere() -> None:
    metrics = Metrics()
    metrics.observe(Report(request_id="r", route=ROUTE, stream=True, accepted=1.0, outcome="overloaded"))
    metrics.observe(Report(request_id="r", route=ROUTE, stream=True, accepted=1.0, outcome="disconnect"))
    assert counted(metrics, "requests_total") == {("overloaded", ROUTE): 1, ("disconnect", ROUTE): 1}
    assert value(metrics, "overhead_seconds_count") == 0


def test_one_engine_alone() -> None:
    metrics = Metrics()
    alone = dispatch()
    alone.prefill = None
    metrics.observe(report("ok", alone))
    assert value(metrics, "decode_start_gap_seconds_count") == 0
    assert value(metrics, "leg_duration_seconds_count", leg="prefill") == 0
    assert value(metrics, "leg_duration_seconds_count", leg="decode") == 1
    assert value(metrics, "overhead_seconds_count") == 1


def test_leg_that_never_left_has_no_duration() -> None:
    metrics = Metrics()
    refused = dispatch(Prefill.REFUSED, Decode.UNSENT)
    refused.prefill, refused.decode = LegReport("p0"), LegReport("d0")
    metrics.observe(report("prefill_error", refused, status=502))
    assert value(metrics, "leg_duration_seconds_count", leg="prefill") == 0
    assert value(metrics, "decode_start_gap_seconds_count") == 0
    assert counted(metrics, "leg_errors_total") == {("prefill", "refused"): 1}


@pytest.mark.parametrize("prefill", Prefill)
@pytest.mark.parametrize("decode", Decode)
def test_leg_errors(prefill: Prefill, decode: Decode) -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(prefill, decode)))
    expected = {}
    if prefill not in (Prefill.UNSENT, Prefill.PENDING, Prefill.OK):
        expected["prefill", prefill.value] = 1.0
    if decode not in (Decode.UNSENT, Decode.WAITING, Decode.SPEAKING, Decode.DONE):
        expected["decode", decode.value] = 1.0
    assert counted(metrics, "leg_errors_total") == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (Prefill.REFUSED, Decode.UNSENT, "prefill_refused"),
        (Prefill.BUSY, Decode.WAITING, "prefill_busy"),
        (Prefill.OK, Decode.FAILED, "decode_failed"),
        (Prefill.FAILED, Decode.BROKEN, "decode_broken"),
        (Prefill.OK, Decode.WAITING, "other"),
    ],
)
def test_retries_are_counted_by_what_the_pair_before_failed_of(prefill: Prefill, decode: Decode, reason: str) -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(prefill, decode), dispatch()))
    assert counted(metrics, "retries_total") == {(reason,): 1}


def test_last_pair_is_no_retry() -> None:
    metrics = Metrics()
    metrics.observe(report("decode_error", dispatch(decode=Decode.BROKEN), status=502))
    assert counted(metrics, "retries_total") == {}


@pytest.mark.parametrize(
    ("paid", "debt", "result"),
    [
        (True, Debt.PAID, "paid"),
        (False, Debt.STRANDED, "stranded"),
        (None, Debt.STRANDED, "stranded"),
        (False, Debt.NONE, "unneeded"),
        (None, Debt.PAID, "unneeded"),
    ],
)
def test_rescues(paid: bool | None, debt: Debt, result: str) -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(debt=debt, rescue="failed", rescue_paid=paid)))
    assert counted(metrics, "rescues_total") == {("failed", result): 1}
    assert counted(metrics, "leg_errors_total") == {("prefill", "failed"): 1}


def test_lapsed_lease_is_no_leg_error() -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(rescue="lapsed", rescue_paid=True)))
    assert counted(metrics, "rescues_total") == {("lapsed", "paid"): 1}
    assert counted(metrics, "leg_errors_total") == {}


@pytest.mark.parametrize("reason", ["disconnect", "decode_failed", "prefill_failed", "timeout", "drain"])
def test_settled(reason: str) -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(settled=reason)))
    assert counted(metrics, "settled_total") == {(reason,): 1}


def test_settled_for_an_unknown_reason() -> None:
    metrics = Metrics()
    metrics.observe(report("ok", dispatch(settled="full moon")))
    assert counted(metrics, "settled_total") == {("other",): 1}


def test_observe_is_cheap() -> None:
    metrics, one = Metrics(), report()
    best = min(timeit.repeat(lambda: metrics.observe(one), number=200, repeat=10)) / 200
    assert best < 250e-6, "ten times what it takes; a lookup of labels has slipped in"
