"""What real engines make of it: the legs in sequence, and vLLM's own spans under the right leg."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import pytest
import trio

from tests.otlp import open_receiver
from trio_pdproxy.config import EngineSpec, Settings
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.launch import open_vllm
from trio_pdproxy.serve import serving
from trio_pdproxy.testing import until
from trio_pdproxy.web.app import create_app

from .harness import COMPLETIONS, ask, body_of, over, proxy, quiet

if TYPE_CHECKING:
    from .conftest import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]


async def test_in_sequence_and_at_once_the_text_is_the_same_and_nothing_is_left(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    await quiet(vllm_pair)
    texts: dict[str, list[str]] = {}
    told: list[str] = []
    for legs in ("serial", "concurrent"):
        async with proxy(vllm_pair, legs=legs) as (app, client):
            with trio.fail_after(120):
                texts[legs] = [
                    await ask(client, COMPLETIONS, f"{number} in sequence or at once " * 8, stream=True)
                    for number in range(5)
                ]
            await over(app)
            tried = [report.dispatches[-1] for report in app.recent]
            assert all(d.prefill is not None and d.prefill.end and d.decode.sent and d.prompt_tokens for d in tried)
            after = [d.decode.sent > d.prefill.end for d in tried if d.prefill and d.prefill.end and d.decode.sent]
            assert all(after) if legs == "serial" else not any(after)
            gaps, firsts = ([d.gap or 0.0 for d in tried], [(r.first_byte or 0.0) - r.accepted for r in app.recent])
            told.append(
                f"{legs}: decode-start gap {1000 * median(gaps):.3f} ms, first token {1000 * median(firsts):.1f} ms"
            )
            assert app.pool.decode[0].stranded == 0
    assert texts["serial"] == texts["concurrent"]
    await quiet(vllm_pair)
    with capsys.disabled():
        print("\n" + "; ".join(told) + " (medians of 5)")


@pytest.mark.slow  # a pair of its own: engines are told of tracing when they start
async def test_vllms_own_spans_hang_under_the_right_leg(capsys: pytest.CaptureFixture[str]) -> None:
    with open_receiver() as receiver:
        async with open_vllm(
            flags={"otlp-traces-endpoint": receiver.url},
            env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"},
        ) as engines:
            p, d = engines.prefill[0], engines.decode[0]
            settings = Settings(
                prefill=[EngineSpec(url=p.url, side_channel=p.side_channel)],
                decode=[EngineSpec(url=d.url, side_channel=d.side_channel)],
                bind="127.0.0.1:0",
                otlp_traces_endpoint=receiver.url,
            )
            app = create_app(settings)
            async with serving(app, settings) as url, open_client(url, timeout=120) as client:
                await until(lambda: not app.missing(), 120)
                response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, "trace me", stream=True))
                assert response.status_code == 200
                await over(app)
            server = receiver.named("POST /v1/completions")  # the proxy's are sent at its end
            legs = {leg: receiver.named(f"{leg} leg") for leg in ("prefill", "decode")}

            def below(leg: str) -> list[str]:
                return [span.name for span in receiver.spans if span.parent_id == legs[leg].span_id]

            await until(lambda: below("prefill") and below("decode"), 60)
    assert {span.trace_id for span in receiver.spans if span.parent_id} >= {server.trace_id}
    with capsys.disabled():
        for leg in ("prefill", "decode"):
            print(f"\nunder the {leg} leg: {', '.join(below(leg))}", end="")
        print()
