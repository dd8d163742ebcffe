"""Configs of runs that learn from a teacher: what they may say, what they need, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import ConfigError, build, load_toml
from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, doubts

ENV: dict[str, Any] = {"id": "upper-case"}
OTHER: dict[str, Any] = {"id": "reverse-text"}
BIG: dict[str, Any] = {"model": "big", "base_url": "http://gpu7:8000/v1", "api_key_var": "BIG_KEY"}


def config(**over: Any) -> OrchestratorConfig:
    given = {"kind": "distill", "teacher": "base", "batch_size": 4, "model": {"name": "m"}, "env": [ENV], **over}
    return build(OrchestratorConfig, {key: value for key, value in given.items() if value is not None}, "x")


def test_a_teacher_is_a_name_or_a_table() -> None:
    made = config(teacher="run_a@latest", env=[ENV, {**OTHER, "teacher": BIG}])
    mine, others = made.teachers["upper-case"], made.teachers["reverse-text"]
    assert (mine.model, mine.follows, mine.is_adapter) == ("run_a@latest", "run_a", True)
    assert (others.model, others.follows, others.is_adapter) == ("big", None, False)
    assert made.teacher_adapters == ["run_a@latest"] and made.key_variables == ["PRL_API_KEY", "BIG_KEY"]
    assert (made.rollouts_per_example, made.needs_inference, made.samples_rollouts) == (1, True, True)
    assert build(OrchestratorConfig, made.model_dump(by_alias=True), "x") == made
    assert config().teachers["upper-case"].is_adapter is False and config().teacher_adapters == []


def test_a_run_without_a_teacher_has_none() -> None:
    other = config(kind=None, teacher=None, rollouts_per_example=2)
    assert (other.teaching, other.teachers, other.teacher_adapters) == (None, {}, [])


FOLDERS = [{**ENV, "name": name, "teacher": name} for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"teacher": None}, "must be set with kind = \"distill\", here or in the [[env]] 'upper-case'"),
        ({"teacher": None, "env": [{**ENV, "teacher": "base"}, OTHER]}, "here or in the [[env]] 'reverse-text'"),
        ({"kind": None, "rollouts_per_example": 2}, 'teacher: only used with kind = "distill": remove it'),
        (
            {"kind": "sft", "env": None, "data": [{"path": "x"}]},
            'teacher: only used with kind = "distill": remove it',
        ),
        (
            {"kind": "rl", "teacher": None, "rollouts_per_example": 2, "env": [{**ENV, "teacher": "base"}]},
            'env.0.teacher: only used with kind = "distill": remove it',
        ),
        (
            {"kind": "rl", "teacher": None, "rollouts_per_example": 2, "distill": {"coef": 2.0}},
            'distill: only used with kind = "distill": remove it',
        ),
        (
            {"eval": {"env": [{**ENV, "teacher": "base"}]}},
            "eval.env: nothing is learned in evaluations: remove teacher",
        ),
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature: found 0.7: must be 1"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p: remove it"),
        ({"sampling": {"min_tokens": 4}}, "sampling.min_tokens: remove it"),
        ({"env": []}, "env: must have at least one [[env]]"),
        ({"env": FOLDERS}, "found the adapters a, b, c: must be at most 2, the others at a base_url"),
        ({"teacher": {"model": "m", "api_key_var": "K"}}, "api_key_var: only used with base_url: remove it"),
        ({"teacher": {**BIG, "base_url": "ftp://x"}}, "must be an http address of an OpenAI-compatible API"),
        ({"teacher": {**BIG, "base_url": "http://me:secret@x/v1"}}, "must not contain a user or password"),
        ({"distill": {"objective": "forward_kl", "reward_weight": 1.0}}, "reward_weight: not used with"),
        ({"distill": {"top_k": 4}}, "top_k: only used with"),
        ({"distill": {"objective": "forward_kl", "top_k": 21}}, "distill.top_k"),
        ({"distill": {"coef": 0.0}}, "distill.coef"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(over: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**over)
    assert problem in str(raised.value) and "secret" not in str(raised.value)


def test_a_workspace_of_whole_models_has_teachers_elsewhere_only() -> None:
    whole = TrainerLimits("m", 256, None)
    env = [{**ENV, "teacher": "run_a"}, {**OTHER, "teacher": BIG}]
    found = {each.key: each.message for each in check_against_trainer(config(env=env), whole)}
    assert found.keys() == {"teacher", "env.0.teacher"}
    assert "found 'run_a': must be a model at a base_url" in found["env.0.teacher"]
    assert check_against_trainer(config(teacher=BIG), whole) == []
    assert check_against_trainer(config(env=env), TrainerLimits("m", 256, 8)) == []


def test_several_nodes_have_no_teachers() -> None:
    data = load_toml(EXAMPLES / "multinode" / "demo.toml")
    data["run"] |= {"kind": "distill", "teacher": "base"}
    with pytest.raises(ConfigError, match=r'run.kind: "distill" is not available on several nodes'):
        build(MultinodeConfig, data, "x")


def test_one_rollout_of_an_example_is_usual_unless_rewards_count() -> None:
    assert [each.key for each in doubts(config(), None)] == []
    assert [each.key for each in doubts(config(distill={"reward_weight": 0.5}), None)] == ["advantage.type"]
