"""An engine's connections: kept, expired, found stale, and never leaked, whoever is cancelled where."""

from __future__ import annotations

import gc
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.unit.raw import Pieces, RawServer, answering, eventually, raw_server
from trio_pdproxy.engines import connections as module
from trio_pdproxy.engines.connections import KEEPALIVE, Connections, Origin
from trio_pdproxy.engines.wire import Connection, RefusedError, request_bytes

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
REQUEST = request_bytes(b"GET", b"/", [], b"")


class Network:
    """Dials in memory: every stream gives `answers` again and again."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = answers or (OK,) * 20
        self.streams: list[Pieces] = []

    async def dial(self, host: str, port: int) -> Pieces:
        await trio.lowlevel.checkpoint()
        self.streams.append(Pieces(self.answers, "silence"))
        return self.streams[-1]

    @property
    def open(self) -> int:
        return sum(not stream.closed for stream in self.streams)


def in_memory(network: Network) -> Connections:
    return Connections(Origin("http", "engine", 1), dial=network.dial)


def on_loopback(server: RawServer) -> Connections:
    return Connections(Origin("http", "127.0.0.1", server.port))


async def call(connections: Connections, connection: Connection | None = None) -> Connection:
    """One request and its answer on a connection that is not given back yet."""
    connection = connection or await connections.take()
    await connection.send(REQUEST)
    assert await connection.receive_all(100) == b"ok"
    return connection


# --- where an engine is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        ("http://a:1", Origin("http", "a", 1), "a:1"),
        ("http://a", Origin("http", "a", 80), "a:80"),
        ("https://a", Origin("https", "a", 443), "a:443"),
        ("http://[::1]:5/", Origin("http", "::1", 5), "[::1]:5"),
        ("HTTP://A:1", Origin("http", "a", 1), "a:1"),
    ],
)
def test_an_origin_is_read_from_a_url(url: str, origin: Origin, authority: str) -> None:
    assert Origin.of(url) == origin
    assert Origin.of(url).authority == authority


@pytest.mark.parametrize("url", ["a:1", "//a:1", "ftp://a", "http://", "http://:1", "http://a:99999", "http://a:x", ""])
def test_what_is_no_address_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Origin.of(url)


# --- kept alive -------------------------------------------------------------------------------------


async def test_a_connection_whose_answer_is_complete_is_used_again() -> None:
    network = Network()
    connections = in_memory(network)
    for served in range(5):
        connection = await call(connections)
        assert connection.served == served
        assert (connections.open, connections.idle) == (1, 0)
        await connections.give_back(connection)
        assert (connections.open, connections.idle) == (1, 1)
    assert len(network.streams) == 1


async def test_the_newest_idle_connection_is_taken_first() -> None:
    network = Network()
    connections = in_memory(network)
    taken = [await call(connections) for _ in range(3)]
    for connection in taken:
        await connections.give_back(connection)
    assert [await connections.take() for _ in range(3)] == taken[::-1]
    assert len(network.streams) == 3


async def test_a_fresh_one_has_never_served_and_leaves_the_idle_ones_alone() -> None:
    connections = in_memory(Network())
    await connections.give_back(await call(connections))
    connection = await connections.take(fresh=True)
    assert connection.served == 0
    assert (connections.open, connections.idle) == (2, 1)


@pytest.mark.parametrize("answer", [CLOSING, OK + b"x", OK[:-1], b""], ids=repr)
async def test_a_connection_that_cannot_serve_again_is_closed_when_given_back(answer: bytes) -> None:
    network = Network(answer)
    connections = in_memory(network)
    connection = await connections.take()
    await connection.send(REQUEST)
    if answer:
        assert (await connection.receive_body()).startswith(b"o")
    await connections.give_back(connection)
    assert (connections.open, connections.idle, network.open) == (0, 0, 0)


async def test_closing_and_giving_back_twice_count_once() -> None:
    network = Network()
    connections = in_memory(network)
    connection = await connections.take()
    await connections.close(connection)
    await connections.close(connection)
    await connections.give_back(connection)
    assert (connections.open, connections.idle, network.open) == (0, 0, 0)


# --- expiry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("idle", "reused"), [(0, True), (KEEPALIVE - 0.01, True), (KEEPALIVE, False), (60, False)])
async def test_an_idle_connection_is_used_again_for_three_seconds_only(
    idle: float, reused: bool, mock_clock: trio.testing.MockClock
) -> None:
    network = Network()
    connections = in_memory(network)
    await connections.give_back(await call(connections))
    mock_clock.jump(idle)
    await connections.take()
    assert len(network.streams) == (1 if reused else 2)
    assert (connections.open, connections.idle, network.open) == (1, 0, 1)


async def test_the_idle_time_counts_from_the_last_answer(mock_clock: trio.testing.MockClock) -> None:
    network = Network()
    connections = in_memory(network)
    for _ in range(5):
        await connections.give_back(await call(connections))
        mock_clock.jump(KEEPALIVE - 0.1)
    assert len(network.streams) == 1


async def test_expire_closes_what_was_idle_too_long_and_nothing_else(mock_clock: trio.testing.MockClock) -> None:
    network = Network()
    connections = in_memory(network)
    old, new, busy = [await call(connections) for _ in range(3)]
    await connections.give_back(old)
    mock_clock.jump(2)
    await connections.give_back(new)
    mock_clock.jump(1)
    await connections.expire()
    assert (old.closed, new.closed, busy.closed) == (True, False, False)
    assert (connections.open, connections.idle) == (2, 1)


async def test_giving_one_back_expires_the_others(mock_clock: trio.testing.MockClock) -> None:
    connections = in_memory(Network())
    taken = [await call(connections) for _ in range(10)]
    for connection in taken[:9]:
        await connections.give_back(connection)
    mock_clock.jump(10)
    await connections.give_back(taken[9])
    assert (connections.open, connections.idle) == (1, 1)


# --- found stale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoken", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"], ids=["closed", "spoken out of turn"])
async def test_an_idle_connection_that_the_engine_has_done_with_is_not_used_again(spoken: bytes) -> None:
    go = trio.Event()

    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        first = server.accepted == 1
        await server.read_request(stream)
        await stream.send_all(OK)
        if first:
            await go.wait()
            if not spoken:
                return
            await stream.send_all(spoken)
        await stream.receive_some(1)

    async with raw_server(handler) as server:
        connections = on_loopback(server)
        first = await call(connections)
        await connections.give_back(first)
        assert await connections.take() is first
        connections._idle.append(first)
        go.set()
        await eventually(first.stale)
        second = await call(connections)
        assert second.served == 0
        assert first.closed
        assert (connections.open, connections.idle, server.accepted) == (1, 0, 2)
        await connections.close(second)


async def test_of_many_idle_ones_all_the_stale_are_closed_before_a_new_one_is_opened() -> None:
    async with raw_server(answering(OK, then="close")) as server:
        connections = on_loopback(server)
        taken = [await call(connections) for _ in range(5)]
        for connection in taken:
            await connections.give_back(connection)
        await eventually(lambda: all(connection.stale() for connection in taken))
        fresh = await connections.take()
        assert fresh not in taken
        assert (connections.open, connections.idle) == (1, 0)
        await connections.close(fresh)


# --- refused ----------------------------------------------------------------------------------------


async def test_a_closed_port_is_refused_in_the_systems_words() -> None:
    with trio.socket.socket() as placeholder:
        await placeholder.bind(("127.0.0.1", 0))  # bound and not listening
        connections = Connections(Origin("http", "127.0.0.1", placeholder.getsockname()[1]))
        with pytest.raises(RefusedError, match="Connection refused"):
            await connections.take()
    assert connections.open == 0


async def test_an_engine_that_does_not_accept_in_time_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async def silent(host: str, port: int) -> trio.abc.Stream:
        await trio.sleep_forever()
        raise AssertionError

    connections = Connections(Origin("http", "engine", 1), dial=silent, connect_timeout=5)
    with pytest.raises(RefusedError, match="within 5 s"):
        await connections.take()
    assert trio.current_time() == pytest.approx(5, abs=0.01)
    assert connections.open == 0


@pytest.mark.parametrize("error", [OSError(113, "No route to host"), trio.BrokenResourceError("gone"), OSError()])
async def test_what_dialling_raises_is_a_refusal(error: Exception) -> None:
    async def dial(host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise error

    with pytest.raises(RefusedError, match=r"no connection \(.+\)"):
        await Connections(Origin("http", "engine", 1), dial=dial).take()


async def test_what_can_be_no_host_name_is_a_refusal_not_a_crash() -> None:
    with pytest.raises(RefusedError):
        await Connections(Origin("http", "a" * 64 + ".example", 1)).take()


def test_the_cause_is_found_inside_the_errors_trio_wraps_it_in() -> None:
    error = OSError("all attempts failed")
    error.__cause__ = ExceptionGroup("attempts", [OSError(111, "Connection refused"), OSError(113, "No route")])
    assert module._words(error) == "Connection refused"
    assert module._words(RuntimeError()) == "RuntimeError"


# --- TLS --------------------------------------------------------------------------------------------


def https(server: RawServer) -> Connections:
    return Connections(Origin("https", "127.0.0.1", server.port), ssl_context=ssl.create_default_context())


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100, b""], ids=repr)
async def test_a_server_that_speaks_no_tls_is_a_refusal_and_its_connection_is_closed(answer: bytes) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        if answer:
            await stream.send_all(answer)
            await stream.receive_some(65536)

    async with raw_server(handler) as server:
        connections = https(server)
        with pytest.raises(RefusedError):
            await connections.take()
        await server.until(lambda: server.accepted == 1 and server.open == 0)
        assert connections.open == 0


async def test_a_handshake_that_never_ends_is_bounded_and_its_connection_is_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def dial(host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return ours

    connections = Connections(Origin("https", "engine", 1), dial=dial)
    with pytest.raises(RefusedError, match="within 5 s"):
        await connections.take()
    assert connections.open == 0
    while await theirs.receive_some():
        pass  # until the end of the stream: it was closed


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"]
    done = subprocess.run(
        ["openssl", "req", *kind, *names, "-keyout", "-", "-out", "-"], capture_output=True, check=True, timeout=30
    )
    path.write_bytes(done.stdout)
    return path


async def test_over_tls_a_connection_is_kept_and_a_wrong_certificate_refused(certificate: Path) -> None:
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def handler(server: RawServer, plain: trio.SocketStream) -> None:
        stream = trio.SSLStream(plain, server_context, server_side=True, https_compatible=True)
        for _ in range(3):
            if not await stream.receive_some():
                return
            await stream.send_all(OK)
        await stream.receive_some()

    async with raw_server(handler) as server:
        connections = Connections(Origin("https", "127.0.0.1", server.port), ssl_context=trusting)
        for served in range(3):
            connection = await call(connections)
            assert connection.served == served
            await connections.give_back(connection)
        await connections.shut()
        assert (connections.open, server.accepted) == (0, 1)
        with pytest.raises(RefusedError, match="certificate"):
            await https(server).take()
        await server.until(lambda: server.open == 0)


# --- cancelled --------------------------------------------------------------------------------------


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` when the task it was made in has been stepped `at` times: blocked, or just woken."""

    def __init__(self, scope: trio.CancelScope, at: int, *, woken: bool) -> None:
        self._scope, self._left, self._woken = scope, at, woken
        self._task = trio.lowlevel.current_task()
        self.reached = False

    def _step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self.reached = True
                self._scope.cancel()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._woken:
            self._step(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._woken:
            self._step(task)


async def sweep(server: RawServer, make: Callable[[RawServer], Connections], *, woken: bool) -> int:
    """A whole call, cancelled at each of its steps in turn: nothing may be left open anywhere."""
    steps = 0
    reached = True
    while reached:
        steps += 1
        connections = make(server)
        with trio.CancelScope() as scope:
            at = CancelAt(scope, steps, woken=woken)
            trio.lowlevel.add_instrument(at)
            try:
                connection = await connections.take()
                try:
                    await connection.send(REQUEST)
                    await connection.receive_all(100)
                finally:
                    with trio.move_on_after(1, shield=True):
                        await connections.give_back(connection)
            except RefusedError:
                pass
            finally:
                trio.lowlevel.remove_instrument(at)
        reached = at.reached
        assert connections.open == connections.idle
        await connections.shut()
        assert (connections.open, connections.idle) == (0, 0)
        await server.until(lambda: server.open == 0)
    gc.collect()  # a socket left open would say so
    return steps


@pytest.mark.parametrize("woken", [False, True])
async def test_a_call_cancelled_at_any_step_leaks_no_connection(woken: bool) -> None:
    async with raw_server(answering(OK)) as server:
        assert await sweep(server, on_loopback, woken=woken) > 4


@pytest.mark.parametrize("woken", [False, True])
async def test_a_handshake_cancelled_at_any_step_leaks_no_connection(woken: bool) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        while await stream.receive_some(65536):
            await stream.send_all(b"no TLS")

    async with raw_server(handler) as server:
        assert await sweep(server, https, woken=woken) > 3


@pytest.mark.parametrize("when", ["take", "give_back", "close", "expire", "shut"])
async def test_what_is_cancelled_from_the_start_still_closes_and_counts_right(
    when: str, mock_clock: trio.testing.MockClock
) -> None:
    network = Network()
    connections = in_memory(network)
    taken = [await call(connections) for _ in range(4)]
    for connection in taken[1:]:
        await connections.give_back(connection)
    mock_clock.jump(10)
    with trio.CancelScope() as scope:
        scope.cancel()
        if when == "take":
            await connections.take()
        elif when == "give_back":
            await connections.give_back(taken[0])
        elif when == "close":
            await connections.close(taken[0])
        elif when == "expire":
            await connections.expire()
        else:
            await connections.shut()
    expected = {"take": (1, 0), "give_back": (1, 1), "close": (3, 3), "expire": (1, 0), "shut": (1, 0)}[when]
    assert (connections.open, connections.idle) == expected
    assert network.open == connections.open


async def test_after_shut_nothing_is_kept() -> None:
    network = Network()
    connections = in_memory(network)
    idle, busy = await call(connections), await call(connections)
    await connections.give_back(idle)
    await connections.shut()
    assert idle.closed
    assert not busy.closed
    await connections.give_back(busy)
    assert (connections.open, connections.idle, network.open) == (0, 0, 0)
