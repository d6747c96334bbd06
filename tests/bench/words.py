"""What the load generator and the engines of the benchmark say to each other.

How an engine shall answer stands in the prompt, the only part of a request that every proxy passes on unread. The
answer follows from it byte for byte, so that the load generator knows each answer in advance: one that was cut, mixed
up with another's or changed on its way is an error, and never a good figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

MODEL = "bench"
MARK = b"bench"
ENDLESS = 1_000_000
DONE = b"data: [DONE]\n\n"
TRANSFER_KEY = b',"kv_transfer_params":'

_TAG = b"########"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,'
    b'"model":"bench","choices":[{"index":0,"text":" ########","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
)
_WHOLE = (
    b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,"model":"bench",'
    b'"choices":[{"index":0,"text":" ########","logprobs":null,"finish_reason":"length","stop_reason":null,'
    b'"prompt_logprobs":null,"prompt_token_ids":null,"token_ids":null}],"service_tier":null,'
    b'"system_fingerprint":null,"usage":{"prompt_tokens":8,"total_tokens":24,"completion_tokens":16,'
    b'"prompt_tokens_details":null}'
)


@dataclass(frozen=True, slots=True)
class Ask:
    """How one request is to be answered.

    `count` events, one every `every` milliseconds (0: all at once); the first as soon as the KV is there. A `count` of
    0: until the engines are told to finish. The prefill engine takes `prefill` milliseconds. `pad` bytes make the
    prompt longer.
    """

    tag: int
    count: int = 16
    every: int = 0
    prefill: int = 0
    stream: bool = True
    pad: int = 0

    def body(self) -> bytes:
        """The client's request body."""
        prompt = f"{MARK.decode()} {self.tag:08x} {self.count} {self.every} {self.prefill} {'x' * self.pad}"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self.count or ENDLESS, "stream": self.stream}
        return json.dumps(body, separators=(",", ":")).encode()

    def answer(self) -> bytes:
        """The body a client has to get (of a non-stream answer: how it has to begin)."""
        tag = b"%08x" % self.tag
        return _events(self.count).replace(_TAG, tag) + DONE if self.stream else _WHOLE.replace(_TAG, tag)

    def is_right(self, body: bytes) -> bool:
        """Whether this is the answer. Of one without a fixed count, whole events and the end."""
        if not self.stream:
            return body.startswith(self.answer())
        if self.count:
            return body == self.answer()
        events = (len(body) - len(DONE)) // len(_EVENT)
        return events > 0 and body == (_EVENT * events).replace(_TAG, b"%08x" % self.tag) + DONE


def read_prompt(prompt: bytes, *, count: int, stream: bool) -> Ask:
    """The `Ask` in a prompt as it stands in the JSON, quote included. A foreign one (a probe) is answered at once."""
    words = prompt[1:64].split(b" ", 5)
    if len(words) < 6 or words[0] != MARK:
        return Ask(0, count=count, stream=stream)
    return Ask(int(words[1], 16), int(words[2]), int(words[3]), int(words[4]), stream)


def event_chunk(tag: int) -> bytes:
    """One event, framed as the HTTP chunk an engine's server makes of it."""
    return _chunked(_EVENT).replace(_TAG, b"%08x" % tag)


def burst_chunks(tag: int, count: int) -> bytes:
    """`count` events and the end of the stream, each framed as its own chunk."""
    return _burst(count).replace(_TAG, b"%08x" % tag)


def end_chunks() -> bytes:
    return _chunked(DONE) + b"0\r\n\r\n"


@lru_cache(maxsize=64)
def _events(count: int) -> bytes:
    return _EVENT * count


@lru_cache(maxsize=64)
def _burst(count: int) -> bytes:
    return _chunked(_EVENT) * count + end_chunks()


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
