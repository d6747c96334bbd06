"""OpenTelemetry traces, made from reports.

A request is one SERVER span, each leg of each pair a CLIENT span below it; the first token is an event, and no piece
of a stream costs a span. Nothing of it exists while the request runs, except the ids: `begin` draws those and the
sampler's decision, so that both engines can be told them (their own spans then hang under the right leg); `observe`
makes the spans once the exchange is over. A request that is not sampled costs those two calls and nothing else.

Needs the extra [otel]. Everything but the endpoint is OpenTelemetry's own configuration: OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version

import msgspec
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from trio_pdproxy.core.plan import Plan
from trio_pdproxy.core.report import DispatchReport, Report
from trio_pdproxy.core.trace import TraceContext, leg_span_id, read_traceparent
from trio_pdproxy.core.verdict import Decode, Prefill

Value = str | int | float | bool

# https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_REQUEST = {
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
LONGEST_VALUE = 256
"""Characters of a client's text (the model's name) in an attribute."""

_FINE = frozenset({Prefill.OK, Prefill.UNSENT, Prefill.PENDING, Decode.DONE, Decode.SPEAKING, Decode.UNSENT})
_SPOKE = frozenset({Decode.DONE, Decode.SPEAKING, Decode.CUT})
_NOT_OUR_ERROR = frozenset({"ok", "client_error", "disconnect"})


class _Ids(IdGenerator):
    """Gives the span that is made next the ids that were told to the engines."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class Tracing:
    """The tracing of one app. `endpoint`: where OTLP over HTTP goes; `exporter` instead of that (tests)."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        attributes = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "trio-pdproxy"}
        self._ids = _Ids()
        self._random = RandomIdGenerator()
        self._provider = TracerProvider(resource=Resource.create(attributes), id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("trio_pdproxy", version("trio-pdproxy"))

    def begin(self, plan: Plan, headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
        """The request's place in a trace: the client's, if it named one (`traceparent`), else a new one."""
        given = next((read_traceparent(value) for name, value in headers if name == b"traceparent"), None)
        parent = None
        if given is None:
            number = self._random.generate_trace_id()
        else:
            number = int(given[0], 16)
            parent = _context(given[0], given[1], given[2], remote=True)
        name = f"POST {plan.api.path}"
        result = self._provider.sampler.should_sample(parent, number, name, api.SpanKind.SERVER)
        sampled = result.decision is Decision.RECORD_AND_SAMPLE
        return TraceContext(
            trace_id=f"{number:032x}",
            span_id=f"{self._random.generate_span_id():016x}",
            parent_id=None if given is None else given[1],
            sampled=sampled,
            attributes=tuple(_attributes(plan)) if sampled else (),
        )

    def observe(self, report: Report, wall: float) -> None:
        """Make the spans of a finished exchange. `wall`: what to add to its instants to get seconds since 1970."""
        context = report.trace
        if context is None or not context.sampled:
            return
        parent = _context(context.trace_id, context.parent_id, True, remote=True) if context.parent_id else Context()
        self._ids.trace_id, self._ids.span_id = int(context.trace_id, 16), int(context.span_id, 16)
        span = self._tracer.start_span(
            f"POST {report.route}",
            context=parent,
            kind=api.SpanKind.SERVER,
            attributes=dict(context.attributes) | _server_attributes(report),
            start_time=_ns(report.accepted, wall),
        )
        if report.first_byte is not None and report.status == 200:
            span.add_event("first_token", timestamp=_ns(report.first_byte, wall))
        if report.outcome not in _NOT_OUR_ERROR:
            span.set_attribute("error.type", report.outcome)
            span.set_status(api.StatusCode.ERROR)
        below = api.set_span_in_context(span, Context())
        for dispatch in report.dispatches:
            self._leg(report, dispatch, "prefill", below, wall)
            self._leg(report, dispatch, "decode", below, wall)
        span.end(_ns(report.last_byte or report.ended or report.accepted, wall))

    def _leg(self, report: Report, dispatch: DispatchReport, role: str, parent: Context, wall: float) -> None:
        leg = dispatch.prefill if role == "prefill" else dispatch.decode
        if leg is None or leg.sent is None:
            return
        outcome = dispatch.prefill_outcome if role == "prefill" else dispatch.decode_outcome
        self._ids.span_id = int(leg_span_id(dispatch.id, role), 16)
        attributes: dict[str, Value] = {
            "pdproxy.leg": role,
            "pdproxy.engine": leg.engine,
            "pdproxy.outcome": outcome.value,
            "pdproxy.dispatch_id": dispatch.id,
            "gen_ai.operation.name": _OPERATIONS.get(report.route, "chat"),
            "gen_ai.provider.name": "vllm",
        }
        if leg.status is not None:
            attributes["http.response.status_code"] = leg.status
        if role == "prefill" and dispatch.prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = dispatch.prompt_tokens
        if role == "decode":
            attributes["pdproxy.debt"] = dispatch.debt.value
            if dispatch.gap is not None:
                attributes["pdproxy.decode_start_gap"] = dispatch.gap
        span = self._tracer.start_span(
            f"{role} leg",
            context=parent,
            kind=api.SpanKind.CLIENT,
            attributes=attributes,
            start_time=_ns(leg.sent, wall),
        )
        if outcome in _SPOKE and leg.first is not None:
            span.add_event("first_token", timestamp=_ns(leg.first, wall))
        if role == "prefill" and dispatch.rescued is not None:
            span.add_event("rescue", {"pdproxy.reason": dispatch.rescue or ""}, _ns(dispatch.rescued, wall))
        if outcome not in _FINE:
            span.set_attribute("error.type", outcome.value)
            span.set_status(api.StatusCode.ERROR)
        span.end(_ns(leg.end or dispatch.settled_at or report.ended or leg.sent, wall))

    def shutdown(self) -> None:
        """Send what is left, and end. Blocks: to be called in a thread."""
        self._provider.shutdown()


def _context(trace_id: str, span_id: str, sampled: bool, *, remote: bool) -> Context:
    flags = api.TraceFlags(api.TraceFlags.SAMPLED if sampled else api.TraceFlags.DEFAULT)
    context = api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=flags)
    return api.set_span_in_context(api.NonRecordingSpan(context), Context())


def _attributes(plan: Plan) -> Iterable[tuple[str, Value]]:
    """What the request asks for: numbers, and the model's name."""
    for name, attribute in _REQUEST.items():
        if (raw := plan.members.get(name)) is None:
            continue
        try:
            value = msgspec.json.decode(raw, type=int | float | str)
        except msgspec.DecodeError:
            continue
        if isinstance(value, str) == (name == "model"):
            yield attribute, value[:LONGEST_VALUE] if isinstance(value, str) else value


def _server_attributes(report: Report) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "http.request.method": "POST",
        "http.route": report.route,
        "url.path": report.route,
        "gen_ai.operation.name": _OPERATIONS.get(report.route, "chat"),
        "gen_ai.provider.name": "vllm",
        "pdproxy.request_id": report.request_id,
        "pdproxy.kind": report.kind,
        "pdproxy.outcome": report.outcome,
        "pdproxy.stream": report.stream,
        "pdproxy.pieces": report.events,
        "pdproxy.dispatches": len(report.dispatches),
    }
    if report.status is not None:
        attributes["http.response.status_code"] = report.status
    tokens = next((d.prompt_tokens for d in reversed(report.dispatches) if d.prompt_tokens is not None), None)
    if tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = tokens
    if report.stream and report.first_byte is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = report.first_byte - report.accepted
    if report.planned is not None and report.leased is not None:
        attributes["pdproxy.queue_time"] = report.leased - report.planned
    return attributes


def _ns(instant: float, wall: float) -> int:
    return round((instant + wall) * 1e9)
