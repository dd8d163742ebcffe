"""Runs that learn from a teacher: what it is asked, what batches have of it, what is waited for, what ends a run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from prime_rl.configs.base import build, merge
from prime_rl.configs.distill import DistillConfig
from prime_rl.configs.orchestrator import AdvantageConfig, OrchestratorConfig
from prime_rl.contract.files import mark_stable, put_away, staged_dir
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.peft import ADAPTER_FILE, CONFIG_FILE
from prime_rl.contract.served import is_teacher
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from prime_rl.contract.usage import read_usage
from prime_rl.orchestrator.batch import assemble_batch, has_signal
from prime_rl.orchestrator.envs import agent_judge
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.recorder import Branch, Rollout
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.teacher import Version, newest_version
from tests.metrics_support import undocumented
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    config_data,
    look_often,
    make_model,
    make_run,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S

PEFT = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "base_model_name_or_path": "base",
}


class FakeTeacher(FakeInference):
    """Says of each token what `told` does of (model, token); of a text it reads one token a byte, `begin` before them.

    Attributes:
        read: (model, tokens) of each request.
        keys: that it was asked with.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.told: Callable[[str, int], float | None] = lambda model, token: -1.0 if model == self.model else -2.0
        self.read: list[tuple[str, list[int]]] = []
        self.begin: list[int] = []
        self.longest = 10_000
        self.keys: set[bytes | None] = set()
        self.named = set[str]()
        self.loads: list[tuple[str, bytes]] = []

    def _knows(self, name: str) -> bool:
        return name in self.named or super()._knows(name)

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not is_teacher(body["lora_name"]):
            return super()._load(body)
        if not Path(body["lora_path"], ADAPTER_FILE).exists():
            return 400, {"error": "no adapter"}
        self.loads.append((body["lora_name"], Path(body["lora_path"], ADAPTER_FILE).read_bytes()[10:]))
        if self.loads[-1][1] == b"at fault":
            return 422, {"error": "its weights are at fault"}
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, "ok"

    async def _answer(self, path: str, body: dict[str, Any], headers: dict[bytes, bytes]) -> tuple[int, Any]:
        if "prompt_logprobs" in body:
            self.keys.add(headers.get(b"authorization"))
        return await super()._answer(path, body, headers)

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "prompt_logprobs" not in body:
            return await super()._complete(body)
        if not self._knows(body["model"]):
            return 404, {"error": "no such model"}
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = self.begin + Tokenizer.from_file(f"{self.model}/tokenizer.json").encode(ids).ids
        else:
            self.read.append((body["model"], ids))
        if len(ids) + 1 > self.longest and ids is body["prompt"]:
            return 400, {"error": f"at most {self.longest} tokens"}
        likeliest = {str(token): {"logprob": -3.0 - token} for token in range(body["prompt_logprobs"])}
        told = [{**likeliest, str(token): {"logprob": self.told(body["model"], token)}} for token in ids[1:]]
        return 200, {"choices": [{"prompt_logprobs": [None, *told]}]}


@dataclass
class World:
    run: RunDir
    model: Path
    fake: FakeTeacher
    url: str

    def config(self, **over: Any) -> OrchestratorConfig:
        data = config_data(self.model, client={"base_url": f"{self.url}"})
        return build(OrchestratorConfig, merge(data, {"kind": "distill", "teacher": "base", **over}), "test")

    def start(self, **over: Any) -> asyncio.Task[int]:
        return asyncio.create_task(run_to_the_end(self.config(**over), self.run, lambda: False))

    async def live(self, **over: Any) -> int:
        async with trainer(self.run):
            return await asyncio.wait_for(self.start(**over), PATIENCE_S)

    @asynccontextmanager
    async def running(self, **over: Any) -> AsyncIterator[asyncio.Task[int]]:
        """The run beside a trainer, ended with the block."""
        async with trainer(self.run):
            task = self.start(**over)
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @property
    def status(self) -> RunStatus:
        status = read_status(self.run.status, RunStatus)
        assert status is not None
        return status

    async def waits_for(self, text: str) -> None:
        def waits() -> bool:
            status = read_status(self.run.status, RunStatus)
            return status is not None and text in (status.waiting_on or "")

        await until(waits, f"waiting_on {text!r}")

    def samples(self) -> list[TrainingSample]:
        steps = list_steps(self.run.rollouts)
        return [each for step in steps for each in read_batch(self.run.rollout_file(step)).samples]

    def has_read(self, number: int) -> bool:
        return any(name == f"teacher/run_b@v{number}" for name, _ in self.fake.read)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.orchestrator_metrics.read_text().splitlines()]

    def outside(self, **over: Any) -> dict[str, Any]:
        self.fake.named = {"big"}
        return {"model": "big", "base_url": f"{self.url}", **over}


