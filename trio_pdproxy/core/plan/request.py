"""From a client's request to the bodies of its legs.

A body is read at its top level only (`dict[str, Raw]`): every member a leg does not need changed goes to the engines as
the client wrote it. What a leg needs changed is said once per API, in the table `APIS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from trio_pdproxy.core.errors import Dialect, Fault, ProxyError, bad_request
from trio_pdproxy.core.plan.apis import Api
from trio_pdproxy.core.plan.members import (
    Members,
    is_asked,
    is_given,
    is_literal,
    kind_of,
    raw_of,
    read_members,
    wrong_kind,
)
from trio_pdproxy.core.routing import AFFINITY_BYTES
from trio_pdproxy.core.trace import TraceContext


class Kind(Enum):
    """How a request is served."""

    PUSH = "push"
    """Prefill and decode: both legs at once, the prefill engine pushes its KV into the decode engine's blocks. In front
    of engines in pull mode one after the other."""
    DECODE_ONLY = "decode_only"
    """The decode engine alone: where it would ignore the prefill leg's work anyway."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """How a decode engine finds a prefill engine.

    `host` and `port` are the NIXL side channel's. All of `engine_id`, `host`, `port`, `tp_size` must be right:
    a decode engine that is given none of one of them dies of a KeyError (vLLM 0.32).
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1
    dcp_size: int = 1


# What a client may not bring. `kv_transfer_params` steers the KV connector: one wrong member kills a decode
# engine, a `remote_host` of the client's sends it anywhere. `request_id` names the transfer: two live requests of
# one name get each other's KV. `vllm_xargs` is a second door to the first two: its members become the engine's extra
# arguments, these among them, and `{"kv_transfer_params": 0}` there ends a decode engine that is asked alone.
_STEERING = ("kv_transfer_params", "ec_transfer_params")
_FORBIDDEN = (*_STEERING, "request_id")
_XARGS = "vllm_xargs"

# No server hands such a value on; whoever reads plans without one may.
_LINE_END = re.compile(rb"[\r\n\x00]")

_CLIENTS_TOOLS = ("function", "custom")


@dataclass(frozen=True, slots=True)
class Plan:
    """A client's request, understood: what the exchange needs to dispatch it, as often as it must."""

    api: Api
    kind: Kind
    members: Members
    stream: bool
    several: bool
    """More than one transfer belongs to a dispatch (n > 1, a list of prompts): then a decode engine that
    has spoken may still be waiting for others."""
    dropped: tuple[str, ...] = ()
    """What the client sent and may not send, by name; counted, never forwarded."""
    reason: str = ""
    """Why the kind is not PUSH."""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    """Headers of the client's that go to both engines."""
    session: bytes | None = field(default=None, repr=False)
    """The client's session header."""
    trace: TraceContext | None = None
    """Where the request stands in a trace of ours; then `headers` hold no traceparent of the client's."""

    @property
    def prefix(self) -> bytes:
        """The prompt's beginning, as it stands in the request: what routing by prefix goes by."""
        prompt = self.members.get(self.api.needs[0]) if self.api.needs else None
        return b"" if prompt is None else bytes(memoryview(prompt)[:AFFINITY_BYTES])

    def leg_headers(self, dispatch_id: str, role: str) -> tuple[tuple[bytes, bytes], ...]:
        """The headers of the client's, and the trace's, that go to the `role` engine of a dispatch."""
        if self.trace is None:
            return self.headers
        return (*self.headers, (b"traceparent", self.trace.traceparent(dispatch_id, role)))

    def traced(self, trace: TraceContext) -> Plan:
        """The same request as a part of our trace instead of the client's."""
        headers = tuple(pair for pair in self.headers if pair[0] != b"traceparent")
        return replace(self, trace=trace, headers=headers)

    def alone(self, reason: str) -> Plan:
        """The same request for a decode engine alone."""
        return replace(self, kind=Kind.DECODE_ONLY, reason=reason)

    def prefill_body(self, dispatch_id: str) -> bytes:
        """The prefill leg: one token, no stream, KV kept for the decode engine that names the same id."""
        members = dict(self.members)
        for name in self.api.prefill_drops:
            members.pop(name, None)
        members.update(self.api.prefill_sets)
        return self._encode(members, dispatch_id, {"do_remote_decode": True, "transfer_id": dispatch_id})

    def decode_body(self, dispatch_id: str, coordinates: Coordinates) -> bytes:
        """The decode leg: the client's request, its KV to come from the engine at `coordinates`."""
        return self._encode(
            dict(self.members),
            dispatch_id,
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": coordinates.engine_id,
                "remote_host": coordinates.host,
                "remote_port": coordinates.port,
                "tp_size": coordinates.tp_size,
                "pp_size": coordinates.pp_size,
                "dcp_size": coordinates.dcp_size,
                # vLLM 0.32 pairs by the request id in X-Request-Id, later ones by transfer_id; this one is
                # only used for heartbeats, but its absence kills the engine.
                "remote_request_id": self.api.engine_id.format(dispatch_id),
                "transfer_id": dispatch_id,
            },
        )

    def pull_body(self, transfer_params: msgspec.Raw) -> bytes:
        """The decode leg in pull mode: the client's request with what the prefill engine said, verbatim."""
        return msgspec.json.encode(self.members | {"kv_transfer_params": transfer_params})

    def _encode(self, members: Members, dispatch_id: str, kv_transfer_params: dict[str, object]) -> bytes:
        if self.api.body_id:
            members["request_id"] = raw_of(self.api.body_id.format(dispatch_id))
        members["kv_transfer_params"] = raw_of(kv_transfer_params)
        return msgspec.json.encode(members)

    def alone_body(self) -> bytes:
        """The whole request for one engine that computes prompt and answer itself."""
        return msgspec.json.encode(self.members)


