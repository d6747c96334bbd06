"""The benchmark works: one small run of the command, and the arithmetic it is judged by. No speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench import words
from tests.bench.__main__ import main
from tests.bench.bars import bars
from tests.bench.figures import Figures, Results, histogram_quantile, quantile
from tests.bench.peers import BASELINE, DIRECT, FLOOR, OURS
from tests.bench.processes import ROOT
from tests.bench.run import SIZES, read_loads


def measured(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """One small run of the command, which has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--seconds", "0.2", *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_small_run_gives_every_figure_and_every_answer_is_right(tmp_path: Path) -> None:
    written, drawn = tmp_path / "figures.json", tmp_path / "figures.svg"
    done = measured("--no-install", "--loads", "ttft:2,burst:2,short:2,abort:2", "--json", written, "--plot", drawn)
    said = json.loads(written.read_text())
    # Which of the others can be run depends on what is installed; these two always can.
    assert {DIRECT, OURS} <= set(said["peers"])
    assert not {DIRECT, OURS} & set(said["skipped"])
    assert all(not figures["wrong"] and not figures["why"] for figures in said["figures"])
    for load, names in {
        "ttft 2": ("ttft_p50_ms", "added_ttft_p50_ms", "gap_p50_ms", "gap_p99_ms", "reported_gap_p50_ms"),
        "burst 2": ("events_per_s", "cpu_us_per_event"),
        "short 2": ("requests_per_s", "cpu_us_per_request", "latency_p99_ms"),
        "abort 2": ("requests_per_s", "cpu_us_per_request"),
    }.items():
        ours = said["medians"][load][OURS]
        assert ours.keys() >= set(names), load
        assert all(ours[name] > 0 for name in names if not name.startswith("added")), load
        assert said["medians"][load][DIRECT], load
    left = said["medians"]["abort 2"][OURS]
    assert (left["left"], left["held_kv"]) == (0, 0)
    assert len(said["bars"]) == len(list(bars()))
    assert "what it has to show" in done.stdout
    assert OURS in {element.text for element in ET.fromstring(drawn.read_text()).iter()}


def test_the_floor_of_the_public_interface_answers_right(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    measured("--only", FLOOR, "--loads", "paced:2,burst:2,short:2", "--json", written)
    said = json.loads(written.read_text())
    assert not said["skipped"]
    assert [(figures["peer"], figures["wrong"], figures["why"]) for figures in said["figures"]] == [(FLOOR, 0, "")] * 3


@pytest.mark.parametrize(
    "args", [("--loads", "pace"), ("--loads", "paced:0"), ("--only", "envoy"), ("--repeat", "0"), ("--seconds", "0")]
)
def test_wrong_usage_is_exit_code_2(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 2
    assert "Error" in done.output


def test_loads_are_named_with_and_without_a_number() -> None:
    assert read_loads("short:7,burst,short:7", quick=False) == (("short", 7), *(("burst", n) for n in SIZES["burst"]))
    assert read_loads("workers", quick=True) == (("workers", 128),)
    assert {name for name, _ in read_loads(None, quick=False)} == set(SIZES)


def test_an_answer_follows_from_its_request() -> None:
    ask = words.Ask(0xBEEF, count=3, every=20, prefill=5, pad=100)
    prompt = json.loads(ask.body())["prompt"]
    read = words.read_prompt(json.dumps(prompt).encode()[:64], count=1, stream=True)
    assert (read.tag, read.count, read.every, read.prefill) == (0xBEEF, 3, 20, 5)
    answer = ask.answer()
    assert answer.count(b"0000beef") == 3
    assert answer.endswith(words.DONE)
    assert words.event_chunk(0xBEEF) * 3 + words.end_chunks() == words.burst_chunks(0xBEEF, 3)
    assert words.read_prompt(b'"a"', count=4, stream=False) == words.Ask(0, count=4, stream=False)


def results(**of: dict[str, list[float]]) -> Results:
    """By peer and value name, one figure a repetition, under one load."""
    return Results(
        Figures(peer, "ttft 1", repetition, {name: values[repetition]})
        for peer, named in of.items()
        for name, values in named.items()
        for repetition in range(len(values))
    )


def test_added_times_are_differences_within_a_repetition_and_medians_over_all() -> None:
    mine = {"ttft_p50_ms": [3.0, 12.0, 2.0]}
    found = results(direct={"ttft_p50_ms": [1.0, 9.0, 1.0]}, ours=mine, asyncio={"ttft_p50_ms": [5.0, 13.0, 5.0]})
    found.add_differences(DIRECT)
    assert found.value(OURS, "ttft 1", "added_ttft_p50_ms") == 2.0  # of 2, 3, 1
    assert found.value(BASELINE, "ttft 1", "added_ttft_p50_ms") == 4.0
    (bar,) = [bar for bar in bars() if bar.what == "added TTFT p50, 1 clients"]
    value = bar.value(found)
    assert value == 0.5
    assert bar.met(value)
    assert not bar.met(0.61)


def test_bars_of_speed_are_cost_of_the_other_by_ours() -> None:
    found = Results(
        [
            Figures(OURS, "burst 16", 0, {"cpu_us_per_event": 2.0}),
            Figures(BASELINE, "burst 16", 0, {"cpu_us_per_event": 5.0}),
        ]
    )
    (bar,) = [bar for bar in bars() if bar.what == "burst events per CPU second, 16 clients"]
    assert bar.value(found) == 2.5
    assert bar.met(2.5)
    assert not bar.met(2.49)
    assert [bar.what for bar in bars() if bar.value(found) is not None] == [bar.what]


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert quantile([1.0], 0.99) == 1.0
    assert histogram_quantile([(0.1, 0.0), (0.2, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(0.15)
    assert histogram_quantile([(0.1, 0.0), (float("inf"), 4.0)], 0.5) == 0.1
    assert histogram_quantile([(0.1, 0.0)], 0.5) is None
