"""Between guard and engine: the lock of the weights and the proof of health."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.configs.inference import InferenceConfig, LogprobsMode
from prime_rl.configs.system import SPARE_VERSIONS, SystemConfig
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.notes import Item, read_work
from prime_rl.contract.served import LOGPROBS_HEADER
from prime_rl.contract.status import RunStatus, TrainerRunStatus, TrainerStatus
from prime_rl.inference import sharing
from prime_rl.inference.gateway import FRESH_S, HealthProbe, build_app
from prime_rl.inference.guard import ApiError, decoded, json_response
from prime_rl.inference.serve import Snapshot
from prime_rl.inference.sharing import Asked, ReadWriteLock, StillInUse
from tests.patience import PATIENCE_S
from tests.unit.test_inference_http import adapter, ask


class Engine:
    """An engine whose faults are chosen."""

    def __init__(self) -> None:
        self.tokens = 0
        self.stuck = False
        self.broken = False
        self.works = True
        self.num_asked = 0
        self.loads: list[tuple[str, Path]] = []
        self.loaded: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.endpoints = {"/v1/completions": self.complete_at_once}
        self.lifespan = None

    async def complete_at_once(self, request: Request) -> Response:
        return json_response(await self.complete(request, await decoded(request, dict[str, Any])))

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("secret detail")
        choice = {"index": 0, "token_ids": body["prompt"], "finish_reason": "length"}
        return {"id": "own", "choices": [choice], "model": body.get("model")}

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        self.loads.append((name, folder))
        await self.release.wait()
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)

    def alive(self) -> bool:
        return self.works

    def stats(self) -> Snapshot:
        return Snapshot(num_tokens=self.tokens)

    def adapters(self) -> list[str]:
        return self.loaded

    async def generate_one(self) -> None:
        self.num_asked += 1
        if self.broken:
            raise RuntimeError("secret detail")
        while self.stuck:
            await asyncio.sleep(0.01)

    async def load_weights(self, folder: Path | None) -> None:
        """It takes what it gets."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_health_asks_once_a_second_however_many_ask() -> None:
    engine, clock = Engine(), Clock()
    probe = HealthProbe(engine, clock=clock)
    await asyncio.gather(*(probe.check() for _ in range(20)))
    await probe.check()
    assert engine.num_asked == 1
    clock.now += FRESH_S
    await probe.check()
    assert engine.num_asked == 2


async def test_an_engine_that_does_not_generate_is_ill() -> None:
    engine, clock = Engine(), Clock()
    probe = HealthProbe(engine, timeout_s=0.1, clock=clock)
    engine.stuck = True
    with pytest.raises(ApiError, match=r"no token in 0\.1 s") as caught:
        await probe.check()
    assert caught.value.status == 503
    engine.stuck, engine.broken = False, True
    with pytest.raises(ApiError, match="no token"):
        await probe.check()  # still the last answer
    clock.now += FRESH_S
    probe._timeout_s = PATIENCE_S
    with pytest.raises(ApiError, match=r"RuntimeError\.$") as caught:
        await probe.check()
    assert "secret" not in caught.value.message


async def test_a_full_engine_is_healthy_by_the_tokens_of_others() -> None:
    engine = Engine()
    engine.stuck = True
    probe = HealthProbe(engine, timeout_s=PATIENCE_S)
    check = asyncio.create_task(probe.check())
    while not engine.num_asked:
        await asyncio.sleep(0)
    engine.tokens += 1
    await check


async def test_the_turnstile_keeps_changes_and_requests_apart() -> None:
    weights_lock, seen = ReadWriteLock(), []

    async def request(name: str, until: asyncio.Event) -> None:
        with await weights_lock.enter():
            seen.append(name)
            await until.wait()

    async def change() -> None:
        async with weights_lock.alone(PATIENCE_S):
            seen.append("change")

    old, new = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(request("old", old))
    await asyncio.sleep(0)
    changing = asyncio.create_task(change())
    await asyncio.sleep(0)
    second = asyncio.create_task(request("new", new))
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["old"]
    old.set()
    new.set()
    await asyncio.gather(first, changing, second)
    assert seen == ["old", "change", "new"]


