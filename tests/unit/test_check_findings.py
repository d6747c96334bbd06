"""What `check` says of facts: one rule a test, on engines that differ from sound ones in that alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trio_pdproxy.check import EngineFacts, Finding, Level, Load, findings, script_findings
from trio_pdproxy.check.facts import Told, read_load
from trio_pdproxy.check.findings import loopback
from trio_pdproxy.config import EngineSpec, Role, Settings
from trio_pdproxy.engines.coordinates import Meta
from trio_pdproxy.launch import Script, make_plan

P = EngineSpec(url="http://10.0.0.1:8100", name="p0")
D = EngineSpec(url="http://10.0.0.2:8200", name="d0")
SETTINGS = Settings(prefill=[P], decode=[D])
BUSY = Load(running=1, kv_usage=0.5)


def prefill(**more: Any) -> EngineFacts:
    told = Told(remote_engine_id="e-p", remote_host="10.0.0.1", remote_port=5600, transfer_mode="push")
    return sound("prefill", P, {"meta": Meta("e-p", "hash"), "told": told, "loads": [BUSY, BUSY]} | more)


def decode(**more: Any) -> EngineFacts:
    return sound("decode", D, {"meta": Meta("e-d", "hash"), "loads": [Load(), Load()]} | more)


def sound(role: Role, spec: EngineSpec, more: dict[str, Any]) -> EngineFacts:
    facts = EngineFacts(role, spec, health=200, version="0.32.0", models_status=200, model="m", max_model_len=4096)
    facts.closes_early = False
    return replace(facts, **more)


def only(*facts: EngineFacts, settings: Settings = SETTINGS) -> Finding:
    (found,) = findings(facts, settings)
    return found


def test_sound_engines_have_no_finding() -> None:
    assert findings([prefill(), decode()], SETTINGS) == []


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ({"unreachable": "connection refused"}, "unreachable", "connection refused"),
        ({"models_status": 401, "model": None}, "api_key_missing", "PDPROXY_API_KEY"),
        ({"version": None}, "not_vllm", "/version"),
        ({"model": None}, "not_vllm", "/v1/models"),
        ({"health": 503}, "unhealthy", "503"),
        ({"told": None, "meta": None}, "no_connector", "kv_producer"),
        ({"meta": None, "no_meta": "silence"}, "no_side_channel", "the engine itself says 10.0.0.1:5600"),
        ({"meta": Meta("e-x", "hash")}, "side_channel_of_another", "e-x"),
        ({"probe": "answered 500: x", "told": None}, "probe_failed", "answered 500"),
        ({"loads": [replace(BUSY, ranks=2)] * 2}, "dp_size", "dp_size=2"),
    ],
)
def test_a_prefill_engine_that_cannot_serve(more: dict[str, Any], code: str, words: str) -> None:
    found = only(prefill(**more), decode())
    assert (found.level, found.code, found.engine) == (Level.ERROR, code, "p0")
    assert words in found.what + found.advice


def test_an_api_key_that_is_refused() -> None:
    settings = Settings.model_validate({**dict(SETTINGS), "api_key": "k"})
    found = only(prefill(), decode(models_status=401, model=None), settings=settings)
    assert found.code == "api_key_wrong"


def test_a_decode_engine_without_a_side_channel_is_a_warning() -> None:
    found = only(prefill(), decode(meta=None, no_meta="silence"))
    assert (found.level, found.code) == (Level.WARNING, "no_side_channel")
    assert "kv_consumer" in found.advice


def test_blocks_held_while_idle_are_stranded_only_at_decode_and_only_if_they_stay() -> None:
    held = Load(kv_usage=0.02)
    found = only(prefill(), decode(loads=[held, held]))
    assert (found.level, found.code) == (Level.ERROR, "stranded")
    assert "2 %" in found.what
    assert "restart" in found.advice
    assert findings([prefill(loads=[held, held]), decode(loads=[held, Load()])], SETTINGS) == []
    assert findings([prefill(), decode(loads=[replace(held, running=1), held])], SETTINGS) == []


def test_a_connection_that_is_closed_too_early_is_a_warning() -> None:
    found = only(prefill(closes_early=True), decode())
    assert (found.level, found.code) == (Level.WARNING, "keep_alive")
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in found.advice


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"version": "0.31.0"}, "vLLM 0.32.0 and 0.31.0"),
        ({"model": "other"}, "models m and other"),
        ({"meta": Meta("e-d", "else", block_size=16)}, "block sizes None and 16"),
        ({}, "the connector (p0 is in push mode)"),
    ],
)
def test_different_compatibility_hashes_are_explained_as_far_as_can_be_seen(more: dict[str, Any], words: str) -> None:
    found = only(prefill(), decode(**({"meta": Meta("e-d", "else")} | more)))
    assert (found.code, found.engine) == ("cannot_pair", "p0 and d0")
    assert words in found.what


def test_engines_that_differ_without_their_hashes_saying_so() -> None:
    assert only(prefill(), decode(model="other")).code == "models_differ"
    found = only(prefill(), decode(max_model_len=2048))
    assert (found.level, found.code) == (Level.WARNING, "max_model_len")
    assert "d0 takes 2048" in found.what


def test_push_and_pull_engines_are_never_mixed() -> None:
    p1 = EngineSpec(url="http://10.0.0.1:8101", side_channel="10.0.0.1:5601", name="p1")
    pulls = Told(remote_engine_id="e-p1", remote_host="10.0.0.1", transfer_mode="pull")
    found = only(prefill(), prefill(spec=p1, told=pulls, meta=Meta("e-p1", "hash")), decode())
    assert found.code == "mixed_modes"
    assert "p0 push, p1 pull" in found.what


def test_a_side_channel_on_localhost_matters_between_two_hosts_alone() -> None:
    told = Told(remote_engine_id="e-p", remote_host="localhost", transfer_mode="push")
    found = only(prefill(told=told), decode())
    assert found.code == "side_channel_on_localhost"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1" in found.advice
    here = EngineSpec(url="http://10.0.0.1:8200", name="d0")
    assert findings([prefill(told=told), decode(spec=here)], SETTINGS) == []
    assert [loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "host")] == [True] * 3 + [
        False
    ] * 2


def test_requests_that_queue_longer_than_the_lease() -> None:
    queued = ((10.0, 90.0), (40.0, 97.0), (float("inf"), 100.0))
    found = only(prefill(), decode(loads=[Load(queued=queued)] * 2))
    assert (found.level, found.code) == (Level.WARNING, "lease_too_short")
    assert "3 of its 100 requests" in found.what
    assert "lease of 30 s" in found.what
    long = Settings.model_validate({**dict(SETTINGS), "lease": 100, "first_byte_timeout": 300})
    assert findings([prefill(), decode(loads=[Load(queued=queued)] * 2)], long) == []


def test_metrics_of_several_ranks_are_taken_together() -> None:
    text = """# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="10.0"} 4.0
