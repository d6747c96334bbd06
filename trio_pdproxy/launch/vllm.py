"""The command line and environment of a vLLM engine on the CPU for one role. Pure: nothing is started here.

What is chosen and why was measured on vLLM 0.32 with the NIXL connectors over UCX's tcp transport.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cache import foreign_environ

Role = Literal["prefill", "decode"]
Mode = Literal["push", "pull"]
"""P writes into D's memory while D waits, or D reads P's once P has answered."""

SERVED_MODEL = "tiny"
BLOCK_SIZE = 32
# The engines are many processes on few cores; the proxy beside them must still be served first.
NICE = 10
# uvicorn closes idle connections after 5 s by default, within the proxy's own keep-alive: the proxy would
# now and then send a request into a connection that is just being closed. The server's end waits longer.
KEEP_ALIVE_SECONDS = 75

CONNECTORS: dict[Mode, str] = {"push": "NixlPushConnector", "pull": "NixlPullConnector"}
# "kv_both" is deprecated for these connectors.
KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """One engine to be: its role, where it listens, what it serves.

    port -- HTTP; side_channel_port -- NIXL's ZeroMQ listener, which hands out the engine's coordinates
    mode -- both engines of a pair must have the same
    dp_size -- data-parallel ranks behind the one HTTP port. Each is a whole engine of its own (memory, engine id
        with `_dp<rank>` at its end) and has its side channel at side_channel_port + rank
    lease -- seconds P keeps KV nobody has come for (vLLM's default is 30)
    kv_gib -- memory for KV; one GiB is 16,384 blocks of the test model
    extra -- further vLLM options, appended, so they win
    """

    name: str
    role: Role
    model: Path
    port: int
    side_channel_port: int
    host: str = "127.0.0.1"
    lease: int = 30
    kv_gib: int = 1
    max_model_len: int = 4096
    max_num_seqs: int = 32
    mode: Mode = "push"
    dp_size: int = 1
    extra: Sequence[str] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def side_channel(self) -> str:
        """host:port, as the proxy's configuration wants it; rank 0's if there are several."""
        return f"{self.host}:{self.side_channel_port}"

    @property
    def side_channel_ports(self) -> range:
        """One for each rank."""
        return range(self.side_channel_port, self.side_channel_port + self.dp_size)


def kv_transfer_config(engine: VllmEngine) -> dict[str, object]:
    """vLLM's --kv-transfer-config.

    No engine_id, on purpose: vLLM then makes a new one per start. An engine that comes back with its old
    id meets peers that still hold its dead predecessor's NIXL agent, and every request between them hangs.
    """
    return {
        "kv_connector": CONNECTORS[engine.mode],
        "kv_role": KV_ROLES[engine.role],
        "kv_connector_extra_config": {"kv_lease_duration": engine.lease},
    }


def vllm_argv(engine: VllmEngine, python: Path) -> list[str]:
    """The command. P and D must get the same model string: it is part of their compatibility check."""
    return [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(engine.model)),
        *("--served-model-name", SERVED_MODEL),
        *("--host", engine.host),
        *("--port", str(engine.port)),
        *("--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *(("--data-parallel-size", str(engine.dp_size)) if engine.dp_size > 1 else ()),
        "--enforce-eager",  # no compilation: a tiny model starts sooner without it
        *("--kv-transfer-config", json.dumps(kv_transfer_config(engine), separators=(",", ":"))),
        *engine.extra,
    ]


def vllm_env(
    engine: VllmEngine, base: Mapping[str, str], *, gentle: Path, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment: `base` without Python's own variables, ours over it, `extra` over both.

    gentle -- the folder of the sitecustomize module that makes busy waits give the core away.
    """
    env = foreign_environ(base)
    env |= {
        "PYTHONPATH": str(gentle),
        "PYTHONUNBUFFERED": "1",  # so that the last lines of a crash reach the log
        "VLLM_CPU_KVCACHE_SPACE": str(engine.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding gives both engines the same cores
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": engine.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.side_channel_port),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        "UCX_TLS": "tcp,self",  # no shared memory: containers often give /dev/shm 64 MB
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return env | dict(extra or {})
