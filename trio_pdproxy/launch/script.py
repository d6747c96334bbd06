"""The launch script: which engines to start, how, and the proxy in front. Values only; nothing is started here.

    preset: cuda
    model: meta-llama/Llama-3.1-8B-Instruct
    prefill: {count: 1, devices: [0]}
    decode: {count: 1, devices: [1]}
    proxy: {bind: 0.0.0.0:8000}

`load_script` reads one from a file and reports everything that is wrong with it at once, each with its line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from trio_pdproxy.config import ROLES, ConfigError, EngineSpec, Role, Settings
from trio_pdproxy.config import values as v
from trio_pdproxy.config.problems import problems_of, raise_together

from .script_file import read
from .script_rules import contradictions
from .script_values import Command, Devices, Env, Flags, Host, Port

Preset = Literal["cuda", "cpu", "sim"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
Mode = Literal["push", "pull"]
"""P writes into D's memory while D waits, or D reads P's once P has answered."""


_MODEL = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _restart(value: object) -> object:
    return {"attempts": 0} if value in ("never", False) else {} if value in ("always", True, None) else value


class Restart(BaseModel):
    """What becomes of an engine that ends although nobody asked it to. `attempts: 0`: it stays down."""

    model_config = _MODEL

    attempts: Annotated[v.Count, Field(ge=0)] = Field(
        default=5, description="Restarts within `within`; one more end and the engine is given up. 0: never restarted."
    )
    within: Annotated[v.Seconds, Field(gt=0)] = Field(
        default=3600.0, description="The time over which restarts are counted."
    )
    delay: Annotated[v.Seconds, Field(ge=0)] = Field(
        default=1.0, description="Before the first restart; twice as long before each further one within `within`."
    )
    stranded: Annotated[v.Count, Field(ge=0)] = Field(
        default=0,
        description="Requests whose KV a decode engine may hold for good (their push can never come, see the metric "
        "stranded_total) before it is taken out of use, restarted and taken back, while another one serves. 0: never.",
    )
    max_delay: Annotated[v.Seconds, Field(ge=0)] = Field(default=60.0, description="The longest delay.")


class RoleEngines(BaseModel):
    """The engines of one role."""

    model_config = _MODEL

    count: Annotated[v.Count, Field(ge=0, le=256)] = Field(default=1, description="How many are started here.")
    host: Host | None = Field(default=None, description="Where they listen; as the script's `host`.")
    port: Port | None = Field(
        default=None,
        description="HTTP port of the first, the next ones follow; or `auto`: free ones. Default: 8100 for prefill, "
        "8200 for decode.",
    )
    side_channel_port: Port | None = Field(
        default=None,
        description="NIXL side channel port of the first, the next ones follow (one for each data-parallel rank); or "
        "`auto`. Default: 5600 for prefill, 5700 for decode.",
    )
    devices: Devices | None = Field(
        default=None,
        description="GPUs, divided among the engines in order (CUDA_VISIBLE_DEVICES). Default with the cuda preset: "
        "as many as the parallel sizes need, prefill engines first. []: CUDA_VISIBLE_DEVICES is left as it is.",
    )
    flags: Flags = Field(default={}, description="vLLM flags over the script's.")
    env: Env = Field(default={}, description="Environment over the script's.")
    command: Command | None = Field(
        default=None,
        description="The whole command instead of the preset's; ${port}, ${index} and so on are filled in.",
    )
    external: tuple[EngineSpec, ...] = Field(
        default=(), description="Engines that run already, elsewhere: URL[;key=value]... They are used, never started."
    )
    max_inflight: Annotated[v.Count, Field(ge=1)] | None = Field(
        default=None,
        description="Requests at one of these engines at the same time. Default: max-num-seqs where it is given.",
    )


class Script(BaseModel):
    """A whole launch script. Immutable. Made from keywords, from a mapping, or from a file (`load_script`)."""

    model_config = _MODEL

    preset: Preset = Field(
        default="cuda",
        description="What the commands start from: cuda (`vllm serve` on GPUs), cpu (vLLM for the CPU, from "
        "`trio-pdproxy engines install` unless `vllm` says otherwise), sim (simulated engines).",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="The model, the very same text for every engine. cpu: a tiny test model by default; sim: a name.",
    )
    served_model_name: str | None = Field(default=None, min_length=1, description="What clients call it.")
    vllm: Command | None = Field(
        default=None, description="How vLLM is run, e.g. `/opt/vllm/bin/vllm serve`. Default: `vllm serve`."
    )
    mode: Mode = Field(default="push", description="NixlPushConnector or NixlPullConnector, for every engine.")
    lease: Annotated[v.Seconds, Field(ge=1)] = Field(
        default=30.0, description="Seconds prefill engines keep KV that nobody fetched (kv_lease_duration)."
    )
    keep_alive: Annotated[v.Seconds, Field(gt=0)] = Field(
        default=75.0,
        description="Seconds an engine keeps an idle connection (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); longer than the "
        "proxy's 3 s, or requests meet connections that are just being closed.",
    )
    host: Host = Field(default="127.0.0.1", description="Address the engines listen on and are reached at.")
    flags: Flags = Field(
        default={},
        description="vLLM flags for every engine: `max-model-len: 8192`; true: a flag without value; false: its --no- "
        "form; null: a preset's flag is left out; a mapping becomes JSON.",
    )
    env: Env = Field(default={}, description="Environment for every engine; null removes a variable.")
    nice: Annotated[v.Count, Field(ge=0, le=19)] | None = Field(
        default=None, description="Niceness of the engines. Default: 10 with the cpu preset, else 0."
    )
    logs: Path | None = Field(
        default=None,
        description="Folder for one NAME.log per engine. Default: trio-pdproxy/NAME-OF-SCRIPT in the user's state "
        "folder. A relative one is relative to the script.",
    )
    ready_timeout: Annotated[v.Seconds, Field(gt=0)] | None = Field(
        default=None, description="From an engine's start to its readiness. Default: cuda 30m, cpu 5m, sim 30s."
    )
    stop_grace: Annotated[v.Seconds, Field(ge=0)] = Field(
        default=10.0, description="From SIGTERM to SIGKILL of an engine's processes."
    )
    restart: Annotated[Restart, BeforeValidator(_restart)] = Field(
        default=Restart(), description="For engines that end by themselves once they were ready; or `never`."
    )
    prefill: RoleEngines = Field(default=RoleEngines(), description="The prefill engines.")
    decode: RoleEngines = Field(default=RoleEngines(), description="The decode engines.")
    proxy: dict[str, Any] | Literal[False] = Field(
        default={}, description="Settings of the proxy, all but its engines; false: engines only, no proxy here."
    )

    def of(self, role: Role) -> RoleEngines:
        return self.prefill if role == "prefill" else self.decode

    def flags_of(self, role: Role) -> dict[str, Any]:
        """The script's flags under the role's own, without the presets'."""
        return self.flags | self.of(role).flags

    def env_of(self, role: Role) -> dict[str, str | None]:
        return self.env | self.of(role).env

    def ranks_of(self, role: Role) -> int:
        """Data-parallel ranks of each engine of a role."""
        return int(self.flags_of(role).get("data-parallel-size") or 1)

    def devices_needed(self, role: Role) -> int:
        """GPUs each engine of a role needs: tensor times pipeline times data parallel size."""
        flags = self.flags_of(role)
        sizes = [int(flags.get(f"{kind}-parallel-size") or 1) for kind in ("tensor", "pipeline", "data")]
        return sizes[0] * sizes[1] * sizes[2]

    @model_validator(mode="after")
    def _check(self) -> Script:
        raise_together("Script", contradictions(self))
        return self


