"""One generation request: from its bytes through the engine core to the answer's bytes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from trio_pdproxy.sim import render
from trio_pdproxy.sim.core import EngineCore, EngineDied, Job, TransferFailed
from trio_pdproxy.sim.faults import Fault, SeenRequest
from trio_pdproxy.sim.http import Exchange
from trio_pdproxy.sim.parse import KINDS, Kind, Refusal, Work, parse
from trio_pdproxy.sim.settings import SimSettings
from trio_pdproxy.sim.shapes import Shape, messages_error, shape_for

RANK_HEADER = "x-data-parallel-rank"


async def generate(
    exchange: Exchange,
    settings: SimSettings,
    choose: Callable[[int | None], EngineCore],
    seen: SeenRequest,
    fault: Fault | None,
) -> None:
    """Answer the request; `fault` is the one the exchange was given, if any.

    `choose` gives the rank that was asked for (it exists), or one of its own choice.
    """
    if fault is not None and not fault.after_work:
        await exchange.strike("before_head")
    kind = KINDS[exchange.path]
    try:
        work = parse(
            exchange.body,
            exchange.headers.get("content-type", ""),
            kind=kind,
            settings=settings,
        )
    except Refusal as refusal:
        own_shape = kind == "messages" and refusal.kind != "Bad Request"
        body = messages_error(refusal.message, refusal.kind) if own_shape else refusal.body
        await exchange.respond(refusal.status, body)
        return
    rank = _asked_rank(exchange, kind)
    if rank is not None and not 0 <= rank < settings.dp_size:
        await _refuse_rank(exchange, work, f"data_parallel_rank {rank} is out of range [0, {settings.dp_size}).")
        return
    core = choose(rank)
    seen.rank = core.ranks.index(core)
    job = core.open(work, _request_id(seen, work))
    try:
        answer = _answer_stream if work.stream else _answer_whole
        await answer(exchange, core, job)
    finally:
        core.close(job)


def _asked_rank(exchange: Exchange, kind: Kind) -> int | None:
    if kind == "responses":  # the header is not looked at
        return None
    try:
        return int(exchange.headers.get(RANK_HEADER, ""))
    except ValueError:
        return None


async def _refuse_rank(exchange: Exchange, work: Work, message: str) -> None:
    """Found late, by the engine: a stream has begun by then."""
    kind = "BadRequestError"
    if work.stream and work.kind in ("completions", "chat"):
        await exchange.strike("before_head")
        await exchange.start()
        await exchange.end_with([render.error_frame(message, kind, 400), render.DONE])
    elif work.kind == "messages":
        await exchange.respond(400, messages_error(message, kind))
    else:
        await exchange.respond(400, render.error(message, kind, None, 400))


def _request_id(seen: SeenRequest, work: Work) -> str:
    if work.kind == "responses":  # the header is not looked at
        return work.request_id or f"resp_{uuid.uuid4().hex}"
    in_body = work.request_id if work.kind != "messages" else None
    return seen.id or in_body or uuid.uuid4().hex


def _shape(core: EngineCore, job: Job) -> Shape:
    return shape_for(
        job.work.kind,
        response_id=job.response_id,
        model=core.settings.model,
        created=int(time.time()),
        choices=len(job.sequences),
        prompt_tokens=job.sequences[0].prompt.tokens,
    )


async def _answer_whole(exchange: Exchange, core: EngineCore, job: Job) -> None:
    shape = _shape(core, job)
    exchange.failure = shape.failure(render.INTERNAL, opened=False)
    try:
        while not job.is_over:
            await core.step(job)
    except (TransferFailed, EngineDied) as error:
        exchange.close_after = isinstance(error, EngineDied)
        message = render.ENGINE_DIED if exchange.close_after else render.INTERNAL
        await exchange.respond(500, shape.failure_body(message))
        return
    transfer = _transfer(exchange, core, job)
    texts = ["".join(sequence.words) for sequence in job.sequences]
    body = shape.whole(texts, _counts(core, job), transfer)
    await exchange.strike("before_head")
    await exchange.respond(200, body)


def _transfer(exchange: Exchange, core: EngineCore, job: Job) -> dict[str, object] | None:
    if not job.work.keeps_blocks:
        return None
    params = core.transfer_params(job)
    what = exchange.fault.what if exchange.fault is not None else None
    if what in ("no_params", "other_params"):
        exchange.fault, exchange.struck = None, True
    if what == "other_params":
        params["remote_engine_id"] = str(uuid.uuid4())
    return None if what == "no_params" else params


async def _answer_stream(exchange: Exchange, core: EngineCore, job: Job) -> None:
    """The head goes out at once, before any KV; what follows is what the engine says, or how it failed."""
    shape = _shape(core, job)
    exchange.failure = shape.failure(render.INTERNAL, opened=False)
    failed: str | None = None
    try:
        # Registered before the head is sent: a client that sees the head knows that D holds blocks.
        await core.begin(job)
    except TransferFailed:
        failed = render.INTERNAL
    except EngineDied:
        failed, exchange.close_after = render.ENGINE_DIED, True
    await exchange.strike("before_head")
    await exchange.start()
    for event in shape.early():
        await exchange.event(event)
    opened = False
    if failed is None:
        failed, opened = await _tell(exchange, core, job, shape)
    if failed is None:
        ending: list[bytes] | None = shape.closing(_counts(core, job), include_usage=job.work.include_usage)
    else:
        ending = shape.failure(failed, opened=opened)
    await exchange.end_with(ending)


async def _tell(exchange: Exchange, core: EngineCore, job: Job, shape: Shape) -> tuple[str | None, bool]:
    """Send the tokens; what went wrong, or None, and whether the stream was opened."""
    last = job.work.max_tokens
    opened = False
    try:
        while not job.is_over:
            for sequence in await core.step(job):
                if not opened:
                    opened = True
                    exchange.failure = shape.failure(render.INTERNAL, opened=True)
                    for event in shape.opening():
                        await exchange.event(event)
                spoken = sequence.produced
                token = sequence.words[spoken - 1]
                await exchange.event(shape.token(sequence.choice, token, last=spoken >= last))
    except TransferFailed:
        return render.INTERNAL, opened
    except EngineDied:
        return render.ENGINE_DIED, opened
    return None, opened


def _counts(core: EngineCore, job: Job) -> render.Counts:
    tells = core.settings.prompt_tokens_details or job.work.kind == "responses"
    return render.Counts(
        prompt=sum(sequence.prompt.tokens for sequence in job.sequences) // job.work.n,
        completion=sum(sequence.produced for sequence in job.sequences),
        cached=job.sequences[-1].cached if tells else None,
    )
