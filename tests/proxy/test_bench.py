"""`bench` and `top` in front of a real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from trio_pdproxy.bench.load import BenchError, Load, Target, calibrate, run_load
from trio_pdproxy.cli.top import look, picture, quantile
from trio_pdproxy.sim import Fault, SimSettings
from trio_pdproxy.testing.rig import open_rig

from .test_commands import free_port
from .test_observe import command


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_load_is_sent_and_every_token_counted(endpoint: str, stream: bool) -> None:
    async with open_rig() as rig, Target(rig.url) as target:
        assert await target.model() == "sim"
        load = Load(num_prompts=12, input_len=100, output_len=7, endpoint=endpoint, stream=stream)  # type: ignore[arg-type]
        characters = await calibrate(target, load, "sim")
        measured = await run_load(target, load, "sim", characters)
        assert [seen.error for seen in measured.requests] == [""] * 12
        assert {seen.output_tokens for seen in measured.requests} == {7}
        assert all(90 <= seen.input_tokens <= 110 for seen in measured.requests)
        assert all((seen.ttft is not None) == stream for seen in measured.requests)
        assert measured.peak > 1


async def test_no_more_are_under_way_than_allowed() -> None:
    async with open_rig(sim=SimSettings(prefill_base=0.02)) as rig, Target(rig.url) as target:
        measured = await run_load(target, Load(num_prompts=9, output_len=2, max_concurrency=3), "sim", 50)
        assert measured.peak == 3
        assert all(seen.success for seen in measured.requests)


async def test_the_same_seed_sends_the_same_prompts_and_a_salt_others() -> None:
    async with open_rig() as rig, Target(rig.url) as target:
        for salt in ("", "", "other"):
            await run_load(target, Load(num_prompts=2, output_len=1, max_concurrency=1), "sim", 80, salt=salt)
        prompts = [seen.body["prompt"] for seen in rig.d.requests if seen.path == "/v1/completions"]
        assert prompts[0:2] == prompts[2:4]
        assert not set(prompts[4:6]) & set(prompts[:4])


async def test_what_fails_is_told_in_words() -> None:
    async with open_rig() as rig, Target(rig.url) as target:
        rig.d.faults.add(Fault("mid_body", "reset", after=2, times=None))
        measured = await run_load(target, Load(num_prompts=2, output_len=9), "sim", 50)
        assert all("error in the stream" in seen.error or "closed" in seen.error for seen in measured.requests)
        assert all(not seen.success for seen in measured.requests)
    async with Target(f"http://127.0.0.1:{free_port()}") as nobody:
        with pytest.raises(BenchError, match="does not answer"):
            await nobody.model()


async def test_the_command_prints_the_block_and_writes_json(tmp_path: Path) -> None:
    async with open_rig() as rig:
        args = ["--num-prompts", "10", "--input-len", "50", "--output-len", "5", "--json", str(tmp_path / "r.json")]
        done = await command("bench", rig.url, *args, "--direct", rig.d.url)
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert " Serving Benchmark Result " in out
    assert "Successful requests:                     10" in out
    assert "engine alone" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["proxy"]["completed"] == result["direct"]["completed"] == 10
    assert result["proxy"]["total_output_tokens"] == 50


async def test_compare_shows_the_gap_of_both_modes(tmp_path: Path) -> None:
    page, file = tmp_path / "c.html", tmp_path / "c.json"
    args = ["--num-prompts", "5", "--input-len", "60", "--output-len", "3", "--html", str(page), "--json", str(file)]
    done = await command("bench", "--compare", "serial,concurrent", *args)
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    for words in ("decode-start gap p50", "time to first token p50", "serial", "concurrent", "prefill leg", "◆"):
        assert words in out
    saw = {mode: result["proxy_saw_ms"] for mode, result in json.loads(file.read_text()).items()}
    assert saw["serial"]["decode-start gap"]["count"] == saw["concurrent"]["decode-start gap"]["count"] == 5
    # In sequence the decode leg waits for all of the prefill leg, whatever the machine is doing besides.
    assert saw["serial"]["decode-start gap"]["p50"] >= saw["serial"]["prefill leg"]["p50"]
    assert page.read_bytes().startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    "args",
    [
        ["--compare", "serial,fast"],
        ["--compare", "serial", "--direct", "http://x"],
        ["--html", "x.html"],
        ["--compare", "serial", "--prefill", "http://x"],
        ["--request-rate", "0"],
        ["--metric-percentiles", "200"],
        ["--compare", "serial", "--prefill", "ftp://x", "--decode", "http://y"],
    ],
)
async def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    from click.testing import CliRunner

    from trio_pdproxy.cli.bench import bench

    done = await trio.to_thread.run_sync(lambda: CliRunner().invoke(bench, args))
    assert done.exit_code == 2


# -- top -----------------------------------------------------------------------------------------


def text_of(frame: object) -> str:
    from rich.console import Console

    console = Console(width=140)
    with console.capture() as captured:
        console.print(frame)
    return captured.get()


async def test_top_shows_engines_and_flows() -> None:
    async with open_rig() as rig:
        before = await look(rig.url)
        for _ in range(4):
            await rig.stream(max_tokens=3)
        await rig.quiet()
        now = await look(rig.url)
        frame = text_of(picture(rig.url, before, now))
    for words in ("prefill-0", "decode-0", "up", "0/64", "0/256", "requests/s", "decode-start gap", "not ok: none"):
        assert words in frame
    assert now.total("pdproxy_requests_total") - before.total("pdproxy_requests_total") == 4
    gap = quantile(before, now, "pdproxy_decode_start_gap_seconds", 0.5)
    assert gap is not None
    assert gap > 0
    assert quantile(now, now, "pdproxy_decode_start_gap_seconds", 0.5) is None


async def test_top_says_why_an_engine_is_down() -> None:
    async with open_rig(health_interval=0.1, health_timeout=0.1) as rig:
        rig.app.pool.decode[0].doubt("it was restarted")
        frame = text_of(picture(rig.url, now := await look(rig.url), now))
        assert "down" in frame
        assert "decode-0: it was restarted" in frame
        assert "NOT READY" in frame


async def test_top_once_is_a_picture_and_nobody_there_is_exit_code_1() -> None:
    async with open_rig() as rig:
        done = await command("top", rig.url, "--once", "--interval", "0.2")
        assert done.returncode == 0, done.stderr
        assert "decode-0" in done.stdout.decode()
    nobody = await command("top", f"http://127.0.0.1:{free_port()}", "--once")
    assert nobody.returncode == 1
    assert "does not answer" in nobody.stderr.decode()