async def test_requests_that_do_not_end_hold_up_a_change_for_so_long_only() -> None:
    weights_lock = ReadWriteLock()
    with await weights_lock.enter():
        with pytest.raises(StillInUse) as caught:
            async with weights_lock.alone(0.01):
                pytest.fail("somebody is inside")
        assert caught.value.num_users == 1
        with await weights_lock.enter():
            pass
    async with weights_lock.alone(0.01):
        pass


async def test_requests_of_others_hold_up_the_weights_of_a_run_for_less_long_than_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "GUESTS_S", 0.05)
    engine, own = Engine(), asyncio.Event()
    for step in (1, 2):
        folder = tmp_path / "run_a" / "broadcast" / f"step_{step}"
        folder.mkdir(parents=True)
        mark_stable(folder)
    OutputDir(tmp_path).run("run_a").orch_toml.parent.mkdir(parents=True)
    OutputDir(tmp_path).run("run_a").orch_toml.touch()
    app = build_app(engine, InferenceConfig(output_dir=tmp_path), drain_s=PATIENCE_S)

    async def complete(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == ["own"]:
            await own.wait()
        else:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        return {"id": "own"}

    async def asking(prompt: str, **headers: str) -> Any:
        body = json.dumps({"prompt": [prompt]}).encode()
        return await ask(app, "/v1/completions", body, headers={"content-type": "application/json", **headers})

    engine.complete = complete  # type: ignore[method-assign]
    others = [asyncio.create_task(asking("endless")) for _ in range(3)]
    mine = asyncio.create_task(asking("own", **{"x-run": "run_a"}))
    await asyncio.sleep(0.02)
    body = json.dumps({"weight_dir": str(tmp_path / "run_a" / "broadcast" / "step_1")}).encode()
    update = asyncio.create_task(ask(app, "/update_weights", body))
    async with asyncio.timeout(PATIENCE_S):
        for status, answered in await asyncio.gather(*others):
            assert status == 503 and answered["error"]["message"] == "The weights of run_a are loaded: ask again."
        assert not update.done() and not mine.done(), "a request of the run itself is waited for"
        own.set()
        assert (await mine)[0] == 200
        assert await update == (200, {"weights": "run_a/broadcast/step_1"})


async def test_requests_of_others_that_come_again_and_again_take_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights_lock = ReadWriteLock()

    async def ask() -> None:
        asked = Asked()
        with await weights_lock.enter(asked):
            await asked.listen(asyncio.Event().wait)  # type: ignore[arg-type]

    for grace_s in (0.05, *[100 * PATIENCE_S] * 5):
        monkeypatch.setattr(sharing, "GUESTS_S", grace_s)
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S), weights_lock.alone(2 * PATIENCE_S, "run_a"):
            pass
        await asking


async def test_a_folder_with_an_odd_name_does_no_harm_to_headers(tmp_path: Path) -> None:
    folder = tmp_path / "a\r\nb: c"
    folder.mkdir()
    (folder / "STABLE").touch()
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path))
    status, body = await ask(app, "/update_weights", b'{"weight_dir": "%s/a\\r\\nb: c"}' % str(tmp_path).encode())
    assert (status, body) == (200, {"weights": "a%0D%0Ab%3A%20c"})


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
async def test_every_answer_tells_which_logprobs_there_are(tmp_path: Path, mode: LogprobsMode) -> None:
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path, logprobs_mode=mode))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path, status in (("/v1/completions", 200), ("/reload_weights", 200), ("/nowhere", 404)):
            answer = await client.post(path, json={"prompt": [1]})
            assert (answer.status_code, answer.headers[LOGPROBS_HEADER]) == (status, mode), path


async def test_only_known_routes_are_answered_and_by_their_method(tmp_path: Path) -> None:
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path), api_key="secret")
    key = {"authorization": "Bearer secret"}
    for path in ("/adapters", "/v1/load_lora_adapter/", "/invocations", "/v1/../metrics", "/sleep"):
        assert (await ask(app, path, headers=key))[0] == 404 and (await ask(app, path))[0] == 401
    status, body = await ask(app, "/v1/completions", method="GET", headers=key)
    assert status == body["error"]["code"] == 405 and "takes POST, not GET" in body["error"]["message"]


def put_trainer(output: OutputDir, **fields: Any) -> None:
    """The last words of a trainer that has ended, for a moment or for good."""
    output.trainer_status.parent.mkdir(exist_ok=True)
    output.trainer_status.write_bytes(msgspec.json.encode(TrainerStatus(state="stopped", **fields)))


