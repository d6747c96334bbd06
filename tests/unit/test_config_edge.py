"""The settings of the edge: keys, TLS, comments. What cannot work is said at start, with the file's name."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError

from trio_pdproxy.config import Settings, engine_context, load_settings, split_keys

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"


def settings(**values: Any) -> Settings:
    return Settings(**({"prefill": [P], "decode": [D]} | values))


def refused(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        settings(**values)
    return "\n".join(str(e["loc"]) + e["msg"] for e in caught.value.errors())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """CA, certificate, key."""
    ca = trustme.CA()
    signed = ca.issue_cert("127.0.0.1")
    paths = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    ca.cert_pem.write_to_path(str(paths[0]))
    signed.cert_chain_pems[0].write_to_path(str(paths[1]))
    signed.private_key_pem.write_to_path(str(paths[2]))
    return paths


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a", ("a",)),
        ("a b,c\n\td\r\n", ("a", "b", "c", "d")),
        ("# nobody\na # until tomorrow\n  # b\nc#d", ("a", "c#d")),
        ("", ()),
        (" ,\n,", ()),
    ],
)
def test_keys_are_split_at_spaces_commas_and_lines(text: str, keys: tuple[str, ...]) -> None:
    assert split_keys(text) == keys


def test_keys_come_from_the_environment_or_a_file_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key-1\nkey-2 # comment\n")
    environ = {"PDPROXY_PREFILL": P, "PDPROXY_DECODE": D, "PDPROXY_AUTH": "terminate"}
    for more in ({"PDPROXY_CLIENT_KEYS": "key-1, key-2"}, {"PDPROXY_CLIENT_KEYS_FILE": str(path)}):
        found = load_settings(environ=environ | more)
        assert found.client_keys is not None
        assert split_keys(found.client_keys.get_secret_value()) == ("key-1", "key-2")
        assert "key-1" not in str(found.redacted()["client_keys"])
        assert "key-1" not in repr(found)
    assert settings(auth="terminate", client_keys=["key-1", "key-2"]).client_keys is not None


def test_who_could_never_get_in_is_told_so() -> None:
    assert "needs client_keys" in refused(auth="terminate")
    assert "only looked at where auth is terminate" in refused(client_keys="a")
    assert "at least one key" in refused(auth="terminate", client_keys=" # ")
    assert "visible ASCII" in refused(auth="terminate", client_keys="k\xe9y")
    assert "k\xe9y" not in refused(auth="terminate", client_keys="k\xe9y")
    assert "auth" in refused(auth="none")


def test_tls_files_are_tried_at_start(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    ca, cert, key = pair
    settings(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=ca)
    settings(engine_ca_file=ca, engine_cert_file=cert, engine_key_file=key)
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    settings(tls_cert_file=both)
    assert "tls_key_file needs tls_cert_file" in refused(tls_key_file=key)
    assert "engine_key_file needs engine_cert_file" in refused(engine_key_file=key)
    assert "tls_client_ca_file needs tls_cert_file" in refused(tls_client_ca_file=ca)
    assert str(cert) in refused(tls_cert_file=cert), "it has no key"
    assert "key" in refused(tls_cert_file=ca, tls_key_file=key), "another one's key"
    assert "No such file" in refused(engine_ca_file=tmp_path / "nothing")
    assert "cannot use" in refused(engine_ca_file=key)
    wrong = refused(tls_cert_file=tmp_path / "a", engine_ca_file=tmp_path / "b")
    assert wrong.count("No such file") == 2, "all of it at once"


def test_how_engines_are_checked(pair: tuple[Path, Path, Path]) -> None:
    ca, cert, key = pair
    assert engine_context(settings()) is None
    context = engine_context(settings(engine_ca_file=ca))
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(context.get_ca_certs()) == 1, "this CA and no other"
    assert engine_context(settings(engine_cert_file=cert, engine_key_file=key)) is not None


def test_pings_are_off_unless_asked_for() -> None:
    assert settings().ping_interval == 0
    assert settings(ping_interval="15s").ping_interval == 15
    assert "ping_interval" in refused(ping_interval=-1)
