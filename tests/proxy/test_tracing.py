"""Traces: what an OTLP receiver is told of a request, and what the engines are told of the trace."""

from __future__ import annotations

import time

import pytest
import trio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.otlp import Receiver, open_receiver
from trio_pdproxy.core.plan import APIS, read_plan
from trio_pdproxy.core.report import Report
from trio_pdproxy.core.trace import leg_span_id, read_traceparent
from trio_pdproxy.observe.tracing import Tracing
from trio_pdproxy.sim import Fault, SimSettings
from trio_pdproxy.testing.rig import open_rig

SERVER, CLIENT = 2, 3
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LONG = "a secret prompt " * 20


async def traced(
    receiver: Receiver, headers: dict[str, str] | None = None, fault: Fault | None = None
) -> dict[str, str]:
    """One streamed chat through a proxy that traces; the traceparent each engine was told, by role."""
    async with open_rig(sim=SimSettings(itl=0.002), otlp_traces_endpoint=receiver.url) as rig:
        if fault is not None:
            rig.d.faults.add(fault)
        messages = [{"role": "user", "content": LONG}]
        body = {"model": "sim", "messages": messages, "max_tokens": 20, "temperature": 0.5, "stream": True}
        response = await rig.client.post("/v1/chat/completions", json=body, headers=headers)
        assert (response.status_code == 200) == (fault is None)
        await rig.quiet()
        told = {}
        for role, engine in (("prefill", rig.p), ("decode", rig.d)):
            seen = next(s for s in reversed(engine.requests) if s.path == "/v1/chat/completions")
            if "traceparent" in seen.headers:
                told[role] = seen.headers["traceparent"]
        return told


async def test_a_request_is_a_server_span_with_a_client_span_for_each_leg() -> None:
    with open_receiver() as receiver:
        before = time.time_ns()
        told = await traced(receiver)
        after = time.time_ns()
    assert sorted(span.name for span in receiver.spans) == ["POST /v1/chat/completions", "decode leg", "prefill leg"]
    server = receiver.named("POST /v1/chat/completions")
    p, d = receiver.named("prefill leg"), receiver.named("decode leg")
    assert (server.kind, p.kind, d.kind) == (SERVER, CLIENT, CLIENT)
    assert server.parent_id == ""
    assert p.parent_id == d.parent_id == server.span_id
    assert {p.trace_id, d.trace_id} == {server.trace_id}
    # What each engine was told is the leg's own span: its spans will hang under the right one.
    assert told == {
        "prefill": f"00-{server.trace_id}-{p.span_id}-01",
        "decode": f"00-{server.trace_id}-{d.span_id}-01",
    }
    assert before < server.start < p.start < d.start < server.end < after
    assert server.start < d.events["first_token"] < d.end <= after
    assert d.events["first_token"] <= server.events["first_token"] < server.end
    assert not any(span.error for span in receiver.spans)
    assert server.service == "trio-pdproxy"


async def test_spans_have_the_genai_attributes_and_no_prompt() -> None:
    with open_receiver() as receiver:
        await traced(receiver)
    server = receiver.named("POST /v1/chat/completions").attributes
    assert server["gen_ai.operation.name"] == "chat"
    assert server["gen_ai.provider.name"] == "vllm"
    assert server["gen_ai.request.model"] == "sim"
    assert server["gen_ai.request.max_tokens"] == 20
    assert server["gen_ai.request.temperature"] == 0.5
    assert server["gen_ai.usage.input_tokens"] > 20
    assert server["http.response.status_code"] == 200
    assert server["pdproxy.outcome"] == "ok"
    assert receiver.named("decode leg").attributes["pdproxy.engine"] == "decode-0"
    assert "secret" not in repr(receiver.spans)


async def test_the_clients_trace_is_continued() -> None:
    with open_receiver() as receiver:
        told = await traced(receiver, {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "a=b"})
    server = receiver.named("POST /v1/chat/completions")
    assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
    assert all(value.startswith(f"00-{TRACE}-") and CALLER not in value for value in told.values())


async def test_what_is_not_sampled_makes_no_span_and_the_engines_are_told_so() -> None:
    with open_receiver() as receiver:
        told = await traced(receiver, {"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert receiver.spans == []
    assert {value.rpartition("-")[2] for value in told.values()} == {"00"}


async def test_failed_legs_are_errors() -> None:
    with open_receiver() as receiver:
        await traced(receiver, fault=Fault("before_head", "status", status=500))
    server = receiver.named("POST /v1/chat/completions")
    assert server.error
    assert server.attributes["error.type"] == "decode_error"
    failed = receiver.named("decode leg")
    assert failed.error
    assert failed.attributes["http.response.status_code"] == 500
    assert failed.attributes["error.type"] == "failed"
    assert not failed.events, "an error's body is no token"


def test_the_sampler_is_opentelemetrys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    exporter = InMemorySpanExporter()
    tracing = Tracing("http://127.0.0.1:1", exporter=exporter)
    plan = read_plan(APIS["/v1/completions"], b'{"prompt": "x"}', [(b"content-type", b"application/json")])
    sampled = 0
    for _ in range(400):
        report = Report("r", "/v1/completions", stream=False, accepted=1.0, last_byte=2.0, ended=2.0)
        report.trace = tracing.begin(plan, ())
        sampled += report.trace.sampled
        tracing.observe(report, 0.0)
    tracing.shutdown()
    assert 50 < sampled < 150
    assert len(exporter.get_finished_spans()) == sampled


@pytest.mark.parametrize(
    "header",
    [b"", b"00-1", b"ff-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b"00-" + b"0" * 32 + b"-" + b"2" * 16 + b"-01"],
)
def test_an_invalid_traceparent_is_none(header: bytes) -> None:
    assert read_traceparent(header) is None


def test_a_later_version_may_say_more() -> None:
    assert read_traceparent(f"01-{TRACE}-{CALLER}-01-what".encode()) == (TRACE, CALLER, True)


def test_leg_spans_differ_by_role_and_dispatch() -> None:
    ids = {leg_span_id(dispatch, role) for dispatch in ("a", "b") for role in ("prefill", "decode")}
    assert len(ids) == 4
    assert all(len(span) == 16 for span in ids)


async def test_the_last_spans_are_sent_at_shutdown_but_not_waited_for_without_end() -> None:
    started = trio.current_time()
    async with open_rig(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as rig:  # nobody there
        assert (await rig.post()).status_code == 200
        await rig.quiet()
    assert trio.current_time() - started < 20