_KNOWN = (*Script.model_fields, *RoleEngines.model_fields, *Restart.model_fields)


def load_script(path: Path) -> Script:
    """The script in a YAML file. Raises `ConfigError`, which lists every problem, each with its line."""
    found = read(path)
    problems = list(found.problems)
    if not problems and not isinstance(found.value, dict):
        problems.append((str(path), "the file must hold a launch script: `name: value` lines"))
    if isinstance(found.value, dict):
        values = dict(found.value)
        for role in ROLES:
            if values.get(role, ...) is None:  # a key with nothing after it
                values[role] = {}
        if isinstance(logs := values.get("logs"), str):
            values["logs"] = path.parent / Path(logs).expanduser()
        if isinstance(proxy := values.get("proxy"), dict):
            values["proxy"] = {
                name: str(path.parent / given) if name.endswith("_file") and isinstance(given, str) else given
                for name, given in proxy.items()
            }
        elif "proxy" in values and proxy is None:
            values["proxy"] = {}
        try:
            script = Script.model_validate(values)
        except ValidationError as error:
            for problem in problems_of(error, known=_KNOWN):
                name = ".".join(str(part) for part in problem.loc if isinstance(part, str))
                place = found.place(problem.loc) if problem.loc else str(path)
                problems.append((place, f"{name}: {problem.message}" if name else problem.message))
    if problems:
        raise ConfigError(problems)
    return script


def json_schema() -> dict[str, Any]:
    """The script's JSON schema, for editors."""
    schema = Script.model_json_schema()
    settings = Settings.model_json_schema()
    schema["$defs"] |= settings.pop("$defs", {})
    for name in ROLES:
        settings["properties"].pop(name)
    settings["required"] = []
    settings["description"] = schema["properties"]["proxy"]["description"]
    schema["properties"]["proxy"] = {"anyOf": [settings, {"const": False}]}
    restart = schema["properties"]["restart"]
    words = {"enum": ["never", "always"], "description": restart.get("description", "")}
    schema["properties"]["restart"] = {"anyOf": [restart, words]}
    # An engine is mostly written as text.
    engine = schema["$defs"]["EngineSpec"]
    schema["$defs"]["EngineSpec"] = {"anyOf": [engine, {"type": "string"}]}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trio-pdproxy launch script"
    return schema
