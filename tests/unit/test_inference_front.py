"""Between guard and engine: the turnstile, the proof of health, and the folder that leaves nothing behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import pytest
from safetensors.torch import load_file

from prime_rl.configs.inference import InferenceConfig, LogprobsMode
from prime_rl.configs.system import SPARE_VERSIONS, SystemConfig
from prime_rl.contract.layout import LOGPROBS_HEADER
from prime_rl.inference.checks import StartError
from prime_rl.inference.errors import ApiError
from prime_rl.inference.front import Front
from prime_rl.inference.guard import Guard
from prime_rl.inference.health import FRESH_S, HealthProbe
from prime_rl.inference.limits import adapter_bytes, check_adapter_room
from prime_rl.inference.private_tmp import PREFIX, private_tmp
from prime_rl.inference.turnstile import StillInUse, Turnstile
from prime_rl.inference.vllm.adapters import AdapterGate
from tests.inference_support import make_adapter, make_model
from tests.unit.test_inference_http import ask


class Engine:
    """An engine whose faults are chosen."""

    def __init__(self) -> None:
        self.tokens = 0
        self.stuck = False
        self.broken = False
        self.num_asked = 0

    def num_tokens(self) -> int:
        return self.tokens

    def adapters(self) -> list[str]:
        return []

    async def generate_one(self) -> None:
        self.num_asked += 1
        if self.broken:
            raise RuntimeError("secret detail")
        while self.stuck:
            await asyncio.sleep(0.01)

    async def verify_adapter(self, name: str) -> None:
        """It has none."""

    async def load_weights(self, folder: Path) -> None:
        """It takes what it gets."""

    async def load_base(self) -> None:
        """It has only one."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_health_asks_once_a_second_however_many_ask() -> None:
    engine, clock = Engine(), Clock()
    probe = HealthProbe(engine.generate_one, engine.num_tokens, clock=clock)
    await asyncio.gather(*(probe.check() for _ in range(20)))
    await probe.check()
    assert engine.num_asked == 1
    clock.now += FRESH_S
    await probe.check()
    assert engine.num_asked == 2


async def test_an_engine_that_does_not_generate_is_ill() -> None:
    engine, clock = Engine(), Clock()
    probe = HealthProbe(engine.generate_one, engine.num_tokens, timeout_s=0.1, clock=clock)
    engine.stuck = True
    with pytest.raises(ApiError, match=r"no token in 0\.1 s") as caught:
        await probe.check()
    assert caught.value.status == 503
    engine.stuck, engine.broken = False, True
    with pytest.raises(ApiError, match="no token"):
        await probe.check()  # still the last answer
    clock.now += FRESH_S
    with pytest.raises(ApiError, match=r"RuntimeError\.$") as caught:
        await probe.check()
    assert "secret" not in caught.value.message


async def test_a_full_engine_is_healthy_by_the_tokens_of_others() -> None:
    engine = Engine()
    engine.stuck = True
    probe = HealthProbe(engine.generate_one, engine.num_tokens, timeout_s=5.0)
    check = asyncio.create_task(probe.check())
    while not engine.num_asked:
        await asyncio.sleep(0)
    engine.tokens += 1
    await check


async def test_the_turnstile_keeps_changes_and_requests_apart() -> None:
    turnstile, seen = Turnstile(), []

    async def request(name: str, until: asyncio.Event) -> None:
        with await turnstile.enter():
            seen.append(name)
            await until.wait()

    async def change() -> None:
        async with turnstile.alone(5.0):
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
    turnstile = Turnstile()
    with await turnstile.enter():
        with pytest.raises(StillInUse) as caught:
            async with turnstile.alone(0.01):
                pytest.fail("somebody is inside")
        assert caught.value.num_users == 1
        with await turnstile.enter():
            pass
    async with turnstile.alone(0.01):
        pass