@asynccontextmanager
async def trainer(run: RunDir) -> AsyncIterator[None]:
    task = asyncio.create_task(stand_in_trainer(run))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    look_often(monkeypatch)
    monkeypatch.setattr("prime_rl.orchestrator.teacher.MAX_LOOK_S", 0.02)
    monkeypatch.setattr("prime_rl.orchestrator.teacher.LOAD_RETRY_S", 0.02)
    monkeypatch.setattr(agent_judge, "WAIT_S", 0.02)
    model = make_model(tmp_path / "model")
    fake = FakeTeacher(model)
    async with serving(fake) as url:
        yield World(make_run(tmp_path, "run_b"), model, fake, url)


def write_adapter(folder: Path, mark: str = "") -> None:
    """An adapter as far as the orchestrator looks at it; the fake server tells them apart by `mark`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(PEFT))
    (folder / ADAPTER_FILE).write_bytes((2).to_bytes(8, "little") + b"{}" + mark.encode())


def publish(run: RunDir, version: int, mark: str = "") -> None:
    run.broadcast.mkdir(parents=True, exist_ok=True)
    with staged_dir(run.broadcast_dir(version)) as folder:
        write_adapter(folder, mark)
        mark_stable(folder)


def give(run: RunDir, number: int, source: str) -> None:
    """What is copied when a run is added."""
    write_adapter(run.teacher_dir(number))
    run.teacher_source(number).write_text(source)


async def test_the_advantage_of_a_token_is_how_much_likelier_the_teacher_holds_it(world: World) -> None:
    world.fake.told = lambda model, token: -0.5 - token / 64
    assert await world.live(rollouts_per_example=1, distill={"coef": 2.0}) == 0
    samples = world.samples()
    assert len(samples) == 12
    for each in samples:
        told = zip(each.token_ids, each.loss_mask, each.logprobs, each.token_advantages, strict=True)
        assert [value for *_, value in told] == pytest.approx(
            [
                2 * (-0.5 - token / 64 - own) if is_learned else 0.0
                for token, is_learned, own in zip(each.token_ids, each.loss_mask, each.logprobs, strict=True)
            ]
        )
        assert any(each.token_advantages) and each.use == ""
    read = [tokens for _, tokens in world.fake.read]
    assert all(each.token_ids in read for each in samples), "the teacher reads prompt and answer"
    line = world.lines()[0]
    ids = [token for each in samples[:4] for at, token in enumerate(each.token_ids) if each.loss_mask[at]]
    assert line["distill/kl"] == pytest.approx(sum(token / 64 for token in ids) / len(ids))
    assert line["distill/teacher_tokens"] == sum(len(each.token_ids) for each in samples[:4])
    assert line["signal"] == 1 and "distill/teacher_version" not in line and "reward/mean" in line
    (used,) = read_usage(world.run.path.parent / "usage" / "run_b.jsonl").values()
    assert used.teacher_tokens == sum(map(len, read))


def group(rewards: list[float], **branch: Any) -> Group:
    branches = [Branch([5, 6, 7], [False, True, True], [0.0, -1.0, -2.0], 1, [0], **branch) for _ in rewards]
    rollouts = [Rollout([each], reward, {}, False) for each, reward in zip(branches, rewards, strict=True)]
    return Group(0, "env", "env/0", rollouts)


def test_rewards_count_beside_the_teacher_by_their_weight() -> None:
    taught = group([1.0, 0.0], teacher_T=[0.0, -1.5, -1.0])
    advantage, teaching = AdvantageConfig(type="mean"), DistillConfig(reward_weight=4.0)
    batch = assemble_batch("run_b", 1, [taught], advantage=advantage, temperature=1.0, teaching=teaching)
    assert [each.token_advantages for each in batch.samples] == [[0.0, 1.5, 3.0], [0.0, -2.5, -1.0]]
    assert [each.advantage for each in batch.samples] == [2.25, -1.75]
    own = group([1.0, 0.0], teacher_T=[0.0, -1.5, -1.0], token_advantages_T=[0.0, 1.0, 0.0])
    batch = assemble_batch("run_b", 1, [own], advantage=advantage, temperature=1.0, teaching=teaching)
    assert batch.samples[0].token_advantages == [0.0, 3.5, 1.0]


def test_a_taught_group_has_signal_unless_both_agree() -> None:
    advantage, teaching = AdvantageConfig(), DistillConfig()
    assert has_signal(group([1.0, 1.0], teacher_T=[0.0, -1.0, -2.5]), advantage, teaching)
    assert not has_signal(group([1.0, 0.0], teacher_T=[0.0, -1.0, -2.0]), advantage, teaching)
    assert not has_signal(group([1.0, 1.0]), advantage)


async def test_a_server_elsewhere_is_waited_for_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "teacher's")
    most, asked = {"read": 0.0}, 0

    def fault(path: str, body: dict[str, Any]) -> int | None:
        nonlocal asked
        if "prompt_logprobs" not in body:
            return None
        asked += asked < most["read"]
        return 503 if asked >= most["read"] else None

    world.fake.fault = fault
    async with trainer(world.run):
        running = world.start(teacher=world.outside(api_key_var="TEACHER_KEY"))
        await world.waits_for(f"the teacher at {world.url}/completions (HTTP 503")
        most["read"] = 4
        await until(lambda: len(world.fake.read) > 0, "a rollout to be read")
        await world.waits_for(f"the teacher at {world.url}/completions (HTTP 503")
        most["read"] = math.inf
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
    assert world.fake.keys == {b"Bearer teacher's"}
    assert {model for model, _ in world.fake.read} == {"big"}
    assert all(any(each.token_advantages) for each in world.samples())


async def test_a_server_that_does_not_come_back_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_judge, "GIVE_UP_S", 0.0)
    world.fake.fault = lambda path, body: 503 if len(world.fake.read) > 3 and "prompt_logprobs" in body else None
    assert await world.live(teacher=world.outside()) == 1
    assert (world.status.state, world.status.waiting_on) == ("failed", None)
    assert f"the teacher at {world.url}/completions (HTTP 503" in (world.status.reason or "")


@pytest.mark.parametrize(("begin", "code"), [([], 0), ([1], 0), ([1, 2], 1)])
async def test_a_teacher_reads_texts_as_the_student_does(world: World, begin: list[int], code: int) -> None:
    world.fake.begin = begin
    assert await world.live(teacher=world.outside(), max_steps=1) == code
    words = "reads a text as other tokens than the run's model: a teacher must have the same tokenizer"
    assert world.status.reason == (f"the teacher at {world.url}/completions {words}" if code else None)


async def test_a_teacher_without_the_students_last_token_is_refused(world: World) -> None:
    last = 258
    world.fake.fault = lambda path, body: 400 if "prompt_logprobs" in body and body["prompt"][-1] == last else None
    assert await world.live(teacher=world.outside()) == 1
    assert "refuses: HTTP 400" in (world.status.reason or "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"choices": []}, "gives no prompt_logprobs, as vLLM does"),
        ({"choices": [{"text": "x"}]}, "gives no prompt_logprobs, as vLLM does"),
    ],
)
async def test_what_gives_no_prompt_logprobs_is_no_teacher(world: World, answer: Any, reason: str) -> None:
    async def answered(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, answer

    world.fake._complete = answered  # type: ignore[method-assign]
    assert await world.live(teacher=world.outside()) == 1
    assert reason in (world.status.reason or "")


@pytest.mark.parametrize("teacher", ["base", "big"])
async def test_a_rollout_that_is_too_long_for_the_teacher_is_made_again(
    world: World, teacher: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.fake.longest = 90
    world.fake.answer = lambda body: [9] * (60 if body["seed"] % 2 else 3) + [IM_END]
    over: dict[str, Any] = {"teacher": world.outside() if teacher == "big" else "base", "rollouts_per_example": 1}
    assert await world.live(**over, sampling={"max_tokens": 64}) == 0
    assert "rollout dropped: the teacher cannot read" in caplog.text
    assert all(len(each.token_ids) < 90 for each in world.samples())


async def test_a_probability_that_is_none_is_refused(world: World) -> None:
    world.fake.told = lambda model, token: 1.0
    assert await world.live(teacher=world.outside()) == 1
    assert "returned an invalid logprob: must be a finite number and at most 0" in (world.status.reason or "")


async def test_an_adapter_teaches_under_a_name_of_its_own_and_goes_at_the_end(world: World) -> None:
    give(world.run, 0, "run_a@v4")
    world.fake.adapters["teacher/run_b@v7"] = "left by one that was killed"
    world.fake.adapters["teacher/run_other@v0"] = "of another run"
    assert await world.live(teacher="run_a@v4") == 0
    assert {model for model, _ in world.fake.read} == {"teacher/run_b@v0"}
    assert list(world.fake.adapters) == ["teacher/run_other@v0"]


async def test_each_environment_may_have_its_teacher(world: World) -> None:
    give(world.run, 0, "run_a")
    give(world.run, 1, "run_c")
    short = {"id": "reverse-text", "args": {"wording": "short", "num_examples": 20}}
    envs = [{**short, "name": name} for name in ("one", "two", "three")]
    envs[0]["teacher"], envs[1]["teacher"] = "run_a", "run_c"
    world.fake.told = lambda model, token: -1.0 - len(model) if model == str(world.model) else -1.0 * int(model[-1])
    assert await world.live(env=envs, rollouts_per_example=1, max_steps=6) == 0
    names = {"one": "teacher/run_b@v0", "two": "teacher/run_b@v1", "three": str(world.model)}
    found = {
        (each.example_id.partition("/")[0], model)
        for each in world.samples()
        for model, tokens in world.fake.read
        if tokens == each.token_ids and {max(each.token_advantages)} <= {world.fake.told(model, 0) + 0.5, 0.0}
    }
    assert found >= set(names.items())


async def test_what_a_restarted_server_has_lost_is_loaded_again(world: World) -> None:
    give(world.run, 0, "run_a")
    async with world.running(teacher="run_a", max_steps=6) as running:
        await until(lambda: len(world.fake.read) > 5, "some rollouts to be read")
        world.fake.adapters.clear()
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
    assert world.fake.num_unknown and len(world.samples()) == 24


async def test_a_teacher_whose_room_another_run_has_for_now_is_waited_for(world: World) -> None:
    give(world.run, 0, "run_a")
    full = {"now": False}
    world.fake.fault = lambda path, body: (
        400 if full["now"] and path.endswith("/load_lora_adapter") and is_teacher(body["lora_name"]) else None
    )
    async with world.running(teacher="run_a", max_steps=300) as running:
        await until(lambda: len(world.fake.read) > 5, "some rollouts to be read")
        full["now"] = True
        world.fake.adapters.pop("teacher/run_b@v0")
        words = "inference to take the teacher run_a ("
        await until(lambda: running.done() or words in (world.status.waiting_on or ""), words)
        assert not running.done(), world.status.reason
        full["now"] = False
        num = len(world.fake.read)
        await until(lambda: len(world.fake.read) > num + 4, "the teacher to go on")


async def test_an_edited_teacher_is_refused_by_name(world: World) -> None:
    give(world.run, 0, "run_a")
    assert await world.live(teacher="run_c") == 1
    assert "teacher: found 'run_c', and the run has a copy of 'run_a': teachers are" in (world.status.reason or "")


async def test_a_run_that_trains_is_followed_version_by_version(world: World) -> None:
    followed = make_run(world.run.path.parent, "run_a")
    async with world.running(teacher="run_a@latest", max_steps=500, ckpt={"interval": 100}) as running:
        await world.waits_for("run_a to publish its first version")
        followed.paused.write_text("for the night", encoding="utf-8")
        await world.waits_for("run_a (paused) to publish its first version")
        followed.paused.unlink()
        publish(followed, 3)
        await until(lambda: world.has_read(6), "the first version to teach")
        publish(followed, 5)
        await until(lambda: world.has_read(10), "the next version to teach")
        await until(lambda: list_steps(world.run.teachers) == [10], "the copy of the first version to go")
        assert [name for name in world.fake.adapters if is_teacher(name)] == ["teacher/run_b@v10"]
        await until(lambda: world.lines()[-1].get("distill/teacher_version") == 5, "the new version in the metrics")
        put_away(followed.path)
        num = len(world.fake.read)
        await until(lambda: len(world.fake.read) > num + 4, "the last copy to teach on")
        assert not running.done()
    num = len(world.fake.read)
    async with world.running(teacher="run_a@latest", max_steps=500) as running:
        await until(lambda: len(world.fake.read) > num + 4, "a restarted one to go on with its copy")
    assert world.fake.read[-1][0] == "teacher/run_b@v10"
    assert undocumented("orchestrator", world.lines()) == set()


async def test_a_version_that_could_not_be_unloaded_goes_before_the_next(world: World) -> None:
    followed = make_run(world.run.path.parent, "run_a")
    publish(followed, 1)
    busy = {"now": True}
    world.fake.fault = lambda path, body: (
        429 if busy["now"] and path.endswith("/unload_lora_adapter") and is_teacher(body["lora_name"]) else None
    )
    async with world.running(teacher="run_a@latest", max_steps=500):
        await until(lambda: world.has_read(2), "the first version to teach")
        publish(followed, 2)
        await until(lambda: list_steps(world.run.teachers) == [4], "the copy of the first version to go")
        busy["now"] = False
        publish(followed, 3)
        await until(lambda: list_steps(world.run.teachers) == [6], "the copy of the second version to go")
        assert [name for name in world.fake.adapters if is_teacher(name)] == ["teacher/run_b@v6"]


async def test_a_version_whose_weights_are_at_fault_costs_the_student_no_more_than_a_wait(world: World) -> None:
    followed = make_run(world.run.path.parent, "run_a")
    publish(followed, 1)
    world.fake.told = lambda model, token: None if model == "teacher/run_b@v2" else -1.0
    async with world.running(teacher="run_a@latest", max_steps=500):
        waits = "run_a to publish another version, for the teacher"
        await until(lambda: world.has_read(2), "the first version to be asked")
        await until(lambda: (world.status.waiting_on or "").startswith(waits), waits)
        publish(followed, 2)
        await until(lambda: world.has_read(4), "the next version to teach")


async def test_a_followed_run_that_was_set_back_teaches_what_it_publishes_anew(world: World) -> None:
    """Under a version that was in use before; while that was in use, and while it would not do."""
    followed = make_run(world.run.path.parent, "run_a")
    publish(followed, 1, "first")
    world.fake.told = lambda model, token: None if world.fake.loads[-1][1] == b"second" else -1.0
    async with world.running(teacher="run_a@latest", max_steps=500) as running:
        await until(lambda: world.has_read(2), "the first version to teach")
        publish(followed, 1, "second")
        waits = "run_a to publish another version, for the teacher"
        await until(lambda: (world.status.waiting_on or "").startswith(waits), waits)
        publish(followed, 1, "third")
        await until(lambda: world.fake.loads[-1][1] == b"third", "what was published last to be loaded")
        num = len(world.fake.read)
        await until(lambda: len(world.fake.read) > num + 4, "it to teach")
        assert not running.done() and list_steps(world.run.teachers) == [2]
        loads = list(dict.fromkeys(world.fake.loads))  # who asked in between has it loaded again
        assert loads == [("teacher/run_b@v2", mark) for mark in (b"first", b"second", b"third")]


async def test_a_version_that_inference_refuses_is_asked_for_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    followed = make_run(world.run.path.parent, "run_a")
    publish(followed, 1)
    async with world.running(teacher="run_a@latest", max_steps=500):
        await until(lambda: world.has_read(2), "the first version to teach")
        publish(followed, 2, "at fault")
        await until(lambda: "the teacher stays run_a@v1" in caplog.text, "the refusal to be logged")
        looks = 0

        def look(run: RunDir) -> Version | None:
            nonlocal looks
            looks += 1
            return newest_version(run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("prime_rl.orchestrator.teacher.newest_version", look)
            for _ in range(3):
                before = looks
                followed.broadcast.touch()
                (followed.broadcast / f"note_{looks}").touch()
                await until(lambda before=before: looks > before, "another look")  # type: ignore[misc]
        assert world.fake.loads.count(("teacher/run_b@v4", b"at fault")) == 1
        assert list_steps(world.run.teachers) == [2]


async def test_two_runs_that_are_followed_have_room_for_one_version_each(world: World) -> None:
    followed = [make_run(world.run.path.parent, name) for name in ("run_a", "run_c")]
    for each in followed:
        publish(each, 1)
    short = {"id": "reverse-text", "args": {"wording": "short", "num_examples": 20}}
    envs = [{**short, "name": each.run_id, "teacher": f"{each.run_id}@latest"} for each in followed]
    most = 0

    def fault(path: str, body: dict[str, Any]) -> int | None:
        nonlocal most
        most = max(most, sum(map(is_teacher, world.fake.adapters)))
        return None

    world.fake.fault = fault
    async with world.running(env=envs, max_steps=500) as running:
        await until(lambda: {name for name, _ in world.fake.read} >= {"teacher/run_b@v2", "teacher/run_b@v3"}, "both")
        publish(followed[1], 2)
        await until(lambda: world.has_read(5), "the new one to teach")
        await until(lambda: list_steps(world.run.teachers) == [2, 5], "the old copy to go")
        assert not running.done() and most == 2


async def test_a_version_that_is_no_adapter_leaves_the_teacher_as_it_is(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    followed = make_run(world.run.path.parent, "run_a")
    publish(followed, 1)
    async with world.running(teacher="run_a@latest", max_steps=500):
        await until(lambda: len(world.fake.read) > 4, "some rollouts to be read")
        with staged_dir(followed.broadcast_dir(2)) as folder:
            (folder / CONFIG_FILE).symlink_to("/etc/passwd")
            mark_stable(folder)
        await until(lambda: "the teacher stays run_a@v1" in caplog.text, "the refusal to be logged")
        num = len(world.fake.read)
        await until(lambda: len(world.fake.read) > num + 4, "the teacher to go on")
    assert {name for name, _ in world.fake.read} == {"teacher/run_b@v2"}
    assert list_steps(world.run.teachers) == [2]


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        ("run_b@latest", "teacher: found 'run_b@latest': must be another run, a run does not teach itself"),
        ("run_gone@latest", "teacher: run_gone is gone, and has published no version"),
    ],
)
async def test_a_teacher_that_never_comes_ends_the_run(world: World, teacher: str, reason: str) -> None:
    assert await world.live(teacher=teacher) == 1
    assert world.status.reason == reason


async def test_the_likeliest_tokens_of_the_teacher_stand_in_the_batch(world: World) -> None:
    world.fake.told = lambda model, token: -9.0
    assert await world.live(distill={"objective": "forward_kl", "coef": 0.5, "top_k": 3}) == 0
    samples = world.samples()
    assert {(each.use, each.advantage, each.rollout_id) for each in samples} == {("supervised", 0.5, "")}
    for each in samples:
        assert each.soft_ids == [[0, 1, 2] if is_learned else [] for is_learned in each.loss_mask]
        told = [math.exp(-3.0), math.exp(-4.0)]
        assert all(probs[:2] == pytest.approx(told) and len(probs) == 3 for probs in each.soft_probs if probs)
        assert not any(each.logprobs) and not each.token_advantages
    line = world.lines()[0]
    assert (line["signal"], line["distill/kl"]) == (1, pytest.approx(8.5))
    kept = [json.loads(text) for text in world.run.samples.read_text().splitlines()]
    assert any("completion" in each for each in kept), "rollouts are shown"


async def test_tokens_beyond_the_vocabulary_are_left_out(world: World) -> None:
    complete = world.fake._complete
    last = 258

    async def padded(body: dict[str, Any]) -> tuple[int, Any]:
        code, answer = await complete(body)
        if "prompt_logprobs" in body:
            for each in answer["choices"][0]["prompt_logprobs"][1:]:
                each[str(last + 40)] = {"logprob": -0.5}
        return code, answer

    world.fake._complete = padded  # type: ignore[method-assign]
    world.fake.told = lambda model, token: -9.0
    assert await world.live(teacher=world.outside(), distill={"objective": "forward_kl", "top_k": 3}) == 0
    assert {tuple(ids) for each in world.samples() for ids in each.soft_ids if ids} == {(0, 1)}


async def test_probabilities_that_add_up_to_more_than_one_are_refused(world: World) -> None:
    complete = world.fake._complete

    async def sure(body: dict[str, Any]) -> tuple[int, Any]:
        code, answer = await complete(body)
        if body.get("prompt_logprobs"):
            likeliest = {str(token): {"logprob": -0.1} for token in range(body["prompt_logprobs"])}
            told = [{str(token): {"logprob": -0.1}, **likeliest} for token in body["prompt"][1:]]
            answer["choices"][0]["prompt_logprobs"] = [None, *told]
        return code, answer

    world.fake._complete = sure  # type: ignore[method-assign]
    assert await world.live(teacher=world.outside(), distill={"objective": "forward_kl", "top_k": 3}) == 1
    assert "probabilities of one position that are more than 1" in (world.status.reason or "")
