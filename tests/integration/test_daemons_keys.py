"""Which processes of a workspace can see the API key of inference, and what an environment sees: read from /proc."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import psutil
import pytest

from daemons.launchers.local import find_members, kill_all
from daemons.process import spawn
from daemons.specs import orchestrator_spec
from prime_rl.contract.layout import list_rollout_steps
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.orchestrator.envs.process import BASE_PREFIXES, BASE_VARIABLES
from prime_rl.utils.process import ProcessId
from tests.orchestrator_support import FakeInference, config_data, make_model, make_run, serving, until, write_toml
from tests.patience import PATIENCE_S
from tests.system_support import Workspace

CANARY = "sk-canary-that-nobody-may-see"
MODULE = """
from prime_rl.orchestrator.envs.base import Example, Outcome


class Env:
    id = "somebody's"

    def __init__(self, args, seed):
        pass

    def examples(self, split):
        return [Example("one", [{"role": "user", "content": "?"}], "")]

    async def rollout(self, example, policy):
        await policy.complete(example.messages)
        return Outcome(0.5, {})
"""


async def test_the_orchestrator_has_the_key_in_no_environment_and_an_environment_sees_what_is_named_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "somebodys_env-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "somebodys_env.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\none = somebodys_env:Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{Path(__file__).parents[2]}")
    monkeypatch.setenv("OPERATOR_KEY", CANARY)
    monkeypatch.setenv("NAMED", "yes")
    monkeypatch.setenv("NOT_NAMED", "no")
    model, run = make_model(tmp_path / "model"), make_run(tmp_path / "workspace")
    fake = FakeInference(model)
    fake.api_key = CANARY
    async with serving(fake) as url:
        env = {"id": "plugin:one", "env_vars": ["NAMED", "OPERATOR_KEY", "OPERATOR_KEY_FILE"]}
        client = {"base_url": url, "api_key_var": "OPERATOR_KEY"}
        write_toml(run, config_data(model, max_async_level=0) | {"env": [env], "client": client})
        spec, output_dir = orchestrator_spec(run), run.path.parent
        process = spawn(spec.argv, spec.log, output_dir, spec.name, keys=["OPERATOR_KEY"])
        leader = ProcessId.of(process.pid)
        try:
            await until(lambda: list_rollout_steps(run) == [1] or process.poll() is not None, "a batch")
            assert process.poll() is None, run.log.read_text()
            (child,) = psutil.Process(process.pid).children()
            seen, of_child = psutil.Process(process.pid).environ(), child.environ()
            held = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.is_symlink()]
        finally:
            await asyncio.to_thread(kill_all, find_members(output_dir, [leader], [spec.name]), reap=process.poll)
            await asyncio.to_thread(process.wait, 60)
    assert CANARY not in str(seen) and seen["NOT_NAMED"] == "no"
    assert held and not any("memfd" in each for each in held), "what it read the key from is closed"
    assert of_child["NAMED"] == "yes" and "PATH" in of_child
    others = {name for name in of_child if name not in BASE_VARIABLES and not name.startswith(BASE_PREFIXES)}
    assert others == {"NAMED", "PYTHONUTF8"}, "neither the key, nor the way to it, nor what was not named"


@pytest.mark.release
def test_no_process_of_a_workspace_has_the_key_in_its_environment(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRL_API_KEY", CANARY)
    workspace.up()
    inference = read_status(workspace.paths.inference_status, InferenceStatus)
    assert inference is not None
    assert httpx.get(f"{inference.base_url}/models", trust_env=False, timeout=PATIENCE_S).status_code == 401
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=1000)))
    workspace.wait(lambda: (workspace.runs()["run_a"]["step"] or 0) >= 1, "run_a to train, with the key")
    found = workspace.processes()
    assert len(found) >= 4, "supervisor, trainer, inference, orchestrator"
    assert not [each.info["cmdline"] for each in found if CANARY in str(each.info["environ"])]
    ways = [" ".join(each.info["cmdline"]) for each in found if "PRL_API_KEY_FILE" in (each.info["environ"] or {})]
    assert not any("trainer" in command for command in ways)
