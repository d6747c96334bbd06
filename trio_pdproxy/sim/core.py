"""The engine core of a simulated engine: admission, KV blocks, transfers and time; no HTTP.

One EngineCore is one life of an engine (of one of its data-parallel ranks, which share nothing but their
death): a restart makes a new one, which knows nothing of the old.
A job (one HTTP request) is stepped by the task that answers it; the core has no task of its own.

The debt, which is the reason for all of this: from the moment D has registered its blocks, nothing but P's
push frees them. A job that is closed before leaves *orphans*: sequences without a client that hold blocks.
In pull mode D owes nothing: it reads at once, or fails; what P computed in vain is freed by the lease.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import trio

from trio_pdproxy.sim.kv import BlockPool, Finished, Pull, PushLedger, Registration
from trio_pdproxy.sim.model import Prompt, tokens_of
from trio_pdproxy.sim.parse import Kind, Work
from trio_pdproxy.sim.settings import SimSettings

if TYPE_CHECKING:
    from trio_pdproxy.sim.fabric import Transport

Role = Literal["prefill", "decode"]

CONNECTOR_VERSION = 14

# How an engine makes its ids from the one it was given: a response's is the first two, a sequence's all of it.
_PREFIX: dict[Kind, str] = {"completions": "cmpl-", "chat": "chatcmpl-", "messages": "chatcmpl-", "responses": ""}
_POSTFIX: dict[Kind, str] = {"completions": "-{}", "chat": "", "messages": "", "responses": "_0"}

_NEEDED = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id")

_BEATS_PER_LEASE = 6

_REMEMBERED = 4096
"""Prompts in the prefix cache."""


class TransferFailed(Exception):
    """D could not reach the P it was given: this request fails, its blocks are free."""


class EngineDied(Exception):
    """The engine core is gone, and with it everything that ran in it."""


class State(enum.Enum):
    QUEUED = enum.auto()
    ADMITTED = enum.auto()  # holds blocks, nothing sent
    REMOTE = enum.auto()  # registered with P, waits for the push; or reads from P
    RUNNING = enum.auto()
    ORPHAN = enum.auto()  # as REMOTE, but its client has gone
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and one of its n choices."""

    id: str
    choice: int
    prompt: Prompt
    job: Job
    blocks: int
    block_ids: list[int] = field(default_factory=list)
    state: State = State.QUEUED
    words: list[str] = field(default_factory=list)
    produced: int = 0
    next_at: float = math.inf
    cached: int = 0
    """Of the prompt's tokens: found in the prefix cache, or brought by a transfer."""


@dataclass(slots=True, eq=False)
class Job:
    """The sequences of one request. Setting `wake` makes its task look at them again."""

    work: Work
    response_id: str
    sequences: list[Sequence] = field(default_factory=list)
    wake: trio.Event = field(default_factory=trio.Event)
    beat_at: float = math.inf
    """When P is told next that a queued request will still read its blocks."""

    @property
    def is_over(self) -> bool:
        return all(sequence.state is State.OVER for sequence in self.sequences)


