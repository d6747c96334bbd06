"""What the APIs differ in, as a table.

Where the rules come from (measured on vLLM 0.32): a prefill leg generates one token and answers at once, so `stream`,
`stream_options` and `min_tokens` have to go (the engine answers 400 to the last two), and every field that could ask
for more than one token is overwritten (in chat `max_completion_tokens` beats `max_tokens`). `n` and all that shapes the
prompt stay: they name the transfers and size the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from trio_pdproxy.core.errors import Dialect

FALSE = msgspec.Raw(b"false")
ONE = msgspec.Raw(b"1")


class Usage(Enum):
    """Where an API tells how many of the prompt's tokens came out of a cache."""

    PROMPT = "prompt_tokens_details"
    """`usage.prompt_tokens_details.cached_tokens`."""
    INPUT = "input_tokens_details"
    """`usage.input_tokens_details.cached_tokens`."""
    CACHE_READ = "cache_read_input_tokens"
    """`usage.cache_read_input_tokens`, which `usage.input_tokens` does not include."""


@dataclass(frozen=True, slots=True)
class Api:
    """What the plan must know of one API."""

    path: str
    engine_id: str = ""
    """How engines make their own id of the one they are given."""
    prefill_sets: tuple[tuple[str, msgspec.Raw], ...] = ()
    prefill_drops: tuple[str, ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()
    """Members whose JSON kind is checked: name, kinds allowed (see `members.kind_of`)."""
    needs: tuple[str, ...] = ()
    """At least one of these must be there and not null."""
    dialect: Dialect = Dialect.OPENAI
    """The shape of its errors."""
    body_id: str = ""
    """The value of the body's `request_id` where engines take the id from there and nowhere else; the client sees it
    as the answer's id."""
    early: tuple[bytes, ...] = ()
    """Types of the events that a stream begins with before there is any KV: they prove nothing."""
    opening: bytes = b""
    """What is in the first event of a stream that comes together with the next one, which may be an error."""
    mark: bytes = b"\x00"
    """What is in each event that may hold something to put right for the client, and in no other. Generated text
    cannot hold it: a quote in it is escaped."""
    usage: Usage = Usage.PROMPT
    end: bytes = b"data: [DONE]"
    """What is in a stream's last event: a client that has it has had its answer, and may be gone."""

    @property
    def alone(self) -> bool:
        """One engine answers, nothing is transferred."""
        return not self.prefill_sets


# Answer-only members a prefill leg can do without: they cost the prefill engine work nobody reads.
_ANSWER_ONLY = ("logprobs", "top_logprobs", "echo")
_EVERYWHERE = (("model", "sn"), ("stream", "bn"), ("stream_options", "on"), ("vllm_xargs", "on"))
_SHAPES = (*_EVERYWHERE, ("max_tokens", "#n"), ("min_tokens", "#n"), ("n", "#n"))
_LAST_CHUNK = b'"choices":[]'

PAIRED = (
    Api(
        path="/v1/completions",
        engine_id="cmpl-{}",
        prefill_sets=(("stream", FALSE), ("max_tokens", ONE)),
        prefill_drops=("stream_options", "min_tokens", *_ANSWER_ONLY),
        shapes=(*_SHAPES, ("prompt", "san")),
        needs=("prompt", "prompt_embeds"),
        mark=_LAST_CHUNK,
    ),
    Api(
        path="/v1/chat/completions",
        engine_id="chatcmpl-{}",
        prefill_sets=(("stream", FALSE), ("max_tokens", ONE)),
        prefill_drops=("stream_options", "min_tokens", "max_completion_tokens", *_ANSWER_ONLY),
        shapes=(*_SHAPES, ("max_completion_tokens", "#n"), ("messages", "a")),
        needs=("messages",),
        opening=b'"delta":{"role":',
        mark=_LAST_CHUNK,
    ),
    Api(
        path="/v1/responses",
        engine_id="resp_{}_0",
        prefill_sets=(("stream", FALSE), ("max_output_tokens", ONE), ("store", FALSE)),
        prefill_drops=("stream_options", "top_logprobs", "include", "enable_response_messages"),
        shapes=(
            *_EVERYWHERE,
            ("input", "sa"),
            ("max_output_tokens", "#n"),
            ("background", "bn"),
            ("previous_response_id", "sn"),
            ("tools", "an"),
        ),
        needs=("input",),
        dialect=Dialect.RESPONSES,
        body_id="resp_{}",
        early=(b"response.created", b"response.queued", b"response.in_progress"),
        mark=b'"kv_transfer_params"',
        usage=Usage.INPUT,
        end=b'"type":"response.completed"',
    ),
    Api(
        path="/v1/messages",
        engine_id="chatcmpl-{}",
        prefill_sets=(("stream", FALSE), ("max_tokens", ONE)),
        prefill_drops=("stream_options",),
        shapes=(*_EVERYWHERE, ("max_tokens", "#n"), ("messages", "a"), ("system", "san"), ("tools", "an")),
        needs=("messages",),
        dialect=Dialect.ANTHROPIC,
        opening=b'"type":"message_start"',
        mark=b'"message_delta"',
        usage=Usage.CACHE_READ,
        end=b'"type":"message_stop"',
    ),
)
"""Served by a prefill and a decode engine."""

ALONE = (
    Api(path="/v1/messages/count_tokens", dialect=Dialect.ANTHROPIC),
    *(
        Api(path=path)
        for path in (
            "/tokenize",
            "/detokenize",
            "/v1/embeddings",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        )
    ),
)
"""Answered by one engine, with whatever it answers (404 where its model cannot do it)."""

APIS = {api.path: api for api in (*PAIRED, *ALONE)}