async def test_weights_that_would_not_change_hold_up_no_request(tmp_path: Path) -> None:
    engine, begun = Engine(), asyncio.Event()

    async def complete(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await engine.release.wait()
        return {}

    engine.complete = complete  # type: ignore[method-assign]
    engine.release.clear()
    app = build_app(engine, InferenceConfig(output_dir=tmp_path), drain_s=PATIENCE_S)
    asking = asyncio.create_task(ask(app, "/v1/completions", b'{"prompt": [1]}'))
    await begun.wait()
    assert await asyncio.wait_for(ask(app, "/reload_weights", b""), PATIENCE_S) == (200, {"weights": "base"})
    engine.loaded.append("run_a@v1")
    status, answered = await asyncio.wait_for(ask(app, "/reload_weights", b""), PATIENCE_S)
    assert status == 409 and "unload them first" in answered["error"]["message"] and not asking.done()
    engine.release.set()
    assert (await asking)[0] == 200


@pytest.mark.parametrize(("max_rank", "expected"), [(8, 409), (None, 200)])
async def test_no_weights_take_the_base_model_from_runs_that_train_adapters(
    tmp_path: Path, max_rank: int | None, expected: int
) -> None:
    folder = tmp_path / "run_a" / "broadcast" / "step_1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    mark_stable(folder)
    put_trainer(OutputDir(tmp_path), max_rank=max_rank)
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path))
    body = json.dumps({"weight_dir": str(folder)}).encode()
    status, answered = await ask(app, "/update_weights", body)
    assert status == expected, answered


async def test_a_run_that_trains_has_room_though_versions_of_others_fill_all_slots(tmp_path: Path) -> None:
    names = ("run_done@v7", "run_done@v8", "run_a@v1", "run_a@v2", "run_idle@v1", "chat/run_done@v9")
    engine, folders = Engine(), {}
    for name in names:
        run_id, _, version = name.removeprefix("chat/").partition("@v")
        folders[name] = str(adapter(tmp_path / run_id / "broadcast" / f"step_{version}"))
    put_trainer(OutputDir(tmp_path), runs={"run_a": TrainerRunStatus(run_idx=0)})
    app = build_app(engine, InferenceConfig(output_dir=tmp_path, max_concurrent_runs=1, max_versions_per_run=2))

    async def load(name: str) -> str:
        body = json.dumps({"lora_name": name, "lora_path": folders[name]}).encode()
        try:
            return str((await ask(app, "/v1/load_lora_adapter", body))[1]["error"]["message"])
        except json.JSONDecodeError:  # success is told in plain text
            return "loaded"

    assert [await load(name) for name in ("chat/run_done@v9", "run_done@v7", "run_done@v8")] == ["loaded"] * 3
    assert "All 2 adapter slots are in use" in await load("run_idle@v1"), "it does not train"
    assert [await load(name) for name in ("run_a@v1", "run_a@v2")] == ["loaded"] * 2
    assert engine.loaded == ["chat/run_done@v9", "run_a@v1", "run_a@v2"]
    assert "in use" in await load("run_done@v7"), "nothing gives way to it"


async def test_teachers_have_the_room_that_no_version_needs(tmp_path: Path) -> None:
    """Two of a run at most, beside its share; that of a run which has more than its share gives way to a version."""
    engine, output = Engine(), OutputDir(tmp_path)
    put_trainer(output, runs={run_id: TrainerRunStatus(run_idx=0) for run_id in ("run_a", "run_b")})
    app = build_app(engine, InferenceConfig(output_dir=tmp_path, max_concurrent_runs=2, max_versions_per_run=2))

    async def load(name: str) -> str:
        run_id, _, version = name.removeprefix("teacher/").partition("@v")
        run = output.run(run_id)
        folder = run.teacher_dir(int(version)) if name.startswith("teacher/") else run.broadcast_dir(int(version))
        body = json.dumps({"lora_name": name, "lora_path": str(adapter(folder))}).encode()
        try:
            return str((await ask(app, "/v1/load_lora_adapter", body))[1]["error"]["message"])
        except json.JSONDecodeError:  # success is told in plain text
            return "loaded"

    for name in ("run_a@v1", "teacher/run_a@v1", "teacher/run_a@v2"):
        assert await load(name) == "loaded"
    assert await load("teacher/run_a@v3") == "run_a has 2 teachers loaded, the most of a run: unload one first."
    assert await load("run_b@v1") == "loaded"
    full = "All 4 adapter slots are in use: unload an adapter first, or raise inference.max_versions_per_run."
    assert await load("teacher/run_b@v1") == full, "teachers take no room from each other"
    assert await load("run_b@v2") == "loaded"
    assert engine.loaded == ["run_a@v1", "teacher/run_a@v2", "run_b@v1", "run_b@v2"]
    assert await load("run_a@v2") == "loaded", "its own teacher gives way"
    assert engine.loaded == ["run_a@v1", "run_b@v1", "run_b@v2", "run_a@v2"]
    assert "holds its 2 adapter slots" in await load("run_b@v3")
    assert "in use" in await load("teacher/run_b@v2") and len(engine.loaded) == 4
    put_trainer(output, runs={"run_a": TrainerRunStatus(run_idx=0)})
    assert await load("teacher/run_a@v4") == "loaded", "run_b does not train any more"
    assert engine.loaded == ["run_a@v1", "run_b@v2", "run_a@v2", "teacher/run_a@v4"]


