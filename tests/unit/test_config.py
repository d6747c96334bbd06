"""The configuration: what is accepted, what is refused, and that every problem is told with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from trio_pdproxy.cli.options import settings_from, settings_options
from trio_pdproxy.config import Address, ConfigError, EngineSpec, Settings, load_settings, split_specs

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"
BOTH = {"PDPROXY_PREFILL": P, "PDPROXY_DECODE": D}


def settings(**values: Any) -> Settings:
    return Settings(**({"prefill": [P], "decode": [D]} | values))


def messages(error: ValidationError) -> list[str]:
    return [e["msg"] for e in error.errors()]


def refused(**values: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        settings(**values)
    return messages(caught.value)


def problems(
    file: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_settings(file=file, environ=BOTH if environ is None else environ, flags=flags or {})
    for place, message in caught.value.problems:
        assert place in str(caught.value)
        assert message in str(caught.value)
    return list(caught.value.problems)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "proxy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- engine specs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "side_channel", "name"),
    [
        ("http://10.0.0.1:8100", "http://10.0.0.1:8100", "10.0.0.1:5600", "10.0.0.1:8100"),
        ("http://10.0.0.1:8100/", "http://10.0.0.1:8100", "10.0.0.1:5600", "10.0.0.1:8100"),
        (
            "HTTP://P0.Example.org:8100",
            "http://p0.example.org:8100",
            "p0.example.org:5600",
            "p0.example.org:8100",
        ),
        ("http://my_vllm", "http://my_vllm:80", "my_vllm:5600", "my_vllm:80"),
        ("https://p.example", "https://p.example:443", "p.example:5600", "p.example:443"),
        ("http://[::1]:8100", "http://[::1]:8100", "[::1]:5600", "[::1]:8100"),
        ("http://[2001:DB8:0::1]", "http://[2001:db8::1]:80", "[2001:db8::1]:5600", "[2001:db8::1]:80"),
        (f"{P};side_channel=[fe80::2]:5601;name=p0", P, "[fe80::2]:5601", "p0"),
        (f" {P} ; name = p0 ; ", P, "127.0.0.1:5600", "p0"),
    ],
)
def test_spec_text(text: str, url: str, side_channel: str, name: str) -> None:
    spec = EngineSpec.parse(text)
    assert (spec.url, str(spec.side_channel), spec.name) == (url, side_channel, name)
    assert EngineSpec.parse(str(spec)) == spec
    assert spec.tls == url.startswith("https")
    assert spec.url == f"{'https' if spec.tls else 'http'}://{spec.address}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must start with http"),
        ("127.0.0.1:8100", "must start with http"),
        ("ftp://h:1", "must start with http"),
        ("http://", "HOST:PORT"),
        ("http://:8100", "HOST:PORT"),
        ("http://h:8100/v1", "no /v1"),
        ("http://h:8100?x=1", "no query"),
        ("http://h:8100#", "no query"),
        ("http://h:0", "from 1 to 65535"),
        ("http://h:65536", "from 1 to 65535"),
        ("http://h:", "from 1 to 65535"),
        ("http://h:8x", "from 1 to 65535"),
        ("http://h:٣", "only ASCII"),
        ("http://ho st:1", "no spaces"),
        ("http://-h:1", "not a valid name"),
        ("http://1.2.3.256:1", "not a valid name"),
        ("http://a..b:1", "not a valid name"),
        ("http://::1:8100", "brackets"),
        ("http://[::1", "not a valid URL"),
        ("http://[fe80::1%25eth0]:1", "zone"),
        (f"{P};name=", "at least 1 character"),
        (f"{P};name=a b", "pattern"),
        (f"{P};name=a/b", "pattern"),
        (f"{P};max_inflight=0", "greater than or equal to 1"),
        (f"{P};max_inflight=1.5", "whole number"),
        (f"{P};lease=0", "greater than 0"),
        (f"{P};lease=nan", "duration"),
        (f"{P};side_channel=5600", "HOST:PORT"),
        (f"{P};side_channel=::1:5600", "brackets"),
        (f"{P};side_channel=[h]:5600", "only an IPv6"),
        (f"{P};side_channel=[::g]:5600", "IPv6 address is not valid"),
        (f"{P};side_channel=h:0", "from 1 to 65535"),
        (f"{P};sidechannel=h:1", "did you mean side_channel?"),
        (f"{P};lease", "key=value"),
        (f"{P};lease=3;lease=4", "given twice"),
        (f"{P};url={D}", "given twice"),
    ],
)
def test_spec_refused(text: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineSpec.parse(text)
    assert len(messages(caught.value)) == 1
    assert says in messages(caught.value)[0]


def test_spec_tells_everything_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineSpec.parse("http://h:0;lease=x;foo;tp_size=-1;nme=p")
    assert len(messages(caught.value)) == 5


def test_spec_pieces() -> None:
    spec = EngineSpec(url=P, side_channel=("::1", 5601), lease="20s", engine_id="e", tp_size=2, dcp_size=2)
    assert spec.side_channel == Address("::1", 5601)
    assert spec.lease == 20.0
    assert spec == EngineSpec.model_validate(spec.model_dump(mode="json"))
    assert hash(spec) == hash(EngineSpec.parse(str(spec)))
    with pytest.raises(ValidationError):
        spec.name = "other"
    with pytest.raises(ValidationError, match="as a mapping with a url"):
        EngineSpec.model_validate(5)
    with pytest.raises(ValidationError, match="is required"):
        EngineSpec.model_validate({"name": "p"})


@pytest.mark.parametrize(
    "text",
    ["http://me:s3cret@h:1", "http://s3cret@h:1", "http://me:s3;cret=s3@h:1", "http://h:1;name=s3cret@h"],
)
def test_userinfo_is_refused_and_never_shown(text: str) -> None:
    for make in (EngineSpec.parse, lambda t: EngineSpec(url=t), lambda t: Settings(prefill=[t], decode=[D])):
        with pytest.raises(ValidationError) as caught:
            make(text)
        assert "s3" not in str(caught.value) + repr(caught.value) + json.dumps(messages(caught.value))
        assert "@" not in str(caught.value)
    assert "s3" not in str(problems(environ={"PDPROXY_PREFILL": text, "PDPROXY_DECODE": D}))


HOSTS = st.one_of(
    st.from_regex(r"[a-z]([a-z0-9_-]{0,20}[a-z0-9])?(\.[a-z]([a-z0-9-]{0,9}[a-z])?){0,3}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
PORTS = st.integers(1, 65535)
ADDRESSES = st.builds(Address, HOSTS, PORTS)
SPECS = st.builds(
    lambda scheme, where, keys: EngineSpec(url=f"{scheme}://{where}", **keys),
    st.sampled_from(["http", "https"]),
    ADDRESSES,
    st.fixed_dictionaries(
        {},
        optional={
            "side_channel": ADDRESSES,
            "name": st.from_regex(r"[A-Za-z0-9._:\[\]-]{1,40}", fullmatch=True),
            "max_inflight": st.integers(1, 10**9),
            "lease": st.floats(min_value=1e-6, max_value=1e9),
            "engine_id": st.from_regex(r"[A-Za-z0-9_=.\-]{1,40}", fullmatch=True),
            "tp_size": st.integers(1, 64),
            "pp_size": st.integers(1, 64),
            "dcp_size": st.integers(1, 64),
        },
    ),
)


@hypothesis_settings(deadline=None)  # a busy machine is no failure
@given(st.lists(SPECS, max_size=4))
def test_spec_round_trip(specs: list[EngineSpec]) -> None:
    assert [EngineSpec.parse(text) for text in split_specs(", ".join(map(str, specs)) + ",")] == specs
    for spec in specs:
        assert EngineSpec.model_validate_json(spec.model_dump_json()) == spec


@hypothesis_settings(deadline=None)  # a busy machine is no failure
@given(st.text(max_size=60) | st.from_regex(r"https?://[\[\]:a-z0-9.%/@-]{0,12}(;[a-z_]{1,8}=?.{0,8}){0,3}"))
def test_any_text_is_a_spec_or_a_clear_refusal(text: str) -> None:
    try:
        spec = EngineSpec.parse(text)
    except ValidationError:
        return
    assert EngineSpec.parse(str(spec)) == spec


# --- settings in code -----------------------------------------------------------------------------


def test_defaults() -> None:
    s = settings()
    assert (s.connect_timeout, s.prefill_timeout, s.first_byte_timeout, s.idle_timeout) == (5, 120, 150, 60)
    assert (s.request_timeout, s.write_timeout, s.drain_grace, s.settle_timeout) == (3600, 30, 2, 120)
    assert (s.lease, s.queue_size, s.queue_timeout, s.attempts, s.shutdown_grace) == (30, 1024, 30, 2, 30)
    assert (s.body_limit, s.upload_timeout, s.health_interval, s.health_timeout) == (128 * 2**20, 60, 5, 2)
    assert (str(s.bind), s.admin_bind, s.log_level, s.log_format) == ("127.0.0.1:8000", None, "info", "text")
    assert s.max_inflight_of("prefill", s.prefill[0]) == 64
    assert s.max_inflight_of("decode", s.decode[0]) == 256
    assert s.lease_of(s.prefill[0]) == 30


def test_every_field_has_a_description_and_a_schema() -> None:
    for model in (Settings, EngineSpec):
        properties = model.model_json_schema()["properties"]
        assert list(properties) == list(model.model_fields)
        assert all(p.get("description", "").endswith(".") for p in properties.values())


def test_in_code() -> None:
    spec = EngineSpec(url=P, max_inflight=3, lease=10)
    s = Settings(prefill=[spec], decode=f"{D},http://[::1]:8200", settle_timeout="3m", body_limit="1MiB")
    assert s.prefill == (spec,)
    assert [d.name for d in s.decode] == ["127.0.0.1:8200", "[::1]:8200"]
    assert (s.settle_timeout, s.body_limit) == (180, 2**20)
    assert (s.max_inflight_of("prefill", spec), s.lease_of(spec)) == (3, 10)
    assert Settings(prefill=[{"url": P}], decode=[D]).prefill[0].url == P
    assert Settings.model_validate(s) is s
    assert Settings.model_validate(s.model_dump()) == s
    with pytest.raises(ValidationError):
        s.lease = 3


def test_keys_that_are_no_names() -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({1: 2, "prefill": [P], "decode": [D]})
    with pytest.raises(ValidationError):
        Settings.model_validate([P, D])


def test_settle_follows_prefill() -> None:
    assert settings(prefill_timeout=60).settle_timeout == 60
    assert settings(prefill_timeout=60, settle_timeout=90).settle_timeout == 90
    assert refused(prefill_timeout="x") == ["write a duration in seconds, or with a unit: 500ms, 30s, 2m, 1h, not 'x'"]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("30 s", 30), ("1.5m", 90), ("2min", 120), ("1H", 3600), ("7", 7), (7, 7)],
)
def test_durations(written: object, seconds: float) -> None:
    assert settings(request_timeout=5000, idle_timeout=written).idle_timeout == seconds


@pytest.mark.parametrize("wrong", ["", "s", "1d", "1 2s", True, float("inf"), float("nan"), [1], 10**400, 0, "-1"])
def test_durations_refused(wrong: object) -> None:
    assert len(refused(idle_timeout=wrong)) == 1


@pytest.mark.parametrize(("written", "size"), [("64KiB", 65536), ("1 GiB", 2**30), ("2MB", 2000000), (4096, 4096)])
def test_sizes(written: object, size: int) -> None:
    assert settings(body_limit=written).body_limit == size


@pytest.mark.parametrize("wrong", ["1.5MiB", "1XB", True, 1.0, 1023, "-5"])
def test_sizes_refused(wrong: object) -> None:
    assert len(refused(body_limit=wrong)) == 1


@pytest.mark.parametrize("wrong", [True, "x", 1.0, None.__class__, 0, 17])
def test_counts_refused(wrong: object) -> None:
    assert len(refused(attempts=wrong)) == 1


@pytest.mark.parametrize(
    ("bind", "shown"),
    [
        ("0.0.0.0:80", "0.0.0.0:80"),
        ("[::]:8000", "[::]:8000"),
        ("localhost:0", "localhost:0"),
        (("::1", 1), "[::1]:1"),
    ],
)
def test_bind(bind: object, shown: str) -> None:
    assert str(settings(bind=bind).bind) == shown


@pytest.mark.parametrize(
    "wrong", [":8000", "8000", 8000, "::1:80", "[::1]", "*:80", "h:65536", ("h", "x"), None.__class__]
)
def test_bind_refused(wrong: object) -> None:
    assert len(refused(bind=wrong)) == 1


def test_admin_bind() -> None:
    assert settings(admin_bind="off").admin_bind is None
    assert settings(admin_bind=False).admin_bind is None
    assert str(settings(admin_bind="127.0.0.1:9000", admin_token="t").admin_bind) == "127.0.0.1:9000"
    assert "needs admin_token" in refused(admin_bind="127.0.0.1:9000")[0]
    assert "both 127.0.0.1:8000" in refused(admin_bind="127.0.0.1:8000", admin_token="t")[0]
    assert settings(bind="127.0.0.1:0", admin_bind="127.0.0.1:0", admin_token="t").admin_bind == (
        "127.0.0.1",
        0,
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"connect_timeout": 120, "first_byte_timeout": 200},
            "connect_timeout (120 s) must be less than prefill_timeout",
        ),
        (
            {"connect_timeout": 40, "first_byte_timeout": 40},
            "less than first_byte_timeout (40 s): connecting",
        ),
        ({"settle_timeout": 119}, "prefill_timeout (120 s) must be at most settle_timeout (119 s)"),
        ({"drain_grace": 121}, "drain_grace (121 s) must be at most settle_timeout"),
        (
            {"prefill_timeout": 3601, "drain_grace": 0},
            "prefill_timeout (3601 s) must be at most request_timeout",
        ),
        ({"first_byte_timeout": 3601}, "first_byte_timeout (3601 s) must be at most request_timeout"),
        ({"queue_timeout": 3600}, "queue_timeout (3600 s) must be less than request_timeout"),
        ({"health_timeout": 5.5}, "health_timeout (5.5 s) must be at most health_interval"),
        ({"lease": 148}, "lease (148 s) plus 2 s must be less than first_byte_timeout (150 s)"),
        ({"first_byte_timeout": 32}, "lease (30 s) plus 2 s must be less than first_byte_timeout (32 s)"),
        ({"prefill": [f"{P};lease=200"]}, "127.0.0.1:8100's lease (200 s) plus 2 s"),
        ({"decode": [f"{D};lease=20"]}, "only prefill engines have a lease"),
        ({"prefill": [P, "http://127.0.0.1:8100/"]}, "given twice as a prefill engine"),
        ({"decode": [D, f"{D};name=other"]}, "given twice as a decode engine"),
        ({"prefill": [f"{P};name=x"], "decode": [f"{D};name=x"]}, "the name x is taken"),
        ({"prefill": [P], "decode": [P]}, "the name 127.0.0.1:8100 is taken"),
        (
            {"prefill": [P, "http://127.0.0.1:8101"]},
            "the same side channel as 127.0.0.1:8100, 127.0.0.1:5600",
        ),
        ({"prefill": [P, "http://h:1", "http://h:2;side_channel=g:1;name=h:1"]}, "the name h:1 is taken"),
        ({"prefill": []}, "no prefill engine"),
        ({"decode": ""}, "no decode engine"),
        ({"prefill": 5}, "write a list of engines"),
        ({"leese": 5}, "did you mean lease?"),
    ],
)
def test_contradictions(values: dict[str, Any], says: str) -> None:
    found = refused(**values)
    assert len(found) == 1
    assert says in found[0]


def test_borders_that_are_right() -> None:
    settings(lease=147.9, settle_timeout=120, drain_grace=120, first_byte_timeout=150, health_timeout=5)
    settings(prefill_timeout=3600, first_byte_timeout=3600, queue_size=0, queue_timeout=0, shutdown_grace=0)
    # The general lease counts only where an engine uses it.
    settings(lease=500, prefill=[f"{P};lease=20"])
    # One server in both roles is possible when it has two names.
    settings(prefill=[f"{P};name=p"], decode=[f"{P};name=d"])


def test_no_problem_hides_another() -> None:
    found = refused(
        prefill=[{"url": P, "max_inflight": "x"}, f"{P};lease=500;foo"],
        decode=[],
        idle_timeout="x",
        connect_timeout=130,
        unknown=1,
    )
    for says in ("whole number", "key=value", "given twice", "lease (500 s)", "no decode", "duration"):
        assert sum(says in text for text in found) == 1, says
    assert sum("connect_timeout (130 s)" in text for text in found) == 1
    assert sum("no such setting" in text for text in found) == 1
    assert len(found) == 8


def test_a_name_and_a_side_channel_taken_at_once() -> None:
    found = refused(prefill=[f"{P};name=a", "http://127.0.0.1:8101;name=a"])
    assert len(found) == 2


def test_a_wrong_name_or_side_channel_collides_with_nothing() -> None:
    assert len(refused(prefill=[P, "http://127.0.0.1:8101;side_channel=x"])) == 1
    assert len(refused(prefill=[f"{P};name=h:1", "http://h:1;name=a b"])) == 1


def test_a_wrong_value_takes_part_in_no_comparison() -> None:
    assert len(refused(prefill_timeout="x", settle_timeout=1, drain_grace=0, queue_timeout="y")) == 2


# --- secrets --------------------------------------------------------------------------------------


def test_secrets_are_redacted(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    s = settings(api_key_file=key, admin_token="s3cret2")
    assert s.api_key is not None
    assert s.api_key.get_secret_value() == "s3cret"
    shown = s.redacted()
    json.dumps(shown)
    assert shown["api_key"] == "**********"
    assert shown["bind"] == "127.0.0.1:8000"
    assert shown["prefill"][0]["side_channel"] == "127.0.0.1:5600"
    assert settings().redacted()["api_key"] is None
    assert "s3cret" not in repr(s) + str(s) + str(shown) + s.model_dump_json()
    assert Settings.model_validate(s.model_dump()) == s
    assert settings(api_key=SecretStr("k")).api_key == SecretStr("k")


def test_secrets_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "spaced").write_text("s3 cret")
    for name in ("empty", "spaced"):
        told = problems(environ=BOTH | {"PDPROXY_API_KEY_FILE": f"{tmp_path}/{name}"})
        assert told == [
            (
                "PDPROXY_API_KEY_FILE",
                f"what {tmp_path}/{name} holds must be visible ASCII characters without spaces",
            )
        ]
    assert "not UTF-8" in refused(api_key_file=tmp_path / "bytes")[0]
    assert "No such file" in refused(api_key_file=tmp_path / "none")[0]
    assert "keep one" in refused(api_key="s3cret", api_key_file=tmp_path / "none")[0]
    assert len(refused(api_key_file=5)) == 1
    for wrong in ("s3 cret", "s3\ncret", "", "s3crét", 53):
        found = refused(api_key=wrong)
        assert len(found) == 1
        assert "s3" not in found[0]
        assert "53" not in found[0]
    # A token that could not be read is not also missing.
    assert len(refused(admin_bind="127.0.0.1:9000", admin_token_file=tmp_path / "none")) == 1


# --- sources --------------------------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f"prefill: [{{url: {P}, name: from-file}}]\ndecode: '{D};name=d0, http://127.0.0.1:8201;name=d1'\n"
        "lease: 11\nqueue_size: 1\nattempts: 3\nlog_level: DEBUG\n",
    )
    environ = {"PDPROXY_CONFIG": str(file), "PDPROXY_LEASE": "12", "PDPROXY_QUEUE_SIZE": "2", "HOME": "/"}
    s = load_settings(environ=environ, flags={"lease": "13", "bind": None, "prefill": ()})
    assert (s.lease, s.queue_size, s.attempts, s.log_level) == (13, 2, 3, "debug")
    assert [e.name for e in (*s.prefill, *s.decode)] == ["from-file", "d0", "d1"]
    environ |= {"PDPROXY_PREFILL": f"{P};name=from-env", "PDPROXY_DECODE": " "}
    s = load_settings(environ=environ, flags={})
    assert [e.name for e in s.prefill] == ["from-env"]
    assert len(s.decode) == 2
    s = load_settings(environ=environ, flags={"prefill": ("http://a;name=f0", "http://b,http://c")})
    assert [e.name for e in s.prefill] == ["f0", "b:80", "c:80"]


def test_file_argument_beats_the_variable(tmp_path: Path) -> None:
    file = written(tmp_path, "lease: 11\n")
    s = load_settings(file=file, environ=BOTH | {"PDPROXY_CONFIG": "/nowhere", "PDPROXY_ENGINES_HOME": "/x"})
    assert s.lease == 11


def test_a_replaced_value_is_not_looked_at(tmp_path: Path) -> None:
    file = written(tmp_path, "lease: nonsense\n")
    assert load_settings(file=file, environ=BOTH, flags={"lease": "9"}).lease == 9


def test_secret_sources(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file")
    file = written(tmp_path, "api_key_file: key\n")
    s = load_settings(file=file, environ=BOTH)
    assert s.api_key == SecretStr("from-file")
    s = load_settings(file=file, environ=BOTH | {"PDPROXY_API_KEY": "from-env"})
    assert s.api_key == SecretStr("from-env")
    assert s.api_key_file is None
    found = problems(flags={"api_key": "s3cret", "admin_token_file": "/x"})
    assert [place for place, _ in found] == ["--api-key", "--admin-token-file"]
    assert "PDPROXY_API_KEY" in found[0][1]
    assert "s3cret" not in str(found)


def test_all_problems_with_their_places(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f"""\
prefill:
  - url: {P}
    max_inflight: many
    lase: 3
  - {P};foo;lease=200
  - 5
