"""The proxy in front of real vLLM engines: the right text, by transfer, and nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.testing import requested, until

from .hand import MODEL
from .harness import CHAT, COMPLETIONS, ask, ask_single, body_of, over, proxy, quiet
from .metrics import EngineMetrics, read_metrics, wait_for

if TYPE_CHECKING:
    from .conftest import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]

REQUESTS = 30


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_thirty_prompts_at_once_get_the_text_of_one_engine_by_transfer(
    vllm_pair: VllmPair, path: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    await quiet(vllm_pair)
    before_p, before_d = await read_metrics(vllm_pair.prefill.url), await read_metrics(vllm_pair.decode.url)
    kind = f"{'stream' if stream else 'whole'} {path}"
    prompts = [f"{number} {kind}: the quick brown fox jumps over the lazy dog" for number in range(REQUESTS)]
    texts: dict[str, str] = {}
    async with proxy(vllm_pair) as (app, client):

        async def one(prompt: str) -> None:
            texts[prompt] = await ask(client, path, prompt, stream=stream)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(one, prompt)
        await over(app)
        gaps = sorted(r.dispatches[0].gap or 0.0 for r in app.recent)
    after_d = await wait_for(vllm_pair.decode.url, lambda now: now.idle, seconds=5)
    # A reference run on decode would put the prompt into its prefix cache; prefill computes them alone.
    async with open_client(vllm_pair.prefill.url, timeout=60) as single:
        references = {prompt: await ask_single(single, path, prompt) for prompt in prompts}
    assert len(set(references.values())) == REQUESTS, "a mix-up would not show"
    assert texts == references

    def transferred(now: EngineMetrics) -> bool:
        return now.transfers >= before_p.transfers + REQUESTS

    after_p = await wait_for(vllm_pair.prefill.url, transferred, seconds=10)
    assert after_p.transfers - before_p.transfers == REQUESTS
    computed = after_d.computed_tokens - before_d.computed_tokens
    external = after_d.external_tokens - before_d.external_tokens
    assert external > 0
    assert computed == 0, "decode computed a prompt itself"
    assert (await quiet(vllm_pair))[0].failed_transfers == 0
    with capsys.disabled():
        print(
            f"\n{kind}: {REQUESTS} of {REQUESTS} equal to one engine alone; transfers +{REQUESTS}; prompt tokens by "
            f"transfer +{external:g}, computed by decode +{computed:g}; kv use back to 0 on both; "
            f"decode-start gap median {1000 * gaps[len(gaps) // 2]:.3f} ms, largest {1000 * gaps[-1]:.3f} ms"
        )


async def test_clients_that_leave_before_the_first_byte_leave_no_block_behind(vllm_pair: VllmPair) -> None:
    await quiet(vllm_pair)
    async with proxy(vllm_pair) as (app, client):
        for number in range(5):
            with trio.move_on_after(0.12 + 0.01 * number):
                await client.post(COMPLETIONS, json=body_of(COMPLETIONS, f"{number} " + "leave early " * 200))
        await over(app)
        assert sum(report.outcome == "disconnect" for report in app.recent) >= 3
        assert app.pool.decode[0].stranded == 0
    await quiet(vllm_pair)


async def test_a_client_that_leaves_in_mid_stream_frees_both_engines(vllm_pair: VllmPair) -> None:
    await quiet(vllm_pair)
    async with proxy(vllm_pair) as (app, client):
        body = body_of(COMPLETIONS, "go on for long", stream=True, max_tokens=2000, ignore_eos=True)
        async with requested(str(client.base_url), COMPLETIONS, body) as connection:
            assert (await connection.receive_head()).status == 200
            assert await connection.receive_body()
        await over(app)
        assert app.recent[-1].outcome == "disconnect"
    await quiet(vllm_pair)


async def test_an_engines_refusal_comes_back_as_it_is(vllm_pair: VllmPair) -> None:
    async with (
        proxy(vllm_pair) as (app, client),
        open_client(vllm_pair.prefill.url, timeout=60) as single,
    ):
        for body in (
            {"model": "nope", "prompt": "x"},
            {"model": MODEL, "prompt": "x" * 5000},
            {"model": MODEL, "prompt": "x", "temperature": -1},
            {"model": MODEL, "prompt": "x", "max_tokens": 0},
        ):
            ours = await client.post(COMPLETIONS, json=body)
            alone = await single.post(COMPLETIONS, json=body)
            assert ours.status_code == alone.status_code
            assert ours.json() == alone.json()
        assert app.pool.decode[0].stranded == 0
    await quiet(vllm_pair)


async def test_no_client_can_steer_the_connector(vllm_pair: VllmPair) -> None:
    """Each of these ends a decode engine that is asked directly, or sends it somewhere."""
    async with proxy(vllm_pair) as (_, client):
        for more in (
            {"kv_transfer_params": {"do_remote_prefill": True}},
            {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1}},
            {"vllm_xargs": {"kv_transfer_params": 0}},
            {"vllm_xargs": {"kv_transfer_params": 0}, "prompt_logprobs": 1},
            {"vllm_xargs": {"ec_transfer_params": 0}, "prompt_logprobs": 1},
        ):
            response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, "steer", **more))
            assert response.status_code == 200, response.text
    await quiet(vllm_pair)


async def test_what_decode_would_compute_itself_is_asked_of_it_alone(vllm_pair: VllmPair) -> None:
    before = await read_metrics(vllm_pair.prefill.url)
    async with proxy(vllm_pair) as (app, client):
        for more in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"use_beam_search": True, "n": 2}):
            response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, "alone", **more))
            assert response.status_code == 200, response.text
            await over(app)
            assert app.recent[-1].kind == "decode_only"
    after = await read_metrics(vllm_pair.prefill.url)
    assert after.transfers == before.transfers
    await quiet(vllm_pair)


async def test_several_choices_and_prompts_come_by_transfer(vllm_pair: VllmPair) -> None:
    await quiet(vllm_pair)
    before = await read_metrics(vllm_pair.prefill.url)
    async with proxy(vllm_pair) as (_, client):
        prompts = ["first of several prompts", "the second one is a little longer"]
        response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, prompts))
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 2
        body = body_of(COMPLETIONS, "two choices", n=2, temperature=1, seed=7)
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 2
    after, _ = await quiet(vllm_pair)
    assert after.transfers - before.transfers == 4


@pytest.mark.kills
async def test_a_restarted_prefill_engine_is_learned_again(vllm_pair: VllmPair) -> None:
    async with proxy(vllm_pair, health_interval=1, health_timeout=1) as (app, client):
        old = app.pool.prefill[0].coordinates
        await trio.to_thread.run_sync(vllm_pair.restart, vllm_pair.prefill)
        await until(lambda: not (app.missing() or app.pool.prefill[0].coordinates == old), 60)
        with trio.fail_after(60):
            text = await ask(client, COMPLETIONS, "after the restart", stream=False)
        async with open_client(vllm_pair.prefill.url, timeout=60) as single:
            assert text == await ask_single(single, COMPLETIONS, "after the restart")
        assert app.pool.decode[0].stranded == 0
    await quiet(vllm_pair)