async def test_work_with_a_teacher_is_that_of_its_run(tmp_path: Path) -> None:
    engine = Engine()
    engine.loaded.append("teacher/run_b@v7")
    OutputDir(tmp_path).inference.mkdir()
    run = OutputDir(tmp_path).run("run_b")
    run.control.mkdir(parents=True)
    run.orch_toml.touch()
    seen = list[Any]()

    async def complete(request: Request) -> Response:
        noted = read_work(OutputDir(tmp_path).replica_work(0))
        seen.append((request.state.run_id, noted and noted.items))
        return json_response({})

    engine.endpoints = {"/v1/completions": complete}
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))
    body = {"model": "teacher/run_b@v7", "prompt": [1]}
    status, _ = await ask(app, "/v1/completions", json.dumps(body).encode())
    assert status == 200 and seen == [("run_b", [Item("run_b", "served teacher/run_b@v7")])]


async def test_a_version_that_is_kept_served_comes_back_and_gives_way_to_runs_that_train(tmp_path: Path) -> None:
    output, engine = OutputDir(tmp_path), Engine()
    folders = {}
    for name in ("run_done@v7", "run_other@v2", "run_a@v1", "run_a@v2"):
        run_id, _, version = name.partition("@v")
        folders[name] = str(adapter(tmp_path / run_id / "broadcast" / f"step_{version}"))
        mark_stable(Path(folders[name]))
        output.run(run_id).control.mkdir(exist_ok=True)
        output.run(run_id).orch_toml.touch()
    put_trainer(output, runs={"run_a": TrainerRunStatus(run_idx=0)})
    output.run("run_done").status.write_bytes(msgspec.json.encode(RunStatus(run_id="run_done", state="finished")))
    app = build_app(engine, InferenceConfig(output_dir=tmp_path, max_concurrent_runs=1, max_versions_per_run=2))

    async def complete(model: str) -> tuple[int, str]:
        status, answered = await ask(app, "/v1/completions", json.dumps({"model": model, "prompt": [1]}).encode())
        return status, answered.get("model") or answered["error"]["message"]

    async def load(name: str) -> None:
        with contextlib.suppress(json.JSONDecodeError):
            await ask(
                app, "/v1/load_lora_adapter", json.dumps({"lora_name": name, "lora_path": folders[name]}).encode()
            )

    assert await complete("run_done") == (404, "run_done is finished; prl serve run_done loads it")
    assert await complete("run_done@v7") == (404, "run_done is finished; prl serve run_done@v7 loads it")
    assert (await complete("run_a@v9"))[
        1
    ] == "run_a is training; its newest version is served as soon as it is published"
    assert await complete("run_none@v1") == (200, "run_none@v1"), "the engine's to refuse"
    output.run("run_done").served.write_text("run_done@v7")
    output.run("run_other").served.write_text("run_done@v7")  # a run answers for no other
    output.run("run_a").served.write_text("run_a@v1")  # of a run that trains its orchestrator loads what it needs
    assert await asyncio.gather(*(complete("run_done@v7") for _ in range(3))) == [(200, "run_done@v7")] * 3
    assert await complete("run_done") == (404, "run_done is served as run_done@v7: name a version")
    assert (await complete("run_other@v2"))[0] == 404 and (await complete("run_a@v1"))[0] == 404
    assert engine.loaded == ["run_done@v7"]
    for name in ("run_a@v1", "run_a@v2"):
        await load(name)
    assert engine.loaded == ["run_a@v1", "run_a@v2"], "it gave way"
    status, message = await complete("run_done@v7")
    assert status == 503 and "run_done@v7 is not loaded now: All 2 adapter slots are in use" in message
    await engine.unload_adapter("run_a@v1")
    assert await complete("run_done@v7") == (200, "run_done@v7")


