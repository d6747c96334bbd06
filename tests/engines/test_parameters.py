"""What clients may ask for, on real engines: the same text, or the same error, as one engine alone gives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import trio

from trio_pdproxy.core import sse
from trio_pdproxy.engines.transport import open_client

from .hand import MODEL
from .harness import CHAT, COMPLETIONS, over, proxy, quiet

if TYPE_CHECKING:
    from .conftest import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
AT_ONCE = 4
PATIENCE = 45.0
"""Seconds for one answer, on machines that are short of CPU."""
PROMPT = "the quick brown fox jumps over the lazy dog, and then again over "
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
SAMPLED = {"temperature": 1, "seed": 7}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]

CASES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {},
        {"prompt": [75, 72, 79, 79, 82] * 9},
        {"prompt": "short"},
        {"prompt": [PROMPT + "a", "a shorter one"]},
        {"prompt": [PROMPT + "b", "a shorter second one", "x"]},
        {"prompt": [[75, 72, 79] * 9, [80, 81] * 20]},
        {"n": 2, **SAMPLED},
        {"n": 2},
        {"best_of": 2},
        {"use_beam_search": True, "n": 2},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"echo": True},
        {"logprobs": 2},
        {"stop": ["a", "e", "\n"]},
        {"stop_token_ids": [75], "ignore_eos": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[a-c]{4}"}},
        {"truncate_prompt_tokens": 40},
        {"priority": 1},
        {"cache_salt": "salt"},
        {"return_token_ids": True},
        {"logit_bias": {"75": 100}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1, **SAMPLED},
        {"min_tokens": 5},
        {"min_tokens": 50},
        {"stream_options": {"include_usage": True}},
        {"stream_options": None},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_completion_tokens": 3},
        {"suffix": "x"},
        {"something_new": {"a": [1]}},
        {"allowed_token_ids": [75, 76]},
        {"bad_words": ["a"]},
        {"prompt": "x" * 4080},
        {"prompt": "x" * 4096},
        {"prompt": "x" * 5000},
        {"prompt": ""},
        {"prompt": []},
        {"model": "nope"},
        {"temperature": -1},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "n": 2, **SAMPLED},
        {"stream": True, "prompt": [PROMPT + "c", "another"]},
        {"stream": True, "temperature": -1},
    ],
    CHAT: [
        {},
        {"messages": TURNS},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]},
        {
            "messages": [*TURNS, {"role": "assistant", "content": "go"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": []},
        {"max_tokens": 3, "max_completion_tokens": 8},
        {"max_completion_tokens": 5},
        {"logprobs": True, "top_logprobs": 2},
        {"top_logprobs": 2},
        {"n": 2, **SAMPLED},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "max_tokens": 40},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"reasoning_effort": "low"},
        {"parallel_tool_calls": False},
        {"chat_template_kwargs": {"a": 1}},
        {"min_tokens": 5},
        {"echo": True},
        {"thinking_token_budget": 5},
        {"stop": "e"},
        {"seed": 3, "temperature": 1},
        {"max_tokens": 0},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "messages": TURNS},
    ],
    RESPONSES: [
        {},
        {"instructions": "be kind"},
        {"input": TURNS},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "in parts"}]}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "max_output_tokens": 40},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"previous_response_id": "resp_0"},
        {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "none"},
        {"truncation": "auto"},
        {"store": True},
        {"metadata": {"a": "b"}, "user": "me"},
        {"max_output_tokens": 0},
        {"max_tokens": 3},
        {"temperature": -1},
        {"input": "x" * 5000},
        {"input": 7 * [{"role": "user", "content": "again"}]},
        {"model": "nope"},
        {"stream": True},
        {"stream": True, "input": TURNS},
        {"stream": True, "temperature": -1},
    ],
    MESSAGES: [
        {},
        {"system": "be kind"},
        {"system": [{"type": "text", "text": "be kind"}]},
        {"messages": TURNS[1:]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
        {"stop_sequences": ["e", "a"]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100},
        {"thinking": {"type": "disabled"}},
        {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "none"}},
        {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        {"top_k": 3, "top_p": 0.9},
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"model": "nope"},
        {"temperature": -1},
        {"stream": True},
        {"stream": True, "messages": TURNS[1:]},
    ],
}
NAMES = [(path, number) for path, cases in CASES.items() for number in range(len(cases))]


def body_of(path: str, number: int) -> dict[str, Any]:
    more = CASES[path][number]
    body: dict[str, Any] = {"model": MODEL, "temperature": 0}
    said = f"{PROMPT}{number} {path}"
    if path == RESPONSES:
        return body | {"input": said, "max_output_tokens": 12} | more
    content = {"prompt": said} if path == COMPLETIONS else {"messages": [{"role": "user", "content": said}]}
    return body | content | {"max_tokens": 12} | more


async def said(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and what was said: without ids, times, and what the cache had."""
    try:
        response = await client.post(path, json=body, timeout=PATIENCE)
    except httpx.TimeoutException:
        return 0, f"nothing within {PATIENCE:g} s"
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [event for event in sse.events(response.content) if event != b"[DONE]"]
        return response.status_code, _streamed([msgspec.json.decode(event) for event in events])
    return response.status_code, _plain(response.json())


