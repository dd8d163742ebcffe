"""What is learned from elsewhere saves rewards: texts first, and a teacher. SmolLM2-135M, real processes.

One workspace and one trainer have all runs of a comparison, three seeds of each kind, and two neighbours that learn
other sums from rewards meanwhile. The task are sums that are asked for without an example: the model begins with a
sentence, for which there is no room, so rewards alone have little to begin with.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from tests.learning import MIN_STANDARD_ERRORS
from tests.patience import PATIENCE_S
from tests.system_support import PARTS_TOML, SUPERVISOR_TOML, Workspace, closed

# Twelve minutes on two cores that do nothing else.
TIMEOUT_S = 8 * PATIENCE_S
pytestmark = [pytest.mark.release, pytest.mark.timeout(TIMEOUT_S)]
SEEDS = (1, 2, 3)
NEIGHBOURS = ("run_near_1", "run_near_2")
# The texts count: 8 updates with 32 of them have the tokens of 4 with 64 rollouts.
TEXT_UPDATES, UPDATES_AFTER, UPDATES_ALONE, NEIGHBOUR_UPDATES = 8, 8, 13, 12
MAX_OPERAND = 20
SYSTEM = "Sums."
SYSTEM_TOML = """\
output_dir = "{output_dir}"
max_concurrent_runs = 8
seq_len = 64
[model]
name = "{model}"
[lora]
rank = 8
alpha = 16
"""
RUN = """\
batch_size = {batch_size}
max_steps = {max_steps}
seed = {seed}
[model]
name = "{model}"
[optim]
lr = {lr}
[ckpt]
keep_rollouts = true
"""
REWARDS = """\
[sampling]
max_tokens = 4
[[env]]
id = "arithmetic"
[env.args]
wording = "short"
max_operand = {max_operand}
operations = ["{operation}"]
num_examples = 300
num_eval_examples = 48
[env.prompt]
system = "{system}"
"""


@pytest.fixture
def workspace(tmp_path: Path, smollm2: Path) -> Iterator[Workspace]:
    """One slot for each run of a comparison and its neighbours."""
    made = Workspace(tmp_path / "workspace", tmp_path / "system.toml", smollm2)
    text = SYSTEM_TOML + PARTS_TOML + SUPERVISOR_TOML
    made.system_toml.write_text(text.format(output_dir=made.output_dir, model=smollm2, engine="embedded"))
    yield from closed(made)


def add(workspace: Workspace, run_id: str, head: str, rest: str, **values: object) -> None:
    """Add a run of `values` for `head`, RUN and `rest`."""
    defaults = {
        "model": workspace.model,
        "batch_size": 64,
        "max_operand": MAX_OPERAND,
        "operation": "+",
        "seed": 0,
        "lr": 1e-4,
    }
    path = workspace.output_dir.parent / f"{run_id}.toml"
    path.write_text((head + RUN + rest).format(**{**defaults, "system": SYSTEM, **values}))
    workspace.prl("runs", "add", str(path), "--id", run_id)


def add_learner(workspace: Workspace, run_id: str, max_steps: int, seed: int, *, start: str = "") -> None:
    """A run that learns sums from rewards, from the base model or from what `start` has learned."""
    rest = REWARDS + (f'[init]\nfrom = "{start}"\n' if start else "")
    add(workspace, run_id, "rollouts_per_example = 8\n", rest, max_steps=max_steps, seed=seed)


def add_neighbours(workspace: Workspace) -> None:
    """Two runs of others in the same trainer, with differences."""
    for seed, run_id in enumerate(NEIGHBOURS):
        values = {"operation": "-", "batch_size": 16, "max_steps": NEIGHBOUR_UPDATES, "seed": seed}
        add(workspace, run_id, "rollouts_per_example = 8\n", REWARDS, **values)


def add_texts(workspace: Workspace, run_id: str, seed: int) -> None:
    """A run that learns sums with their results, asked for as the environment does."""
    rng, rows = random.Random(seed), []
    for _ in range(TEXT_UPDATES * 32):
        left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Compute: {left} + {right}"}]
        rows.append({"prompt": asked, "completion": str(left + right)})
    path = workspace.output_dir.parent / f"{run_id}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = f'[[data]]\npath = "{path.name}"\nnum_held_out = 0\n'
    add(workspace, run_id, 'kind = "sft"\n', source, batch_size=32, max_steps=TEXT_UPDATES, seed=seed, lr=5e-4)


def finish(workspace: Workspace, run_ids: Sequence[str]) -> None:
    def done() -> bool:
        states = {run_id: run["state"] for run_id, run in workspace.runs().items()}
        assert not {"failed", "evicted", "invalid"} & set(states.values()), f"{states}\n{workspace.logs()}"
        return all(states[run_id] == "finished" for run_id in run_ids)

    wait_for(done, f"{', '.join(run_ids)} to finish", timeout_s=TIMEOUT_S, poll_s=1.0)


def final_rewards(workspace: Workspace, run_ids: Sequence[str]) -> list[float]:
    """Of the newest versions, on the same examples, which none of them has trained on."""
    results = workspace.json("eval", *run_ids, "-n", "48", "-k", "4")["results"]
    assert [each["problem"] for each in results] == [None] * len(run_ids), results
    return [each["figures"]["reward"] for each in results]


def trained_tokens(workspace: Workspace) -> dict[str, int]:
    return {row["name"]: row["tokens_trained"] for row in workspace.json("usage")["rows"]}


def check_alone(workspace: Workspace, *run_ids: str) -> None:
    """The runs and both neighbours have the weights that their batches give without neighbours, at 1e-4."""
    workspace.prl("down")
    verdicts = workspace.selfcheck(*(f"--run={run_id}" for run_id in (*run_ids, *NEIGHBOURS)))
    assert len(verdicts) == len(run_ids) + 2 and all(each["reached"]["ok"] for each in verdicts.values()), verdicts
    print({run_id: (each["difference"], each["reached"]["difference"]) for run_id, each in verdicts.items()})


def check_rise(differences: Sequence[float], what: str) -> None:
    """The mean of what seeds differ by is far from what chance makes of it."""
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    print(f"{what}: {mean:.3f} +- {error:.3f}, by seed {[round(each, 3) for each in differences]}")
    assert mean >= MIN_STANDARD_ERRORS * error > 0, f"{what}: {differences}"


def test_texts_and_then_rewards_beat_rewards_alone(workspace: Workspace) -> None:
    """At no more trained tokens, those of the texts included."""
    workspace.up()
    add_neighbours(workspace)
    for seed in SEEDS:
        add_texts(workspace, f"run_texts_{seed}", seed)
        add_learner(workspace, f"run_alone_{seed}", UPDATES_ALONE, seed)
    for seed in SEEDS:
        finish(workspace, [f"run_texts_{seed}"])
        add_learner(workspace, f"run_after_{seed}", UPDATES_AFTER, seed, start=f"run_texts_{seed}")
    finish(workspace, [*(f"run_{kind}_{seed}" for kind in ("after", "alone") for seed in SEEDS), *NEIGHBOURS])

    tokens = trained_tokens(workspace)
    for seed in SEEDS:
        assert tokens[f"run_texts_{seed}"] + tokens[f"run_after_{seed}"] <= tokens[f"run_alone_{seed}"], tokens
    after, alone = (final_rewards(workspace, [f"run_{kind}_{seed}" for seed in SEEDS]) for kind in ("after", "alone"))
    check_rise([one - other for one, other in zip(after, alone, strict=True)], f"{after} against {alone}")
    check_alone(workspace, f"run_texts_{SEEDS[0]}", f"run_after_{SEEDS[0]}")


DISTILL = """\
kind = "distill"
teacher = "run_teacher@latest"
distill.objective = "forward_kl"
"""
STUDENT_UPDATES, MIN_SHARE_OF_GAIN = 16, 0.8


def test_a_student_gets_most_of_what_its_teacher_gained_beside_it(workspace: Workspace) -> None:
    """From a fresh adapter, by the newest version of a teacher that still learns, and without a reward of its own."""
    workspace.up()
    add_neighbours(workspace)
    add_texts(workspace, "run_texts", 0)
    finish(workspace, ["run_texts"])
    add_learner(workspace, "run_teacher", UPDATES_ALONE, 0, start="run_texts")
    students = [f"run_student_{seed}" for seed in SEEDS]
    for seed, run_id in zip(SEEDS, students, strict=True):
        add(workspace, run_id, DISTILL, REWARDS, max_steps=STUDENT_UPDATES, seed=seed, lr=5e-4)
    finish(workspace, ["run_teacher", *students, *NEIGHBOURS])

    teacher, base, *found = final_rewards(workspace, ["run_teacher", "base", *students])
    shares = [(reward - base) / (teacher - base) for reward in found]
    print(f"of {teacher - base:.3f}, students got {[round(share, 2) for share in shares]}")
    assert teacher - base > 0.2 and statistics.mean(shares) >= MIN_SHARE_OF_GAIN, (base, teacher, shares)
    check_alone(workspace, "run_teacher", students[0])