class EngineCore:
    def __init__(
        self, role: Role, settings: SimSettings, transport: Transport, *, host: str, port: int, engine_id: str
    ) -> None:
        self.role: Role = role
        self.settings = settings
        self.host = host
        self.port = port  # of the side channel
        self.engine_id = engine_id
        self.url = ""
        self.life = uuid.uuid4().hex
        self.transport = transport
        self.pool = BlockPool(settings.num_blocks)
        self.ledger = PushLedger()
        self.agents: dict[str, object] = {}
        """What it remembers of its peers, by id: one that comes back under its old id is not met anew."""
        self.counts: Counter[State] = Counter()
        self.ranks: tuple[EngineCore, ...] = (self,)
        """The engine's data-parallel ranks, this one among them."""
        self.dead = trio.Event()
        self.side_channel_broken = trio.Event()
        self.pushes = self.pulls = self.stale_pulls = self.expired = self.failed_transfers = 0
        self.prompt_tokens = Counter[str]()
        self._queue: deque[Sequence] = deque()
        self._remote: dict[str, Sequence] = {}
        self._jobs: dict[Job, None] = {}
        self._cache: dict[str, str] = {}
        self._seen: dict[str, None] = {}

    @property
    def compatibility_hash(self) -> str:
        factors = (self.settings.version, CONNECTOR_VERSION, self.settings.model, self.settings.mode)
        return hashlib.sha256(repr(factors).encode()).hexdigest()

    # ------------------------------------------------------------------ jobs

    def open(self, work: Work, request_id: str) -> Job:
        """Queue the request's sequences; those that fit are admitted at once."""
        job = Job(work, _PREFIX[work.kind] + request_id)
        for number, prompt in enumerate(work.prompts):
            base = job.response_id + _POSTFIX[work.kind].format(number)
            blocks = max(1, -(-prompt.tokens // self.settings.block_size))
            for k in range(work.n):
                name = f"{k}_{base}" if work.n > 1 else base
                sequence = Sequence(f"{name}-{uuid.uuid4().hex[:8]}", number * work.n + k, prompt, job, blocks=blocks)
                job.sequences.append(sequence)
                self._queue.append(sequence)
                self.counts[State.QUEUED] += 1
        self._jobs[job] = None
        if self._pulls(work):
            job.beat_at = trio.current_time()
        self._admit()
        return job

    async def begin(self, job: Job) -> None:
        """Start what has been admitted: register with P, or begin to compute. Called by `step` too."""
        for sequence in job.sequences:
            if sequence.state is State.ADMITTED:
                await self._start(sequence)

    async def step(self, job: Job) -> list[Sequence]:
        """Wait until the job says something: the sequences whose next token is due, each moved on by one.

        Raises TransferFailed or EngineDied. Waits without end for a push that does not come.
        """
        while True:
            if self.dead.is_set():
                raise EngineDied
            await self.begin(job)
            now = trio.current_time()
            due = [s for s in job.sequences if s.state is State.RUNNING and s.next_at <= now]
            if due:
                for sequence in due:
                    sequence.produced += 1
                    sequence.next_at += self.settings.itl
                    if sequence.produced >= job.work.max_tokens:
                        await self._finish(sequence)
                return due
            if job.beat_at <= now and any(s.state is State.QUEUED for s in job.sequences):
                await self._beat(job)
                continue
            job.wake = trio.Event()
            with trio.move_on_at(self._next_deadline(job)):
                await job.wake.wait()
            self._admit()

    def close(self, job: Job) -> None:
        """The job's answer is over, or its client has left."""
        self._jobs.pop(job, None)
        for sequence in job.sequences:
            if sequence.state is State.REMOTE:
                self._move(sequence, State.ORPHAN)
            elif sequence.state not in (State.ORPHAN, State.OVER):
                self._move(sequence, State.OVER)
                self.pool.give(sequence.id)
        self._admit()

    def die(self) -> None:
        """What a failed assertion does to a real engine: every request of every rank fails, then the server exits."""
        for core in self.ranks:
            core.dead.set()
            for job in core._jobs:
                job.wake.set()

    def expire(self) -> None:
        """Free what P's leases no longer hold. Everything that reads blocks calls this first."""
        for request_id in self.ledger.expire(trio.current_time()):
            self.pool.give(request_id)
            self.expired += 1

    def transfer_params(self, job: Job) -> dict[str, Any]:
        """What a prefill leg's answer carries; of several prompts only the first one's."""
        first = job.sequences[0]
        mode = self.settings.mode
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(first.block_ids)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": first.id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": max(self.settings.tp_size, self.settings.dcp_size),
            "dcp_size": self.settings.dcp_size,
            "pp_size": self.settings.pp_size,
            "remote_num_tokens": first.prompt.tokens,
            **({"remote_blocks_expiry_time": None} if mode == "pull" else {}),  # a time only for blocks that D lends
            "transfer_mode": mode,
            "remote_prefill_cached_tokens": 0,
        }

    # ------------------------------------------------------------- transfers

    async def accept(self, registration: Registration) -> None:
        """P: a registration has arrived."""
        self.expire()
        done = self.ledger.register(registration)
        if done is not None:
            await self._push(done, registration)

    def receive(self, request_id: str, done: Finished) -> bool:
        """D: P has written. False: the write failed at P, and D is never told."""
        sequence = self._remote.pop(request_id, None)
        if sequence is None:
            return False
        if done.blocks < sequence.blocks:
            # P asserts that it has at least as many blocks: the registration is gone, D's blocks are lost.
            return False
        self._keep(sequence, done.key)
        if sequence.state is State.ORPHAN:
            self._move(sequence, State.OVER)
            self.pool.give(sequence.id)
            self._admit()
        else:
            self._run(sequence, done.key, self.settings.first_token)
            sequence.job.wake.set()
        return True

    def answer(self, pull: Pull) -> str:
        """P: D reads, or says that it will or will not. The key of the KV that it finds in the blocks it names."""
        self.expire()
        if pull.what == "renew":
            # A real engine gives two thirds of a lease more; all of one keeps the leases in the order of their ends.
            self.ledger.renew(pull.request_id, trio.current_time() + self.settings.lease)
            return ""
        key = self.pool.read(pull.blocks)
        if self.ledger.pulled(pull.request_id):
            self.pool.give(pull.request_id)
            self._admit()
        elif pull.what == "read":
            self.stale_pulls += 1
        return key

    async def _push(self, done: Finished, registration: Registration) -> None:
        if await self.transport.push(self, registration, done):
            self.ledger.pushed(done.request_id)
            self.pool.give(done.request_id)
            self.pushes += 1
            self._admit()
        else:
            self.failed_transfers += 1

    # ------------------------------------------------------------- sequences

    async def _start(self, sequence: Sequence) -> None:
        work = sequence.job.work
        params = work.transfer
        if self._pulls(work):
            await self._pull(sequence)
            return
        if not params or not params.get("do_remote_prefill") or work.recomputes:
            self._compute(sequence)
            return
        self._require(not any(name not in params for name in _NEEDED))
        self._move(sequence, State.REMOTE)
        self._remote[sequence.id] = sequence
        registration = Registration(
            request_id=sequence.id,
            blocks=sequence.blocks,
            decode_engine_id=self.engine_id,
            decode_url=self.url,
            decode_life=self.life,
            remote_engine_id=str(params["remote_engine_id"]),
            remote_host=str(params["remote_host"]),
            remote_port=int(params["remote_port"]),
            tp_size=int(params["tp_size"]),
            pp_size=int(params.get("pp_size", 1)),
        )
        try:
            await self.transport.register(self, registration)
        except BaseException as error:
            # Not once P has the registration: from there on `register` neither fails nor is cancelled.
            self._remote.pop(sequence.id, None)
            self._fail(sequence, error)
            raise

    def _pulls(self, work: Work) -> bool:
        return self.settings.mode == "pull" and bool(work.transfer and work.transfer.get("do_remote_prefill"))

    async def _pull(self, sequence: Sequence) -> None:
        work = sequence.job.work
        params = work.transfer or {}
        complete = all(name in params for name in _NEEDED)
        if work.recomputes:
            if complete:
                await self._tell(params, "release")
            self._compute(sequence)
            return
        # P names the blocks of its first prompt only, and D asserts that they are as many as its own.
        self._require("tp_size" in params and len(work.prompts) == 1 and len(_blocks_in(params)) >= sequence.blocks)
        self._move(sequence, State.REMOTE)
        if not complete:
            return  # D warns, and then waits for a transfer that it has not begun
        try:
            key = await self.transport.pull(self, _pull_of(params, "read", sequence.blocks))
        except BaseException as error:
            self._fail(sequence, error)
            raise
        self.pulls += 1
        self._keep(sequence, key)
        self._run(sequence, key, self.settings.first_token)

    async def _tell(self, params: dict[str, Any], what: Literal["release", "renew"]) -> None:
        """D: tell P about blocks that are not read now. A P that cannot be told is no error."""
        with contextlib.suppress(TransferFailed):
            await self.transport.pull(self, _pull_of(params, what))

    async def _beat(self, job: Job) -> None:
        """D: let P's lease on the blocks of a request that queues here run on."""
        job.beat_at = trio.current_time() + self.settings.lease / _BEATS_PER_LEASE
        params = job.work.transfer or {}
        if all(name in params for name in _NEEDED):
            await self._tell(params, "renew")

    def _require(self, holds: bool) -> None:
        """What a real engine asserts in its core or worker, and dies of."""
        if not holds:
            self.die()
            raise EngineDied

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self.pool.give(sequence.id)
        self._move(sequence, State.OVER)
        self.failed_transfers += isinstance(error, TransferFailed)

    def _keep(self, sequence: Sequence, key: str) -> None:
        """D: KV has come. It is cached under the prompt it was asked for, whatever it is: a mix-up stays."""
        self.prompt_tokens["external_kv_transfer"] += sequence.prompt.tokens
        sequence.cached = sequence.prompt.tokens
        if key != sequence.prompt.key and sequence.prompt.tokens >= self.settings.block_size:
            self._cache[sequence.prompt.key] = key

    def _compute(self, sequence: Sequence) -> None:
        self.prompt_tokens["local_compute"] += sequence.prompt.tokens
        if sequence.prompt.key in self._seen:
            size = self.settings.block_size
            sequence.cached = (sequence.prompt.tokens - 1) // size * size  # the last token is always computed
        self._seen[sequence.prompt.key] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        wait = self.settings.prefill_base + self.settings.prefill_per_token * sequence.prompt.tokens
        self._run(sequence, sequence.prompt.key, wait)

    def _run(self, sequence: Sequence, key: str, wait: float) -> None:
        # A prompt that D has cached wrongly answers wrongly, whoever computed it this time.
        key = self._cache.get(sequence.prompt.key, key)
        sequence.words = tokens_of(key, sequence.choice % sequence.job.work.n, sequence.job.work.max_tokens)
        sequence.next_at = trio.current_time() + wait
        self._move(sequence, State.RUNNING)

    async def _finish(self, sequence: Sequence) -> None:
        self._move(sequence, State.OVER)
        if not sequence.job.work.keeps_blocks:
            self.pool.give(sequence.id)
            self._admit()
            return
        self.expire()
        ends = trio.current_time() + self.settings.lease
        if self.settings.mode == "pull":
            self.ledger.hold(sequence.id, ends)
            return
        done = Finished(sequence.id, sequence.blocks, sequence.prompt.key)
        registration = self.ledger.finish(done, ends)
        if registration is not None:
            await self._push(done, registration)

    def _admit(self) -> None:
        """First come, first served: a large request at the head holds the small ones behind it back."""
        self.expire()
        while self._queue:
            sequence = self._queue[0]
            if sequence.state is State.QUEUED:
                if self.counts[State.RUNNING] + self.counts[State.ADMITTED] >= self.settings.max_num_seqs:
                    return
                if not self.pool.take(sequence.id, sequence.blocks, sequence.prompt.key):
                    return
                sequence.block_ids = self.pool.held[sequence.id]
                self._move(sequence, State.ADMITTED)
                sequence.job.wake.set()
            self._queue.popleft()

    def _move(self, sequence: Sequence, state: State) -> None:
        self.counts[sequence.state] -= 1
        sequence.state = state
        self.counts[state] += 1

    def _next_deadline(self, job: Job) -> float:
        deadline = min((s.next_at for s in job.sequences if s.state is State.RUNNING), default=math.inf)
        if any(s.state is State.QUEUED for s in job.sequences):
            deadline = min(deadline, job.beat_at, next(iter(self.ledger.leases.values()), math.inf))
        return deadline


def _blocks_in(params: dict[str, Any]) -> list[int]:
    """The ids of P's blocks: one list a group of layers, and there is one group."""
    groups = params.get("remote_block_ids")
    return list(groups[0]) if isinstance(groups, list) and groups and isinstance(groups[0], list) else []


def _pull_of(params: dict[str, Any], what: Literal["read", "release", "renew"], blocks: int = 0) -> Pull:
    # Of a longer prompt at P, D reads the end.
    ids = _blocks_in(params)[-blocks:] if what == "read" else []
    return Pull(
        request_id=str(params["remote_request_id"]),
        blocks=tuple(ids),
        remote_engine_id=str(params["remote_engine_id"]),
        remote_host=str(params["remote_host"]),
        remote_port=int(params["remote_port"]),
        tp_size=int(params["tp_size"]),
        pp_size=int(params.get("pp_size", 1)),
        what=what,
    )
