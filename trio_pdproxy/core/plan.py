"""From a client's request to the bodies of its legs. Pure: ids and coordinates are handed in.

A body is read at its top level only (`dict[str, Raw]`): every member a leg does not need changed goes to
the engines as the client wrote it. What a leg needs changed is said once per API, in the table `APIS`.

Where the rules come from (measured on vLLM 0.32): a prefill leg generates one token and answers at once,
so `stream`, `stream_options` and `min_tokens` have to go (the engine answers 400 to the last two), and every
field that could ask for more than one token is overwritten (in chat `max_completion_tokens` beats
`max_tokens`). `n` and all that shapes the prompt stay: they name the transfers and size the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from trio_pdproxy.core.errors import Fault, ProxyError, bad_request
from trio_pdproxy.core.routing import AFFINITY_BYTES
from trio_pdproxy.core.trace import TraceContext

TRUE = msgspec.Raw(b"true")
FALSE = msgspec.Raw(b"false")
ONE = msgspec.Raw(b"1")

Members = dict[str, msgspec.Raw]


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


@dataclass(frozen=True, slots=True)
class Api:
    """What the plan must know of one OpenAI-style API."""

    path: str
    id_prefix: str
    """Of the engine's own request ids: `<id_prefix>-<dispatch id>`."""
    prefill_sets: tuple[tuple[str, msgspec.Raw], ...]
    prefill_drops: tuple[str, ...]
    shapes: tuple[tuple[str, str], ...]
    """Members whose JSON kind is checked: name, kinds allowed (see `_kind`)."""
    needs: tuple[str, ...]
    """At least one of these must be there and not null."""


# Answer-only members a prefill leg can do without: they cost the prefill engine work nobody reads.
_ANSWER_ONLY = ("logprobs", "top_logprobs", "echo")
_COMMON_SHAPES = (
    ("model", "sn"),
    ("stream", "bn"),
    ("stream_options", "on"),
    ("max_tokens", "#n"),
    ("min_tokens", "#n"),
    ("n", "#n"),
    ("vllm_xargs", "on"),
)

APIS = {
    api.path: api
    for api in (
        Api(
            path="/v1/completions",
            id_prefix="cmpl",
            prefill_sets=(("stream", FALSE), ("max_tokens", ONE)),
            prefill_drops=("stream_options", "min_tokens", *_ANSWER_ONLY),
            shapes=(*_COMMON_SHAPES, ("prompt", "san")),
            needs=("prompt", "prompt_embeds"),
        ),
        Api(
            path="/v1/chat/completions",
            id_prefix="chatcmpl",
            prefill_sets=(("stream", FALSE), ("max_tokens", ONE)),
            prefill_drops=("stream_options", "min_tokens", "max_completion_tokens", *_ANSWER_ONLY),
            shapes=(*_COMMON_SHAPES, ("max_completion_tokens", "#n"), ("messages", "a")),
            needs=("messages",),
        ),
    )
}

# What a client may not bring. `kv_transfer_params` steers the KV connector: one wrong member kills a decode
# engine, a `remote_host` of the client's sends it anywhere. `request_id` names the transfer: two live requests of
# one name get each other's KV. `vllm_xargs` is a second door to the first two: its members become the engine's extra
# arguments, these among them, and `{"kv_transfer_params": 0}` there ends a decode engine that is asked alone.
_STEERING = ("kv_transfer_params", "ec_transfer_params")
_FORBIDDEN = (*_STEERING, "request_id")
_XARGS = "vllm_xargs"

_KIND_NAMES = {
    "s": "a string",
    "o": "an object",
    "a": "an array",
    "b": "true or false",
    "#": "a number",
    "n": "null",
}


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
        prompt = self.members.get(self.api.needs[0])
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
        return _encode(members, {"do_remote_decode": True, "transfer_id": dispatch_id})

    def decode_body(self, dispatch_id: str, coordinates: Coordinates) -> bytes:
        """The decode leg: the client's request, its KV to come from the engine at `coordinates`."""
        return _encode(
            dict(self.members),
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
                "remote_request_id": f"{self.api.id_prefix}-{dispatch_id}",
                "transfer_id": dispatch_id,
            },
        )

    def pull_body(self, transfer_params: msgspec.Raw) -> bytes:
        """The decode leg in pull mode: the client's request with what the prefill engine said, verbatim."""
        return msgspec.json.encode(self.members | {"kv_transfer_params": transfer_params})

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
    members = _members(body)
    dropped = tuple(name for name in _FORBIDDEN if members.pop(name, None) is not None)
    dropped += _clean_xargs(members)
    for name, kinds in api.shapes:
        _check_shape(members, name, kinds)
    if not any(_given(members, name) for name in api.needs):
        raise bad_request(f"`{api.needs[0]}` is missing", param=api.needs[0], code="missing_field")
    reason = _decode_only_reason(members)
    if not reason and min_prefill_tokens and _estimated_tokens(members.get(api.needs[0])) < min_prefill_tokens:
        reason = "a short prompt"
    return Plan(
        api=api,
        kind=Kind.DECODE_ONLY if reason else Kind.PUSH,
        members=members,
        stream=_is(members, "stream", b"true"),
        several=_several(members),
        dropped=dropped,
        reason=reason,
        headers=tuple(pair for pair in headers if pair[0] in FORWARDED_HEADERS),
        session=next((value for name, value in headers if name == session_header), None),
    )


