"""The figures of an evaluation."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from prime_rl.orchestrator.metrics import eval_metrics, pass_at
from tests.unit.test_orchestrator_pure import a_rollout


def test_pass_at_k_is_the_chance_among_all_choices_of_k() -> None:
    for num_rollouts, num_passed, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if num_passed <= num_rollouts >= k:
            outcomes = [True] * num_passed + [False] * (num_rollouts - num_passed)
            chosen = list(itertools.combinations(outcomes, k))
            assert pass_at(k, num_rollouts, num_passed) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_an_evaluation_reports_mean_and_passes_with_their_errors() -> None:
    examples = [[a_rollout(1.0), a_rollout(0.0)], [a_rollout(0.5), replace(a_rollout(0.5), truncated=True)]]
    examples.append([a_rollout(1.0)] * 2)
    figures = eval_metrics("talk", examples, pass_reward=1.0)
    assert figures["eval/talk/reward"] == pytest.approx(4 / 6) and figures["eval/talk/truncated"] == pytest.approx(
        1 / 6
    )
    assert figures["eval/talk/reward_se"] == pytest.approx(statistics.stdev([0.5, 0.5, 1.0]) / 3**0.5)
    assert figures["eval/talk/avg@2"] == figures["eval/talk/reward"]
    assert figures["eval/talk/avg@2_se"] == figures["eval/talk/reward_se"]
    assert figures["eval/talk/pass@1"] == pytest.approx(0.5) and figures["eval/talk/pass@2"] == pytest.approx(2 / 3)
    assert figures["eval/talk/pass@2_se"] == pytest.approx(statistics.stdev([1, 0, 1]) / 3**0.5)
    assert "eval/talk/pass@4" not in figures and figures["eval/talk/exact_match"] == pytest.approx(0.5)
    assert eval_metrics("talk", examples, pass_reward=0.5)["eval/talk/pass@2"] == 1.0
    one = eval_metrics("talk", examples[:1], pass_reward=1.0)
    assert one["eval/talk/reward_se"] == 0.0, "one example says nothing about others"
