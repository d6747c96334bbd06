"""An OTLP receiver in this process: what exporters POST to /v1/traces, decoded."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """One span. Ids in hex, instants in nanoseconds."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    error: bool
    attributes: dict[str, Any]
    events: dict[str, int]


@dataclass(slots=True)
class Receiver:
    url: str = ""
    spans: list[SpanSeen] = field(default_factory=list)

    def named(self, name: str) -> SpanSeen:
        (found,) = (span for span in self.spans if span.name == name)
        return found


@contextmanager
def open_receiver() -> Iterator[Receiver]:
    """A receiver on a free port of 127.0.0.1, in a thread, until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _spans(request: Any) -> Iterator[SpanSeen]:
    for resource in request.resource_spans:
        of = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SpanSeen(
                    service=of.get("service.name", ""),
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    error=span.status.code == 2,
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    events={event.name: event.time_unix_nano for event in span.events},
                )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
