"""The load generator's pure parts: figures, layout, arrivals, prompts."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest

from trio_pdproxy.bench.load import Load, Measured, Seen, _arrivals
from trio_pdproxy.bench.prompts import characters_for, random_text
from trio_pdproxy.bench.result import block, percentile_of, result_of


def seen(number: int) -> Seen:
    """A request of 100 + number ms to the first of 11 tokens, and 10 ms between two."""
    ttft = 0.1 + number / 1000
    return Seen(
        success=True,
        latency=ttft + 0.1,
        ttft=ttft,
        itl=[0.01] * 10,
        input_tokens=100,
        output_tokens=11,
    )


def measured(*requests: Seen, **load: object) -> Measured:
    return Measured(Load(num_prompts=len(requests), **load), "m", 2.0, 3, list(requests))  # type: ignore[arg-type]


def test_figures_have_vllms_names_and_are_right() -> None:
    result = result_of(measured(*(seen(number) for number in range(101))), (50, 99))
    assert result["completed"] == 101
    assert result["total_input_tokens"] == 10_100
    assert result["total_output_tokens"] == 1_111
    assert result["request_throughput"] == 50.5
    assert result["output_throughput"] == 555.5
    assert result["mean_ttft_ms"] == pytest.approx(150)
    assert result["median_ttft_ms"] == pytest.approx(150)
    assert result["p50_ttft_ms"] == pytest.approx(150)
    assert result["p99_ttft_ms"] == pytest.approx(199)
    assert result["mean_tpot_ms"] == pytest.approx(10)
    assert result["p99_itl_ms"] == pytest.approx(10)
    assert result["mean_e2el_ms"] == pytest.approx(250)
    assert result["request_rate"] == "inf"
    msgspec.json.encode(result)


def test_failures_count_and_spoil_no_figure() -> None:
    result = result_of(measured(seen(0), Seen(error="answered 500", latency=9.0)))
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["p99_e2el_ms"] == pytest.approx(200)
    assert result["errors"] == ["answered 500"]


def test_the_block_is_laid_out_as_vllm_bench_serve_does() -> None:
    text = block(result_of(measured(seen(0), seen(10), max_concurrency=4, request_rate=8.0)))
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     2         "
    assert "Maximum request concurrency:             4         " in lines
    assert "Request rate configured (RPS):           8.00      " in lines
    assert "Benchmark duration (s):                  2.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "Mean TTFT (ms):                          105.00    " in lines
    assert "P99 TTFT (ms):                           109.90    " in lines
    assert lines[-1] == "=" * 50


def test_a_run_without_a_single_success_has_a_block_too() -> None:
    assert "Failed requests:                         1" in block(result_of(measured(Seen(error="no"))))


@pytest.mark.parametrize(("percentile", "value"), [(50, 50.0), (90, 90.0), (99.9, 99.9), (100, 100.0), (0.1, 0.1)])
def test_percentiles_are_interpolated(percentile: float, value: float) -> None:
    assert percentile_of([float(number) for number in range(101)], percentile) == pytest.approx(value)


def test_one_value_is_every_percentile() -> None:
    assert percentile_of([3.0], 99) == 3.0


def test_arrivals_have_the_rate_and_are_the_same_for_the_same_seed() -> None:
    load = Load(num_prompts=2000, request_rate=50.0, seed=7)
    times = _arrivals(load)
    assert times == _arrivals(load)
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)
    assert set(_arrivals(Load(num_prompts=3))) == {0.0}
    assert Load().request_rate == inf


def test_prompts_have_the_length_and_differ() -> None:
    random = Random(1)
    texts = {random_text(random, 300) for _ in range(50)}
    assert len(texts) == 50
    assert {len(text) for text in texts} <= {299, 300}  # one may end with the space between two words


def test_the_length_goes_by_two_counted_prompts() -> None:
    # A template of 10 tokens and a token every 4 characters.
    assert characters_for(512, (64, 26), (512, 138)) == 4 * (512 - 10)