async def test_a_folder_with_an_odd_name_does_no_harm_to_headers(tmp_path: Path) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"{}"})  # type: ignore[operator]

    folder = tmp_path / "a\r\nb: c"
    folder.mkdir()
    (folder / "STABLE").touch()
    guard = Guard(Front(app, Engine(), InferenceConfig(output_dir=tmp_path)), api_key=None, output_dir=tmp_path)
    status, body = await ask(guard, "/update_weights", b'{"weight_dir": "%s/a\\r\\nb: c"}' % str(tmp_path).encode())
    assert (status, body) == (200, {"weights": "a%0D%0Ab%3A%20c"})


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
async def test_every_answer_names_which_logprobs_there_are(tmp_path: Path, mode: LogprobsMode) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"{}"})  # type: ignore[operator]

    front = Front(app, Engine(), InferenceConfig(output_dir=tmp_path, logprobs_mode=mode))
    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/v1/models", "/v1/completions", "/reload_weights"):
            answer = await client.post(path)
            assert (answer.status_code, answer.headers[LOGPROBS_HEADER]) == (200, mode), path


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


HOLD = (
    "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    "from prime_rl.inference.private_tmp import private_tmp\n"
    "with private_tmp() as folder:\n"
    "    (folder / 'left').touch(); print(folder, flush=True); sys.stdin.read()\n"
)


def test_a_private_folder_goes_with_its_process_or_at_the_next_start(tmp: Path) -> None:
    with private_tmp() as folder:
        assert folder.parent == tmp and folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(tmp.iterdir()) == []
    command = [sys.executable, "-c", HOLD, str(tmp)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        held = Path(killed.stdout.readline().strip())
        with private_tmp():
            assert (held / "left").exists(), "its owner lives"
        killed.kill()
    (tmp / "other").mkdir()
    assert held.exists() and held.name.startswith(PREFIX)
    with private_tmp() as folder:
        assert set(tmp.iterdir()) == {folder, tmp / "other"}


def test_adapters_that_cannot_fit_are_refused_with_what_to_lower() -> None:
    data = {"max_concurrent_runs": 1024, "max_versions_per_run": 4, "model": {"lora": {"rank": 512}}}
    config = InferenceConfig.model_validate(data)
    shapes = {"layers.0.q_proj.weight": (64, 32), "layers.0.norm.weight": (64,), "layers.0.other.weight": (9, 9)}
    assert adapter_bytes(config, shapes, "cpu") == 2 * adapter_bytes(config, shapes, "cuda") == 512 * (64 + 32) * 4
    check_adapter_room(config, 2**20, 3, 12 * 2**30)
    with pytest.raises(StartError, match=r"need 12\.00 GiB .*rank 512, 11\.00 GiB free: lower max_conc") as caught:
        check_adapter_room(config, 2**20, 3, 11 * 2**30)
    assert caught.value.exit_code == 2


def test_a_workspace_sizes_inference_for_its_runs_and_their_async_level() -> None:
    workspace = SystemConfig.model_validate({"max_concurrent_runs": 3, "max_async_level": 5})
    assert workspace.inference.max_versions_per_run == 7 and workspace.inference.max_loras == 21
    assert SystemConfig().inference.max_versions_per_run == SystemConfig().max_async_level + SPARE_VERSIONS
    own = SystemConfig.model_validate({"max_async_level": 5, "inference": {"max_versions_per_run": 2}})
    assert own.inference.max_versions_per_run == 2


def test_an_adapter_that_vllm_ignored_or_cut_is_seen(tmp_path: Path) -> None:
    """What vLLM's layers hold is said here; that they hold it is in the contract, where every load is measured."""
    model = make_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    size_A, size_B = (
        sum(float(t.double().square().sum()) for name, t in tensors.items() if kind in name)
        for kind in ("lora_A", "lora_B")
    )
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    whole = (size_A, 4 * size_B)  # alpha is twice the rank
    gate = AdapterGate(config, list)
    gate("run_a@v1", folder)
    gate.check_sizes("run_a@v1", [whole])
    for held in ([None], [(0.0, 0.0)], [(size_A, size_B)], [(0.99 * size_A, 4 * size_B)], [whole, (size_A, 0.0)]):
        gate("run_a@v1", folder)
        with pytest.raises(ValueError, match="its layers hold"):
            gate.check_sizes("run_a@v1", held)
