"""A JSON object read at its top level only: what is not looked at stays as it was written."""

from __future__ import annotations

import msgspec

from trio_pdproxy.core.errors import ProxyError, bad_request

Members = dict[str, msgspec.Raw]

DEPTH_LIMIT = 128
"""Arrays and objects inside each other. Far above any schema people write; engines hand such text to parsers that
recurse in C++ (tool and output schemas), where too much of it is a crash and no error."""
PARTS_LIMIT = 1_000_000
"""Arrays and objects in one body, and half of its strings: what bounds the time that measuring its depth takes."""

_KIND_NAMES = {
    "s": "a string",
    "o": "an object",
    "a": "an array",
    "b": "true or false",
    "#": "a number",
    "n": "null",
}
_KINDS = {b'"': "s", b"{": "o", b"[": "a", b"t": "b", b"f": "b", b"n": "n"}
_BRACKETS = b"[]{}"
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_AS_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def read_members(body: bytes) -> Members:
    """The top level of a request body. Raises `ProxyError` (400)."""
    try:
        # msgspec leaves members it does not decode unchecked for UTF-8, and an engine that decodes them
        # answers with a 500.
        body.decode("utf-8")
        members = msgspec.json.decode(body, type=Members)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 (byte {error.start})", code="invalid_utf8") from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError:
        raise bad_request("the body must be a JSON object", code="not_an_object") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    check_depth(body)
    return members


def check_depth(body: bytes) -> None:
    """Raises `ProxyError` (400) where `body` (valid JSON) is nested beyond `DEPTH_LIMIT`. Linear, and in C: a body
    made to be slow here has to be large first."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH_LIMIT:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # of escapes these alone matter to where strings end
    if plain.count(b'"') > 4 * PARTS_LIMIT:
        raise _too_complex()
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(_AS_ONE_KIND, _ALL_BUT_BRACKETS)
    if len(brackets) > 2 * PARTS_LIMIT:
        raise _too_complex()
    for _ in range(DEPTH_LIMIT):  # each round takes the innermost away
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return
    raise _too_deep()


def _too_complex() -> ProxyError:
    return bad_request(
        f"the body has more than {PARTS_LIMIT} arrays and objects, or too many strings", code="too_complex"
    )


def _too_deep() -> ProxyError:
    return bad_request(f"the body is nested too deeply (more than {DEPTH_LIMIT} levels)", code="too_deep")


def kind_of(raw: msgspec.Raw) -> str:
    """The JSON kind of a value, told by its first byte: s, o, a, b, n, or # for numbers."""
    return _KINDS.get(bytes(memoryview(raw)[:1]), "#")


def wrong_kind(name: str, kind: str, kinds: str) -> ProxyError:
    """What is said of a member whose `kind` is none of `kinds`."""
    wanted = " or ".join(_KIND_NAMES[k] for k in kinds)
    return bad_request(f"`{name}` must be {wanted}, not {_KIND_NAMES[kind]}", param=name, code="wrong_type")


def is_given(members: Members, name: str) -> bool:
    """Whether a member is there and not null."""
    raw = members.get(name)
    return raw is not None and kind_of(raw) != "n"


def is_literal(members: Members, name: str, literal: bytes) -> bool:
    raw = members.get(name)
    return raw is not None and bytes(raw) == literal


def is_asked(members: Members, name: str) -> bool:
    """Whether a member is there and neither null nor false."""
    return is_given(members, name) and not is_literal(members, name, b"false")


def object_in(members: Members, name: str) -> Members | None:
    """A member that is an object, at its top level; None where it is none."""
    raw = members.get(name)
    if raw is None or kind_of(raw) != "o":
        return None
    try:
        return msgspec.json.decode(raw, type=Members)
    except (msgspec.DecodeError, RecursionError):
        return None


def int_in(members: Members | None, name: str) -> int | None:
    """A member that is a number without a fraction; None where it is none."""
    raw = None if members is None else members.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=int)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None


def raw_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
