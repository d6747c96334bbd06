"""`trio-pdproxy check` in front of simulated engines, one of each kind of trouble."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import trio
import yaml

from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.sim import SimEngine, SimSettings, open_cluster
from trio_pdproxy.testing import until

from .launched import check


def spec(engine: SimEngine, name: str) -> str:
    return f"{engine.url};side_channel={engine.side_channel};name={name}"


@asynccontextmanager
async def no_vllm() -> AsyncIterator[str]:
    """A web server that is something else."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            while await stream.receive_some(65536):
                await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_sound_engines_have_nothing_wrong() -> None:
    async with open_cluster() as cluster:
        p, d = cluster.prefill[0], cluster.decode[0]
        code, found, err = await check("--prefill", spec(p, "p0"), "--decode", spec(d, "d0"))
    assert (code, found["findings"], err) == (0, [], "")
    assert [engine["engine_id"] for engine in found["engines"]] == [p.engine_id, d.engine_id]
    assert found["engines"][0]["mode"] == "push"


async def test_each_kind_of_trouble_is_named_at_its_engine() -> None:
    async with (
        open_cluster(decode=2, decode_settings=SimSettings(keep_alive=1.0)) as push,
        open_cluster(decode=0, settings=SimSettings(mode="pull")) as pull,
        open_cluster(prefill=0, settings=SimSettings(api_key="k3y")) as locked,
        open_cluster(prefill=0, settings=SimSettings(version="0.31.0")) as old,
        no_vllm() as other,
    ):
        p, (d, stranded) = push.prefill[0], push.decode
        await strand(p, stranded)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
            args = ["--prefill", spec(p, "p0"), "--prefill", spec(pull.prefill[0], "pull")]
            args += ["--prefill", f"{nobody};side_channel=127.0.0.1:9;name=nobody"]
            decode = {"d0": d, "stranded": stranded, "locked": locked.decode[0], "old": old.decode[0]}
            for name, engine in decode.items():
                args += ["--decode", spec(engine, name)]
            code, found, _ = await check(*args, "--decode", f"{other};name=other")
    assert code == 1
    codes = {(finding["engine"], finding["code"]) for finding in found["findings"]}
    assert {
        ("nobody", "unreachable"),
        ("other", "not_vllm"),
        ("locked", "api_key_missing"),
        ("stranded", "stranded"),
        ("d0", "keep_alive"),
        ("p0 and pull", "mixed_modes"),
        ("p0 and old", "cannot_pair"),
        ("pull and d0", "cannot_pair"),
    } <= codes
    assert not {("p0 and d0", "cannot_pair"), ("d0", "stranded"), ("p0", "keep_alive")} & codes


async def strand(p: SimEngine, d: SimEngine) -> None:
    """A decode leg without its prefill leg, and its client gone."""
    headers = {"x-request-id": uuid4().hex}
    told = {"do_remote_prefill": True, "remote_request_id": "x", **p.coordinates}
    body = {"model": "sim", "prompt": "hello " * 50, "max_tokens": 4, "kv_transfer_params": told}
    async with open_client(d.url, timeout=10) as client:
        with trio.move_on_after(0.5):
            await client.post("/v1/completions", json=body, headers=headers)
    await until(lambda: d.orphans == 1, 5)


async def test_a_script_is_checked_before_it_is_started(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {"port": "auto", "side_channel_port": "auto"}
        values = {"preset": "sim", "prefill": free | {"port": port}, "decode": free}
        script.write_text(yaml.safe_dump(values))
        code, found, _ = await check(str(script))
        assert code == 1
        assert [(finding["engine"], finding["code"]) for finding in found["findings"]] == [("p0", "port_in_use")]
    code, found, _ = await check(str(script))
    assert (code, found["findings"]) == (0, [])
    script.write_text("preset: sim\nprefil: {}\n")
    code, _, err = await check(str(script))
    assert code == 2
    assert "prefil: there is no such setting; did you mean prefill" in err
