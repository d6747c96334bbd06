"""What goes wrong in front of real vLLM engines, through the proxy: every client has an honest answer, and every block
that a decode engine holds comes free or is counted.

A hop in front of each engine makes the faults that an engine alone cannot be made to have.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import trio

from trio_pdproxy.core import sse
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.testing import until
from trio_pdproxy.web.app import ProxyApp

from .harness import CHAT, COMPLETIONS, ask_single, body_of, over, proxy, quiet, restart, text_of
from .hop import Fault, Hop, open_hop
from .metrics import read_metrics, wait_for

if TYPE_CHECKING:
    from .conftest import Engine as VllmEngine
    from .conftest import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000)]

FREE_SECONDS = 5
"""For decode to be free once the proxy says that nothing is owed."""
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client saw."""

    status: int | None
    """None: it had left before."""
    seconds: float
    """Until its answer was there, or until it left."""
    at: float
    """When that was."""
    body: bytes
    complete: bool
    headers: httpx.Headers | None = None

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        if self.headers is None or "event-stream" not in self.headers["content-type"]:
            return text_of(msgspec.json.decode(self.body))
        assert self.body.endswith(b"data: [DONE]\n\n"), self.body
        chunks = [msgspec.json.decode(event) for event in sse.events(self.body)[:-1]]
        return "".join(
            c["text"] if "text" in c else c["delta"].get("content", "") for k in chunks for c in k["choices"]
        )


@dataclass(slots=True)
class Stand:
    """The pair, a hop in front of each of both, the proxy in front of them, and who asks and looks."""

    pair: VllmPair
    p: Hop
    d: Hop
    app: ProxyApp
    client: httpx.AsyncClient
    capsys: pytest.CaptureFixture[str]

    @property
    def stranded(self) -> int:
        return sum(engine.stranded for engine in self.app.pool.decode)

    async def ask(
        self,
        prompt: str | list[str],
        *,
        stream: bool,
        path: str = COMPLETIONS,
        stay: trio.CancelScope | None = None,
        begun_with: trio.Event | None = None,
        ready: bool = True,
        **more: Any,
    ) -> Seen:
        """One request, read to whatever end it has, or until the client leaves, which is when `stay` is cancelled.
        `begun_with` is set at the first byte. Not sent before every engine is usable, if `ready`."""
        if ready:
            await until(lambda: all(engine.usable for engine in self.app.pool.engines), 30)
        begun = trio.current_time()
        status, body, complete, headers = None, b"", True, None
        with stay or trio.move_on_after(60) as scope:
            json = body_of(path, prompt, stream=stream, **more)
            async with self.client.stream("POST", path, json=json) as response:
                status, headers = response.status_code, response.headers
                try:
                    async for data in response.aiter_raw():
                        body += data
                        if begun_with is not None:
                            begun_with.set()
                except httpx.ReadError:
                    complete = False
        assert stay is not None or not scope.cancelled_caught, "no answer within a minute"
        now = trio.current_time()
        return Seen(status, now - begun, now, body, complete and not scope.cancelled_caught, headers)

    async def alone(self, prompt: str, path: str = COMPLETIONS) -> str:
        """What the client should read: prefill alone, past the hop."""
        async with open_client(self.pair.prefill.url, timeout=60) as single:
            return await ask_single(single, path, prompt)

    async def held(self) -> float:
        """Share of its blocks that decode holds."""
        return (await read_metrics(self.pair.decode.url)).kv_usage

    async def holding(self, sequences: int) -> float:
        """Wait until that many sequences wait at decode: what share of its blocks it holds for them."""
        await wait_for(self.pair.decode.url, lambda now: now.waiting == sequences and now.kv_usage > 0, seconds=20)
        return await self.held()

    async def ask_and_open(self, prompt: str, *, stream: bool) -> Seen:
        """A request during which prefill's hop opens its gate as soon as decode holds blocks."""

        async def open_once_held() -> None:
            await wait_for(self.pair.decode.url, lambda now: now.kv_usage > 0, seconds=60)
            self.p.gate.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_once_held)
            seen = await self.ask(prompt, stream=stream)
            nursery.cancel_scope.cancel("answered")
        return seen

    async def free(self, case: str, *seen: Seen, stranded: int = 0) -> Report:
        """The end of a case: nothing owed in the proxy, nothing held by decode; one line for whoever reads along."""
        told = max((one.at for one in seen), default=trio.current_time())
        await over(self.app, 60)
        owed = trio.current_time() - told
        assert self.stranded == stranded, (case, self.app.recent[-1])
        assert all(engine.inflight == engine.debts == 0 for engine in self.app.pool.engines)
        freed = "not looked at"
        if not stranded:
            await wait_for(self.pair.decode.url, lambda now: now.idle, seconds=FREE_SECONDS)
            freed = f"0 after {trio.current_time() - told:.2f} s"
        answers = ", ".join(f"{one.status or 'left'} at {one.seconds:.2f} s" for one in seen)
        self.say(f"{case}: {answers}; owed {owed:.2f} s; decode {freed}; stranded {self.stranded}")
        return self.app.recent[-1]

    def say(self, line: str) -> None:
        with self.capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    async def pay(self, post: bytes) -> None:
        """Pay by hand what the proxy has counted as stranded: the prefill leg once more, past the hop."""
        head, _, body = post.partition(b"\r\n\r\n")
        name = next(line for line in head.split(b"\r\n") if line.startswith(b"x-request-id:"))
        headers = {"content-type": "application/json", "x-request-id": name.split(b":")[1].strip().decode()}
        async with open_client(self.pair.prefill.url, timeout=60) as single:
            assert (await single.post(COMPLETIONS, content=body, headers=headers)).status_code == 200
        await wait_for(self.pair.decode.url, lambda now: now.idle, seconds=FREE_SECONDS)


