"""Eight prefill and eight decode engines, two thousand requests in flight: how the policies spread them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio

from trio_pdproxy.sim import Fault, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig, requested, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COUNT = 2000
SIM = SimSettings(itl=0.0, max_num_seqs=4000, max_model_len=20_000, num_blocks=1_000_000)
ROOM: dict[str, Any] = {"prefill_max_inflight": 4000, "decode_max_inflight": 4000, "health_interval": 60}


async def completed(rig: Rig, prompt: str) -> None:
    """One request on a connection of its own; its answer must be its own."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
    async with requested(rig.url, "/v1/completions", body) as connection:
        assert (await connection.receive_head()).status == 200
        assert expected_text(prompt, 2).encode() in await connection.receive_all(1 << 20)


async def all_at_once(rig: Rig, prompts: list[str]) -> None:
    """All in flight together before the first is answered."""
    gate = trio.Event()
    for sim in rig.cluster.prefill:
        sim.faults.add(Fault("before_head", "slow", until=gate, times=None))
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(completed, rig, prompt)
        await until(lambda: rig.app.active == len(prompts), 120)
        gate.set()
    await rig.quiet(30)


def legs(rig: Rig) -> tuple[list[int], list[int]]:
    """Requests at each prefill and each decode engine, without the proxy's probes."""
    prefill = [sum("transfer_id" in (seen.transfer or {}) for seen in sim.requests) for sim in rig.cluster.prefill]
    return prefill, [len(sim.requests) for sim in rig.cluster.decode]


@pytest.mark.parametrize("policy", ["round_robin", "least_inflight", "power_of_two"])
async def test_two_thousand_at_once_are_spread_evenly(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_rig(prefill=8, decode=8, sim=SIM, prefill_policy=policy, decode_policy=policy, **ROOM) as rig:
        await all_at_once(rig, [f"prompt {number}" for number in range(COUNT)])
        prefill, decode = legs(rig)
        with capsys.disabled():
            print(f"\n{policy}: {COUNT} at once; at each prefill engine {prefill}, at each decode engine {decode}")
        allowed = 0.05 if policy != "power_of_two" else 0.25
        for counts in (prefill, decode):
            assert sum(counts) == COUNT
            assert max(abs(count - COUNT / 8) for count in counts) <= allowed * COUNT / 8


async def test_prefix_affinity_hits_and_no_engine_is_drowned(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"shared system prompt number {number % 40}, " * 20 + f"question {number}" for number in range(COUNT)]
    async with open_rig(prefill=8, decode=8, sim=SIM, prefill_policy="prefix_affinity", **ROOM) as rig:
        await all_at_once(rig, prompts)
        prefill, _ = legs(rig)
        holders: Counter[str] = Counter()
        for sim in rig.cluster.prefill:
            prefixes = {seen.body["prompt"][:400] for seen in sim.requests if "transfer_id" in (seen.transfer or {})}
            holders.update(prefixes)
        hits = COUNT - sum(holders.values())  # each engine computes each prefix it gets once
        with capsys.disabled():
            print(
                f"\nprefix_affinity: {COUNT} at once, 40 prefixes: {100 * hits / COUNT:.1f} % hits, largest load "
                f"{max(prefill) / (COUNT / 8):.2f} x mean ({prefill})"
            )
        assert hits >= 0.9 * COUNT
        assert max(prefill) <= 1.25 * COUNT / 8 + 1
