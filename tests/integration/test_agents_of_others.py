"""Agents as their makers publish them, with SmolLM2 behind the gateway: what they sample is what is trained on.

Their packages have an environment of their own, made once from the package index.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.base import build
from prime_rl.configs.envs import SessionLimits
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.gateway.keys import new_secret
from prime_rl.gateway.serve import serving_here
from prime_rl.orchestrator.envs.base import Outcome
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import Branch, PolicySession
from prime_rl.orchestrator.sessions import Sessions
from prime_rl.orchestrator.try_env import at_server
from tests.integration.conftest import _once
from tests.integration.test_orchestrator_inference import server, serving
from tests.orchestrator_support import until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.release
PROGRAMS = Path(__file__).parents[1] / "programs"
PACKAGES = ["openai==3.57.0", "smolagents==1.26.0", "openai-agents==0.24.0", "mini-swe-agent==2.4.6"]
SEQ_LEN, MAX_TOKENS, MAX_TURNS = 8192, 24, 6
# Of a log-probability, in float32, over all layers of two programs.
TOLERANCE = 2e-4
MINI = {
    **{"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
}


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the agents."""

    def make(folder: Path) -> None:
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder / "venv")], check=True)
        python = str(folder / "venv" / "bin" / "python")
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *PACKAGES], check=True)

    return _once(tmp_path_factory, "agents", make) / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def policy(smollm2: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return loaded


@pytest.fixture(scope="module")
def inference(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    workspace = tmp_path_factory.mktemp("agents") / "workspace"
    with server(workspace, smollm2, max_model_len=SEQ_LEN) as process:
        asyncio.run(until(lambda: serving(workspace, process) is not None, "the server"))
        yield serving(workspace, process)


async def recorded(model: Path, url: str, command: list[str], variables: dict[str, str]) -> tuple[list[Branch], str]:
    """The branches of what a program asked in one session, and what it printed."""
    data = {
        **{"batch_size": 1, "rollouts_per_example": 1, "env": [{"id": "sessions"}]},
        **{"model": {"name": str(model)}, "sampling": {"max_tokens": MAX_TOKENS}, "advantage": {"type": "batch"}},
    }
    config, tokenizer = build(OrchestratorConfig, data, "test"), ChatTokenizer.load(str(model))
    async with AsyncExitStack() as cleanup:
        turns, _ = await at_server(config, tokenizer, url, str(model), SEQ_LEN, cleanup)
        sessions = Sessions("run_a", new_secret(), tokenizer, max_model_len=SEQ_LEN)
        sessions.served_at(await cleanup.enter_async_context(serving_here(sessions, sessions.secret)))
        policy = PolicySession(turns, tokenizer, seed=1)
        session = await cleanup.enter_async_context(sessions.open(policy, SessionLimits(MAX_TURNS)))
        base = session.base_url.removesuffix("/v1")
        environ = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            **{"OPENAI_BASE_URL": session.base_url, "OPENAI_API_BASE": session.base_url, "OPENAI_API_KEY": session.key},
            **{"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": session.key, "PRL_MODEL": "run_a"},
            **{"OPENAI_AGENTS_DISABLE_TRACING": "1", **variables},
        }
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert policy.answer_lens, output.decode()
        branches = policy.finished(Outcome(0.5)).branches
        assert sum(branch.num_completion_tokens for branch in branches) == sum(policy.answer_lens)
        return branches, output.decode()


@pytest.mark.parametrize(
    ("name", "words", "fewest"),
    [
        ("agent_smolagents.py", ["code"], 2),
        ("agent_smolagents.py", ["tools"], 2),
        ("agent_openai_agents.py", ["chat", "whole"], 1),
        ("agent_openai_agents.py", ["chat", "stream"], 1),
        ("agent_openai_agents.py", ["responses", "whole"], 1),
        ("agent_openai_agents.py", ["responses", "stream"], 1),
        ("mini", ["openai"], 2),
        ("mini", ["anthropic"], 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
async def test_what_an_agent_samples_is_recorded_as_it_was_sampled(
    agents: Path,
    policy: PreTrainedModel,
    inference: str,
    smollm2: Path,
    tmp_path: Path,
    name: str,
    words: list[str],
    fewest: int,
) -> None:
    command, variables = [str(agents), str(PROGRAMS / name), *words], {}
    if name == "mini":
        task = [
            "-m",
            f"{words[0]}/run_a",
            "-t",
            "Say hello.",
            "-y",
            "--exit-immediately",
            "-o",
            str(tmp_path / "o.json"),
        ]
        command = [str(agents), "-m", "minisweagent.run.mini", *task]
        variables = {**MINI, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    branches, output = await recorded(smollm2, inference, command, variables)
    assert sum(len(branch.turn_versions) for branch in branches) >= fewest, output
    for branch in branches:
        ids = torch.tensor([branch.token_ids_T])
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(policy(ids).logits[0], dim=-1)
        at = [place for place, on in enumerate(branch.loss_mask_T) if on]
        expected = torch.stack([logprobs_TV[place - 1, branch.token_ids_T[place]] for place in at])
        found = torch.tensor([branch.logprobs_T[place] for place in at])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