FORWARDED_HEADERS = frozenset({b"authorization", b"traceparent", b"tracestate", b"user-agent"})
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


def _members(body: bytes) -> Members:
    try:
        # msgspec leaves members it does not decode unchecked for UTF-8, and an engine that decodes them
        # answers with a 500.
        body.decode("utf-8")
        return msgspec.json.decode(body, type=Members)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 (byte {error.start})", code="invalid_utf8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="too_deep") from None
    except msgspec.ValidationError:
        raise bad_request("the body must be a JSON object", code="not_an_object") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _clean_xargs(members: Members) -> tuple[str, ...]:
    raw = members.get(_XARGS)
    if raw is None or _kind(raw) != "o":
        return ()
    try:
        xargs = msgspec.json.decode(raw, type=Members)
    except msgspec.DecodeError:
        raise bad_request("the body is not valid JSON", param=_XARGS, code="invalid_json") from None
    dropped = tuple(f"{_XARGS}.{name}" for name in _STEERING if xargs.pop(name, None) is not None)
    if dropped:
        members[_XARGS] = msgspec.Raw(msgspec.json.encode(xargs))
    return dropped


def _kind(raw: msgspec.Raw) -> str:
    """The JSON kind of a value, told by its first byte: s, o, a, b, n, or # for numbers."""
    first = bytes(memoryview(raw)[:1])
    return {b'"': "s", b"{": "o", b"[": "a", b"t": "b", b"f": "b", b"n": "n"}.get(first, "#")


def _check_shape(members: Members, name: str, kinds: str) -> None:
    raw = members.get(name)
    if raw is None or (kind := _kind(raw)) in kinds:
        return
    wanted = " or ".join(_KIND_NAMES[k] for k in kinds)
    raise bad_request(f"`{name}` must be {wanted}, not {_KIND_NAMES[kind]}", param=name, code="wrong_type")


def _given(members: Members, name: str) -> bool:
    raw = members.get(name)
    return raw is not None and _kind(raw) != "n"


def _is(members: Members, name: str, literal: bytes) -> bool:
    raw = members.get(name)
    return raw is not None and bytes(raw) == literal


def _asked(members: Members, name: str) -> bool:
    """Whether a member is there and neither null nor false."""
    return _given(members, name) and not _is(members, name, b"false")


def _several(members: Members) -> bool:
    if _given(members, "n") and not _is(members, "n", b"1"):
        return True
    if _given(members, "prompt_embeds"):
        return True  # one or a list of them, and each beside what `prompt` says
    prompt = members.get("prompt")
    if prompt is None or _kind(prompt) != "a":
        return False
    # A list of numbers is one prompt, a list of strings or lists is several (or one: no harm in waiting).
    inner = bytes(memoryview(prompt)[1:64]).lstrip()[:1]
    return inner in (b'"', b"[", b"{", b"")


def _decode_only_reason(members: Members) -> str:
    """Which member makes the decode engine ignore transferred KV and compute the prompt itself."""
    if _given(members, "prompt_logprobs"):
        return "prompt_logprobs"
    if _asked(members, "echo") and _asked(members, "logprobs"):
        return "echo with logprobs"
    if _asked(members, "use_beam_search"):
        return "use_beam_search"
    return ""


def _estimated_tokens(prompt: msgspec.Raw | None) -> int:
    """About how many tokens a prompt has: four bytes of text are one (English, common tokenizers); token ids are
    counted by their commas. JSON around chat messages counts as text: short chats are overestimated a little."""
    if prompt is None:
        return 0
    data = memoryview(prompt)
    first = bytes(data[1:64]).lstrip()[:1]
    if _kind(prompt) == "a" and first.isdigit():
        return bytes(data).count(b",") + 1
    return len(data) // 4


def _encode(members: Members, kv_transfer_params: dict[str, object]) -> bytes:
    members["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(kv_transfer_params))
    return msgspec.json.encode(members)


class Told(msgspec.Struct, frozen=True):
    """What a prefill engine's 200 says of itself, in its `kv_transfer_params`."""

    remote_engine_id: str
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    transfer_mode: str = "pull"
    """push or pull; engines that say nothing are older than push."""


def told_in(answer: bytes) -> Told | None:
    """None if it did not take part in a transfer (no `kv_transfer_params`): it is no NIXL prefill engine."""
    params = transfer_params_in(answer)
    try:
        told = None if params is None else msgspec.json.decode(params, type=Told)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return told if told is not None and told.remote_engine_id else None


def transfer_params_in(answer: bytes) -> msgspec.Raw | None:
    """A prefill engine's `kv_transfer_params` as it wrote them: what a pulling decode engine is handed."""
    try:
        params = msgspec.json.decode(answer, type=Members).get("kv_transfer_params")
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return None if params is None or _kind(params) != "o" else params


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    """What some APIs call them."""


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


def prompt_tokens_in(answer: bytes) -> int | None:
    """How many tokens the prompt had, as the engine says in its answer."""
    try:
        usage = msgspec.json.decode(answer, type=_Counted).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if usage is None else usage.prompt_tokens or usage.input_tokens


def without_kv_transfer_params(answer: bytes) -> bytes:
    """A non-stream answer as the client may see it. Byte for byte the same if there was nothing to hide."""
    if b'"kv_transfer_params"' not in answer:
        return answer
    try:
        members = msgspec.json.decode(answer, type=Members)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return answer
    if members.pop("kv_transfer_params", None) is None:
        return answer
    return msgspec.json.encode(members)