async def test_bodies_are_json_of_the_expected_shape(tmp_path: Path) -> None:
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path))
    bad = (
        b"",
        b"{",
        b"[]",
        b'{"weight_dir": 1}',
        b'{"weight_dir": "\xff"}',
        b"[" * 10**6,
        b'{"weight_dir": "", "y": 1}',
    )
    for body in bad:
        status, answered = await ask(app, "/update_weights", body)
        assert status == 400 and "\n" not in answered["error"]["message"], body[:30]
    assert (await ask(app, "/v1/completions", b'{"prompt": [1]}', headers={"content-type": "text/plain"}))[0] == 415


async def test_a_fault_of_the_engine_is_an_error_without_details(tmp_path: Path) -> None:
    engine = Engine()
    engine.broken = True
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"prompt": [1]}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}
    with pytest.raises(RuntimeError):  # for the log
        await build_app(engine, InferenceConfig(output_dir=tmp_path))(scope, receive, send)
    assert sent[0]["status"] == 500 and b"RuntimeError" in sent[1]["body"] and b"secret" not in sent[1]["body"]


async def test_token_ids_go_in_and_out_without_text(tmp_path: Path) -> None:
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path))
    body = b'{"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "model": "run_a@v1", "request_id": "mine"}'
    status, answered = await ask(app, "/inference/v1/generate", body)
    assert status == 200 and answered["request_id"] == "mine" and answered["choices"][0]["token_ids"] == [5, 6]
    assert answered["model"] == "run_a@v1"


@pytest.mark.parametrize(
    "name", ["model", "prompt", "token_ids", "messages", "stream", "priority", "cache_salt", "request_id"]
)
@pytest.mark.parametrize("value", [None, "run_a@v1"])
async def test_what_belongs_beside_the_sampling_parameters_does_not_hide_among_them(
    tmp_path: Path, name: str, value: str | None
) -> None:
    """The model is what the gateway notes, and gives a turn to: the engine must not get another one."""
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path))
    body = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 2, name: value}}).encode()
    status, answered = await ask(app, "/inference/v1/generate", body)
    assert status == 400 and answered["error"]["param"] == f"sampling_params.{name}"
    assert answered["error"]["message"].startswith(f"sampling_params: found '{name}', which is no sampling parameter")


async def test_adapters_are_loaded_from_the_resolved_path(tmp_path: Path) -> None:
    folder, engine = adapter(tmp_path / "run_a" / "broadcast" / "step_1"), Engine()
    (tmp_path / "newest").symlink_to(folder)
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))

    def body(**fields: Any) -> bytes:
        return json.dumps({"lora_name": "run_a@v1", "lora_path": str(tmp_path / "newest"), **fields}).encode()

    async def status(**fields: Any) -> int:
        with contextlib.suppress(json.JSONDecodeError):  # success is told in plain text
            return (await ask(app, "/v1/load_lora_adapter", body(**fields)))[0]
        return 200

    assert await status() == 200 and engine.loads == [("run_a@v1", folder)]
    for fields in ({"load_inplace": True}, {"lora_name": "../x"}, {"lora_name": "x" * 129}, {"lora_name": ""}):
        assert await status(**fields) == 400
    assert len(engine.loads) == 1


async def test_other_requests_are_answered_while_an_adapter_is_loaded(tmp_path: Path) -> None:
    folder, engine = adapter(tmp_path / "run_a" / "broadcast" / "step_1"), Engine()
    engine.release.clear()
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))
    body = json.dumps({"lora_name": "run_a@v1", "lora_path": str(folder)}).encode()
    load = asyncio.create_task(ask(app, "/v1/load_lora_adapter", body))
    while not engine.loads:
        await asyncio.sleep(0.001)
    assert (await ask(app, "/v1/completions", b'{"prompt": [1]}'))[0] == 200
    engine.release.set()
    with pytest.raises(json.JSONDecodeError):
        await load