decode: http://me:pw@h, http://h/v1
prefil_timeout: 3
lease: 200
lease: 300
drain_grace: 999
idle_timeout: [1]
""",
    )
    found = problems(
        file,
        {"PDPROXY_LEESE": "1", "PDPROXY_zzz": "1", "PDPROXY_IDLE_TIMEOUT": "", "PDPROXY_WRITE_TIMEOUT": "-1"},
        {"body_limit": "12XB", "settle_timeout": "50", "helth_timeout": 2},
    )
    expected = [
        (f"{file}:3", "max_inflight: write a whole number, not 'many'"),
        (f"{file}:4", "lase: there is no such setting; did you mean lease?"),
        (f"{file}:5", "key=value"),
        (f"{file}:5", "lease (200 s) plus 2 s"),
        (f"{file}:5, {file}:2", "given twice as a prefill engine"),
        (f"{file}:6", "as a mapping with a url"),
        (f"{file}:7", "no user or password"),
        (f"{file}:7", "no /v1"),
        (f"{file}:8", "did you mean prefill_timeout?"),
        (f"{file}:10", "'lease' is given twice, first in line 9"),
        (f"{file}:10", "lease (300 s) plus 2 s must be less than first_byte_timeout"),
        (f"{file}:11, --settle-timeout", "drain_grace (999 s) must be at most settle_timeout (50 s)"),
        (f"{file}:12", "idle_timeout: write a duration"),
        ("PDPROXY_LEESE", "did you mean PDPROXY_LEASE?"),
        ("PDPROXY_zzz", "no such variable"),
        ("--helth-timeout", "did you mean --health-timeout?"),
        ("PDPROXY_WRITE_TIMEOUT", "should be greater than 0"),
        ("--body-limit", "number of bytes"),
        ("--settle-timeout", "prefill_timeout (120 s) must be at most settle_timeout (50 s)"),
    ]
    for (place, message), (want_place, want) in zip(found, expected, strict=True):
        assert place == want_place
        assert want in message


def test_lists_in_the_environment_count_their_engines() -> None:
    found = problems(environ={"PDPROXY_PREFILL": P, "PDPROXY_DECODE": f"{D},http://h;lease=x"})
    assert found == [
        (
            "PDPROXY_DECODE (engine 2)",
            "lease: write a duration in seconds, or with a unit: 500ms, 30s, 2m, 1h, not 'x'",
        )
    ]


def test_no_engines_at_all() -> None:
    found = problems(environ={})
    assert [place for place, _ in found] == ["", ""]
    for role, (_, message) in zip(("prefill", "decode"), found, strict=True):
        assert message.startswith(f"no {role} engine")
        assert f"--{role} http://" in message
        assert f"PDPROXY_{role.upper()}=" in message


def test_a_file_that_cannot_be_read_is_the_only_thing_missing(tmp_path: Path) -> None:
    assert problems(tmp_path / "none", {}) == [("--config", f"cannot read {tmp_path}/none: No such file or directory")]
    found = problems(environ={"PDPROXY_CONFIG": str(tmp_path), "PDPROXY_LEASE": "x"})
    assert [place for place, _ in found] == ["PDPROXY_CONFIG", "PDPROXY_LEASE"]
    (tmp_path / "latin").write_bytes(b"# \xe9\n")
    assert "UTF-8" in problems(tmp_path / "latin", {})[0][1]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("lease: 3\nbind: [::1]:8000\n", 2, "not valid YAML"),
        ("- lease\n", 1, "name: value"),
        ("lease: 3\n---\nlease: 4\n", 2, "not valid YAML"),
        ("\nlease: !!python/object/apply:os.system [x]\n", 2, "write a duration"),
        ("lease: !secret 5\n", 1, "tag !secret is not supported"),
        ("lease: 2024-99-99\n", 1, "write a duration"),
        ("queue_size: 0b_\n", 1, "write a whole number"),
        ("<<: 5\n", 1, "merges mappings only"),
        ("? [a]\n: 5\n", 1, "there is no setting"),
        ("attempts: yes\n", 1, "write a whole number"),
        (f"prefill:\n- {{url: {P}, url: {P}}}\n", 2, "'url' is given twice"),
        (f"prefill:\n- [{P}]\n", 2, "as a mapping with a url"),
        ("prefill:\n- name: p\n", 2, "url: is required"),
    ],
)
def test_yaml_refused(tmp_path: Path, text: str, line: int, says: str) -> None:
    environ = {"PDPROXY_DECODE": D} if "prefill" in text else BOTH
    found = problems(written(tmp_path, text), environ)
    assert len(found) == 1
    assert found[0][0] == f"{tmp_path}/proxy.yaml:{line}"
    assert says in found[0][1]


def test_yaml_that_never_ends_is_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in problems(written(tmp_path, "lease: " + "[" * 5000))[0][1]
    assert "not valid YAML" in problems(written(tmp_path, "lease: \x01\n"))[0][1]
    assert len(problems(written(tmp_path, "lease: &a [*a]\n"))) == 1


def test_yaml_accepted(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f"\ufeffprefill:\n- &p\n  url: {P}\n  lease: 20\n- <<: *p\n  url: http://127.0.0.1:8101\n"
        f"  side_channel: 127.0.0.1:5601\ndecode: {{url: {D}}}\nadmin_bind: off\nqueue_timeout:\n"
        "lease: 25s\n",
    )
    s = load_settings(file=file, environ={})
    assert [(p.name, p.lease) for p in s.prefill] == [("127.0.0.1:8100", 20), ("127.0.0.1:8101", 20)]
    assert (s.admin_bind, s.queue_timeout, s.lease) == (None, 30, 25)
    assert load_settings(file=written(tmp_path, ""), environ=BOTH) == settings()
    assert len(problems(written(tmp_path, "prefill:\ndecode: []\n"), {})) == 2


# --- flags ----------------------------------------------------------------------------------------


@click.command()
@settings_options
@click.option("--own")
def show(own: str | None, **params: Any) -> None:
    click.echo(json.dumps(settings_from(params).redacted()))


def test_flags_of_all_settings_but_secrets() -> None:
    text = CliRunner().invoke(show, ["--help"]).output
    for name in Settings.model_fields:
        assert (f"--{name.replace('_', '-')} " in text) == (
            not name.startswith(("api_key", "admin_token", "client_keys"))
        )
    assert "[default: 128MiB]" in text
    assert "text|json" in text


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    file = written(tmp_path, f"decode: {D}\nlease: 10\nattempts: 4\n")
    arguments = [
        "--config",
        str(file),
        "--prefill",
        P,
        "--prefill",
        "http://h:1",
        "--lease",
        "20s",
        "--own",
        "x",
    ]
    result = CliRunner(env={"PDPROXY_LEASE": "15", "PDPROXY_QUEUE_SIZE": "7"}).invoke(show, arguments)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [p["name"] for p in shown["prefill"]] == ["127.0.0.1:8100", "h:1"]
    assert (shown["lease"], shown["attempts"], shown["queue_size"]) == (20, 4, 7)


def test_wrong_flags_end_with_code_2_and_everything_on_stderr() -> None:
    result = CliRunner(env={"PDPROXY_BODY_LIMIT": "x"}).invoke(show, ["--prefill", "h", "--attempts", "0"])
    assert result.exit_code == 2
    assert result.stdout == ""
    for place in ("--prefill: ", "--attempts: ", "PDPROXY_BODY_LIMIT: ", "no decode engine"):
        assert place in result.stderr
    with pytest.raises(click.exceptions.Exit):
        settings_from({"lease": "x"}, environ={})


def test_traces_without_opentelemetry_are_a_problem_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_pdproxy.config.rules._tracing_installed", lambda: False)
    environ = {"PDPROXY_PREFILL": "http://p", "PDPROXY_DECODE": "http://d"}
    load_settings(environ=environ)
    with pytest.raises(ConfigError) as caught:
        load_settings(environ=environ | {"PDPROXY_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"})
    ((place, message),) = caught.value.problems
    assert place == "PDPROXY_OTLP_TRACES_ENDPOINT"
    assert "trio-pdproxy[otel]" in message
