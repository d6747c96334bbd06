"""What each preset starts from: the program, its flags, its environment. Pure.

What is chosen for the cpu preset, and why, was measured on vLLM 0.32 with the NIXL connectors over UCX's tcp
transport.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from trio_pdproxy.config import Role

from .cache import PYTHON_VARIABLES
from .environment import EngineEnvironment
from .model import model_folder
from .script import Mode, Preset, Script
from .script_rules import KV_CONFIG

TEST_MODEL = "tiny"
"""What the cpu preset's own model is called."""

READY_TIMEOUTS: Mapping[Preset, float] = {"cuda": 1800.0, "cpu": 300.0, "sim": 30.0}
# The cpu preset's engines are many processes on few cores; the proxy beside them must still be served first.
NICE: Mapping[Preset, int] = {"cuda": 0, "cpu": 10, "sim": 0}

CONNECTORS: Mapping[Mode, str] = {"push": "NixlPushConnector", "pull": "NixlPullConnector"}
# "kv_both" is deprecated for these connectors.
KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

_API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")

_CPU_FLAGS: Mapping[str, Any] = {
    "block-size": 32,
    "max-model-len": 4096,
    "max-num-seqs": 32,
    "enforce-eager": True,  # no compilation: a tiny model starts sooner without it
}
_CPU_ENV: dict[str, str | None] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 16,384 blocks of the test model
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding gives both engines the same cores
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self",  # no shared memory: containers often give /dev/shm 64 MB
    "HF_HUB_OFFLINE": "1",
}
_VLLM_ENV: dict[str, str | None] = {
    "PYTHONUNBUFFERED": "1",  # so that the last lines of a crash reach the log
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def own_vllm(script: Script) -> bool:
    """Whether the script needs the engine environment of `trio-pdproxy engines install`."""
    return script.preset == "cpu" and script.vllm is None


def own_model(script: Script) -> bool:
    """Whether the script serves the test model that is made here."""
    return script.preset == "cpu" and script.model is None


def model_of(script: Script) -> str:
    if script.model is not None:
        return script.model
    return str(model_folder()) if script.preset == "cpu" else "sim"


def served_model(script: Script) -> str:
    """What clients call the model."""
    return script.served_model_name or (TEST_MODEL if own_model(script) else model_of(script))


def flags(script: Script, role: Role) -> dict[str, Any]:
    """Every vLLM flag of a role but those the engine's place decides (host, port, model). User's over the preset's."""
    given = script.flags_of(role)
    merged = (dict(_CPU_FLAGS) if script.preset == "cpu" else {}) | given
    if script.preset != "sim":
        merged[KV_CONFIG] = kv_transfer_config(script, role)
    return merged


def kv_transfer_config(script: Script, role: Role) -> Any:
    """vLLM's --kv-transfer-config; a mapping in the script's flags is laid over it, text replaces it.

    No engine_id, on purpose: vLLM then makes a new one per start. An engine that comes back with its old
    id meets peers that still hold its dead predecessor's NIXL agent, and every request between them hangs.
    """
    config: Any = {
        "kv_connector": CONNECTORS[script.mode],
        "kv_role": KV_ROLES[role],
        "kv_connector_extra_config": {"kv_lease_duration": int(script.lease)},
    }
    for given in (script.flags.get(KV_CONFIG), script.of(role).flags.get(KV_CONFIG)):
        if isinstance(given, str):
            config = given
        elif isinstance(given, Mapping) and isinstance(config, dict):
            config = _over(config, given)
    return config


def environment(script: Script, role: Role, found: EngineEnvironment | None) -> dict[str, str | None]:
    """What is set (None: removed) in the environment the launcher itself has. `${...}` is not replaced yet.

    found -- the engine environment, where the script needs it
    """
    if script.of(role).command is not None:
        found = None  # whose interpreter that is, only the script knows
    env: dict[str, str | None] = {}
    if script.preset != "sim":
        env |= _VLLM_ENV | {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "${host}",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "${side_channel_port}",
            # uvicorn's 5 s default, met by a small delay, closes a connection under a proxy's next request.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(ceil(script.keep_alive)),
        }
    if script.preset == "cpu":
        env |= _CPU_ENV
    if found is not None:
        # Not handed down to another interpreter: they belong to the launcher's own Python.
        env = dict.fromkeys(PYTHON_VARIABLES) | {"PYTHONPATH": str(found.gentle)} | env
    return env | script.env_of(role)


def command(script: Script, role: Role, found: EngineEnvironment | None) -> list[str]:
    """The command line, with `${...}` not replaced yet.

    P and D get the same model text: it is part of their compatibility check.
    """
    own = script.of(role).command
    if own is not None:
        return list(own)
    if script.preset == "sim":
        return _sim(script, role)
    program = list(script.vllm or ())
    if not program:
        program = [str(found.python), *_API_SERVER] if found is not None else ["vllm", "serve"]
    # `vllm serve` wants the model first, the module it stands for as an option.
    model = ["${model}"] if program[-1] == "serve" else ["--model", "${model}"]
    named = ["--served-model-name", "${served_model_name}"] if _renamed(script) else []
    where = ["--host", "${host}", "--port", "${port}"]
    return [*program, *model, *named, *where, *flag_words(flags(script, role))]


def _renamed(script: Script) -> bool:
    return served_model(script) != model_of(script)


def _sim(script: Script, role: Role) -> list[str]:
    counts = {"prefill": ("1", "0"), "decode": ("0", "1")}[role]
    given = script.flags_of(role)
    ranks = str(script.ranks_of(role))
    known: dict[str, Any] = {
        "prefill": counts[0],
        "decode": counts[1],
        "host": "${host}",
        f"{role}-port": "${port}",
        "side-port": "${side_channel_port}",
        "model": "${served_model_name}",
        "mode": script.mode,
        "lease": f"{script.lease:g}",
        "keep-alive": f"{script.keep_alive:g}",
        "kv-over-http": True,
        **({"prefill-dp": ranks} if role == "prefill" and ranks != "1" else {}),
    }
    rest = {name: value for name, value in given.items() if name != "data-parallel-size"}
    return [sys.executable, "-m", "trio_pdproxy", "sim", *flag_words(known | rest)]


def flag_words(given: Mapping[str, Any]) -> list[str]:
    """A mapping of flags as words of a command line."""
    words: list[str] = []
    for name, value in given.items():
        flag = f"--{name}"
        if value is None:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [flag, _json(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [flag, *(_json(item) if isinstance(item, (Mapping, list)) else str(item) for item in value)]
        else:
            words += [flag, str(value)]
    return words


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        merged[name] = _over(held, value) if isinstance(held, dict) and isinstance(value, Mapping) else value
    return merged