async def test_adapters_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    """Two that come together under one name, or for the last slot, see each other."""
    folders = {f"{run_id}@v1": adapter(tmp_path / run_id / "broadcast" / "step_1") for run_id in ("run_a", "run_b")}
    engine = Engine()
    engine.release.clear()
    app = build_app(engine, InferenceConfig(output_dir=tmp_path, max_concurrent_runs=1, max_versions_per_run=1))

    async def load(name: str) -> str:
        body = json.dumps({"lora_name": name, "lora_path": str(folders[name])}).encode()
        try:
            return str((await ask(app, "/v1/load_lora_adapter", body))[1]["error"]["message"])
        except json.JSONDecodeError:  # success is told in plain text
            return "loaded"

    same = [asyncio.create_task(load("run_a@v1")) for _ in range(2)]
    while not engine.loads:
        await asyncio.sleep(0.001)
    other = asyncio.create_task(load("run_b@v1"))
    await asyncio.sleep(0)
    engine.release.set()
    already, full = "The lora adapter 'run_a@v1' has already been loaded.", "All 1 adapter slots are in use"
    assert sorted(await asyncio.gather(*same)) == sorted(("loaded", already)), "either of the two may be the first"
    assert (await other).startswith(full) and engine.loaded == ["run_a@v1"]


async def test_an_adapter_that_nobody_waited_for_is_not_kept(tmp_path: Path) -> None:
    folder, engine = adapter(tmp_path / "run_a" / "broadcast" / "step_1"), Engine()
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))
    body = json.dumps({"lora_name": "run_a@v1", "lora_path": str(folder)}).encode()
    assert (await ask(app, "/v1/load_lora_adapter", body, gone=True))[0] == 400
    assert engine.loads and not engine.loaded


async def test_a_server_without_adapters_takes_none(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "run_a" / "broadcast" / "step_1")
    bare = InferenceConfig.model_validate({"output_dir": tmp_path, "full_finetune": True})
    body = json.dumps({"lora_name": "run_a@v1", "lora_path": str(folder)}).encode()
    status, answered = await ask(build_app(Engine(), bare), "/v1/load_lora_adapter", body)
    assert status == 400 and "serves no adapters" in answered["error"]["message"]


@pytest.mark.parametrize(
    ("name", "place", "status"),
    [
        ("run_a@v1", "run_b/broadcast/step_1", 403),
        ("run_a@v1", "run_a/broadcast/step_2", 403),
        ("run_a@v1", "run_a/mine", 403),
        ("run_link@v1", "run_a/broadcast/step_1", 403),
        ("chat/run_a@v1", "run_b/broadcast/step_1", 403),
        ("chat/run_a@v1", "run_a/checkpoints/step_1", 200),
        ("run_a@v1", "run_a/checkpoints/step_1/trainer", 200),
        ("run_a@v1", "run_a/checkpoints/step_2/trainer", 403),
        ("chat/today/0", "evaluations/today/0", 200),
        ("chat/today/0", "evaluations/today/1", 400),
        ("chat/../run_a/broadcast/step_1", "run_a/broadcast/step_1", 400),
        ("today/0", "evaluations/today/0", 400),
        ("teacher/run_a@v7", "run_a/teacher/step_7", 200),
        ("teacher/run_a@v7", "run_a/teacher/step_8", 403),
        ("teacher/run_a@v7", "run_b/teacher/step_7", 403),
        ("teacher/run_a@v1", "run_a/broadcast/step_1", 403),
        ("run_a@v7", "run_a/teacher/step_7", 403),
        ("teacher/today/0", "evaluations/today/0", 400),
        ("teacher/chat/run_a@v1", "run_a/teacher/step_1", 400),
        ("teacher/run_link@v7", "run_a/teacher/step_7", 403),
        ("mine", "run_a/broadcast/step_1", 400),
        ("base", "run_a/broadcast/step_1", 400),
    ],
)
async def test_the_name_of_a_version_means_what_its_own_run_has_published(
    tmp_path: Path, name: str, place: str, status: int
) -> None:
    engine, folder = Engine(), adapter(tmp_path / place)
    (tmp_path / "run_link").symlink_to(tmp_path / "run_a")
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    found = 200
    with contextlib.suppress(json.JSONDecodeError):  # success is told in plain text
        found, answered = await ask(app, "/v1/load_lora_adapter", body)
        assert "\n" not in answered["error"]["message"]
    assert (found, engine.loaded) == (status, [name] * (status == 200))