vllm:request_queue_time_seconds_bucket{engine="1",le="10.0"} 1.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf"} 5.0
vllm:request_queue_time_seconds_bucket{engine="1",le="+Inf"} 1.0
vllm:request_queue_time_seconds_count{engine="0"} 5.0
vllm:request_queue_time_seconds_sum{engine="0"} 50.0
"""
    load = read_load(text)
    assert load == Load(3, 0, 0.5, 2, ((10.0, 5.0), (float("inf"), 6.0)))
    assert read_load("a page\n") is None
    assert read_load("") is None


# -- scripts ---------------------------------------------------------------------------------------


def of_script(**script: Any) -> list[str]:
    wanted = Script.model_validate({"preset": "cuda", "model": "org/m", "vllm": "/bin/sh serve"} | script)
    return [finding.code for finding in script_findings(wanted, make_plan(wanted), running=True)]


def test_a_script_is_looked_at_without_being_started(tmp_path: Any) -> None:
    assert of_script() == []
    assert of_script(vllm="no-such serve") == ["no_program", "no_program"]
    assert of_script(model=str(tmp_path / "none")) == ["no_model"]
    assert of_script(decode={"flags": {"kv-cache-dtype": "fp8"}}) == ["cannot_pair"]
    assert of_script(decode={"flags": {"max-model-len": 8}}) == ["cannot_pair"]
    pull = {"flags": {"kv-transfer-config": {"kv_connector": "NixlPullConnector"}}}
    assert of_script(decode=pull) == ["mixed_modes"]
    assert of_script(flags={"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1"}'}) == ["no_connector"]
    assert of_script(keep_alive=2) == ["keep_alive"]
    assert of_script(decode={"flags": {"max-num-seqs": 8}, "max_inflight": 9}) == ["max_inflight"]
    far = {"count": 0, "external": ["http://10.0.0.9:8200"]}
    assert of_script(decode=far) == ["side_channel_on_localhost"]
    assert of_script(decode=far, host="10.0.0.1") == []
