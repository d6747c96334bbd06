"""The engines do what the proxy is built on, without the proxy: if these fail, look at the engines first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from . import hand
from .metrics import read_metrics, wait_for

if TYPE_CHECKING:
    from .conftest import VllmPair

# A cold start of both engines, or making their environment, is part of the first test.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 5


async def test_both_legs_at_once_give_the_text_of_one_engine_and_leave_nothing(vllm_pair: VllmPair) -> None:
    p, d = vllm_pair.prefill, vllm_pair.decode
    before_p, before_d = await read_metrics(p.url), await read_metrics(d.url)
    coordinates = await hand.learn(p.side_channel)

    with trio.fail_after(60):
        text = await hand.pair(p.url, d.url, coordinates, PROMPT)
    reference = (await hand.complete(p.url, {"prompt": PROMPT, "max_tokens": 8}))["choices"][0]["text"]

    assert text == reference
    after_d = await wait_for(d.url, lambda now: now.idle and now.external_tokens > before_d.external_tokens, seconds=20)
    # Every token but what D's prefix cache may have held came by transfer, none was computed twice.
    assert after_d.external_tokens - before_d.external_tokens == len(PROMPT)
    assert after_d.computed_tokens == before_d.computed_tokens
    after_p = await wait_for(p.url, lambda now: now.idle and now.transfers > before_p.transfers, seconds=20)
    assert after_p.transfers - before_p.transfers == 1
    assert after_p.kv_expired == before_p.kv_expired


async def test_different_prompts_have_different_texts(vllm_pair: VllmPair) -> None:
    """A mix-up of two requests' KV must show: every reference text differs from the others."""
    texts: list[str] = []
    for number in range(16):
        body = {"prompt": f"{number:02d} {PROMPT}", "max_tokens": 8}
        texts.append((await hand.complete(vllm_pair.prefill.url, body))["choices"][0]["text"])
    assert len(set(texts)) == len(texts)


async def test_many_pairs_at_once_get_their_own_texts(vllm_pair: VllmPair) -> None:
    p, d = vllm_pair.prefill, vllm_pair.decode
    coordinates = await hand.learn(p.side_channel)
    prompts = [f"pair {number:02d}: {PROMPT}" for number in range(16)]
    texts: dict[str, str] = {}

    async def one(prompt: str) -> None:
        texts[prompt] = await hand.pair(p.url, d.url, coordinates, prompt)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(one, prompt)
    for prompt in prompts:
        reference = (await hand.complete(p.url, {"prompt": prompt, "max_tokens": 8}))["choices"][0]["text"]
        assert texts[prompt] == reference
    await wait_for(d.url, lambda now: now.idle, seconds=20)


async def test_a_one_token_probe_names_the_same_coordinates_as_the_side_channel(vllm_pair: VllmPair) -> None:
    p = vllm_pair.prefill
    before = await read_metrics(p.url)
    coordinates = await hand.learn(p.side_channel)
    probe = await hand.complete(
        p.url, {"prompt": "x", "max_tokens": 1, "kv_transfer_params": hand.prefill_params("probe")}
    )
    told = probe["kv_transfer_params"]
    assert told["remote_engine_id"] == coordinates.engine_id
    assert (told["remote_host"], told["remote_port"]) == (coordinates.host, coordinates.port)
    assert told["tp_size"] == coordinates.tp_size
    assert told["transfer_mode"] == "push"
    # A probe holds a block until the lease runs out, and that is counted.
    held = await read_metrics(p.url)
    assert held.kv_usage > 0
    after = await wait_for(p.url, lambda now: now.idle, seconds=vllm_pair.lease + 10)
    assert after.kv_expired == before.kv_expired + 1


async def test_both_side_channels_agree_on_compatibility(vllm_pair: VllmPair) -> None:
    p = await trio.to_thread.run_sync(hand.get_meta, vllm_pair.prefill.side_channel)
    d = await trio.to_thread.run_sync(hand.get_meta, vllm_pair.decode.side_channel)
    assert p["compatibility_hash"] == d["compatibility_hash"]
    assert p["engine_id"] != d["engine_id"]


@pytest.mark.kills
async def test_a_killed_prefill_engine_comes_back_with_a_new_id_and_pairs_at_once(vllm_pair: VllmPair) -> None:
    p, d = vllm_pair.prefill, vllm_pair.decode
    before = await hand.learn(p.side_channel)
    await trio.to_thread.run_sync(vllm_pair.restart, p)
    after = await hand.learn(p.side_channel)
    assert after.engine_id != before.engine_id

    with trio.fail_after(60):
        text = await hand.pair(p.url, d.url, after, f"after the restart: {PROMPT}")
    body = {"prompt": f"after the restart: {PROMPT}", "max_tokens": 8}
    assert text == (await hand.complete(p.url, body))["choices"][0]["text"]
    await wait_for(d.url, lambda now: now.idle, seconds=20)
