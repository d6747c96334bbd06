"""The relay on simulated engines: what both engines see, and what the client gets."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from trio_pdproxy.core.verdict import Decode, Prefill
from trio_pdproxy.exchange.dispatch import Dispatch
from trio_pdproxy.sim import SeenRequest, SimSettings, expected_chat, expected_text
from trio_pdproxy.testing import Rig, open_rig

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "why is the sky blue"}]


def last(rig: Rig) -> tuple[SeenRequest, SeenRequest]:
    """The last legs that prefill and decode saw; the probes of the proxy have no transfer id."""
    return rig.p.requests[-1], rig.d.requests[-1]


async def test_a_completion_is_the_decode_engines_answer_without_kv_transfer_params() -> None:
    async with open_rig() as rig:
        response = await rig.post(prompt="tell me", max_tokens=6)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.json()["choices"][0]["text"] == expected_text("tell me", 6)
        assert "kv_transfer_params" not in response.text
        assert int(response.headers["content-length"]) == len(response.content)
        await rig.quiet()


async def test_a_chat_is_the_decode_engines_answer() -> None:
    async with open_rig() as rig:
        response = await rig.client.post(CHAT, json={"model": "sim", "messages": MESSAGES, "max_tokens": 6})
        assert response.json()["choices"][0]["message"]["content"] == expected_chat(MESSAGES, 6)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_is_passed_on_byte_for_byte(path: str) -> None:
    async with open_rig() as rig:
        body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "tell me"}
        answer = await rig.stream(path, **body, max_tokens=6, stream_options={"include_usage": True})
        assert answer.status == 200
        assert answer.complete
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.text == (expected_chat(MESSAGES, 6) if path == CHAT else expected_text("tell me", 6))
        assert answer.raw.endswith(b"data: [DONE]\n\n")
        assert b'"usage"' in answer.raw
        await rig.quiet()


async def test_the_kv_came_by_transfer() -> None:
    async with open_rig() as rig:
        before = rig.p.pushes
        await rig.post(prompt="a prompt", max_tokens=1)
        assert rig.p.pushes == before + 1
        assert last(rig)[1].transfer


async def test_both_legs_carry_one_fresh_id_and_never_the_clients() -> None:
    async with open_rig() as rig:
        response = await rig.client.post(
            COMPLETIONS,
            json={"model": "sim", "prompt": "x", "request_id": "mine"},
            headers={"x-request-id": "mine", "x-data-parallel-rank": "1"},
        )
        assert response.headers["x-request-id"] == "mine"
        first = last(rig)
        await rig.post(prompt="x")
        second = last(rig)
        for p, d in (first, second):
            assert p.id == d.id
            assert len(p.id or "") == 32
            assert p.body["kv_transfer_params"]["transfer_id"] == p.id
            assert d.body["kv_transfer_params"]["transfer_id"] == p.id
            assert "request_id" not in p.body
            assert "request_id" not in d.body
            assert "x-data-parallel-rank" not in p.headers
            assert "x-data-parallel-rank" not in d.headers
        assert first[0].id != second[0].id


async def test_a_clients_kv_transfer_params_never_reach_an_engine() -> None:
    async with open_rig() as rig:
        evil = {"do_remote_prefill": True, "remote_host": "evil.example"}
        response = await rig.post(
            prompt="x", kv_transfer_params=evil, vllm_xargs={"kv_transfer_params": "x", "keep": 1}
        )
        assert response.status_code == 200
        p, d = last(rig)
        assert p.body["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": p.id}
        assert d.body["kv_transfer_params"]["remote_host"] == "127.0.0.1"
        for seen in (p, d):
            assert seen.body["vllm_xargs"] == {"keep": 1}
        await rig.quiet()
        assert rig.report.dropped == ("kv_transfer_params", "vllm_xargs.kv_transfer_params")


@pytest.mark.parametrize(
    ("path", "more", "changed", "gone"),
    [
        (COMPLETIONS, {"max_tokens": 9, "min_tokens": 5}, {"max_tokens": 1}, ["min_tokens"]),
        (COMPLETIONS, {}, {"max_tokens": 1}, []),
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 1}, []),
        (COMPLETIONS, {"logprobs": 2}, {"max_tokens": 1}, ["logprobs"]),
        (COMPLETIONS, {"echo": True}, {"max_tokens": 1}, ["echo"]),
        (
            CHAT,
            {"max_tokens": 7, "max_completion_tokens": 8, "min_tokens": 5},
            {"max_tokens": 1},
            ["max_completion_tokens", "min_tokens"],
        ),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, {"max_tokens": 1}, ["logprobs", "top_logprobs"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prefill_leg_asks_for_one_token_and_no_stream(
    path: str, more: dict[str, Any], changed: dict[str, Any], gone: list[str], stream: bool
) -> None:
    async with open_rig() as rig:
        body: dict[str, Any] = {"model": "sim", "seed": 7, "stop": ["zzz"], "stream": stream, **more}
        body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await rig.client.post(path, json=body)
        assert response.status_code == 200, response.text
        p, d = last(rig)
        assert p.body["stream"] is False
        for name in (*gone, "stream_options"):
            assert name not in p.body
        for name, value in changed.items():
            assert p.body[name] == value
        for name in ("seed", "stop", "prompt", "messages", "model"):
            assert p.body.get(name) == body.get(name)
        assert {k: v for k, v in d.body.items() if k != "kv_transfer_params"} == body
        await rig.quiet()


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 2},
    ],
)
async def test_what_a_decode_engine_would_compute_itself_goes_to_it_alone(more: dict[str, Any]) -> None:
    async with open_rig() as rig:
        before = len(rig.p.requests)
        evil = {"kv_transfer_params": "x"}
        response = await rig.post(prompt="hello", vllm_xargs=evil, **more)
        assert response.status_code == 200
        assert len(rig.p.requests) == before
        seen = rig.d.requests[-1]
        assert "kv_transfer_params" not in seen.body
        assert seen.body["vllm_xargs"] == {}
        await rig.quiet()
        assert rig.report.kind == "decode_only"


async def test_several_choices_and_prompts_are_transferred_one_by_one() -> None:
    async with open_rig() as rig:
        before = rig.p.pushes
        response = await rig.post(prompt=["one", "two two"], n=2, temperature=1, seed=1, max_tokens=3)
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert len(texts) == 4
        assert rig.p.pushes == before + 4
        assert rig.p.requests[-1].body["n"] == 2
        await rig.quiet()


async def test_an_engines_refusal_comes_back_verbatim_and_costs_nothing() -> None:
    async with open_rig(sim=SimSettings(max_model_len=64)) as rig:
        for stream in (False, True):
            response = await rig.post(prompt="x" * 100, stream=stream)
            assert response.status_code == 400
            assert response.json() == rig_error(response)
            await rig.quiet()
        response = await rig.client.post(COMPLETIONS, json={"model": "nope", "prompt": "x"})
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "NotFoundError"
        await rig.quiet()
        assert rig.app.pool.decode[0].stranded == 0


def rig_error(response: httpx.Response) -> Any:
    """vLLM's own shape: nothing of ours was put around it."""
    body = msgspec.json.decode(response.content)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "BadRequestError"
    return body


