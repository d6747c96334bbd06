"""Whose keys open the door, and what of a client's credentials an engine sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import Rig, open_rig, until
from trio_pdproxy.web.auth import Keys

ENGINES = "engines-own-key"
KEYS = "client-key-one client-key-two"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings")
BODY = {"model": "sim", "prompt": "x", "messages": [], "input": "x", "max_tokens": 1}
LOCKED = SimSettings(api_key=ENGINES)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(rig: Rig, headers: dict[str, str] | list[tuple[str, str]] | None = None, path: str = PATHS[0]) -> int:
    return (await rig.client.post(path, json=BODY, headers=headers)).status_code


async def test_terminate_lets_in_who_has_one_of_the_keys_and_sends_engines_their_own() -> None:
    async with open_rig(sim=LOCKED, auth="terminate", client_keys=KEYS, api_key=ENGINES) as rig:
        for headers in (bearer("client-key-one"), bearer("client-key-two"), {"x-api-key": "client-key-two"}):
            assert await status(rig, headers) == 200
            for engine in (rig.p, rig.d):
                seen = engine.requests[-1]
                assert seen.headers["authorization"] == f"Bearer {ENGINES}"
                assert "x-api-key" not in seen.headers
        models = await rig.client.get("/v1/models", headers=bearer("client-key-one"))
        assert models.json()["data"][0]["id"] == "sim"


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_nothing_is_read_and_no_engine_is_asked(path: str) -> None:
    async with open_rig(sim=LOCKED, auth="terminate", client_keys=KEYS, api_key=ENGINES) as rig:
        before = len(rig.p.requests), len(rig.d.requests)
        guesses: list[Any] = [
            None,
            bearer(""),
            bearer(ENGINES),
            bearer("client-key-on"),
            bearer("client-key-one "[:-1] + "x"),
            bearer(KEYS),
            bearer("client-key-one,client-key-two"),
            {"authorization": "client-key-one"},
            {"authorization": "Basic client-key-one"},
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            {"cookie": "authorization=client-key-one"},
            # Two of them: who reads the other one would let in somebody else.
            [("authorization", "Bearer client-key-one"), ("authorization", "Bearer wrong")],
            [("authorization", "Bearer client-key-one"), ("x-api-key", "wrong")],
        ]
        answers = set()
        for headers in guesses:
            response = await rig.client.post(path, json=BODY, headers=headers)
            assert response.status_code == 401, headers
            assert response.headers["www-authenticate"] == "Bearer"
            answers.add(response.content)
        assert len(answers) == 1, "an answer that differs helps who guesses"
        assert (await rig.client.get("/v1/models")).status_code == 401
        assert (len(rig.p.requests), len(rig.d.requests)) == before
        assert rig.app.gate is not None
        assert rig.app.gate.refused == len(guesses) + 1
        for open_path in ("/health", "/ready", "/status", "/metrics"):
            assert (await rig.client.get(open_path)).status_code == 200


async def test_a_401_has_the_shape_of_its_api() -> None:
    async with open_rig(auth="terminate", client_keys=KEYS) as rig:
        openai = (await rig.client.post("/v1/responses", json=BODY)).json()
        assert openai["error"]["code"] == "invalid_api_key"
        anthropic = (await rig.client.post("/v1/messages", json=BODY)).json()
        assert anthropic["error"]["type"] == "authentication_error"


async def test_a_wrong_key_is_never_in_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    async with open_rig(auth="terminate", client_keys=KEYS) as rig:
        for number in range(50):
            assert await status(rig, bearer(f"guess-{number}")) == 401
        assert await status(rig, bearer("client-key-one")) == 200
        await rig.quiet()
    assert "guess-" not in caplog.text
    assert "client-key-one" not in caplog.text
    assert sum("without a valid key" in record.getMessage() for record in caplog.records) <= 1


async def test_pass_through_hands_on_what_the_client_brings_and_nothing_of_ours() -> None:
    async with open_rig(sim=LOCKED, api_key=ENGINES) as rig:
        assert await status(rig, bearer(ENGINES)) == 200
        assert await status(rig) == 401
        assert await status(rig, bearer("wrong")) == 401
        assert (await rig.client.get("/v1/models")).status_code == 401
        assert (await rig.client.get("/v1/models", headers=bearer(ENGINES))).status_code == 200
        assert (await rig.client.get("/v1/models", headers=[(b"authorization", b"Bearer \xe9")])).status_code == 401
        await rig.quiet()


async def test_open_sends_engines_their_key_whoever_asks() -> None:
    async with open_rig(sim=LOCKED, auth="open", api_key=ENGINES) as rig:
        assert await status(rig) == 200
        assert await status(rig, bearer("a client's own business")) == 200
        assert rig.d.requests[-1].headers["authorization"] == f"Bearer {ENGINES}"


@pytest.mark.parametrize("mode", ["pass_through", "terminate", "open"])
async def test_engines_with_a_key_are_watched_and_warmed_up_with_it(mode: str) -> None:
    keys: dict[str, Any] = {"client_keys": KEYS} if mode == "terminate" else {}
    async with open_rig(sim=LOCKED, auth=mode, api_key=ENGINES, warm_up=True, **keys) as rig:
        assert rig.app.missing() == []


async def test_an_edit_of_the_keys_is_used_at_once_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def write(text: bytes) -> None:
        path.with_suffix(".new").write_bytes(text)
        os.replace(path.with_suffix(".new"), path)

    write(b"# who may\nold-key # until tomorrow\n")
    async with open_rig(auth="terminate", client_keys_file=path) as rig:
        gate = rig.app.gate
        assert gate is not None
        assert await status(rig, bearer("old-key")) == 200
        assert await status(rig, bearer("until")) == 401
        write(b"new-key\nanother-key\n")
        await until(lambda: len(gate.keys) == 2, 10)
        assert [await status(rig, bearer(key)) for key in ("old-key", "new-key", "another-key")] == [401, 200, 200]
        for bad in (b"", b"# nobody\n", b"\xff\xfe"):
            write(bad)
            await trio.sleep(1.2)
            assert await status(rig, bearer("new-key")) == 200
        path.unlink()
        await trio.sleep(1.2)
        assert await status(rig, bearer("new-key")) == 200


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time it takes tells neither whether a key is known nor which one it is."""
    compared: list[int] = []

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return a == b

    keys = Keys(["one", "two", "three"])
    monkeypatch.setattr("trio_pdproxy.web.auth.hmac.compare_digest", counting)
    results = [keys.knows(key) for key in (b"one", b"three", b"", b"x" * 10_000)]
    assert results == [True, True, False, False]
    assert compared == [64] * 12, "digests, all of one length"
