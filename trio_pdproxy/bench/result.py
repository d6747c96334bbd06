"""The figures over a load, with the names and the layout of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from math import inf
from statistics import fmean, median, pstdev, quantiles

from trio_pdproxy.bench.load import Measured, Seen

# Key, short name, heading: vLLM's.
METRICS: tuple[tuple[str, str, str, Callable[[Seen], Iterable[float | None]]], ...] = (
    ("ttft", "TTFT", "Time to First Token", lambda seen: (seen.ttft,)),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)", lambda seen: (seen.tpot,)),
    ("itl", "ITL", "Inter-token Latency", lambda seen: seen.itl),
    ("e2el", "E2EL", "End-to-end Latency", lambda seen: (seen.latency,)),
)
WIDTH = 50

Result = dict[str, object]


def result_of(measured: Measured, percentiles: Sequence[float] = (99.0,)) -> Result:
    """All figures, ready for JSON, under the names that `vllm bench serve --save-result` uses. Times in ms."""
    load = measured.load
    good = [seen for seen in measured.requests if seen.success]
    tokens_in, tokens_out = sum(seen.input_tokens for seen in good), sum(seen.output_tokens for seen in good)
    duration = measured.duration
    result: Result = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": load.endpoint,
        "model_id": measured.model,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if load.request_rate == inf else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
        "duration": duration,
        "completed": len(good),
        "failed": len(measured.requests) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_concurrent_requests": measured.peak,
        "errors": sorted({seen.error for seen in measured.requests if seen.error}),
    }
    for key, _, _, values_of in METRICS:
        values = [1000 * value for seen in good for value in values_of(seen) if value is not None]
        if not values:
            continue
        result[f"mean_{key}_ms"] = fmean(values)
        result[f"median_{key}_ms"] = median(values)
        result[f"std_{key}_ms"] = pstdev(values)
        for percentile in percentiles:
            result[f"p{percentile:g}_{key}_ms"] = percentile_of(values, percentile)
    return result


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """Interpolated, as numpy's default is. `percentile` in 0..100, to a tenth."""
    if len(values) == 1 or percentile >= 100:
        return max(values)
    if percentile <= 0:
        return min(values)
    return quantiles(values, n=1000, method="inclusive")[max(0, round(percentile * 10) - 1)]


def block(result: Result, percentiles: Sequence[float] = (99.0,)) -> str:
    """The result as `vllm bench serve` prints it."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def line(label: str, key: str, form: str = ".2f") -> None:
        if result.get(key) is not None:
            lines.append(f"{label:<40} {result[key]:<10{form}}")

    line("Successful requests:", "completed", "")
    line("Failed requests:", "failed", "")
    line("Maximum request concurrency:", "max_concurrency", "")
    if result["request_rate"] != "inf":
        line("Request rate configured (RPS):", "request_rate")
    line("Benchmark duration (s):", "duration")
    line("Total input tokens:", "total_input_tokens", "")
    line("Total generated tokens:", "total_output_tokens", "")
    line("Request throughput (req/s):", "request_throughput")
    line("Output token throughput (tok/s):", "output_throughput")
    line("Peak concurrent requests:", "max_concurrent_requests")
    line("Total token throughput (tok/s):", "total_token_throughput")
    for key, short, heading, _ in METRICS:
        if f"mean_{key}_ms" in result:
            lines.append(f"{heading:-^{WIDTH}}")
            line(f"Mean {short} (ms):", f"mean_{key}_ms")
            line(f"Median {short} (ms):", f"median_{key}_ms")
            for percentile in percentiles:
                line(f"P{percentile:g} {short} (ms):", f"p{percentile:g}_{key}_ms")
    lines.append("=" * WIDTH)
    return "\n".join(lines)