@asynccontextmanager
async def open_stand(
    pair: VllmPair, capsys: pytest.CaptureFixture[str], *, second: str = "", hops: str = "pd", **settings: Any
) -> AsyncIterator[Stand]:
    """`hops`: before which of both engines (p, d) there is one. `second`: the role of which the proxy is given the
    engine once more, past its hop, as if it were another. Ends with both engines holding nothing."""
    await quiet(pair)
    async with open_hop(pair.prefill.url) as p, open_hop(pair.decode.url) as d:
        # With its sizes given prefill is not probed: a probe would hold a block for a whole lease in every test.
        more = f";lease={pair.lease};tp_size=1"
        prefill = [f"{p.url if 'p' in hops else pair.prefill.url};side_channel={pair.prefill.side_channel}{more}"]
        decode = [f"{d.url if 'd' in hops else pair.decode.url};side_channel={pair.decode.side_channel}"]
        if second == "prefill":  # under another name for the same place: two engines have two side channels
            alias = pair.prefill.side_channel.replace("127.0.0.1", "localhost")
            prefill.append(f"{pair.prefill.url};side_channel={alias}{more}")
        if second == "decode":
            decode.append(f"{pair.decode.url};side_channel={pair.decode.side_channel}")
        # Engines on a busy machine are slow to say that they are well.
        ours: dict[str, Any] = {"prefill": prefill, "decode": decode, "health_interval": 5, "health_timeout": 5}
        async with proxy(pair, **(ours | settings)) as (app, client):
            yield Stand(pair, p, d, app, client, capsys)
    await quiet(pair)


async def together(*asks: Callable[[], Awaitable[Seen]]) -> list[Seen]:
    """What each has seen, in their order, asked at the same time."""
    seen: dict[int, Seen] = {}

    async def one(number: int, ask: Callable[[], Awaitable[Seen]]) -> None:
        seen[number] = await ask()

    async with trio.open_nursery() as nursery:
        for number, ask in enumerate(asks):
            nursery.start_soon(one, number, ask)
    return [seen[number] for number in range(len(asks))]


