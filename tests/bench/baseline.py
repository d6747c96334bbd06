"""The asyncio baseline: `python -m tests.bench.baseline --port 8000 --prefill HOST:PORT --decode HOST:PORT ...`.

Written for this benchmark in the shape of vLLM's push demo as of its pull request 55088, on the same libraries
(FastAPI, uvicorn on uvloop, aiohttp): the body read as JSON, both legs out at once from a session of its own each,
prefill drained in a task, decode streamed to the client in pieces of up to 1 KiB, the task awaited at the end. Its
faults are its own as well (see the README, "What it does when things go wrong"): it is measured, not used.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600)
PIECE = 1024


async def relayed(url: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
    """What an engine answers, piece by piece."""
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        if response.status >= 500:
            raise HTTPException(response.status, await response.text())
        async for piece in response.content.iter_chunked(PIECE):
            yield piece  # noqa: ASYNC119  the demo's shape


async def only_json(request: Request) -> None:
    if request.headers.get("content-type", "").lower() != "application/json":
        raise HTTPException(415, "Content-Type must be application/json")


class Baseline:
    """The two legs of each request."""

    def __init__(self, prefill: str, decode: str, told: dict[str, Any]) -> None:
        self.prefill = f"http://{prefill}"
        self.decode = f"http://{decode}"
        self.told = told

    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()
        request_id, transfer_id = str(uuid.uuid4()), f"xfer-{uuid.uuid4()}"
        headers = {"X-Request-Id": request_id}
        path = request.url.path
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        first = {
            **body,
            "max_tokens": 1,
            "kv_transfer_params": {
                **nothing,
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            },
        }
        second = {
            **body,
            "kv_transfer_params": {**self.told, "remote_request_id": request_id, "transfer_id": transfer_id},
        }

        async def drained() -> None:
            async for _ in relayed(self.prefill + path, first, headers):
                pass

        draining = asyncio.create_task(drained())

        async def streamed() -> AsyncIterator[bytes]:
            try:
                async for piece in relayed(self.decode + path, second, headers):
                    yield piece
            finally:
                await draining

        return StreamingResponse(streamed(), media_type="application/json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--side-channel-port", type=int, required=True)
    args = parser.parse_args()
    baseline = Baseline(
        args.prefill,
        args.decode,
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": args.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": args.side_channel_port,
            "tp_size": 1,
            "pp_size": 1,
        },
    )
    router = APIRouter()
    for path in ("/v1/completions", "/v1/chat/completions"):
        router.add_api_route(
            path, baseline.complete, methods=["POST"], dependencies=[Depends(only_json)], response_model=None
        )
    app = FastAPI()
    app.include_router(router)
    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop")


if __name__ == "__main__":
    main()
