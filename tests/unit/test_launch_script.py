"""Launch scripts: what is wrong is told with its line, and what is right comes to exact commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trio_pdproxy.config import ROLES, ConfigError
from trio_pdproxy.launch import LaunchPlan, Script, load_script, make_plan
from trio_pdproxy.launch.dry_run import commands
from trio_pdproxy.launch.script import json_schema

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.yaml") if not path.name.startswith("prometheus-"))
ENVIRON = {"HOME": "/home/u", "PATH": "/bin", "HF_TOKEN": "t0ken", "PDPROXY_ENGINES_HOME": "/engines"}


def plan(environ: dict[str, str] | None = None, **script: Any) -> LaunchPlan:
    return make_plan(Script.model_validate(script), environ=ENVIRON | (environ or {}))


def cuda(**script: Any) -> LaunchPlan:
    return plan(**({"preset": "cuda", "model": "org/model"} | script))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def problems(tmp_path: Path, text: str) -> list[tuple[str, str]]:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_script(path)
    return [(place.removeprefix(f"{path}").lstrip(":"), message) for place, message in caught.value.problems]


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("preset: cpu\nmodle: x\n", "2", "modle: there is no such setting; did you mean"),
        ("preset: sim\nprefill:\n  prot: 8100\n", "3", "prefill.prot: there is no such setting; did you mean port"),
        ("preset: sim\nprefill: {count: two}\n", "2", "write a whole number, not 'two'"),
        ("preset: rocm\n", "1", "'cuda', 'cpu' or 'sim'"),
        ("preset: cuda\n", "", "model is required"),
        ("preset: sim\npreset: cpu\n", "2", "'preset' is given twice, first in line 1"),
        ("preset: sim\n  x: 1\n", "2", "is not valid YAML"),
        ("- preset\n", "", "must hold a launch script"),
        ("", "", "must hold a launch script"),
        ("preset: sim\nprefill: {count: 0}\n", "2", "the proxy needs a prefill engine"),
        ("preset: sim\nprefill: {count: 0}\ndecode: {count: 0}\n", "2", "there is nothing to start"),
        ("preset: sim\nprefill: {port: 8200}\n", "1", "d0's port would be 8200, which is p0's port already"),
        ("preset: sim\nprefill: {port: 70000}\n", "2", "write a port from 1 to 65535, or auto"),
        ("preset: sim\nprefill: {count: 9, port: 65530}\n", "2", "would be 65536"),
        ("preset: sim\nproxy: {lesae: 3}\n", "2", "proxy.lesae: there is no such setting; did you mean lease"),
        ("preset: sim\nlease: 500\n", "1", "must be less than first_byte_timeout"),
        ("preset: sim\nproxy:\n  prefill: http://a\n", "3", "the engines are the script's"),
        ("preset: sim\nhost: 0.0.0.0\n", "2", "not every interface"),
        ("preset: sim\ndecode:\n  command: run ${prot}\n", "3", "there is no ${prot}; there are ${name}"),
        ("preset: sim\ndecode:\n  command: echo $\n", "3", "write $$ for a dollar sign"),
        ("preset: sim\ndecode:\n  command: 'echo \"'\n", "3", "cannot be split into words"),
        ("preset: sim\nenv: {A B: 1}\n", "2", "is not the name of an environment variable"),
        ("preset: sim\nenv: {A: true}\n", "2", "write '1' or '0'"),
        ("model: m\nflags: {api-key: s3cret}\n", "2", "set PDPROXY_API_KEY"),
        ("model: m\nflags:\n  kv_transfer_config: {engine_id: e1}\n", "2", "leave engine_id out"),
        ("model: m\nprefill:\n  devices: [0, 1, 2]\n", "3", "3 devices for 1 engines that need 1 each"),
        ("model: m\nprefill: {devices: 0}\ndecode: {devices: 0}\n", "3", "device 0 is the prefill engines' already"),
        ("model: m\nprefill:\n  flags: {tensor-parallel-size: x}\n", "3", "must be a whole number, not 'x'"),
    ],
)
def test_a_wrong_script_is_told_with_its_line(tmp_path: Path, text: str, line: str, words: str) -> None:
    found = problems(tmp_path, text)
    assert any(words in message for _, message in found), found
    place, message = next(one for one in found if words in one[1])
    assert place == line, found
    assert "s3cret" not in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "preset: sim\nnice: 99\nprefill: {count: -1}\nproxy: {idle_timeout: never}\n")
    assert [place for place, _ in found] == ["2", "3"]  # with these known, what lies between values is looked at
    assert len(problems(tmp_path, "preset: sim\nproxy: {idle_timeout: never, attempts: 0}\n")) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_script(tmp_path / "none.yaml")


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"p0: the environment has no TOKEN_OF_MINE"):
        cuda(env={"HF_TOKEN": "${TOKEN_OF_MINE}"})


# -- what it comes to ------------------------------------------------------------------------------


def test_roles_differ_and_no_engine_id_is_ever_set() -> None:
    configs = {}
    for engine in cuda(lease=12).engines:
        configs[engine.role] = json.loads(option(engine.argv(), "--kv-transfer-config"))
    p, d = configs["prefill"], configs["decode"]
    assert (p.pop("kv_role"), d.pop("kv_role")) == ("kv_producer", "kv_consumer")
    assert p == d == {"kv_connector": "NixlPushConnector", "kv_connector_extra_config": {"kv_lease_duration": 12}}


def test_pull_changes_the_connector_only() -> None:
    for push, pull in zip(cuda().engines, cuda(mode="pull").engines, strict=True):
        assert pull.argv() == [word.replace("NixlPushConnector", "NixlPullConnector") for word in push.argv()]


def test_the_kv_transfer_config_of_the_script_is_laid_over_ours() -> None:
    given = {"kv_transfer_config": {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"]}}}
    argv = cuda(flags=given, prefill={"flags": {"kv-transfer-config": {"kv_role": "kv_both"}}}).of("prefill")[0].argv()
    assert json.loads(option(argv, "--kv-transfer-config")) == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": 30, "backends": ["UCX"]},
    }


def test_flags_become_words_and_a_role_wins() -> None:
    flags = {
        "max_model_len": 100,
        "--enforce-eager": True,
        "compilation_config.cudagraph_mode": "NONE",
        "enable-prefix-caching": False,
        "dtype": None,
    }
    lists = {"override": {"a": 1}, "middleware": ["x", "y"]}
    p, d = (engine.argv() for engine in cuda(flags=flags | lists, decode={"flags": {"max-model-len": 7}}).engines)
    assert option(p, "--max-model-len") == "100"
    assert option(d, "--max-model-len") == "7"
    assert "--enforce-eager" in p
    assert option(p, "--compilation-config.cudagraph_mode") == "NONE"
    assert "--no-enable-prefix-caching" in p
    assert "--dtype" not in p
    assert option(p, "--override") == '{"a":1}'
    assert p[p.index("--middleware") + 1 :][:2] == ["x", "y"]


def test_vllm_serve_takes_the_model_first_and_the_module_as_an_option() -> None:
    assert cuda().engines[0].argv()[:3] == ["vllm", "serve", "org/model"]
    own = cuda(vllm="/venv/bin/python -m vllm.entrypoints.openai.api_server", served_model_name="m").engines[0].argv()
    assert option(own, "--model") == "org/model"
    assert option(own, "--served-model-name") == "m"


def test_devices_are_split_in_order_and_follow_the_parallel_sizes() -> None:
    def seen(made: LaunchPlan) -> list[str | None]:
        return [engine.changes().get("CUDA_VISIBLE_DEVICES") for engine in made.engines]

    two = {"count": 2}
    assert seen(cuda(prefill=two, decode={"count": 2, "flags": {"tensor-parallel-size": 2}})) == [
        "0",
        "1",
        "2,3",
        "4,5",
    ]
    pp = {"flags": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}}
    assert seen(cuda(prefill=pp | {"devices": "4-7"}, decode={"devices": ["MIG-a"]})) == ["4,5,6,7", "MIG-a"]
    assert seen(cuda(prefill={"devices": []}, decode={"devices": []})) == [None, None]
    assert seen(plan(preset="cpu")) == [None, None]
    assert seen(cuda(env={"CUDA_VISIBLE_DEVICES": "9"})) == ["9", "9"]


def test_ranks_are_one_engine_with_a_side_channel_each() -> None:
    made = cuda(prefill={"count": 2, "flags": {"data-parallel-size": 2}})
    first, second = made.of("prefill")
    assert [list(engine.side_channel_ports) for engine in (first, second)] == [[5600, 5601], [5602, 5603]]
    assert (first.spec.dp_size, str(second.spec.side_channel)) == (2, "127.0.0.1:5602")
    assert option(first.argv(), "--data-parallel-size") == "2"
    assert (second.host, 5603) in made.addresses


def test_every_place_is_filled_in_and_an_engine_id_is_new_at_each_start() -> None:
    text = "${name} ${role} ${index} ${host} ${port} ${side_channel_port} ${model} [${devices}] $$"
    text += " ${engine_id} ${HF_TOKEN}"
    engine = cuda(decode={"count": 2, "port": 9000, "command": text, "env": {"N": "${index}"}}).of("decode")[1]
    words, again = engine.argv(), engine.argv()
    assert words[:9] == ["d1", "decode", "1", "127.0.0.1", "9001", "5701", "org/model", "[]", "$"]
    assert words[-1] == "t0ken"
    assert len(words[-2]) == 36
    assert words[-2] != again[-2]
    assert engine.environ({})["N"] == "1"
    # What vLLM needs is set for commands of one's own, too.
    assert engine.environ({})["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5701"


def test_the_cpu_presets_environment_drops_the_launchers_python_and_lets_the_script_win() -> None:
    engine = plan(preset="cpu", env={"OMP_NUM_THREADS": 2, "UCX_TLS": None}).engines[0]
    env = engine.environ({"PATH": "/bin", "PYTHONPATH": "/mine", "PYTHONWARNINGS": "error", "UCX_TLS": "all"})
    assert env["PATH"] == "/bin"
    assert env["PYTHONPATH"].startswith("/engines/")
    assert "PYTHONWARNINGS" not in env
    assert "UCX_TLS" not in env
    assert env["OMP_NUM_THREADS"] == "2"
    assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 5
    argv = engine.argv()
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert Path(argv[0]).parts[:2] == ("/", "engines")
    assert option(argv, "--served-model-name") == "tiny"


def test_the_proxy_is_told_what_the_script_knows() -> None:
    made = cuda(
        lease=12,
        prefill={"count": 0, "external": ["http://10.0.0.9:8100;name=far"]},
        decode={"flags": {"max-num-seqs": 32}, "port": 9000},
        proxy={"bind": "0.0.0.0:80", "idle_timeout": "2m"},
    )
    settings = made.settings
    assert settings is not None
    assert [str(spec) for spec in settings.decode] == [
        "http://127.0.0.1:9000;side_channel=127.0.0.1:5700;name=d0;max_inflight=32"
    ]
    assert [spec.name for spec in settings.prefill] == ["far"]
    assert (settings.lease, settings.idle_timeout, str(settings.bind)) == (12, 120, "0.0.0.0:80")
    assert cuda(proxy=False).settings is None
    assert cuda(prefill={"max_inflight": 3}).of("prefill")[0].spec.max_inflight == 3


def test_flags_beat_the_environment_and_that_the_script() -> None:
    script = Script.model_validate({"preset": "sim", "proxy": {"bind": "127.0.0.1:1", "attempts": 1}})
    environ = ENVIRON | {"PDPROXY_BIND": "127.0.0.1:2", "PDPROXY_ATTEMPTS": "3", "PDPROXY_PREFILL": "http://other:1"}
    settings = make_plan(script, environ=environ, flags={"bind": "127.0.0.1:3"}).settings
    assert settings is not None
    assert (settings.bind.port, settings.attempts) == (3, 3)
    assert [spec.name for spec in settings.prefill] == ["p0"]
    with pytest.raises(ConfigError, match="attempts"):
        make_plan(script, environ=ENVIRON | {"PDPROXY_ATTEMPTS": "x"})


def test_the_api_key_reaches_the_engines_and_is_never_shown() -> None:
    made = plan({"PDPROXY_API_KEY": "s3cret"}, preset="sim")
    assert made.secrets == {"VLLM_API_KEY": "s3cret"}
    shown = commands(made)
    assert "s3cret" not in shown
    assert shown.count('VLLM_API_KEY="$PDPROXY_API_KEY"') == 2


def test_automatic_ports_are_all_different() -> None:
    free = {"count": 3, "port": "auto", "side_channel_port": "auto"}
    made = plan(preset="sim", prefill=free, decode=free)
    assert len(set(made.addresses)) == len(made.addresses) == 12


def test_logs_go_where_the_script_or_the_system_says(tmp_path: Path) -> None:
    assert plan(preset="sim").logs == Path("/home/u/.local/state/trio-pdproxy/launch")
    assert plan({"XDG_STATE_HOME": "/x"}, preset="sim").logs == Path("/x/trio-pdproxy/launch")
    assert plan({"LOGS_DIRECTORY": "/var/log/pd"}, preset="sim").logs == Path("/var/log/pd/launch")
    path = tmp_path / "s.yaml"
    path.write_text("preset: sim\nlogs: here\n")
    assert load_script(path).logs == tmp_path / "here"


# -- the examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_example_comes_to_commands_that_a_shell_reads_back(path: Path) -> None:
    script = load_script(path)
    made = make_plan(script, environ=ENVIRON)
    blocks = commands(made).strip().split("\n\n")
    assert len(blocks) == len(made.engines) + (made.settings is not None)
    assert len(made.engines) == sum(script.of(role).count for role in ROLES)
    for engine, block in zip(made.engines, blocks, strict=False):
        comment, command = block.split("\n", 1)
        assert engine.name in comment
        words = shlex.split(command.replace("\\\n", " "))
        # An engine's id, where one is written, is another one each time.
        assert words[-len(engine.words) :] == engine.argv()
        for name, value in engine.changes().items():
            assert (f"{name}={value}" in words) if value is not None else (name in words)


def test_the_schema_for_editors_is_up_to_date() -> None:
    # After a change: trio-pdproxy launch --schema > examples/launch.schema.json
    assert json.loads((EXAMPLES / "launch.schema.json").read_text()) == json_schema()
    for path in SCRIPTS:
        assert path.read_text().startswith("# yaml-language-server: $schema=launch.schema.json\n")


def test_the_schema_knows_every_setting() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Script.model_fields)
    assert schema["additionalProperties"] is False
    proxy = schema["properties"]["proxy"]["anyOf"][0]
    assert "bind" in proxy["properties"]
    assert "prefill" not in proxy["properties"]