async def test_the_clients_authorization_goes_to_both_engines() -> None:
    async with open_rig(sim=SimSettings(api_key="sesame"), api_key="sesame") as rig:
        response = await rig.client.post(
            COMPLETIONS,
            json={"model": "sim", "prompt": "x"},
            headers={"authorization": "Bearer sesame", "cookie": "a=b", "traceparent": "00-ab-cd-01"},
        )
        assert response.status_code == 200
        for seen in last(rig):
            assert seen.headers["authorization"] == "Bearer sesame"
            assert seen.headers["traceparent"] == "00-ab-cd-01"
            assert "cookie" not in seen.headers
        # Who brings no key does not get in with the proxy's own.
        assert (await rig.post()).status_code == 401


async def test_each_prefill_engine_has_its_own_coordinates() -> None:
    async with open_rig(prefill=3, decode=2) as rig:
        for number in range(12):
            response = await rig.post(prompt=f"prompt {number}", max_tokens=4)
            assert response.json()["choices"][0]["text"] == expected_text(f"prompt {number}", 4)
        for sim in rig.cluster.prefill:
            assert sim.pushes == 4
        for sim in rig.cluster.decode:
            assert len(sim.requests) == 6
        await rig.quiet()


async def test_prefill_is_on_the_wire_before_decode() -> None:
    async with open_rig() as rig:
        for _ in range(20):
            await rig.post()
        await rig.quiet()
        gaps = [r.dispatches[0].gap for r in rig.app.recent]
        assert all(gap is not None and gap >= 0 for gap in gaps)


async def test_a_large_request_reaches_both_engines_whole() -> None:
    async with open_rig(sim=SimSettings(max_model_len=8_000_000, num_blocks=1_000_000)) as rig:
        prompt = "0123456789" * 300_000
        response = await rig.post(prompt=prompt, max_tokens=2)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == expected_text(prompt, 2)
        await rig.quiet()


async def test_kept_alive_connections_are_used_again() -> None:
    async with open_rig() as rig:
        for _ in range(10):
            await rig.post()
        await rig.quiet()
        for engine in rig.app.pool.engines:
            assert engine.connections.open == 1
        assert rig.report.dispatches[0].decode.reused


async def test_prefills_answer_gives_way_to_what_decode_has_begun_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way = 0
    give_way = Dispatch._give_way

    async def watched(dispatch: Dispatch) -> None:
        nonlocal gave_way
        leg = dispatch.decode_leg
        assert leg is not None
        speaks = dispatch.outcomes[1] is Decode.WAITING and leg.connection.stale()
        await give_way(dispatch)
        if speaks:
            gave_way += 1
            assert dispatch.outcomes == (Prefill.PENDING, Decode.SPEAKING)

    monkeypatch.setattr(Dispatch, "_give_way", watched)
    async with open_rig(sim=SimSettings(prefill_base=0, prefill_per_token=0)) as rig:
        for _ in range(100):
            assert (await rig.stream(max_tokens=3)).complete
            await rig.quiet()
    assert gave_way
