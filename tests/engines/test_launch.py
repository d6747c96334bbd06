"""`trio-pdproxy launch` with real vLLM engines on this machine's CPU: the example, its faults, its end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import trio
import yaml

from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.launch.guard import group_members, shared_memory_of
from trio_pdproxy.launch.ports import is_free
from trio_pdproxy.testing import until

from ..bench.processes import cpu_seconds
from ..proxy.launched import EXAMPLES, Launched, check, launched

pytestmark = pytest.mark.timeout(900)

READY = 400
"""Seconds, on a machine that does other things as well; 25 to 40 where it does not."""


def example(tmp_path: Path) -> Path:
    """examples/cpu-1p1d.yaml, but on ports that nobody has."""
    script = yaml.safe_load((EXAMPLES / "cpu-1p1d.yaml").read_text())
    for role in ("prefill", "decode"):
        script[role] |= {"port": "auto", "side_channel_port": "auto"}
    script |= {"logs": "logs", "ready_timeout": READY, "restart": {"delay": 0.5}}
    script["proxy"] = {"bind": "127.0.0.1:0", "prefill_timeout": 100, "eject_time": 1}
    path = tmp_path / "script.yaml"
    path.write_text(yaml.safe_dump(script))
    return path


async def ask(run: Launched, prompt: str) -> str | None:
    """The answer's text; None where it was not served."""
    async with open_client(run.url, timeout=200) as client:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None


@pytest.mark.engines
async def test_the_example_serves_recovers_from_a_kill_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(words: str) -> None:
        with capsys.disabled():
            print(f"\nlaunch: {words}")

    begun = trio.current_time()
    async with launched(tmp_path, example(tmp_path)) as run:
        await run.ready(READY)
        say(f"ready after {trio.current_time() - begun:.1f} s: {run.out.splitlines()[0]}")
        text = await ask(run, "a prompt to be remembered")
        assert text
        # A machine that is busy with other things makes requests queue, which check may mention.
        code, found, _ = await check(*specs(run))
        assert code == 0, found
        assert {finding["code"] for finding in found["findings"]} <= {"lease_too_short"}
        assert [engine["mode"] for engine in found["engines"]] == ["push", None]

        # Whatever vLLM and NIXL do while they wait, it may not take a core each: others starve then (launch/gentle.py).
        await until_at_rest(run, 60)
        say(f"both engines at rest, {await busy(run, 2):.0%} of a core")

        # The API server of the prefill engine alone: its EngineCore and worker would live on, and hold its ports.
        old, other = run.groups["p0"], run.groups["d0"]
        shared = shared_memory(run)
        assert shared
        children = Path(f"/proc/{old}/task/{old}/children").read_text().split()
        assert len(group_members(old)) > 2
        begun = trio.current_time()
        os.kill(int(children[0]), signal.SIGKILL)
        await until(lambda: group_members(old) == [], 20)
        say(f"the killed engine's group was gone after {trio.current_time() - begun:.1f} s")
        with trio.fail_after(READY):
            while await ask(run, "a prompt to be remembered") != text:  # noqa: ASYNC110
                await trio.sleep(0.5)
        say(f"and the same answer was served again after {trio.current_time() - begun:.1f} s")
        assert run.groups["d0"] == other
        ids = set(re.findall(r"engine_id: ([0-9a-f-]{36})", (tmp_path / "logs" / "p0.log").read_text()))
        assert len(ids) == 2

        groups, ports = list(run.groups.values()), run.ports
        shared |= shared_memory(run)
        begun = trio.current_time()
        run.process.send_signal(signal.SIGINT)
        assert await run.wait() == 0
        say(f"ended {trio.current_time() - begun:.1f} s after SIGINT")
    assert all(group_members(group) == [] for group in groups)
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert not shared & {entry.inode() for entry in os.scandir("/dev/shm")}


@pytest.mark.slow
async def test_nothing_outlives_a_launcher_that_is_sigkilled(tmp_path: Path) -> None:
    async with launched(tmp_path, example(tmp_path)) as run:
        await run.ready(READY)
        groups, ports, shared = list(run.groups.values()), run.ports, shared_memory(run)
        assert all(len(group_members(group)) > 2 for group in groups)
        run.process.kill()
        await run.wait()
        await until(lambda: all(group_members(group) == [] for group in groups), 5)
        assert all(is_free("127.0.0.1", port) for port in ports)
    assert not shared & {entry.inode() for entry in os.scandir("/dev/shm")}


@pytest.mark.slow
async def test_a_model_that_is_none_is_told_in_words(tmp_path: Path) -> None:
    script = yaml.safe_load(example(tmp_path).read_text())
    (tmp_path / "model").mkdir()
    path = tmp_path / "script.yaml"
    path.write_text(yaml.safe_dump(script | {"model": str(tmp_path / "model"), "served_model_name": "tiny"}))
    async with launched(tmp_path, path) as run:
        with trio.fail_after(READY):
            assert await run.process.wait() == 1
        last = run.err.splitlines()[-1]
        assert "what failed first: engine" in last
        assert "the model path is wrong, or the model is incomplete" in last


async def until_at_rest(run: Launched, seconds: float) -> None:
    """Until both engines together leave most of one core alone."""
    with trio.fail_after(seconds):
        while await busy(run, 1) > 0.5:
            pass


async def busy(run: Launched, seconds: float) -> float:
    """How many cores the engines keep busy, of all their processes."""
    before = cpu_of(run)
    await trio.sleep(seconds)
    return (cpu_of(run) - before) / seconds


def cpu_of(run: Launched) -> float:
    return sum(cpu_seconds(pid for group in run.groups.values() for pid in group_members(group)).values())


def specs(run: Launched) -> list[str]:
    """The engines as `check` takes them, from what the launch says of them."""
    lines = re.findall(r"^  (prefill|decode) +(\w+)  (http://\S+)  side channel (\S+)", run.out, re.MULTILINE)
    return [word for role, name, url, side in lines for word in (f"--{role}", f"{url};side_channel={side};name={name}")]


def shared_memory(run: Launched) -> set[int]:
    """The files in /dev/shm that the engines have mapped now."""
    return shared_memory_of([pid for group in run.groups.values() for pid in group_members(group)])
