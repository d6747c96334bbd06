"""Bodies made from vLLM's own description of its API, the right and the wrong ones: each gets an answer, none gets
anything to an engine that should have been stopped.

The description is a real engine's; what answers is simulated, for no engine deserves this many wrong bodies.
`SCHEMA_EXAMPLES=2000 pytest -m engines tests/engines/test_schema.py` tries more.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings

from tests.proxy.test_fuzz import PAIRED, Target, check, request, talk, target

if TYPE_CHECKING:
    from .conftest import VllmPair

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "25"))
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900 + 2 * EXAMPLES)]
__all__ = ["target"]  # the fixture


@pytest.fixture
async def description(vllm_pair: VllmPair) -> Any:
    async with httpx.AsyncClient(base_url=vllm_pair.prefill.url, trust_env=False, timeout=60) as client:
        return (await client.get("/openapi.json")).raise_for_status().json()


@pytest.mark.parametrize("mode", ["positive", "negative"])
async def test_any_body_that_vllm_describes_gets_an_answer(target: Target, description: Any, mode: str) -> None:
    await trio.to_thread.run_sync(_try_all, target, description, mode)  # hypothesis is no friend of event loops


def _try_all(target: Target, description: Any, mode: str) -> None:
    api = schemathesis.openapi.from_dict(description)
    statuses: set[int] = set()
    for path in (*PAIRED, "/tokenize"):
        cases = api[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        _try_path(target, path, cases, statuses)
    assert statuses & ({200, 400} if mode == "positive" else {400})


def _try_path(target: Target, path: str, cases: Any, statuses: set[int]) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize="SCHEMA_EXAMPLES" not in os.environ,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases)
    def one(case: Any) -> None:
        data = request(path, case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode())
        answers = talk(target, data)
        assert answers, data
        check(target, data, answers)
        statuses.update(status for status, _ in answers)

    one()