_OWN = frozenset(
    {
        "id",
        "item_id",
        "created",
        "created_at",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
        "system_fingerprint",
        "prompt_tokens_details",
        "input_tokens_details",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "sequence_number",
    }
)


def _plain(value: Any) -> Any:
    """Without what differs from one request to the next."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if name not in _OWN}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"<dict of \d+ items>", "<dict>", value)  # the legs have members of the proxy's
    return _Near(value) if isinstance(value, float) else value


def _where(got: Any, wanted: Any, at: str = "") -> str:
    """The first place where they differ."""
    if isinstance(got, dict) and isinstance(wanted, dict) and got.keys() == wanted.keys():
        return next((_where(got[name], wanted[name], f"{at}.{name}") for name in got if got[name] != wanted[name]), "")
    if isinstance(got, list | tuple) and isinstance(wanted, list | tuple) and len(got) == len(wanted):
        pairs = enumerate(zip(got, wanted, strict=True))
        return next((_where(a, b, f"{at}[{index}]") for index, (a, b) in pairs if a != b), "")
    return f"{at}: {str(got)[:200]} for {str(wanted)[:200]}"


class _Near(float):
    """A probability's logarithm: what else an engine computes in the same step changes its last digits. (Rounding would
    not do: some value is always next to where it goes the other way.)"""

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        # As far as rounding would let them differ.
        return isinstance(other, float) and abs(float(self) - float(other)) < 0.01

    def __ne__(self, other: object) -> bool:
        return not self == other


def _streamed(events: list[dict[str, Any]]) -> Any:
    """The texts of a stream by choice, and how it ended: how its tokens came together is chance."""
    texts: dict[int, str] = {}
    others: set[str] = set()
    for event in events:
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            others.add(str(choice.get("finish_reason")))
        if event.get("type") in ("response.output_text.delta", "content_block_delta"):
            delta = event["delta"]
            texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta["text"])
        others.add(str(event.get("type")))
        if "usage" in event and "choices" in event and not event["choices"]:
            others.add(str(_plain(event["usage"])))
    return texts, others


async def test_every_parameter_gives_the_text_or_the_error_of_one_engine(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    await quiet(vllm_pair)
    ours: dict[tuple[str, int], tuple[int, Any]] = {}
    alone: dict[tuple[str, int], tuple[int, Any]] = {}
    limit = trio.CapacityLimiter(AT_ONCE)
    async with (
        proxy(vllm_pair) as (app, client),
        open_client(vllm_pair.prefill.url, timeout=120) as single,
    ):

        async def one(path: str, number: int) -> None:
            async with limit:
                body = body_of(path, number)
                ours[path, number] = await said(client, path, body)
                alone[path, number] = await said(single, path, body)

        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for path, number in NAMES:
                    nursery.start_soon(one, path, number)
            # What else an engine computes in the same step changes last digits, and with them a token where two are as
            # likely: those are asked again with nothing else in hand.
            again = [name for name in NAMES if ours[name] != alone[name]]
            for path, number in again:
                print(f"asked again: {path} {CASES[path][number]}: {_where(ours[path, number], alone[path, number])}")
                await one(path, number)
        await over(app)
        stranded = app.pool.decode[0].stranded
        slow = [
            report for report in app.recent if (report.ended or trio.current_time()) - report.accepted > PATIENCE / 2
        ]
    different = {
        f"{path} {CASES[path][number]}": (ours[path, number], alone[path, number])
        for path, number in NAMES
        if ours[path, number] != alone[path, number]
    }
    statuses = [status for status, _ in ours.values()]
    with capsys.disabled():
        print(f"\n{len(NAMES)} requests, {len(NAMES) - len(different)} as one engine alone; statuses ", end="")
        print({status: statuses.count(status) for status in sorted(set(statuses))})
        for name, (got, wanted) in different.items():
            print(f"  {name}: {_where(got, wanted)}\n    proxy: {str(got)[:400]}\n    alone: {str(wanted)[:400]}")
        print(*slow, sep="\n")
    assert not different, "told above"
    assert len(again) <= 3, again
    assert stranded == 0
    assert statuses.count(200) > len(NAMES) // 2
    await quiet(vllm_pair)
