"""The NIXL side channel: asked the one safe question, understood or refused, always within its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import trio
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.raw import RawServer, raw_server
from trio_pdproxy.engines.coordinates import Meta, SideChannelError, ZmqSideChannel, read_meta

pack = msgspec.msgpack.encode

AGENT = {
    "engine_id": "the-engine",
    "agent_metadata": b"\x00\xff",
    "kv_caches_base_addr": [1, 2],
    "block_size": 32,
    "num_blocks": 100,
    "dcp_size": 2,
    "attn_backend_name": "CPU",
}


def payload(agent: object = AGENT, compatibility_hash: object = "the-hash") -> bytes:
    return pack({"compatibility_hash": compatibility_hash, "agent_metadata_bytes": pack(agent)})


class Listener:
    def __init__(self) -> None:
        self.port = 0
        self.asked: list[bytes] = []


@contextmanager
def listening(answer: Callable[[], list[bytes] | None]) -> Iterator[Listener]:
    """A ROUTER in a thread, as an engine has one; `answer` gives the frames of each reply, None for none."""
    listener = Listener()
    stop = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        listener.port = router.bind_to_random_port("tcp://127.0.0.1")

        def run() -> None:
            while not stop.is_set():
                if router.poll(10):
                    identity, empty, question = router.recv_multipart()
                    listener.asked.append(question)
                    if (frames := answer()) is not None:
                        router.send_multipart([identity, empty, *frames])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener
        finally:
            stop.set()
            thread.join()


async def test_an_engine_tells_who_it_is_and_only_rank_zero_is_asked() -> None:
    with listening(lambda: [payload(), pack(time.perf_counter())]) as listener:
        meta = await ZmqSideChannel().ask("127.0.0.1", listener.port)
    assert meta == Meta("the-engine", "the-hash", block_size=32, num_blocks=100, dcp_size=2)
    assert [msgspec.msgpack.decode(question) for question in listener.asked] == [[b"get_meta_msg", 0, 0]]


async def test_an_engine_that_answers_later_than_others_is_still_heard_and_many_are_asked_at_once() -> None:
    channel = ZmqSideChannel()
    with listening(lambda: [payload()]) as listener:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(channel.ask, "127.0.0.1", listener.port)
    assert len(listener.asked) == 20


async def test_a_restarted_engine_is_heard_on_the_same_channel_with_its_new_id() -> None:
    ids = iter(["old", "new"])
    with listening(lambda: [payload(AGENT | {"engine_id": next(ids)})]) as listener:
        channel = ZmqSideChannel()
        assert [(await channel.ask("127.0.0.1", listener.port)).engine_id for _ in range(2)] == ["old", "new"]


async def test_a_listener_that_never_answers_is_given_up_within_the_deadline() -> None:
    with listening(lambda: None) as listener:
        began = trio.current_time()
        with pytest.raises(SideChannelError, match=r"no answer .* within 0\.2 s"):
            await ZmqSideChannel(0.2).ask("127.0.0.1", listener.port)
        assert 0.15 < trio.current_time() - began < 2


async def test_a_closed_port_is_given_up_within_the_deadline() -> None:
    with trio.socket.socket() as placeholder:
        await placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        began = trio.current_time()
        with pytest.raises(SideChannelError, match="VLLM_NIXL_SIDE_CHANNEL_HOST"):
            await ZmqSideChannel(0.2).ask("127.0.0.1", port)
        assert trio.current_time() - began < 2


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 200], ids=repr)
async def test_a_port_that_speaks_no_zeromq_is_given_up_within_the_deadline(greeting: bytes) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        if greeting:
            await stream.send_all(greeting)
        while await stream.receive_some(4096):
            pass

    async with raw_server(handler) as server:
        with pytest.raises(SideChannelError):
            await ZmqSideChannel(0.2).ask("127.0.0.1", server.port)


@pytest.mark.parametrize("host", ["no such host", "", "a:b:c"])
async def test_what_can_be_no_address_is_an_error_of_the_side_channel(host: str) -> None:
    with pytest.raises(SideChannelError):
        await ZmqSideChannel(0.2).ask(host, 5600)


async def test_a_cancelled_question_is_over_within_its_deadline_and_the_channel_goes_on() -> None:
    answers: list[list[bytes] | None] = [None, [payload()]]
    with listening(lambda: answers.pop(0)) as listener:
        channel = ZmqSideChannel(0.3)
        with trio.fail_after(3):
            with trio.move_on_after(0.05):
                with pytest.raises(SideChannelError):
                    await channel.ask("127.0.0.1", listener.port)
            assert (await channel.ask("127.0.0.1", listener.port)).engine_id == "the-engine"


async def test_a_system_without_a_socket_to_give_is_an_error_of_the_side_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_context() -> zmq.Context[zmq.Socket[bytes]]:
        raise zmq.ZMQError(24, "Too many open files")

    monkeypatch.setattr("trio_pdproxy.engines.coordinates.zmq.Context", no_context)
    with pytest.raises(SideChannelError, match="Too many open files"):
        await ZmqSideChannel(0.2).ask("127.0.0.1", 5600)


GARBAGE = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "text": b"hello",
    "a number": pack(1),
    "a list": pack(["get_meta_msg", 0, 0]),
    "an empty map": pack({}),
    "no metadata": pack({"compatibility_hash": "h"}),
    "no hash": pack({"agent_metadata_bytes": pack(AGENT)}),
    "metadata is text": pack({"compatibility_hash": "h", "agent_metadata_bytes": "text"}),
    "metadata is empty": pack({"compatibility_hash": "h", "agent_metadata_bytes": b""}),
    "metadata is no map": payload([1, 2]),
    "no engine id": payload({"block_size": 32}),
    "engine id is null": payload(AGENT | {"engine_id": None}),
    "engine id is a number": payload(AGENT | {"engine_id": 7}),
    "hash is a number": payload(compatibility_hash=7),
    "truncated": payload()[:-1],
    "more behind it": payload() + b"x",
    "no text": payload().replace(b"the-engine", b"\xff\xfe-engine"),
    "nested without end": b"\x81\xa1x" + b"\x91" * 100_000,
    "metadata nested without end": pack(
        {"compatibility_hash": "h", "agent_metadata_bytes": b"\x81\xa1x" + b"\x91" * 100_000}
    ),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_the_place_is_named(garbage: bytes) -> None:
    with pytest.raises(SideChannelError, match="here:5600"):
        read_meta(garbage, "here:5600")


@pytest.mark.parametrize("frames", [[b"garbage"], [b""], [b"", payload()]], ids=["garbage", "nothing", "shifted"])
async def test_a_listener_that_answers_garbage_is_an_error_of_the_side_channel(frames: list[bytes]) -> None:
    with listening(lambda: frames) as listener, pytest.raises(SideChannelError, match=r"127\.0\.0\.1"):
        await ZmqSideChannel().ask("127.0.0.1", listener.port)


@given(st.binary())
def test_no_bytes_make_the_reader_raise_anything_else(data: bytes) -> None:
    for garbage in (data, pack({"compatibility_hash": "h", "agent_metadata_bytes": data})):
        with suppress(SideChannelError):
            read_meta(garbage, "here")


def test_members_this_version_does_not_know_are_ignored_and_missing_ones_have_defaults() -> None:
    assert read_meta(payload({"engine_id": "e", "new": {"a": [1]}}), "here") == Meta("e", "the-hash")
