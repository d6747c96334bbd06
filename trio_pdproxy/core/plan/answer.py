"""What engines answer: what the proxy learns of it, and what of it a client may see.

How much of a prompt came out of a cache is the prefill engine's to say. A decode engine counts all that was transferred
to it as cached (vLLM 0.32: 192 of 192 tokens, where prefill had found 160), so its number is replaced by prefill's
wherever prefill told one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trio_pdproxy.core.plan.apis import Api, Usage
from trio_pdproxy.core.plan.members import Members, int_in, is_given, kind_of, object_in

_INTERNAL = ("kv_transfer_params", "ec_transfer_params")
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)


class Told(msgspec.Struct, frozen=True):
    """What a prefill engine's 200 says of itself, in its `kv_transfer_params`."""

    remote_engine_id: str
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    transfer_mode: str = "pull"
    """push or pull; engines that say nothing are older than push."""


@dataclass(frozen=True, slots=True)
class PrefillSaid:
    """What a prefill engine's 200 says of the prompt."""

    cache: Members
    """Members of `usage` for the client; empty where it did not tell."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


NOTHING_SAID = PrefillSaid({})


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
    params = (_read(answer) or {}).get("kv_transfer_params")
    return None if params is None or kind_of(params) != "o" else params


def read_prefill_answer(api: Api, answer: bytes) -> PrefillSaid:
    """What it tells of the prompt, as far as it does. Never raises."""
    usage = object_in(_read(answer) or {}, "usage")
    if usage is None:
        return NOTHING_SAID
    if api.usage is Usage.CACHE_READ:
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        parts = [int_in(usage, name) for name in names]
        told = is_given(usage, "cache_read_input_tokens")
        return PrefillSaid(
            cache={name: usage[name] for name in names if name in usage} if told else {},
            prompt_tokens=sum(part or 0 for part in parts),
            cached_tokens=parts[2],
        )
    details = api.usage.value
    cached = int_in(object_in(usage, details), "cached_tokens")
    return PrefillSaid(
        cache={} if cached is None else {details: usage[details]},
        prompt_tokens=int_in(usage, "prompt_tokens" if api.usage is Usage.PROMPT else "input_tokens"),
        cached_tokens=cached,
    )


def tokens_in(api: Api, answer: bytes) -> tuple[int | None, int | None]:
    """How many tokens a whole answer (or the event that ends a stream) says the prompt had, and were generated."""
    members = _read(answer) or {}
    usage = object_in(object_in(members, "response") or members, "usage")
    if api.usage is Usage.PROMPT:
        return int_in(usage, "prompt_tokens"), int_in(usage, "completion_tokens")
    return int_in(usage, "input_tokens"), int_in(usage, "output_tokens")


def shown_answer(answer: bytes, cache: Members) -> bytes:
    """A whole answer as the client may see it. Byte for byte the same if there is nothing to hide or to put right."""
    if not cache and not any(b'"%b"' % name.encode() in answer for name in _INTERNAL):
        return answer
    members = _read(answer)
    return answer if members is None or not _put_right(members, cache) else msgspec.json.encode(members)


def shown_block(api: Api, block: bytes, cache: Members) -> bytes:
    """Whole events of a stream (those that hold `api.mark`) as the client may see them; all else in them stays."""
    lines = block.split(b"\n")
    for number, line in enumerate(lines):
        if api.mark in line and line.startswith(b"data:"):
            field, data = line[:5], line[5:]
            lines[number] = field + b" " * data.startswith(b" ") + _shown_event(data.strip(), cache)
    return b"\n".join(lines)


def _shown_event(data: bytes, cache: Members) -> bytes:
    members = _read(data)
    if members is None:
        return data
    response = object_in(members, "response")
    if response is not None:  # an event of /v1/responses: the answer as far as it has come
        if not _put_right(response, cache):
            return data
        members["response"] = msgspec.Raw(msgspec.json.encode(response))
    elif not _put_right(members, cache):
        return data
    return msgspec.json.encode(members)


def _put_right(members: Members, cache: Members) -> bool:
    """Take out what is the engines' own, and let `usage` say what prefill saw. Whether anything was changed."""
    changed = [members.pop(name, None) is not None for name in _INTERNAL]
    usage = object_in(members, "usage")
    if cache and usage is not None:
        members["usage"] = msgspec.Raw(msgspec.json.encode(usage | cache))
        return True
    return any(changed)


def _read(answer: bytes) -> Members | None:
    try:
        return msgspec.json.decode(answer, type=Members)
    except _UNREADABLE:
        return None
