"""Read what a vLLM engine says about itself on /metrics (names as of vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx
import trio
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One reading. Counters count since the engine's start."""

    kv_usage: float
    """Share of KV blocks held, 0.0 to 1.0: the only place where a leaked block shows."""
    running: float
    waiting: float
    transfers: float
    """Completed NIXL transfers (counted on the side that WRITEs: P in push mode)."""
    failed_transfers: float
    external_tokens: float
    """Prompt tokens whose KV came by transfer (counted on D)."""
    computed_tokens: float
    """Prompt tokens the engine computed itself."""
    kv_expired: float
    """Requests whose KV was released because the lease ran out."""

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is held."""
        return self.kv_usage == 0 and self.running == 0 and self.waiting == 0


def parse(text: str) -> EngineMetrics:
    """From Prometheus text; what is absent counts as 0 (vLLM shows some only after their first event)."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:")
            if name == "prompt_tokens_by_source_total":
                name = f"{name}/{sample.labels['source']}"
            sums[name] = sums.get(name, 0.0) + sample.value

    def total(*names: str) -> float:
        return next((sums[name] for name in names if name in sums), 0.0)

    return EngineMetrics(
        kv_usage=total("kv_cache_usage_perc"),
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        transfers=total("nixl_xfer_time_seconds_count"),
        failed_transfers=total("nixl_num_failed_transfers_total"),
        external_tokens=total("prompt_tokens_by_source_total/external_kv_transfer"),
        computed_tokens=total("prompt_tokens_by_source_total/local_compute"),
        kv_expired=total("nixl_num_kv_expired_reqs_total"),
    )


async def read_metrics(url: str) -> EngineMetrics:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
        response = await client.get("/metrics")
        response.raise_for_status()
        return parse(response.text)


async def wait_for(url: str, wanted: Callable[[EngineMetrics], bool], *, seconds: float) -> EngineMetrics:
    """Read until `wanted` holds; the last reading is in the assertion's message when it never does."""
    deadline = trio.current_time() + seconds
    while not wanted(reading := await read_metrics(url)):
        assert trio.current_time() < deadline, f"{url} after {seconds:g} s: {reading}"
        await trio.sleep(0.2)
    return reading
