"""`trio-pdproxy sim`: simulated engines on real ports, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

import click
import trio

from trio_pdproxy.core.errors import only
from trio_pdproxy.sim import Fabric, HttpTransport, Mode, SimEngine, SimSettings, Transport
from trio_pdproxy.sim.core import Role


@click.command()
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(0), help="Number of P engines.")
@click.option("--decode", default=1, show_default=True, type=click.IntRange(0), help="Number of D engines.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--prefill-port", default=8100, show_default=True, help="Port of the first P; 0 picks any.")
@click.option("--decode-port", default=8200, show_default=True, help="Port of the first D; 0 picks any.")
@click.option("--side-port", default=5600, show_default=True, help="First side-channel port; 0 picks any.")
@click.option("--model", default="sim", show_default=True, help="The model's name.")
@click.option("--api-key", default=None, envvar="VLLM_API_KEY", help="Asked for on /v1/*; also VLLM_API_KEY.")
@click.option("--num-blocks", default=65536, show_default=True, type=click.IntRange(1), help="KV blocks.")
@click.option("--lease", default=30.0, show_default=True, help="Seconds P keeps blocks for D.")
@click.option("--prefill-ms", default=20.0, show_default=True, help="Milliseconds of a prefill.")
@click.option("--itl-ms", default=5.0, show_default=True, help="Milliseconds between tokens.")
@click.option(
    "--mode", default="push", show_default=True, type=click.Choice(["push", "pull"]), help="NIXL's direction."
)
@click.option(
    "--prefill-dp", default=1, show_default=True, type=click.IntRange(1), help="Data-parallel ranks of each P."
)
@click.option("--keep-alive", default=5.0, show_default=True, help="Seconds an idle connection is kept.")
@click.option("--kv-over-http", is_flag=True, help="Pair with simulated engines of other processes, too.")
def sim(
    *,
    prefill: int,
    decode: int,
    host: str,
    prefill_port: int,
    decode_port: int,
    side_port: int,
    model: str,
    api_key: str | None,
    num_blocks: int,
    lease: float,
    prefill_ms: float,
    itl_ms: float,
    mode: Mode,
    prefill_dp: int,
    keep_alive: float,
    kv_over_http: bool,
) -> None:
    """Run simulated engines and print their addresses, one line an engine.

    They speak vLLM's HTTP and answer GET_META. Their KV travels inside this process unless told otherwise.

    Exit code 0 after SIGINT or SIGTERM; 1 where a port cannot be had.
    """
    settings = SimSettings(
        model=model,
        api_key=api_key,
        num_blocks=num_blocks,
        lease=lease,
        prefill_base=prefill_ms / 1000,
        itl=itl_ms / 1000,
        mode=mode,
        keep_alive=keep_alive,
        remember=100,
    )
    fabric: Transport = HttpTransport() if kv_over_http else Fabric()
    engines: list[SimEngine] = []
    roles: list[tuple[Role, int, int, int]] = [
        ("prefill", prefill, prefill_port, prefill_dp),
        ("decode", decode, decode_port, 1),
    ]
    for role, count, port, ranks in roles:
        for number in range(count):
            engines.append(
                SimEngine(
                    role,
                    name=f"{role}-{number}",
                    settings=replace(settings, dp_size=ranks),
                    fabric=fabric,
                    host=host,
                    port=port + number if port else 0,
                    side_port=side_port,
                )
            )
            side_port += ranks if side_port else 0
    try:
        trio.run(serve, engines)
    except BaseExceptionGroup as group:
        if (error := only(group, OSError)) is None:
            raise
        click.echo(f"trio-pdproxy sim: {error.strerror}; choose another port", err=True)
        sys.exit(1)


async def serve(engines: list[SimEngine], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Serve until SIGINT or SIGTERM. Starts when every engine listens and its line is printed."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            for engine in engines:
                await nursery.start(engine.serve)
                click.echo(
                    f"{engine.role}\t{engine.name}\t{engine.url}\t"
                    f"side channel {engine.side_channel}\tengine id {', '.join(engine.rank_ids)}"
                )
            task_status.started()
            async for number in signals:
                nursery.cancel_scope.cancel(signal.Signals(number).name)
                break