def read_plan(
    api: Api,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    session_header: bytes = b"",
    min_prefill_tokens: int = 0,
) -> Plan:
    """Understand a request body.

    `headers` are the client's, names in lower case; `session_header` is the one that names a session. A prompt of
    fewer than about `min_prefill_tokens` is planned for a decode engine alone. Raises `ProxyError` (400 or 415) with
    the place and what to do; nothing has been sent anywhere then. Only what the proxy itself must read is checked: the
    rest is the engines' to judge, and their answer is passed on.
    """
    headers = tuple(headers)
    _check_content_type(headers)
    members = read_members(body)
    dropped = tuple(name for name in _FORBIDDEN if members.pop(name, None) is not None)
    dropped += _clean_xargs(members)
    for name, kinds in api.shapes:
        if (raw := members.get(name)) is not None and (kind := kind_of(raw)) not in kinds:
            raise wrong_kind(name, kind, kinds)
    if api.needs and not any(is_given(members, name) for name in api.needs):
        raise bad_request(f"`{api.needs[0]}` is missing", param=api.needs[0], code="missing_field")
    if api.dialect is Dialect.RESPONSES and is_asked(members, "background"):
        raise bad_request(
            "`background` is not supported: a response that nobody waits for could not be fetched here",
            param="background",
            code="unsupported",
        )
    reason = "one engine answers" if api.alone else _decode_only_reason(members, api)
    if not reason and min_prefill_tokens and _estimated_tokens(members.get(api.needs[0])) < min_prefill_tokens:
        reason = "a short prompt"
    return Plan(
        api=api,
        kind=Kind.DECODE_ONLY if reason else Kind.PUSH,
        members=members,
        stream=is_literal(members, "stream", b"true"),
        several=_several(members),
        dropped=dropped,
        reason=reason,
        headers=tuple([pair for pair in headers if pair[0] in FORWARDED_HEADERS and not _LINE_END.search(pair[1])]),
        session=next((value for name, value in headers if name == session_header), None),
    )


FORWARDED_HEADERS = frozenset({b"authorization", b"x-api-key", b"traceparent", b"tracestate", b"user-agent"})
"""Everything else stays here: an engine must not be steered by X-Request-Id, X-data-parallel-rank or what
comes next, so this is a list of what passes, not of what does not."""


def _check_content_type(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    values = [value for name, value in headers if name == b"content-type"]
    # Engines answer 400 to anything else; asking them would only cost a leg each.
    media_type, _, parameters = (values[0] if len(values) == 1 else b"").lower().partition(b";")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    if media_type.strip() != b"application/json" or (b"charset=" in charset and b"charset=utf-8" not in charset):
        raise ProxyError(
            "Content-Type must be application/json (UTF-8)",
            status=415,
            fault=Fault.CLIENT,
            code="unsupported_media_type",
        )


def _clean_xargs(members: Members) -> tuple[str, ...]:
    raw = members.get(_XARGS)
    if raw is None or kind_of(raw) != "o":
        return ()
    try:
        xargs = msgspec.json.decode(raw, type=Members)
    except msgspec.DecodeError:
        raise bad_request("the body is not valid JSON", param=_XARGS, code="invalid_json") from None
    dropped = tuple(f"{_XARGS}.{name}" for name in _STEERING if xargs.pop(name, None) is not None)
    if dropped:
        members[_XARGS] = msgspec.Raw(msgspec.json.encode(xargs))
    return dropped


def _several(members: Members) -> bool:
    if is_given(members, "n") and not is_literal(members, "n", b"1"):
        return True
    if is_given(members, "prompt_embeds"):
        return True  # one or a list of them, and each beside what `prompt` says
    prompt = members.get("prompt")
    if prompt is None or kind_of(prompt) != "a":
        return False
    # A list of numbers is one prompt, a list of strings or lists is several (or one: no harm in waiting).
    inner = bytes(memoryview(prompt)[1:64]).lstrip()[:1]
    return inner in (b'"', b"[", b"{", b"")


def _decode_only_reason(members: Members, api: Api) -> str:  # noqa: PLR0911 -- one line a rule
    """Which member makes the decode engine ignore transferred KV and compute the prompt itself."""
    if is_given(members, "prompt_logprobs"):
        return "prompt_logprobs"
    if is_asked(members, "echo") and is_asked(members, "logprobs"):
        return "echo with logprobs"
    if is_asked(members, "use_beam_search"):
        return "use_beam_search"
    if api.dialect is not Dialect.RESPONSES:
        return ""
    if is_given(members, "previous_response_id"):
        return "previous_response_id"  # what it names is kept by a decode engine, if at all
    if _has_built_in_tools(members.get("tools")):
        return "built-in tools"  # after each call the engine starts anew, with an id that prefill never hears of
    return ""


class _Tool(msgspec.Struct):
    type: str = "function"


def _has_built_in_tools(tools: msgspec.Raw | None) -> bool:
    """Whether some tool of /v1/responses is called by the engine itself."""
    try:
        listed = [] if tools is None else msgspec.json.decode(tools, type=list[_Tool] | None) or []
    except (msgspec.DecodeError, RecursionError):
        return False  # the engine's to judge
    return any(tool.type not in _CLIENTS_TOOLS for tool in listed)


def _estimated_tokens(prompt: msgspec.Raw | None) -> int:
    """About how many tokens a prompt has: four bytes of text are one (English, common tokenizers); token ids are
    counted by their commas. JSON around chat messages counts as text: short chats are overestimated a little."""
    if prompt is None:
        return 0
    data = memoryview(prompt)
    first = bytes(data[1:64]).lstrip()[:1]
    if kind_of(prompt) == "a" and first.isdigit():
        return bytes(data).count(b",") + 1
    return len(data) // 4