def test_a_workspace_sizes_inference_for_its_runs_and_their_async_level() -> None:
    workspace = SystemConfig.model_validate({"max_concurrent_runs": 3, "max_async_level": 5})
    assert workspace.inference.max_versions_per_run == 7
    assert workspace.inference.max_run_loras == 21 and workspace.inference.max_loras == 22
    assert SystemConfig().inference.max_versions_per_run == SystemConfig().max_async_level + SPARE_VERSIONS
    own = SystemConfig.model_validate({"max_async_level": 5, "inference": {"max_versions_per_run": 2}})
    assert own.inference.max_versions_per_run == 2


async def test_what_a_request_works_on_is_noted_before_the_engine_gets_it(tmp_path: Path) -> None:
    folder, engine = adapter(tmp_path / "run_a" / "broadcast" / "step_3"), Engine()
    for run_id in ("run_b", "run_c"):
        known = OutputDir(tmp_path).run(run_id).orch_toml
        known.parent.mkdir(parents=True)
        known.touch()
    path = OutputDir(tmp_path).replica_work(2)
    path.parent.mkdir(parents=True)
    seen: list[tuple[str, str]] = []
    complete, load = engine.complete, engine.load_adapter

    def look() -> None:
        work = read_work(path)
        seen.extend(
            (item.run_id, item.what) for item in (work.items if work else []) if (item.run_id, item.what) not in seen
        )

    async def complete_and_look(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        look()
        return await complete(request, body)

    async def load_and_look(request: Request, name: str, folder: Path) -> None:
        look()
        await load(request, name, folder)

    engine.complete, engine.load_adapter = complete_and_look, load_and_look  # type: ignore[method-assign]
    app = build_app(engine, InferenceConfig(output_dir=tmp_path, replica=2, model={"name": "base"}))

    async def complete_as(headers: dict[str, str] | None = None, **fields: Any) -> None:
        body = json.dumps({"prompt": [1], **fields}).encode()
        await ask(app, "/v1/completions", body, headers={"content-type": "application/json", **(headers or {})})

    with contextlib.suppress(json.JSONDecodeError):
        body = json.dumps({"lora_name": "run_a@v3", "lora_path": str(folder)}).encode()
        await ask(app, "/v1/load_lora_adapter", body)
    engine.loaded += ["chat/run_a@v3", "mine"]
    await complete_as(model="run_a@v3")
    await complete_as({"x-run": "run_b"}, model="base")
    await complete_as({"x-run": "run_c"}, model="")
    await complete_as({"x-run": "../run_b"})
    await complete_as({"x-run": "run_made_up"})
    await complete_as(model="chat/run_a@v3")
    await complete_as({"x-run": "run_b"}, model="mine")
    await complete_as({"x-run": "run_b"}, model="run_b@v7")
    assert seen == [
        ("run_a", "loaded run_a@v3"),
        ("run_a", "served run_a@v3"),
        ("run_b", "served the base model for run_b"),
        ("run_c", "served the base model for run_c"),
        ("", "served the base model"),
        ("", "served chat/run_a@v3"),
        ("", "served mine"),
    ], "nothing is noted for a model that is not served"
    assert engine.loaded == ["run_a@v3", "chat/run_a@v3", "mine"]


async def test_whole_weights_are_noted_before_the_engine_gets_them(tmp_path: Path) -> None:
    run, engine, seen = OutputDir(tmp_path).run("run_a"), Engine(), list[Item]()
    folder, load = run.broadcast_dir(1), engine.load_weights
    for each in (run.orch_toml, folder / "model.safetensors", path := OutputDir(tmp_path).replica_work(0)):
        each.parent.mkdir(parents=True)
        each.touch()
    mark_stable(folder)

    async def look(folder: Path | None) -> None:
        work = read_work(path)
        seen.extend(work.items if work else [])
        await load(folder)

    engine.load_weights = look  # type: ignore[method-assign]
    app = build_app(engine, InferenceConfig(output_dir=tmp_path))
    status, answered = await ask(app, "/update_weights", json.dumps({"weight_dir": str(folder)}).encode())
    assert (status, answered) == (200, {"weights": "run_a/broadcast/step_1"})
    assert seen == [Item("run_a", "loaded run_a/broadcast/step_1")]