def prompt_of(case: str, tokens: int = 200) -> str:
    """The test model has a token a byte. It begins with the case: no two share a prefix that may be cached."""
    return (f"{case}: " + "the quick brown fox jumps over the lazy dog. " * 90)[:tokens]


# -- clients that leave ----------------------------------------------------------------------------


@BOTH
async def test_long_prompts_whose_clients_leave_at_any_time_before_the_first_byte(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    async with open_stand(vllm_pair, capsys, hops="") as stand:
        kind = "stream" if stream else "whole"
        times = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
        seen = await together(
            *(
                partial(
                    stand.ask, prompt_of(f"{kind} {t}", 3900), stream=stream, stay=trio.CancelScope(relative_deadline=t)
                )
                for t in times
            )
        )
        await stand.free(f"{len(times)} clients of 3900 tokens leave ({kind})", *seen)
        # Those that were gone before the proxy had read them are not known to it.
        assert {report.outcome for report in stand.app.recent} <= {"disconnect", "ok"}


async def test_whoever_leaves_before_prefill_has_begun_decode_is_freed_by_its_push(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hop keeps the prefill legs back, so that every client is gone for sure before the first byte, and half of
    the legs then fail: nobody is there, and still they have to be sent again."""
    kinds: list[tuple[str, bool, dict[str, Any]]] = [
        (COMPLETIONS, True, {}),
        (COMPLETIONS, False, {}),
        (CHAT, True, {}),
        (CHAT, False, {}),
        (COMPLETIONS, True, {"n": 3, "temperature": 1, "seed": 1}),
        (COMPLETIONS, False, {"n": 3, "temperature": 1, "seed": 1}),
    ]
    faults = [
        Fault("delay", gated=True),
        Fault("answer", status=500, gated=True),
        Fault("answer", status=503, gated=True),
    ]
    async with open_stand(vllm_pair, capsys) as stand:
        for fault, (path, stream, more) in itertools.product(faults, kinds):
            stand.p.arm(fault, fault)
            case = f"prefill {fault}, {path} {'stream' if stream else 'whole'}{' n=3' if more else ''}"
            prompts: list[str | list[str]] = [prompt_of(case)]
            if path == CHAT:
                prompts.append(prompt_of(f"more {case}", 1000))
            else:
                prompts.append([prompt_of(f"first {case}"), prompt_of(f"second {case}", 333)])
            sequences = more.get("n", 1) * (2 if path == CHAT else 3)
            scopes = [trio.CancelScope() for _ in prompts]
            ask = partial(stand.ask, stream=stream, path=path, **more)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave_once_held, stand, sequences, scopes)
                asks = [partial(ask, prompt, stay=scope) for prompt, scope in zip(prompts, scopes, strict=True)]
                seen = await together(*asks)
            assert [one.status for one in seen] == [None, None]
            stand.p.gate.set()
            report = await stand.free(f"{case}, clients leave", *seen)
            assert report.outcome == "disconnect"
            assert report.dispatches[0].settled == "disconnect"
            assert report.dispatches[0].rescue_paid is (None if fault.what == "delay" else True)


async def leave_once_held(stand: Stand, sequences: int, scopes: list[trio.CancelScope]) -> None:
    """The clients leave when decode holds blocks for them."""
    await stand.holding(sequences)
    for scope in scopes:
        scope.cancel("the client leaves")


async def test_clients_that_leave_in_mid_stream(vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        kinds: list[dict[str, Any]] = [{}, {"n": 3, "temperature": 1, "seed": 1}]
        for more in kinds:
            seen = await leave_at_the_first_byte(stand, prompt_of(f"mid-stream {more}"), max_tokens=3000, **more)
            await stand.free(f"leaves in mid-stream, n={more.get('n', 1)}", seen)
            assert stand.app.recent[-1].outcome == "disconnect"
        # The first prompt's tokens come while the second one is still to be computed.
        prompts = [prompt_of("short"), prompt_of("long", 3900)]
        seen = await leave_at_the_first_byte(stand, prompts, max_tokens=100)
        await stand.free("leaves while the second prompt is computed", seen)


async def leave_at_the_first_byte(stand: Stand, prompt: str | list[str], **more: Any) -> Seen:
    stay, begun = trio.CancelScope(), trio.Event()

    async def leave() -> None:
        await begun.wait()
        stay.cancel("the client leaves")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        seen = await stand.ask(prompt, stream=True, stay=stay, begun_with=begun, ignore_eos=True, **more)
    assert (seen.status, seen.complete) == (200, False)
    return seen


# -- the prefill leg fails -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("answer", status=500),
        Fault("answer", status=500, gated=True),
        Fault("answer", status=400, gated=True),
        Fault("answer", status=429, gated=True, headers=b"retry-after: 1\r\n"),
        Fault("answer", status=503, gated=True),
        Fault("reset", gated=True),
        Fault("delay", gated=True),
        Fault("hold", 2),
        Fault("cut", after=60),
        Fault("cut", after=300),
        Fault("lose"),
        Fault("drop"),
        Fault("gateway", 0.01, status=502, headers=b"connection: close\r\n"),
    ],
    ids=str,
)
async def test_a_prefill_leg_that_fails_once_is_made_good(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], fault: Fault
) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        for stream in (True, False):
            kind = f"prefill {fault}, {'stream' if stream else 'whole'}"
            prompt = prompt_of(f"{kind} {fault.after}")
            # A kept-alive connection that is reset has its request sent again at once: that one has to fail, too.
            stand.p.arm(*[fault] * (2 if fault.what == "reset" and not stream else 1))
            seen = await stand.ask_and_open(prompt, stream=stream)
            await stand.free(kind, seen)
            stand.p.faults.clear()
            assert seen.complete
            assert seen.text == await stand.alone(prompt)
            assert stand.app.recent[-1].outcome == "ok"
            ids = {one.id for report in stand.app.recent for one in report.dispatches}
            assert len(ids) == len(stand.app.recent), "no other pair was tried"


@pytest.mark.parametrize(("status", "told"), [(400, 400), (503, 503), (429, 429), (500, 502)], ids=str)
async def test_a_prefill_engine_that_fails_for_good_is_told_and_its_debt_counted(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], status: int, told: int
) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        fault = Fault("answer", status=status, gated=True, headers=b"retry-after: 1\r\n")
        for number, stream in enumerate((True, False), 1):
            stand.p.arm(fault, fault)
            seen = await stand.ask_and_open(prompt_of(f"for good {status} {stream}"), stream=stream)
            assert seen.status == told
            assert seen.headers is not None
            if told == status:
                assert seen.body == fault.body
                assert seen.headers["retry-after"] == "1"
            await stand.free(f"prefill {fault} twice, {'stream' if stream else 'whole'}", seen, stranded=number)
            # What was counted is what is held, until somebody pays.
            await trio.sleep(0.5)
            assert await stand.held() > 0
            await stand.pay(stand.p.posts[-1])


async def test_where_one_prefill_engine_fails_for_good_another_serves(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_stand(vllm_pair, capsys, second="prefill") as stand:
        for stranded, (status, stream) in enumerate(itertools.product((500, 503), (True, False)), 1):
            fault = Fault("answer", status=status, gated=True)
            stand.p.arm(fault, fault)
            for _ in range(4):  # every other request is the other engine's
                prompt = prompt_of(f"another pair {status} {stream} {len(stand.app.recent)}")
                seen = await stand.ask_and_open(prompt, stream=stream)
                assert seen.text == await stand.alone(prompt)
                await over(stand.app)
                if not stand.p.faults:
                    break
            await stand.free(f"prefill {fault} twice, another serves", seen, stranded=stranded)
            first, second = stand.app.recent[-1].dispatches
            assert first.id != second.id
            assert await stand.held() > 0
            await stand.pay(stand.p.posts[-1])


# -- prefill is late -------------------------------------------------------------------------------


@BOTH
async def test_a_late_prefill_is_a_504_at_once_and_its_leg_settles(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    kind = "stream" if stream else "whole"
    bounds: dict[str, Any] = {"connect_timeout": 0.5, "prefill_timeout": 1, "settle_timeout": 5}
    late, hung = Fault("delay", gated=True), Fault("hang")
    async with open_stand(vllm_pair, capsys, **bounds) as stand:
        # The first comes late, the second never and is sent again, the third is sent again in vain.
        for faults, stranded in (([late], 0), ([hung], 0), ([hung, hung], 1)):
            case = f"prefill {', then '.join(map(str, faults))}, {kind}"
            stand.p.arm(*faults)
            seen = await stand.ask(prompt_of(case), stream=stream)
            assert seen.status == 504
            assert 0.95 < seen.seconds < 3
            assert await stand.held() > 0
            stand.p.gate.set()
            report = await stand.free(case, seen, stranded=stranded)
            assert report.dispatches[0].settled == "timeout"
        assert await stand.held() > 0
        await stand.pay(stand.p.posts[-1])


@asynccontextmanager
async def stood_still(pair: VllmPair, engine: VllmEngine, seconds: float) -> AsyncIterator[None]:
    """All processes of an engine are stopped before the block, and go on `seconds` later or when it has failed."""
    begun = trio.current_time()
    await trio.to_thread.run_sync(pair.signal, engine, signal.SIGSTOP)
    try:
        yield
        await trio.sleep_until(begun + seconds)
    finally:
        with trio.move_on_after(10, shield=True):
            await trio.to_thread.run_sync(pair.signal, engine, signal.SIGCONT)


@pytest.mark.parametrize("pause", [3, 8.5])
async def test_a_prefill_engine_that_stands_still(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], pause: float
) -> None:
    """All of its processes are stopped: for less than its leg is carried on, and for more, so that it finds the leg
    that was closed and the one that was sent again side by side when it wakes."""
    bounds: dict[str, Any] = {"connect_timeout": 0.5, "prefill_timeout": 1, "settle_timeout": 6}
    async with open_stand(vllm_pair, capsys, hops="", **bounds) as stand:
        asks = [partial(stand.ask, prompt_of(f"{number} {pause}", 900), stream=number % 2 == 0) for number in range(4)]
        async with stood_still(vllm_pair, vllm_pair.prefill, pause):
            seen = await together(*asks)
            assert [one.status for one in seen] == [504] * 4
            assert all(one.seconds < pause for one in seen)
            assert await stand.held() > 0
        await stand.free(f"prefill stands still for {pause:g} s", *seen)
        prompt = prompt_of(f"after {pause}")
        with trio.fail_after(60):  # who has just woken up may well need more than the second it is given here
            while (after := await stand.ask(prompt, stream=True)).status == 504:
                pass
        assert after.text == await stand.alone(prompt)
        await stand.free("and serves after it", after)


async def test_a_lease_that_has_lapsed_before_decode_asked(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode hears of its request when prefill has forgotten it: after its lease and before the rescue, or after it."""
    async with open_stand(vllm_pair, capsys) as stand:
        delays = [vllm_pair.lease + more for more in (1, 1, 4, 4)]
        stand.d.arm(*(Fault("delay", delay) for delay in delays))
        prompts = [prompt_of(f"lapsed {number}") for number in range(4)]
        seen = await together(
            *(partial(stand.ask, prompt, stream=number % 2 == 0) for number, prompt in enumerate(prompts))
        )
        assert [one.text for one in seen] == [await stand.alone(prompt) for prompt in prompts]
        await stand.free("decode asks when the lease has lapsed", *seen)
        for report in stand.app.recent:
            assert report.dispatches[0].rescue == "lapsed"
            assert report.dispatches[0].rescue_paid is True


# -- the decode leg fails --------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("fault", [Fault("delay", 3), Fault("hold", 3)], ids=str)
async def test_a_decode_engine_that_is_slow_to_accept_or_to_answer(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], fault: Fault, stream: bool
) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        stand.d.arm(fault)
        prompt = prompt_of(f"{fault} {stream}")
        seen = await stand.ask(prompt, stream=stream)
        assert seen.seconds >= 3
        assert seen.text == await stand.alone(prompt)
        report = await stand.free(f"decode {fault}, {'stream' if stream else 'whole'}", seen)
        assert report.dispatches[0].rescue is None


# Each passes the request on: decode holds blocks for it, whatever the proxy is told. Prefill is kept back so that its
# push is still to come when the decode leg breaks.
DECODE_FAULTS = [
    Fault("drop", 0.3),
    Fault("cut", after=0),
    Fault("gateway", 0.3, status=502, headers=b"connection: close\r\n"),
    Fault("gateway", 0.3, status=503, headers=b"connection: close\r\n", body=b"upstream connect error"),
    Fault("gateway", 0.3, status=504, headers=b"connection: close\r\n", body=b"<html>504 Gateway Time-out</html>"),
]


@BOTH
@pytest.mark.parametrize("fault", DECODE_FAULTS, ids=str)
async def test_a_decode_leg_that_breaks_settles_and_another_engine_serves(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], fault: Fault, stream: bool
) -> None:
    kind = f"decode {fault}, {'stream' if stream else 'whole'}"
    async with open_stand(vllm_pair, capsys, second="decode") as stand:
        for number in range(3):
            stand.d.arm(fault)
            stand.p.arm(Fault("delay", 1))
            prompt = prompt_of(f"{number} {kind}")
            seen = await stand.ask(prompt, stream=stream)
            assert seen.text == await stand.alone(prompt)
            report = await stand.free(kind, seen)
            stand.p.faults.clear()
            if len(report.dispatches) == 2:
                break
        else:
            raise AssertionError("no request came by the fault")
        first, second = report.dispatches
        assert first.id != second.id
        assert first.debt.value == "paid"


