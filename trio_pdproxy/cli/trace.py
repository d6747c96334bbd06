"""`trio-pdproxy trace`: the last exchanges of a running proxy as a picture."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click
import trio

TIMEOUT = 10.0


@click.command()
@click.argument("source", metavar="URL|FILE", default="http://127.0.0.1:8000")
@click.option("--last", type=click.IntRange(1), metavar="N", help="The last N exchanges only. Default: all it keeps.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("trace"),
    show_default=True,
    metavar="NAME",
    help="Writes NAME.html (open it in a browser) and NAME.json (open it in https://ui.perfetto.dev).",
)
@click.option("--raw", is_flag=True, help="Write NAME.timelines.json too: the timelines as the proxy tells them.")
def trace(source: str, last: int | None, output: Path, raw: bool) -> None:
    """Draw the last exchanges of a proxy: both legs, the gap between them, percentiles.

    URL is the proxy's admin listener (admin_bind; the token is read from PDPROXY_ADMIN_TOKEN), or its own address where
    expose_timelines is set. FILE is what --raw has written. Neither holds a prompt. Exit code 1 where it cannot be had.
    """
    from trio_pdproxy.observe.chrome import chrome_trace
    from trio_pdproxy.observe.page import html_page
    from trio_pdproxy.observe.timeline import read_timelines

    try:
        data = trio.run(partial(_fetch, source, last)) if "://" in source else Path(source).read_bytes()
        timelines = read_timelines(data)[-last if last else 0 :]
        if not timelines:
            raise click.ClickException(f"{source} has served no exchange yet")
        page = output.with_name(output.name + ".html")
        chrome = output.with_name(output.name + ".json")
        page.write_bytes(html_page({"requests": timelines}))
        chrome.write_bytes(chrome_trace(timelines))
        if raw:
            output.with_name(output.name + ".timelines.json").write_bytes(data)
    except (OSError, ValueError) as error:
        click.echo(f"trio-pdproxy trace: {error}", err=True)
        sys.exit(1)
    click.echo(
        f"{len(timelines)} exchanges\n{page}  open it in a browser\n{chrome}  open it in https://ui.perfetto.dev"
    )


async def _fetch(url: str, last: int | None) -> bytes:
    from trio_pdproxy.engines.transport import fetch
    from trio_pdproxy.engines.wire import EngineError

    path = f"/timelines?last={last}" if last else "/timelines"
    try:
        status, body = await fetch(url, path, token=os.environ.get("PDPROXY_ADMIN_TOKEN"), within=TIMEOUT)
    except EngineError as error:
        raise OSError(f"{url} does not answer: {error}") from None
    match status:
        case 200:
            return body
        case 401:
            raise OSError(f"{url}: the admin token is missing or wrong; give it as PDPROXY_ADMIN_TOKEN")
        case 404:
            raise OSError(
                f"{url} shows no timelines: ask its admin listener (admin_bind, admin_token), or start it with "
                "expose_timelines"
            )
        case _:
            raise OSError(f"{url} answered {status}")
