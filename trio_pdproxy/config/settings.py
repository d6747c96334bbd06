"""The settings: every bound the proxy keeps, with its default and the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    model_validator,
)

from trio_pdproxy.config import values as v
from trio_pdproxy.config.engine import ROLES, EngineSpec, Role, split_spec, split_specs
from trio_pdproxy.config.problems import Problem, problems_of, raise_together
from trio_pdproxy.config.rules import contradictions
from trio_pdproxy.core.routing import POLICIES

# Each may be given by itself or as NAME_file, and never as a flag: a process list shows flags.
SECRETS = ("api_key", "admin_token", "client_keys")


def _seconds(default: float, description: str, **bounds: Any) -> Any:
    return Field(default=default, description=description, **(bounds or {"gt": 0}))


def _known_policy(value: Any) -> Any:
    if isinstance(value, str) and value not in POLICIES:
        raise ValueError(f"there is no policy {value!r}; there are {', '.join(POLICIES)}")
    return value


PolicyName = Annotated[str, BeforeValidator(_known_policy)]


class Settings(BaseModel):
    """Everything the proxy is told. Immutable; durations in seconds, sizes in bytes.

    In code: `Settings(prefill=["http://127.0.0.1:8100"], decode=[EngineSpec(url=...)])`. Any value may
    also be written as in a file or in the environment ("30s", "128MiB"). One `ValidationError` names
    everything that is wrong, values and contradictions between them alike. The files behind
    `api_key_file`, `admin_token_file` and `client_keys_file` are read here, once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    prefill: tuple[EngineSpec, ...] = Field(
        default=(), description="Prefill engines: URL[;key=value]..., several separated by commas."
    )
    decode: tuple[EngineSpec, ...] = Field(
        default=(), description="Decode engines: URL[;key=value]..., several separated by commas."
    )
    bind: v.ListenAddress = Field(
        default=v.Address("127.0.0.1", 8000),
        description="Where clients connect, HOST:PORT. Loopback by default: opening it to others is a "
        "decision. Port 0 takes a free one.",
    )
    admin_bind: v.OptionalListenAddress = Field(
        default=None,
        description="Where the admin paths (change the engines while serving) are served, HOST:PORT. Off by "
        "default: who reaches it can redirect every request. Needs admin_token.",
        json_schema_extra={"shown_default": "off"},
    )
    connect_timeout: v.Seconds = _seconds(
        5.0, "Until an engine accepts a connection. An engine that does not accept in this time is down."
    )
    prefill_timeout: v.Seconds = _seconds(
        120.0, "From the prefill engine's request to its answer: the longest prompt plus that engine's queue."
    )
    first_byte_timeout: v.Seconds = _seconds(
        150.0,
        "For streams, from the decode engine's request to the first byte of its body: a whole prefill plus "
        "the transfer, with room for one rescue after the lease.",
    )
    idle_timeout: v.Seconds = _seconds(
        60.0, "Between two reads of the decode engine's stream: far longer than any step between two tokens."
    )
    request_timeout: v.Seconds = _seconds(
        3600.0,
        "The whole exchange. The only bound for a non-stream answer, which is silent until it is complete: "
        "therefore as long as the longest generation.",
    )
    write_timeout: v.Seconds = _seconds(
        30.0, "For one write to the client: one that stops reading must not hold two engines' slots."
    )
    drain_grace: v.Seconds = _seconds(
        2.0,
        "How long a prefill engine may still answer after decode is done before its leg counts as settling. "
        "Short: the client already has everything.",
        ge=0,
    )
    settle_timeout: v.Seconds = Field(
        default=120.0,
        gt=0,
        description="How long a prefill leg is carried on although nobody waits for its answer, so that the "
        "decode engine's KV blocks are released. Default: prefill_timeout, after which the "
        "engine would have been given up anyway.",
        json_schema_extra={"shown_default": "prefill_timeout"},
    )
    lease: v.Seconds = _seconds(
        30.0,
        "How long prefill engines keep KV blocks that nobody fetched: their kv_lease_duration, which cannot "
        "be asked for; 30 is vLLM's default. A decode engine still silent 2 s later has missed the push.",
    )
    prefill_max_inflight: v.Count = Field(
        default=64,
        ge=1,
        description="Requests at one prefill engine at the same time. It works on few prompts at once; more "
        "only wait there instead of here, where they can go elsewhere.",
    )
    decode_max_inflight: v.Count = Field(
        default=256,
        ge=1,
        description="Requests at one decode engine at the same time. Keep it at or under the engine's "
        "max-num-seqs: what queues there beyond the prefill engine's lease hangs.",
    )
    prefill_policy: PolicyName = Field(
        default="round_robin",
        description="How a prefill engine is chosen: round_robin, least_inflight, power_of_two, prefix_affinity (the "
        "same engine for the same beginning of a prompt, bounded by load: best where prompts share a system prompt), "
        "session_affinity.",
    )
    decode_policy: PolicyName = Field(
        default="least_inflight",
        description="How a decode engine is chosen. Its requests differ in length, the least busy is the best guess.",
    )
    affinity_header: Annotated[str, Field(pattern=r"\A[A-Za-z0-9-]{1,64}\z"), v.Lower] = Field(
        default="x-session-id", description="The client's header that session_affinity goes by."
    )
    min_prefill_tokens: v.Count = Field(
        default=0,
        ge=0,
        description="Prompts shorter than about this many tokens (estimated from their bytes) go to a decode engine "
        "alone: a transfer costs more than they do. 0: none do.",
    )
    fallback: Annotated[Literal["error", "decode_only"], v.Lower] = Field(
        default="error",
        description="Where no prefill engine is usable: error (503), or decode_only: decode engines compute prompts "
        "too. Not the default, because it silently moves prefill's load onto engines sized for decode.",
    )
    warm_up: bool = Field(
        default=True,
        description="Whether each pair of engines has a tiny real transfer before it takes requests: the first one of "
        "a pair costs seconds (NIXL's handshake), and one that cannot transfer is found out before a client does.",
    )
    eject_after: v.Count = Field(
        default=3,
        ge=1,
        description="Failures in a row (no client's 4xx, no engine's 429) after which an engine gets no requests until "
        "a probe and one trial request say that it works again.",
    )
    eject_time: v.Seconds = _seconds(
        5.0, "How long it stays without after that; twice as long each time it fails again, up to a minute."
    )
    retry_budget: v.Ratio = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Retries on another pair per request, on average; ten may come at once. Beyond it a failure is "
        "passed on: where everything fails, retries only double the load.",
    )
    queue_size: v.Count = Field(
        default=1024,
        ge=0,
        description="Requests waiting here for a slot; the next gets 429. 0: none waits. A queue longer than "
        "the engines clear in queue_timeout only makes clients wait for their refusal.",
    )
    queue_timeout: v.Seconds = _seconds(
        30.0,
        "How long a request waits here for a slot before it is refused; by then many clients have left.",
        ge=0,
    )
    attempts: v.Count = Field(
        default=2,
        ge=1,
        le=16,
        description="Pairs of engines tried for one request before the first byte of an answer. A second "
        "helps when an engine is down; more multiply the load when all are.",
    )
    shutdown_grace: v.Seconds = _seconds(
        30.0,
        "How long running requests may go on after the first stop signal; service managers commonly kill "
        "soon after that.",
        ge=0,
    )
    body_limit: v.Size = Field(
        default=128 * 2**20,
        ge=1024,
        description="Largest request body in bytes, more gets 413. It is held in memory; images inside chat "
        "messages make it large.",
        json_schema_extra={"shown_default": "128MiB"},
    )
    upload_timeout: v.Seconds = _seconds(
        60.0, "Between two reads of a request's body: a slow upload may go on, a dead one ends."
    )
    health_interval: v.Seconds = _seconds(
        5.0, "Between two health probes of one engine: how long a dead engine may go unnoticed while idle."
    )
    health_timeout: v.Seconds = _seconds(
        2.0, "For one health probe. Engines answer in milliseconds, but a machine starved of CPU does not."
    )
    auth: Annotated[Literal["pass_through", "terminate", "open"], v.Lower] = Field(
        default="pass_through",
        description="Whose keys clients need. pass_through: the engines', who are sent what a client brings and "
        "judge it. terminate: the proxy's (client_keys); engines are sent api_key. open: nobody's, although engines "
        "are sent api_key.",
    )
    client_keys: v.Keys | None = Field(
        default=None,
        description="The keys that clients may bring where auth is terminate, separated by white space or commas. "
        "Never a flag.",
    )
    client_keys_file: Path | None = Field(
        default=None,
        description="A file that holds client_keys, one a line, # before a comment. An edit is used at once.",
    )
    api_key: v.Secret | None = Field(
        default=None,
        description="The engines' API key (vLLM's --api-key). Never a flag: a process list shows flags.",
    )
    api_key_file: Path | None = Field(default=None, description="A file that holds api_key.")
    tls_cert_file: Path | None = Field(
        default=None,
        description="The certificate (PEM, with its chain) that clients are shown: they then speak https to bind and "
        "admin_bind. Read at start.",
        json_schema_extra={"shown_default": "plain http"},
    )
    tls_key_file: Path | None = Field(
        default=None,
        description="Its private key, without a password.",
        json_schema_extra={"shown_default": "in tls_cert_file"},
    )
    tls_client_ca_file: Path | None = Field(
        default=None,
        description="The CA whose certificates clients must show.",
        json_schema_extra={"shown_default": "none are asked for"},
    )
    engine_ca_file: Path | None = Field(
        default=None,
        description="The CA that https engines' certificates are checked against.",
        json_schema_extra={"shown_default": "the system's"},
    )
    engine_cert_file: Path | None = Field(
        default=None,
        description="The certificate that https engines are shown.",
        json_schema_extra={"shown_default": "none"},
    )
    engine_key_file: Path | None = Field(
        default=None,
        description="Its private key, without a password.",
        json_schema_extra={"shown_default": "in engine_cert_file"},
    )
    ping_interval: v.Seconds = _seconds(
        0.0,
        "While a stream waits for its first token, a comment (`: ping`) is sent this often, for load balancers that "
        "close silent connections. The first one commits the status: what fails after it is told in an error event "
        "under a 200. 0: none.",
        ge=0,
    )
    admin_token: v.Secret | None = Field(
        default=None, description="The bearer token that the admin paths demand. Never a flag."
    )
    admin_token_file: Path | None = Field(default=None, description="A file that holds admin_token.")
    admin_allow: v.Texts = Field(
        default=(),
        description="Where engines that are added by the admin paths may be: host names, *.domain, addresses and "
        "networks (10.0.0.0/8; they allow addresses, not the names that stand for them), separated by commas. Empty: "
        "nowhere. Link-local addresses never are.",
        json_schema_extra={"shown_default": "nowhere"},
    )
    legs: Annotated[Literal["concurrent", "serial"], v.Lower] = Field(
        default="concurrent",
        description="serial sends the decode leg only when prefill has answered. For measuring what the other way "
        "gains (`trio-pdproxy bench --compare`), and for nothing else.",
    )
    timelines: v.Count = Field(
        default=256,
        ge=0,
        le=100_000,
        description="How many of the last exchanges are kept in memory for `trio-pdproxy trace`: 2 to 4 KiB each. They "
        "hold instants and engines' names, never a prompt.",
    )
    expose_timelines: bool = Field(
        default=False,
        description="Serve them (GET /timelines) to clients too, and not only on the admin listener. They show who "
        "asked when (request ids) and your engines' names.",
    )
    otlp_traces_endpoint: Annotated[str | None, Field(pattern=r"\Ahttps?://\S+\z")] = Field(
        default=None,
        description="Send OpenTelemetry traces there (OTLP over HTTP, for example http://collector:4318/v1/traces). "
        "Needs the extra [otel]; sampler, service name and the like come from OpenTelemetry's own OTEL_* variables.",
        json_schema_extra={"shown_default": "off"},
    )
    discovery: Annotated[Literal["off", "dns", "kubernetes"], v.OffWord] = Field(
        default="off",
        description="Where engines are found besides those named here: dns (headless services, by their SRV or address "
        "records) or kubernetes (pods by their labels, as they come and go).",
    )
    discovery_interval: v.Seconds = _seconds(
        5.0, "Between two questions to DNS, and before a Kubernetes API that failed is asked again."
    )
    prefill_dns: v.Texts = Field(
        default=(),
        description="With discovery dns, where prefill engines are: _http._tcp.prefill.llm (SRV; _nixl._tcp of the "
        "same service names the side channels' ports) or prefill.llm:8000 (addresses), several with commas.",
        json_schema_extra={"shown_default": "none"},
    )
    decode_dns: v.Texts = Field(
        default=(),
        description="The same for decode engines.",
        json_schema_extra={"shown_default": "none"},
    )
    dns_server: v.OptionalConnectAddress = Field(
        default=None,
        description="The name server to ask, HOST:PORT. Default: those of /etc/resolv.conf.",
        json_schema_extra={"shown_default": "/etc/resolv.conf"},
    )
    prefill_selector: v.Selector = Field(
        default="llm-d.ai/role=prefill",
        description="With discovery kubernetes, the label selector of the prefill engines' pods.",
    )
    decode_selector: v.Selector = Field(
        default="llm-d.ai/role=decode", description="The same for the decode engines' pods."
    )
    revision_label: Annotated[str, Field(pattern=r"\A([a-z0-9.-]{1,253}/)?[A-Za-z0-9._-]{1,63}\z")] = Field(
        default="trio-pdproxy/revision",
        description="The pods' label that tells roll-outs apart: pods that have it are paired only with pods that have "
        "the same value, or none.",
    )
    kubernetes_namespace: Annotated[str, Field(pattern=r"\A([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?\z")] = Field(
        default="",
        description="The pods' namespace.",
        json_schema_extra={"shown_default": "the proxy's own"},
    )
    kubernetes_api: v.OptionalUrl = Field(
        default=None,
        description="The Kubernetes API, for example http://127.0.0.1:8001 where `kubectl proxy` runs. Default: that "
        "of the cluster the proxy runs in.",
        json_schema_extra={"shown_default": "the cluster's own"},
    )
    kubernetes_credentials: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="The folder with token, ca.crt and namespace that Kubernetes mounts into pods; read again for each "
        "connection, because tokens expire.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], v.Lower] = Field(
        default="info", description="The least severe log records that are written."
    )
    log_format: Annotated[Literal["text", "json"], v.Lower] = Field(
        default="text", description="Log lines for people, or one JSON object a line for log collectors."
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            prefill: Iterable[EngineSpec | Mapping[str, Any] | str] | str = (),
            decode: Iterable[EngineSpec | Mapping[str, Any] | str] | str = (),
            **settings: Any,
        ) -> None: ...

    def lease_of(self, engine: EngineSpec) -> float:
        """Seconds for which this prefill engine keeps blocks: its own `lease`, else the general one."""
        return self.lease if engine.lease is None else engine.lease

    def max_inflight_of(self, role: Role, engine: EngineSpec) -> int:
        """Requests this engine takes at once: its own `max_inflight`, else its role's."""
        if engine.max_inflight is not None:
            return engine.max_inflight
        return self.prefill_max_inflight if role == "prefill" else self.decode_max_inflight

    def redacted(self) -> dict[str, Any]:
        """All settings as plain JSON values for showing; a secret that is set shows as asterisks."""
        return self.model_dump(mode="json")

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, handler: ModelWrapValidatorHandler[Settings]) -> Settings:
        if not isinstance(data, Mapping):
            return handler(data)
        values = {key: value for key, value in data.items() if value is not None}
        problems: list[Problem] = []
        wrong: set[str] = set()  # the names that have a problem of their own: left out of further checks
        engines: dict[Role, list[tuple[int, EngineSpec]]] = {}
        for role in ROLES:
            engines[role], found = _engines(role, values.get(role, ()))
            values[role] = tuple(spec for _, spec in engines[role])
            problems += found
            wrong |= {role} if found else set()
        for secret in SECRETS:
            found = _read_secret(secret, values)
            problems += found
            wrong |= {secret} if found else set()
        follows = "settle_timeout" not in values and "prefill_timeout" in values
        if follows:
            values["settle_timeout"] = values["prefill_timeout"]
        while True:
            try:
                settings = handler(values)
                break
            except ValidationError as error:
                # What is wrong is taken out and the rest tried again, so that the checks between
                # values see all that are right.
                found = problems_of(error, known=cls.model_fields)
                if not all(problem.loc and problem.loc[0] in values for problem in found):
                    raise  # nothing to take out
                for problem in found:
                    name = str(problem.loc[0])
                    wrong.add(name)
                    if not (follows and name == "settle_timeout"):  # prefill_timeout says the same
                        problems.append(problem)
                bad = {problem.loc[0] for problem in found}
                values = {key: value for key, value in values.items() if key not in bad}
        problems += contradictions(settings, engines, wrong)
        raise_together(cls.__name__, problems)
        return settings