@BOTH
async def test_a_decode_leg_that_breaks_without_another_engine_is_a_502_and_settles(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        for fault in DECODE_FAULTS:
            # Another one for the same pair tried again: that is for a kept-alive connection which says nothing.
            stand.d.arm(fault, fault)
            stand.p.arm(Fault("delay", 1), Fault("delay", 1))
            seen = await stand.ask(prompt_of(f"alone {fault} {stream}"), stream=stream)
            assert seen.status == 502, seen.body
            await stand.free(f"decode {fault}, no other, {'stream' if stream else 'whole'}", seen)
            stand.d.faults.clear()
            stand.p.faults.clear()


async def test_a_stream_that_is_cut_never_looks_complete(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_stand(vllm_pair, capsys) as stand:
        stand.d.arm(Fault("cut", after=1500))
        seen = await stand.ask(prompt_of("cut"), stream=True, max_tokens=500, ignore_eos=True)
        assert_cut(seen)
        await stand.free("decode's stream is cut", seen)
        stand.d.arm(Fault("cut", after=300))
        seen = await stand.ask(prompt_of("cut whole"), stream=False)
        assert seen.status == 502
        await stand.free("decode's answer in one piece is cut", seen)


def assert_cut(seen: Seen) -> None:
    """An error event, and no end that could be taken for a good one."""
    assert seen.status == 200
    assert not seen.complete
    assert b"[DONE]" not in seen.body
    assert sse.error_event(sse.events(seen.body)[-1]) is not None, seen.body[-300:]


# -- engines that die ------------------------------------------------------------------------------


def id_of(engine: Engine) -> str:
    assert engine.about.meta is not None
    return engine.about.meta.engine_id


@pytest.mark.kills
async def test_a_prefill_engine_that_is_killed_while_decode_waits(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    debts = 5
    async with open_stand(vllm_pair, capsys, hops="", health_interval=1, health_timeout=1) as stand:
        (p,), (d,) = stand.app.pool.prefill, stand.app.pool.decode
        seen: list[Seen] = []

        async def one(number: int) -> None:
            stay = trio.CancelScope(relative_deadline=2) if number == 0 else None  # its debt is one all the same
            seen.append(await stand.ask(prompt_of(f"killed {number}"), stream=number % 2 == 0, stay=stay))

        await trio.to_thread.run_sync(vllm_pair.signal, vllm_pair.prefill, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            for number in range(debts):
                nursery.start_soon(one, number)
            held = await stand.holding(debts)
            await until(lambda: len(seen) == 1, 10)  # one has left
            await trio.to_thread.run_sync(vllm_pair.kill, vllm_pair.prefill)
        assert sorted(one.status or 0 for one in seen) == [0, *[502] * (debts - 1)]
        assert max(one.seconds for one in seen) < 10
        await stand.free(f"prefill killed with {debts} debts", *seen, stranded=debts)
        assert await stand.held() == held
        refused = await stand.ask("nobody is there", stream=True, ready=False)
        assert refused.status in (502, 503)
        await stand.free("and a request after that", refused, stranded=debts)

        # Decode has to be restarted too, as the log said: what was counted is what it holds. Traffic returns by itself.
        ids = id_of(p), id_of(d)
        await restart(vllm_pair, vllm_pair.prefill, vllm_pair.decode)
        await until(lambda: p.usable and d.usable and not {id_of(p), id_of(d)} & set(ids), 60)
        prompt = prompt_of("both are back")
        back = await stand.ask(prompt, stream=True)
        assert back.text == await stand.alone(prompt)
        await stand.free("both are back", back, stranded=debts)
        await wait_for(vllm_pair.decode.url, lambda now: now.idle, seconds=FREE_SECONDS)


@pytest.mark.kills
async def test_a_decode_engine_that_is_killed_in_mid_stream(
    vllm_pair: VllmPair, capsys: pytest.CaptureFixture[str]
) -> None:
    """One client is being streamed to, one waits for an answer in one piece, and for two decode waits for its KV."""
    async with open_stand(vllm_pair, capsys, hops="p", health_interval=1, health_timeout=1) as stand:
        (d,) = stand.app.pool.decode
        old = id_of(d)
        begun = trio.Event()
        ask = partial(stand.ask, max_tokens=3000, ignore_eos=True)

        async def kill() -> None:
            await begun.wait()
            await wait_for(vllm_pair.decode.url, lambda now: now.running == 2, seconds=30)
            stand.p.arm(*[Fault("delay", gated=True)] * 2)
            waiting.set()
            await wait_for(vllm_pair.decode.url, lambda now: now.waiting == 2, seconds=30)
            await trio.to_thread.run_sync(vllm_pair.kill, vllm_pair.decode)

        waiting = trio.Event()

        async def ask_late(*, stream: bool) -> Seen:
            await waiting.wait()
            return await stand.ask(prompt_of(f"d waiting {stream}"), stream=stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            seen = await together(
                partial(ask, prompt_of("d streaming"), stream=True, begun_with=begun),
                partial(ask, prompt_of("d whole"), stream=False),
                partial(ask_late, stream=True),
                partial(ask_late, stream=False),
            )
        assert_cut(seen[0])
        assert [one.status for one in seen[1:]] == [502] * 3
        stand.p.gate.set()
        await over(stand.app)
        assert stand.stranded == 0
        killed = trio.current_time()
        await wait_for(vllm_pair.prefill.url, lambda now: now.idle, seconds=vllm_pair.lease + 3)
        held = trio.current_time() - killed
        answers = ", ".join(f"{one.status} at {one.seconds:.2f} s" for one in seen)
        stand.say(f"decode killed: {answers}; prefill 0 after {held:.2f} s; stranded 0")

        await restart(vllm_pair, vllm_pair.decode)
        await until(lambda: d.usable and id_of(d) != old, 60)
        prompt = prompt_of("decode is here again")
        back = await stand.ask(prompt, stream=True)
        assert back.text == await stand.alone(prompt)
        await stand.free("decode is back", back)
