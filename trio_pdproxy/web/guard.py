"""What is refused before anything is read or asked: pure decisions on a request's head.

Decisions are made on the raw path as it came, never on one decoded or built from the Host header: what two parsers
may read differently is not read at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hypercorn.typing import HTTPScope

from trio_pdproxy.core.errors import Dialect, Fault, ProxyError, bad_request
from trio_pdproxy.core.plan import APIS

# path -> methods. HEAD comes with GET.
ROUTES: dict[bytes, tuple[str, ...]] = {
    **{path.encode(): ("POST",) for path in APIS},
    b"/v1/models": ("GET", "HEAD"),
    b"/health": ("GET", "HEAD"),
    b"/ready": ("GET", "HEAD"),
    b"/status": ("GET", "HEAD"),
    b"/metrics": ("GET", "HEAD"),
    b"/timelines": ("GET", "HEAD"),
}

SLOWEST_UPLOAD = 1024
"""Bytes a second that a body has to come with on the whole, after a first `upload_timeout` seconds."""

_KEYLESS = frozenset({b"/health", b"/ready", b"/status", b"/metrics"})

_FRAMING = {b"content-length", b"transfer-encoding"}
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=-]+(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")

Headers = Iterable[tuple[bytes, bytes]]


def check(scope: HTTPScope) -> None:
    """Raises `ProxyError` for a request that is not to be served, whoever sends it."""
    _check_headers(scope["headers"], scope["http_version"])
    path = scope["raw_path"]
    if not path.startswith(b"/"):
        # An absolute URI (a proxy's form) or an authority: the host in it is not to be believed.
        raise bad_request("the request target must be a path", code="bad_target")
    methods = ROUTES.get(path)
    if methods is None:
        raise nothing_at(path)
    if scope["method"] not in methods:
        raise MethodError(methods)
    if path.decode() in APIS and scope["http_version"] not in ("1.0", "1.1"):
        # A stream that breaks has no end in HTTP/2 as this server speaks it: its client would wait for ever.
        raise ProxyError("use HTTP/1.1 here", status=505, fault=Fault.CLIENT, code="http_version")


def nothing_at(path: bytes) -> ProxyError:
    """404."""
    return ProxyError(
        f"there is nothing at {path.decode('ascii', 'replace')[:200]}",
        status=404,
        fault=Fault.CLIENT,
        code="not_found",
    )


class MethodError(ProxyError):
    """405, with the methods that are allowed."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        super().__init__(
            f"use {' or '.join(methods)} here",
            status=405,
            fault=Fault.CLIENT,
            code="method_not_allowed",
        )
        self.methods = methods

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", ", ".join(self.methods).encode())]


def _check_headers(headers: Headers, version: str) -> None:
    framed_by = set()
    hosts = 0
    host_is_bad = False
    for name, value in headers:
        if name in _FRAMING:
            framed_by.add(name)
        elif name == b"host":
            hosts += 1
            host_is_bad = bool(value) and not _HOST.fullmatch(value)
    if framed_by == _FRAMING:
        # h11 takes both; who comes before us may have taken the other one (request smuggling).
        raise bad_request("Content-Length together with Transfer-Encoding", code="bad_framing")
    if hosts > 1 or (version != "1.0" and not hosts) or host_is_bad:
        raise bad_request("the Host header is missing or malformed", code="bad_host")


def needs_key(path: bytes) -> bool:
    """Whether this route (one of ROUTES) is for clients with a key, where keys are asked for at all. The others are for
    whoever runs the proxy: they hold no client's text."""
    return path not in _KEYLESS


def dialect_of(path: bytes) -> Dialect:
    """The shape in which a client of this path expects errors, also where nothing is there."""
    return Dialect.ANTHROPIC if path.startswith(b"/v1/messages") else Dialect.OPENAI


def declared_length(headers: Headers) -> int | None:
    """The body's length as declared; None where it comes in chunks. Whoever parsed it has checked that."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None


def too_large(limit: int) -> ProxyError:
    return ProxyError(f"the body is larger than {limit} bytes", status=413, fault=Fault.CLIENT, code="body_too_large")


def client_request_id(headers: Headers) -> str | None:
    """The client's own X-Request-Id, for the echo and the log; None where it has none, or one not fit for either."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return None