def _engines(role: Role, given: object) -> tuple[list[tuple[int, EngineSpec]], list[Problem]]:
    """The engines that are right, each with its number among all that were given, and what is wrong."""
    if isinstance(given, (str, EngineSpec, Mapping)):
        given = [given]
    if not isinstance(given, Iterable):
        return [], [Problem((role,), "write a list of engines: URL[;key=value]... or mappings with a url")]
    items = [part for item in given for part in (split_specs(item) if isinstance(item, str) else [item])]
    engines: list[tuple[int, EngineSpec]] = []
    problems: list[Problem] = []
    for i, item in enumerate(items):
        try:
            engines.append((i, EngineSpec.model_validate(item)))
        except ValidationError as error:
            found = problems_of(error, known=EngineSpec.model_fields, prefix=(role, i))
            problems += found
            fields = split_spec(item)[0] if isinstance(item, str) else item
            if isinstance(fields, Mapping):
                # What is right still takes part in the checks between engines.
                bad = {problem.loc[2] for problem in found if len(problem.loc) > 2}
                rest = {key: value for key, value in fields.items() if key not in bad}
                try:
                    spec = EngineSpec.model_validate(rest)
                except ValidationError:
                    continue
                # What was wrong is not known: it must not collide as a default would.
                unknown = {"name": f"?{role}{i}", "side_channel": v.Address("?", i)}
                update = {key: value for key, value in unknown.items() if key in bad}
                engines.append((i, spec.model_copy(update=update)))
    return engines, problems


def _read_secret(name: str, values: dict[str, Any]) -> list[Problem]:
    """Put the content of NAME_file under NAME. A wrong file is a problem of NAME_file."""
    path = values.get(f"{name}_file")
    if path is None or isinstance(values.get(name), SecretStr):
        return []  # a SecretStr: these values are another Settings', its file has been read
    if not isinstance(path, (str, Path)):
        return []  # the field's own validation says so
    loc = (f"{name}_file",)
    if name in values:
        text = f"{name} and {name}_file are both given: keep one"
        return [Problem(loc, text, between=True, also=((name,),))]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return [Problem(loc, f"cannot read {path}: {reason}")]
    try:
        values[name] = v.keys(SecretStr(text)) if name == "client_keys" else v.secret(SecretStr(text))
    except ValueError as error:
        return [Problem(loc, f"what {path} holds {error}")]
    return []
