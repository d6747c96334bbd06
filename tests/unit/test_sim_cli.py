"""The command `sim`: what it prints, and that a signal ends it."""

from __future__ import annotations

import os
import signal

import pytest
import trio
from click.testing import CliRunner

from trio_pdproxy.cli.sim import serve, sim
from trio_pdproxy.sim import Fabric, SimEngine


async def test_it_prints_the_addresses_and_ends_on_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = Fabric()
    engines = [SimEngine("prefill", fabric=fabric), SimEngine("decode", fabric=fabric)]
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, engines)
            os.kill(os.getpid(), signal.SIGTERM)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["prefill", "decode"]
    for engine, line in zip(engines, lines, strict=True):
        assert engine.url in line
        assert engine.side_channel in line
        assert engine.engine_id in line
        with pytest.raises(OSError, match=r".*"):
            await trio.open_tcp_stream(engine.host, engine.port)


def test_options_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[SimEngine] = []
    monkeypatch.setattr(trio, "run", lambda function, engines: found.extend(engines))
    result = CliRunner().invoke(sim, ["--mode", "pull", "--prefill-dp", "2", "--prefill", "2"])
    assert result.exit_code == 0, result.output
    assert [engine.settings.mode for engine in found] == 3 * ["pull"]
    assert [len(engine.rank_ids) for engine in found] == [2, 2, 1]
    assert [engine.side_channel.rpartition(":")[2] for engine in found] == ["5600", "5602", "5604"]
    assert CliRunner().invoke(sim, ["--mode", "sideways"]).exit_code == 2


def test_help() -> None:
    result = CliRunner().invoke(sim, ["--help"])
    assert result.exit_code == 0
    assert "--kv-over-http" in result.output
