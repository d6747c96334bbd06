"""From facts to what is wrong and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address

from trio_pdproxy.check.facts import EngineFacts
from trio_pdproxy.config import Settings
from trio_pdproxy.engines.connections import KEEPALIVE


class Level(Enum):
    ERROR = "error"
    """It does not work, or will not under load."""
    WARNING = "warning"
    """It works, and will bite."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `code`: a stable word for programs; `engine`: its name, or two names, or ""."""

    level: Level
    code: str
    engine: str
    what: str
    advice: str


START_WITH = '--kv-transfer-config \'{"kv_connector": "NixlPushConnector", "kv_role": "kv_%s"}\''


def findings(facts: Sequence[EngineFacts], settings: Settings) -> list[Finding]:
    """Everything that is wrong, errors first, engine by engine."""
    found = [finding for one in facts for finding in _of_engine(one, settings)]
    found += _between(facts)
    found += _leases(facts, settings)
    return sorted(found, key=lambda finding: finding.level is Level.WARNING)


def loopback(host: str) -> bool:
    """Whether a host name or address means this very machine to whoever reads it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def _error(one: EngineFacts, code: str, what: str, advice: str) -> Finding:
    return Finding(Level.ERROR, code, one.name, what, advice)


def _warning(one: EngineFacts, code: str, what: str, advice: str) -> Finding:
    return Finding(Level.WARNING, code, one.name, what, advice)


def _of_engine(one: EngineFacts, settings: Settings) -> Iterator[Finding]:
    if one.unreachable is not None:
        yield _error(
            one,
            "unreachable",
            f"{one.spec.url} cannot be asked: {one.unreachable}",
            "is the engine running, does it listen on that address (--host), does a firewall stand between?",
        )
        return
    if one.models_status in (401, 403):
        if settings.api_key is None:
            yield _error(one, "api_key_missing", "it wants an API key", "set PDPROXY_API_KEY to its --api-key")
        else:
            yield _error(one, "api_key_wrong", "it refuses the API key", "PDPROXY_API_KEY and its --api-key differ")
        return
    if one.version is None or one.model is None:
        yield _error(
            one,
            "not_vllm",
            f"{one.spec.url} answers, but not as a vLLM server does (no "
            f"{'/version' if one.version is None else 'list of models at /v1/models'})",
            "check the url; a proxy or a load balancer in between is no engine",
        )
        return
    if one.health != 200:
        yield _error(
            one, "unhealthy", f"GET /health answers {one.health}", "its log says why; it may have to be restarted"
        )
    yield from _nixl(one)
    if one.closes_early:
        yield _warning(
            one,
            "keep_alive",
            f"it closes idle connections within the {KEEPALIVE:g} s for which the proxy keeps them",
            "start it with VLLM_HTTP_TIMEOUT_KEEP_ALIVE=75: requests meet connections that are just being closed",
        )
    yield from _held(one)
    ranks = max((load.ranks for load in one.loads), default=1)
    if one.role == "prefill" and ranks > 1 and (one.spec.dp_size or 1) != ranks:
        yield _error(
            one,
            "dp_size",
            f"it has {ranks} data-parallel ranks, and is configured with {one.spec.dp_size or 1}",
            f"write dp_size={ranks}: each rank has an engine id and a side channel of its own",
        )


def _nixl(one: EngineFacts) -> Iterator[Finding]:
    """Whether it can transfer KV at all, and says so where others hear it."""
    kind = "producer" if one.role == "prefill" else "consumer"
    if one.probe is not None:
        yield _error(one, "probe_failed", f"a one-token request {one.probe}", "its log says why")
        return
    if one.role == "prefill" and one.told is None:
        yield _error(
            one,
            "no_connector",
            "it answers without kv_transfer_params: it runs without a NIXL connector",
            f"start it with {START_WITH % kind}",
        )
        return
    if one.meta is None:
        said = ""
        if one.told is not None and one.told.remote_host:
            said = f" (the engine itself says {one.told.remote_host}:{one.told.remote_port})"
        level = Level.ERROR if one.role == "prefill" else Level.WARNING
        yield Finding(
            level,
            "no_side_channel",
            one.name,
            f"no NIXL side channel at {one.spec.side_channel}{said}: {one.no_meta}",
            f"start it with {START_WITH % kind} and VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT; name that as side_channel",
        )
        return
    if one.told is not None and not one.spec.dp_size and one.told.remote_engine_id != one.meta.engine_id:
        yield _error(
            one,
            "side_channel_of_another",
            f"its side channel {one.spec.side_channel} calls itself {one.meta.engine_id}, the engine "
            f"{one.told.remote_engine_id}",
            "side_channel names another engine's: give each engine its own VLLM_NIXL_SIDE_CHANNEL_PORT",
        )


def _held(one: EngineFacts) -> Iterator[Finding]:
    """A decode engine holds blocks for a push that never came: nothing but a restart frees them."""
    if one.role != "decode" or len(one.loads) < 2:
        return
    if all(load.idle and load.kv_usage > 0 for load in one.loads):
        yield _error(
            one,
            "stranded",
            f"it holds {100 * min(load.kv_usage for load in one.loads):.2g} % of its KV blocks and has nothing to do",
            "requests whose push never came hold them for good: restart this engine (with a new engine id)",
        )


def _between(facts: Sequence[EngineFacts]) -> Iterator[Finding]:
    """What keeps engines from pairing."""
    yield from _mixed(facts)
    for p in facts:
        for d in facts:
            if p.role == "prefill" and d.role == "decode" and p.model is not None and d.model is not None:
                yield from _pair(p, d)


def _mixed(facts: Sequence[EngineFacts]) -> Iterator[Finding]:
    modes = {one.name: one.told.transfer_mode for one in facts if one.told is not None}
    if len(set(modes.values())) > 1:
        shown = ", ".join(f"{name} {mode}" for name, mode in modes.items())
        yield Finding(
            Level.ERROR,
            "mixed_modes",
            " and ".join(modes),
            f"push and pull engines are mixed: {shown}",
            "give every engine the same kv_connector, NixlPushConnector or NixlPullConnector: the two never pair",
        )


def _pair(p: EngineFacts, d: EngineFacts) -> Iterator[Finding]:
    names = f"{p.name} and {d.name}"
    if p.meta is not None and d.meta is not None and p.meta.compatibility_hash != d.meta.compatibility_hash:
        yield Finding(
            Level.ERROR,
            "cannot_pair",
            names,
            f"they cannot pair, their NIXL compatibility hashes differ: {_difference(p, d)}",
            "start both with the same vLLM version, --model text, KV cache dtype, KV layout and connector",
        )
    elif p.model != d.model:
        yield Finding(
            Level.ERROR,
            "models_differ",
            names,
            f"they serve different models: {p.model} and {d.model}",
            "give both the same --model and --served-model-name",
        )
    if p.max_model_len and d.max_model_len and p.max_model_len != d.max_model_len:
        small, large = sorted((p, d), key=lambda one: one.max_model_len or 0)
        yield Finding(
            Level.WARNING,
            "max_model_len",
            names,
            f"{small.name} takes {small.max_model_len} tokens, {large.name} {large.max_model_len}",
            "give both the same --max-model-len: what one accepts and the other refuses costs a rescue",
        )
    if p.told is not None and p.host != d.host and loopback(p.told.remote_host):
        yield Finding(
            Level.ERROR,
            "side_channel_on_localhost",
            names,
            f"{p.name} tells others to find its KV at {p.told.remote_host}, but {d.name} is on another host ({d.host})",
            f"start {p.name} with VLLM_NIXL_SIDE_CHANNEL_HOST={p.host}",
        )


def _difference(p: EngineFacts, d: EngineFacts) -> str:
    """What of the difference can be seen from outside."""
    assert p.meta is not None
    assert d.meta is not None
    seen = []
    if p.version != d.version:
        seen.append(f"vLLM {p.version} and {d.version}")
    if p.model != d.model:
        seen.append(f"models {p.model} and {d.model}")
    if p.meta.block_size != d.meta.block_size:
        seen.append(f"block sizes {p.meta.block_size} and {d.meta.block_size}")
    if seen:
        return "; ".join(seen)
    mode = f" ({p.name} is in {p.told.transfer_mode} mode)" if p.told is not None else ""
    return f"version and served model are the same, so it is the --model text, the connector{mode}, or the KV layout"


def _leases(facts: Sequence[EngineFacts], settings: Settings) -> Iterator[Finding]:
    """Requests that wait at a decode engine for longer than a lease find their KV gone, and hang."""
    leases = [settings.lease_of(one.spec) for one in facts if one.role == "prefill"]
    lease = min(leases, default=settings.lease)
    for one in facts:
        if one.role != "decode" or not one.loads or not one.loads[-1].queued:
            continue
        queued = one.loads[-1].queued
        total = queued[-1][1]
        # Up to the first bound that is not below the lease: who is counted after it has waited longer for certain.
        within = next((count for bound, count in queued if bound >= lease), total)
        if total - within > 0:
            yield _warning(
                one,
                "lease_too_short",
                f"{total - within:g} of its {total:g} requests waited there longer than the lease of {lease:g} s",
                "raise kv_lease_duration at the prefill engines (and lease here), or lower its max_inflight",
            )
