"""Official clients against real engines through the proxy: each answer is the one that an engine alone gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from .hand import MODEL
from .harness import over, proxy, quiet

if TYPE_CHECKING:
    from .conftest import VllmPair

# These libraries bring warnings of their own.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000), pytest.mark.filterwarnings("default")]

TOKENS = 12
KEY = "no-engine-asks-for-one"
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network


def said(what: str) -> list[Any]:
    return [{"role": "user", "content": f"the quick brown fox, {what}, and the lazy dog"}]


def openai_sync(url: str) -> list[str]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        chat = {"model": MODEL, "messages": said("openai"), "max_tokens": TOKENS, "temperature": 0}
        found = [client.chat.completions.create(**chat).choices[0].message.content]
        with client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        found.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        assert chunks[-1].usage.completion_tokens == TOKENS
        text = {"model": MODEL, "prompt": "openai text, once upon a time", "max_tokens": TOKENS, "temperature": 0}
        found.append(client.completions.create(**text).choices[0].text)
        found.append("".join(c.choices[0].text for c in client.completions.create(**text, stream=True)))
        asked = {"model": MODEL, "input": said("responses"), "max_output_tokens": TOKENS, "temperature": 0}
        found.append(client.responses.create(**asked).output_text)
        with client.responses.stream(**asked) as stream:
            found.append("".join(e.delta for e in stream if e.type == "response.output_text.delta"))
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**chat | {"model": "nope"})
        found.append(caught.value.message)
        found.append(client.models.list().data[0].id)
    return found


async def openai_async(url: str) -> list[str]:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        chat = {"model": MODEL, "messages": said("openai on trio"), "max_tokens": TOKENS, "temperature": 0}
        whole = await client.chat.completions.create(**chat)
        pieces = []
        async with await client.chat.completions.create(**chat, stream=True) as stream:
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")  # noqa: PERF401
        asked = {"model": MODEL, "input": "responses on trio", "max_output_tokens": TOKENS, "temperature": 0}
        response = await client.responses.create(**asked)
        return [whole.choices[0].message.content, "".join(pieces), response.output_text]


def anthropic_sync(url: str) -> list[str]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": said("anthropic"), "max_tokens": TOKENS}
        greedy = {"extra_body": {"temperature": 0}}  # newer versions have no argument for it
        found = [client.messages.create(**asked, **greedy, system="be kind").content[0].text]
        with client.messages.stream(**asked, **greedy) as stream:
            found.append("".join(stream.text_stream))
            final = stream.get_final_message()
        assert final.usage.output_tokens == TOKENS
        found.append(str(client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens))
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**asked | {"model": "nope"})
        found.append(str(caught.value.body))
    return found


def langchain(url: str) -> list[str]:
    module = pytest.importorskip("langchain_openai")
    question = said("langchain")[0]["content"]
    with httpx.Client() as http:  # its own are never closed
        asked: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": KEY,
            "model": MODEL,
            "temperature": 0,
            "max_tokens": TOKENS,
            "max_retries": 0,
            "http_client": http,
        }
        chat, text = module.ChatOpenAI(**asked), module.OpenAI(**asked)
        return [
            chat.invoke(question).content,
            "".join(str(piece.content) for piece in chat.stream(question)),
            text.invoke("langchain text, once upon a time"),
        ]


def litellm(url: str) -> list[str]:
    module = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": KEY,
        "messages": said("litellm"),
        "max_tokens": TOKENS,
        "temperature": 0,
        "num_retries": 0,
    }
    found = [module.completion(**asked).choices[0].message.content]
    chunks = module.completion(**asked, stream=True)
    found.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    return found


CLIENTS: tuple[Callable[[str], Any], ...] = (openai_sync, openai_async, anthropic_sync, langchain, litellm)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_an_official_client_gets_the_answers_of_one_engine(
    vllm_pair: VllmPair, client: Callable[[str], Any]
) -> None:
    async def ask(url: str) -> list[str]:
        if client is openai_async:
            answers: list[str] = await client(url)
            return answers
        return await trio.to_thread.run_sync(client, url)

    async with proxy(vllm_pair) as (app, through):
        with trio.fail_after(300):
            ours = await ask(str(through.base_url).rstrip("/"))
        await over(app)
        assert all(report.outcome in ("ok", "client_error") for report in app.recent), list(app.recent)
        assert any(report.kind == "push" for report in app.recent)
        assert app.pool.decode[0].stranded == 0
        # Afterwards, and at prefill: decode would find the prompt in its prefix cache.
        with trio.fail_after(300):
            alone = await ask(vllm_pair.prefill.url)
    assert ours == alone
    assert all(ours)
    await quiet(vllm_pair)
