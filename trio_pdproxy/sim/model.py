"""The simulated language model: tokens are bytes, and text is a function of the KV it is read from.

What an engine says is computed from the *key* of the prompt whose KV it holds: on D that is the key P pushed.
So equal prompts give equal text on any engine, whatever the seed, distinct prompts give distinct text from
the first token on, and a mix-up between two requests shows in the answer exactly as it would on real engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

TOKEN_CHARS = 9
"""Each token is a space and eight hex digits: plain ASCII, so that no event needs JSON escaping."""

_PER_DIGEST = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine's cache knows it: how many tokens, and which ones."""

    tokens: int
    key: str
    raw: bytes | None = None
    """Its tokens, where they are bytes."""


def text_prompt(text: str) -> Prompt:
    return _of_bytes(text.encode("utf-8", "surrogatepass"))


def ids_prompt(ids: Sequence[int]) -> Prompt:
    """Token ids below 256 are bytes, so a text and its ids are one prompt; others get a key of their own."""
    if all(0 <= token < 256 for token in ids):
        return _of_bytes(bytes(ids))
    return Prompt(len(ids), _key(b"ids:" + msgspec.json.encode(list(ids))))


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """The chat template: every message's role and content (a list's parts are joined), then the cue."""
    lines = [f"<|{message.get('role')}|>{_content(message.get('content'))}\n" for message in messages]
    return text_prompt("".join(lines) + "<|assistant|>")


def tokens_of(key: str, choice: int, count: int) -> list[str]:
    """The first `count` tokens an engine says after the prompt with this key, for one of its n choices."""
    tokens: list[str] = []
    for number in range(-(-count // _PER_DIGEST)):
        digest = hashlib.sha256(f"{key}:{choice}:{number}".encode()).hexdigest()
        tokens += [" " + digest[start : start + 8] for start in range(0, 64, 8)]
    return tokens[:count]


def expected_text(prompt: str, max_tokens: int, choice: int = 0) -> str:
    """What any simulated engine answers to this completions prompt: for assertions."""
    return "".join(tokens_of(text_prompt(prompt).key, choice, max_tokens))


def expected_chat(messages: Sequence[Mapping[str, Any]], max_tokens: int, choice: int = 0) -> str:
    """What any simulated engine answers to these chat messages: for assertions."""
    return "".join(tokens_of(chat_prompt(messages).key, choice, max_tokens))


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _of_bytes(raw: bytes) -> Prompt:
    return Prompt(len(raw), _key(b"raw:" + raw), raw)


def _key(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
