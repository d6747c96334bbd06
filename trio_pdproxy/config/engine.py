"""One engine as the configuration names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from trio_pdproxy.config import values as v
from trio_pdproxy.config.problems import Problem, problems_of, raise_together

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)

# vLLM's own default for VLLM_NIXL_SIDE_CHANNEL_PORT.
DEFAULT_SIDE_CHANNEL_PORT = 5600


class EngineSpec(BaseModel):
    """One vLLM server: where it is, and what cannot be learned from it.

    Made from keywords, from a mapping, or from text (`EngineSpec.parse`); `str()` gives that text
    back. Immutable and hashable. Everything wrong with it comes in one `ValidationError`, which never
    repeats the URL. What is None is learned from the engine or falls back to the role's setting:
    ask `Settings.lease_of` and `Settings.max_inflight_of`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: v.Url = Field(
        description="Base URL, http or https, without path, query or password; kept as scheme://host:port."
    )
    side_channel: v.ConnectAddress = Field(
        default=v.Address("", 0),
        description="HOST:PORT of the engine's NIXL side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT). "
        "Default: the URL's host, port 5600, which is vLLM's default.",
        json_schema_extra={"shown_default": "the url's host, port 5600"},
    )
    name: Annotated[str, Field(min_length=1, max_length=260, pattern=r"\A[A-Za-z0-9._:\[\]-]+\z")] = Field(
        default="",
        description="What metrics, logs and the admin paths call it: letters, digits and . _ : - [ ]. "
        "Default: host:port of the URL.",
        json_schema_extra={"shown_default": "host:port of the url"},
    )
    max_inflight: Annotated[v.Count, Field(ge=1)] | None = Field(
        default=None,
        description="Requests at this engine at the same time. Default: prefill_max_inflight or decode_max_inflight.",
    )
    lease: Annotated[v.Seconds, Field(gt=0)] | None = Field(
        default=None,
        description="Prefill engines only: seconds for which it keeps KV blocks that nobody fetched, its "
        "kv_lease_duration. Default: the setting lease.",
    )
    engine_id: Annotated[str, Field(min_length=1, max_length=256, pattern=r"\A[^\s;,@]+\z")] | None = Field(
        default=None, description="The engine's id. Learned over the side channel; written here to override."
    )
    tp_size: Annotated[v.Count, Field(ge=1)] | None = Field(
        default=None, description="Tensor parallel size. Learned; written here to override."
    )
    pp_size: Annotated[v.Count, Field(ge=1)] | None = Field(
        default=None, description="Pipeline parallel size. Learned; written here to override."
    )
    dcp_size: Annotated[v.Count, Field(ge=1)] | None = Field(
        default=None, description="Decode context parallel size. Learned; written here to override."
    )

    dp_size: Annotated[v.Count, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="Prefill engines only: their --data-parallel-size. Each rank is a target of its own then, with its "
        "own engine id and the side channel port of rank 0 plus its number.",
    )
    revision: Annotated[str, Field(min_length=1, max_length=63, pattern=r"\A[A-Za-z0-9._-]+\z")] | None = Field(
        default=None,
        description="The roll-out it belongs to, where several are up at once: engines that both have one are paired "
        "only within the same.",
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            url: str,
            side_channel: v.Address | tuple[str, int] | str | None = None,
            name: str | None = None,
            max_inflight: int | None = None,
            lease: float | str | None = None,
            engine_id: str | None = None,
            tp_size: int | None = None,
            pp_size: int | None = None,
            dcp_size: int | None = None,
            dp_size: int | None = None,
            revision: str | None = None,
        ) -> None: ...

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """The spec that `URL[;key=value]...` says. Raises `ValidationError` with all that is wrong."""
        return cls.model_validate(text)

    @property
    def address(self) -> v.Address:
        """Host and port of the URL."""
        return v.split_url(self.url)[1]

    @property
    def tls(self) -> bool:
        """Whether the URL is https."""
        return self.url.startswith("https:")

    def __str__(self) -> str:
        """The text that `parse` reads as this very spec; what follows from the URL is left out."""
        parts = [self.url]
        if self.side_channel != _default_side_channel(self.address):
            parts.append(f"side_channel={self.side_channel}")
        if self.name != str(self.address):
            parts.append(f"name={self.name}")
        keys = ("max_inflight", "lease", "engine_id", "tp_size", "pp_size", "dcp_size", "dp_size", "revision")
        parts += [f"{key}={value}" for key in keys if (value := getattr(self, key)) is not None]
        return ";".join(parts)

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, handler: ModelWrapValidatorHandler[EngineSpec]) -> EngineSpec:
        fields, problems = split_spec(data) if isinstance(data, str) else (data, [])
        try:
            spec = handler(_with_defaults(fields) if isinstance(fields, Mapping) else fields)
        except ValidationError as error:
            problems += problems_of(error, known=cls.model_fields)
        raise_together(cls.__name__, problems)
        return spec


def split_specs(text: str) -> list[str]:
    """The single specs of a list separated by commas; empty ones (a trailing comma) are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_spec(text: str) -> tuple[dict[str, str], list[Problem]]:
    """`URL[;key=value]...` as a mapping, and what is wrong with its form (not with its values)."""
    if "@" in text:
        # A password may hold any separator: nothing of such a text is taken apart, nothing of it is shown.
        return {"url": "@"}, []
    url, *parts = (part.strip() for part in text.split(";"))
    fields, problems = {"url": url}, list[Problem]()
    for part in filter(None, parts):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            problems.append(Problem((), f"write key=value after the ;, not {key!r}"))
        elif key in fields:
            problems.append(Problem((key,), "is given twice"))
        else:
            fields[key] = value
    return fields, problems


def _default_side_channel(url: v.Address) -> v.Address:
    return v.Address(url.host, DEFAULT_SIDE_CHANNEL_PORT)


def _with_defaults(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    filled = {key: value for key, value in fields.items() if value is not None}
    try:
        _, where = v.split_url(filled.get("url"))
    except ValueError:
        return filled  # the URL's own problem is reported; what would follow from it is not missed
    return {"side_channel": _default_side_channel(where), "name": str(where)} | filled
