"""`vllm bench serve` against real engines through the proxy: no request of 200 may fail."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from trio_pdproxy.launch.environment import ensure_environment
from trio_pdproxy.launch.model import ensure_model

from .hand import MODEL
from .harness import CHAT, COMPLETIONS, over, proxy, quiet

if TYPE_CHECKING:
    from .conftest import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1000)]

PROMPTS = 200
BACKENDS = {COMPLETIONS: "openai", CHAT: "openai-chat"}


@pytest.mark.parametrize("path", BACKENDS)
async def test_no_request_of_200_fails(
    vllm_pair: VllmPair, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = await ensure_environment()
    model = await ensure_model(environment)
    async with proxy(vllm_pair) as (app, client):
        # The module, not the command: in the engines' small environment that one misses its own metadata.
        command = [str(environment.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend", BACKENDS[path], "--endpoint", path, "--base-url", str(client.base_url).rstrip("/")]
        command += ["--model", MODEL, "--tokenizer", str(model), "--dataset-name", "random", "--seed", "7"]
        command += ["--random-input-len", "64", "--random-output-len", "8", "--num-prompts", str(PROMPTS)]
        command += ["--max-concurrency", "16", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
        with trio.fail_after(400):
            done = await trio.run_process(
                command,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
            )
        assert done.returncode == 0, done.stdout.decode()[-3000:]
        await over(app)
        outcomes = [report.outcome for report in app.recent if report.route == path]
        assert app.pool.decode[0].stranded == 0
    result = json.loads((tmp_path / "result.json").read_text())
    with capsys.disabled():
        print(
            f"\n{path}: {result['completed']} of {PROMPTS} completed, {result.get('failed', 0)} failed, "
            f"{result['duration']:.1f} s, median TTFT {result['median_ttft_ms']:.0f} ms (shared machine)"
        )
    assert result["completed"] == PROMPTS
    assert result.get("failed", 0) == 0
    assert set(outcomes) == {"ok"}
    await quiet(vllm_pair)
