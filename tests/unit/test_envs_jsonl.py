"""Examples in a JSONL file: its rows, how answers are scored, rewards in a file, and their copies in the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from daemons import actions
from daemons.actions import ActionError
from daemons.cli import run as prl
from daemons.details import codes_of, diff_runs
from daemons.sweeps import sweep_runs
from prime_rl.configs.admitted import changed_data, changed_data_text, read_effect
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.jsonl import MAX_DATA_BYTES, JsonlArgs, read_rows
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.notes import digest_of
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.envs import ProcessEnvironment
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentFault
from prime_rl.orchestrator.envs.jsonl_env import SCORERS, JsonlEnvironment
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.report import environment_figures
from prime_rl.utils import runtime
from tests.orchestrator_support import FakeInference, config_data, make_model, serving, stand_in_trainer
from tui.actions import add_draft, check_draft
from tui.readers.compare import CompareReader, CompareRequest

CAPITALS = [{"prompt": f"capital {number}?", "answer": f"City {number}"} for number in range(30)]
REWARD = """
def score(answer, row):
    if row["prompt"] == "raise":
        raise RuntimeError("red")
    if row["prompt"] == "text":
        return "much"
    return len(answer) / 100


async def later(answer, row):
    from prime_rl.orchestrator.envs import Outcome

    return Outcome(0.25, {"known": float(row["known"])})
"""


def write_rows(path: Path, rows: list[Any], begins: bytes = b"") -> Path:
    path.write_bytes(begins + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return path


class Says:
    """A policy that answers with one text."""

    def __init__(self, text: str = "answer") -> None:
        self.text = text
        self.seen: list[Any] = []
        self.answer_lens: list[int] = []

    async def complete(self, messages: Any) -> str:
        self.seen.append([dict(message) for message in messages])
        self.answer_lens.append(2)
        return self.text


@contextlib.asynccontextmanager
async def running(path: Path, **args: Any) -> AsyncIterator[CheckedEnvironment]:
    config = EnvConfig.model_validate({"id": "jsonl", "args": {"path": str(path), **args}})
    env = ProcessEnvironment(config, seed=1)
    try:
        await env.start()
        yield CheckedEnvironment(env, config, max_failure_share=1.0)
    finally:
        await env.close()


# Rows


@pytest.mark.parametrize(
    ("line", "args", "message"),
    [
        (b'{"question": "q", "answer": "a"}', {}, "no value for 'prompt' (args.prompt); its keys: question, answer"),
        (b'{"prompt": "q"}', {}, "no value for 'answer' (args.answer); its keys: prompt"),
        (b'{"prompt": null, "answer": "a"}', {}, "no value for 'prompt'"),
        (b'{"prompt": "q", "answer": "a"', {}, "not valid JSON: Expecting ',' delimiter (column 30)"),
        (b'["q", "a"]', {}, "found list: must be a JSON object"),
        (b"[" * 100_000, {}, "not valid JSON: nested too deeply"),
        (b'{"prompt": "caf\xe9", "answer": "a"}', {}, "not UTF-8 text (byte 15): save the file as UTF-8"),
        (b'{"prompt": 3, "answer": "a"}', {}, "'prompt' is int: must be text, or a list of messages"),
        (b'{"prompt": [], "answer": "a"}', {}, "'prompt' is list: must be text"),
        (
            b'{"prompt": [{"role": "robot", "content": ""}], "answer": ""}',
            {},
            "message 0 of 'prompt': must have",
        ),
        (b'{"prompt": [{"role": "user", "content": 3}], "answer": ""}', {}, "and a text as content"),
        (b'{"prompt": [{"role": "assistant", "content": ""}], "answer": ""}', {}, "ends with a message of the assist"),
        (b'{"prompt": "q", "answer": "a", "key": 1}', {"id": "key"}, "the id '1' is that of line 1 too"),
        (b'{"prompt": "q", "answer": "a", "key": 1.5}', {"id": "key"}, "'key' is float: must be text or a whole num"),
        (b'{"prompt": "q", "answer": "a", "key": 2}', {"id": "key", "scorer": "number"}, "the answer has no number"),
        (b'{"prompt": "q", "answer": "(7", "key": 2}', {"id": "key", "scorer": "regex"}, "not valid for scorer = 'reg"),
        (b'{"prompt": "q", "answer": "{", "key": 2}', {"id": "key", "scorer": "json"}, "not valid for scorer = 'json'"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: bytes, args: dict[str, Any], message: str) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": "q", "answer": "7", "key": 1}])
    path.write_bytes(path.read_bytes() + b" \n" + line)
    with pytest.raises(ValueError, match="line 3: ") as caught:
        read_rows(path, JsonlArgs(path=str(path), **args))
    assert str(caught.value).startswith(f"{path} line 3: ") and message in str(caught.value)


def test_a_byte_order_mark_is_left_out_or_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": "é", "answer": "ü"}], b"\xef\xbb\xbf")
    (row,) = read_rows(path, JsonlArgs(path="data.jsonl"))
    assert (row.id, row.messages, row.target) == ("1", [{"role": "user", "content": "é"}], "ü")
    path.write_bytes(path.read_bytes().decode().encode("utf-16"))
    with pytest.raises(ValueError, match="begins with a byte order mark of UTF-16: save it as UTF-8"):
        read_rows(path, JsonlArgs(path="data.jsonl"))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n  \n")
    with pytest.raises(ValueError, match=r"data\.jsonl has no rows: write one JSON object a line"):
        read_rows(path, JsonlArgs(path="data.jsonl"))


def test_links_pipes_and_files_without_end_are_not_read(tmp_path: Path) -> None:
    real = write_rows(tmp_path / "real.jsonl", CAPITALS)
    (tmp_path / "link.jsonl").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "large.jsonl").touch()
    os.truncate(tmp_path / "large.jsonl", MAX_DATA_BYTES + 1)
    for name, message in (("link", "is a symbolic link"), ("pipe", "is a named pipe"), ("large", "expected at most")):
        with pytest.raises(OSError, match=message):
            read_rows(tmp_path / f"{name}.jsonl", JsonlArgs(path="x"))


@pytest.mark.parametrize(
    ("args", "num_eval", "num_train"),
    [
        ({}, 3, 27),
        ({"num_eval_examples": 0}, 0, 30),
        ({"num_eval_examples": 30}, 30, 0),
        ({"num_eval_examples": 5, "num_examples": 10}, 5, 10),
    ],
)
def test_the_first_rows_are_for_evaluation_and_the_others_to_train_on(
    tmp_path: Path, args: dict[str, Any], num_eval: int, num_train: int
) -> None:
    path = write_rows(tmp_path / "data.jsonl", CAPITALS)
    env = JsonlEnvironment({"path": str(path), **args}, 0)
    assert [example.id for example in env.examples("eval")] == [str(n + 1) for n in range(num_eval)]
    assert [example.id for example in env.examples("train")] == [str(n + num_eval + 1) for n in range(num_train)]


# Scores


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "wrong"),
    [
        ("exact", " Lima ", ["Lima", "\n Lima"], ["lima", "Lima."]),
        ("exact", 7, ["7"], ["7.0"]),
        ("contains", "Lima", ["It is LIMA!", "Lima"], ["Lim a", ""]),
        ("regex", r"^\s*(yes|no)\b", ["yes, it is", " no"], ["oh yes"]),
        ("number", "so 6 * 7\n#### 1,042", ["it is 1042", "= 1,042.0", "no 7 but 1042"], ["1042, or 43", "none", ""]),
        ("number", -0.5, ["-0.5", "-.5"], ["0.5"]),
        ("json", {"a": [1, 2.0]}, ['{"a": [1, 2.0]}', 'So:\n```json\n{"a": [1, 2.0]}\n```'], ["{'a': [1]}", "[", "{}"]),
        ("json", {"a": [1, True]}, ['{"a": [1.0, true]}'], ['{"a": [1, 1]}', '{"a": [true, true]}', '{"a": [1]}']),
        ("json", "true", ["true"], ["1", '"true"', "[" * 100_000]),
        ("json", 1, ["1", "1.0"], ["true", "2"]),
    ],
)
def test_what_each_scorer_takes_for_right(
    tmp_path: Path, scorer: str, answer: object, right: list[str], wrong: list[str]
) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": "q", "answer": answer}])
    (row,) = read_rows(path, JsonlArgs.model_validate({"path": "x", "scorer": scorer}))
    assert [text for text in right if not SCORERS[scorer](text, row.target)] == []
    assert [text for text in wrong if SCORERS[scorer](text, row.target)] == []


def test_mathematics_is_compared_by_its_value() -> None:
    pytest.importorskip("math_verify")
    right = SCORERS["math"]
    assert (
        right("The answer is 0.5.", r"\frac{1}{2}") and right(r"$x = \boxed{2^3}$", "8") and right("$(1, 3)$", "(1,3)")
    )
    assert not right("The answer is 0.6.", r"\frac{1}{2}") and not right("", "8")


# In its process, with a reward of one's own


async def test_rows_are_asked_and_scored_in_a_process(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "é?"}]
    path = write_rows(tmp_path / "data.jsonl", [{"q": talk, "a": "yes", "name": "first"}])
    async with running(path, prompt="q", answer="a", id="name", num_eval_examples=0) as env:
        (example,) = env.examples("train")
        policy = Says("yes")
        outcome = await env.rollout(example, policy)
        assert (example.id, policy.seen, outcome.reward) == ("first", [talk], 1.0)
        assert (await env.rollout(example, Says("no"))).reward == 0.0


async def test_a_function_of_a_file_scores_and_its_faults_are_dropped_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": each, "known": True} for each in ("good", "raise", "text")])
    async with running(path, reward=f"{tmp_path}/reward.py:score", num_eval_examples=0) as env:
        good, raises, text = env.examples("train")
        assert (await env.rollout(good, Says("x" * 50))).reward == 0.5
        with pytest.raises(EnvironmentFault, match=r"RuntimeError: red \(reward\.py line \d+\)$"):
            await env.rollout(raises, Says())
        with pytest.raises(EnvironmentFault, match="the reward is str instead of a number"):
            await env.rollout(text, Says())
    async with running(path, reward=f"{tmp_path}/reward.py:later", num_eval_examples=0) as env:
        outcome = await env.rollout(env.examples("train")[0], Says())
        assert (outcome.reward, outcome.metrics) == (0.25, {"known": 1.0})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): pass", r"reward\.py has no function 'score'"),
        ("raise KeyError('gone')", "KeyError: 'gone'"),
        ("score = 3", r"reward\.py has no function 'score'"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_says_why(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        async with running(write_rows(tmp_path / "data.jsonl", CAPITALS), reward=f"{tmp_path}/reward.py:score"):
            raise AssertionError


async def test_code_in_a_run_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.data.mkdir(parents=True)
    code, ran = run.data_file("reward.py"), tmp_path / "ran"
    code.write_text(f"import os\nos.mkdir({str(ran)!r})\ndef score(answer, row): return 1", encoding="utf-8")
    path = write_rows(run.data_file("data.jsonl"), CAPITALS)
    code.chmod(0o666)
    with pytest.raises(ConfigError, match="belongs to another account, or others may write it: its code is not run"):
        async with running(path, reward=f"{code}:score"):
            raise AssertionError
    assert not ran.exists()
    code.chmod(0o644)
    async with running(path, reward=f"{code}:score"):
        assert ran.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args.*path: required, but missing"),
        ({"path": "x", "scorer": "near"}, "args.*scorer: found 'near': must be 'exact', 'contains'"),
        ({"path": "x", "reward": "reward.py"}, r"must be a file and a function in it, such as reward\.py:score"),
        ({"path": "x", "promt": "q"}, "unknown key; did you mean 'prompt'"),
    ],
)
def test_wrong_arguments_are_named_when_the_config_is_read(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(EnvConfig, {"id": "jsonl", "args": args}, "test")


# In a workspace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A config with its data and its reward beside it."""
    folder = tmp_path / "own"
    (folder / "data").mkdir(parents=True)
    write_rows(folder / "data" / "train.jsonl", CAPITALS)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return write_config(folder / "own.toml", path="data/train.jsonl", reward="reward.py:score")


def write_config(file: Path, **args: Any) -> Path:
    data = config_data(Path("none"), env=[{"id": "jsonl", "args": args}])
    file.write_text(tomli_w.dumps(data), encoding="utf-8")
    return file


def test_data_and_reward_are_copied_into_the_run(tmp_path: Path, source: Path) -> None:
    workspace = tmp_path / "workspace"
    run = OutputDir(workspace).run(actions.add_run(workspace, source, run_id="run_a"))
    assert sorted(path.name for path in run.data.iterdir()) == ["data-train.jsonl", "reward.py"]
    assert run.data_file("data/train.jsonl").read_bytes() == (source.parent / "data" / "train.jsonl").read_bytes()
    assert run.data_file("reward.py").read_text(encoding="utf-8") == REWARD
    assert actions.add_run(workspace, source, run_id="run_a") == "run_a"
    (source.parent / "reward.py").write_text(REWARD.replace("100", "50"), encoding="utf-8")
    with pytest.raises(ActionError, match="run 'run_a' already exists"):
        actions.add_run(workspace, source, run_id="run_a")
    assert run.data_file("reward.py").read_text(encoding="utf-8") == REWARD


def test_runs_with_other_reward_code_are_compared_apart(tmp_path: Path, source: Path) -> None:
    workspace = tmp_path / "workspace"
    runs = [OutputDir(workspace).run(actions.add_run(workspace, source, run_id=each)) for each in ("run_a", "run_b")]
    reader, request = CompareReader(workspace), CompareRequest(tuple((run.run_id, (), 0) for run in runs))

    data, _ = reader.read(request)
    assert data is not None and (data.keys, len(data.notes)) == ((), 1)
    runs[0].data_file("reward.py").write_text(REWARD.replace("100", "50"), encoding="utf-8")
    data, _ = reader.read(request)
    assert data is not None and data.keys == ("env.0.args.reward",)
    assert data.notes[0] == "2 environments, each ranked by itself: their rewards are not comparable"


def test_a_file_of_a_run_that_was_changed_after_it_was_added_is_told(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = tmp_path / "workspace"
    runs = [OutputDir(workspace).run(actions.add_run(workspace, source, run_id=each)) for each in ("run_a", "run_b")]
    assert [changed_data(run) for run in runs] == [{}, {}]
    assert list(codes_of(runs[0], read_effect(runs[0]).data).values()) == [digest_of(REWARD.encode())[:8]]
    runs[0].data_file("reward.py").write_text(REWARD.replace("100", "50"), encoding="utf-8")
    which = "->".join(digest_of(text.encode())[:8] for text in (REWARD, REWARD.replace("100", "50")))
    assert [changed_data(run) for run in runs] == [{"reward.py": which}, {}]
    assert list(codes_of(runs[0], read_effect(runs[0]).data).values()) == [which]
    cure = "put the first back, then prl runs pause and resume run_a; or add a new run"
    words = f"data/reward.py is not the file that it was when the run was added ({which}): {cure}"
    assert changed_data_text(runs[0]) == [words]
    assert environment_figures([], changed_data_text(runs[0]))["problem"] == words
    place = ["--output-dir", str(workspace)]
    assert prl(["runs", "show", "run_a", *place]) == 0
    assert f"problems {words}" in " ".join(capsys.readouterr().out.split())
    assert prl(["runs", "show", "run_a", "--json", *place]) == 0
    assert json.loads(capsys.readouterr().out)["data_changed"] == [words]
    found = {each.name: each.values for each in diff_runs(workspace, "run_b", "run_a").config}
    assert found["data/reward.py"] == (None, which)
    runs[1].data_file("data/train.jsonl").unlink()
    assert [each.endswith("->gone") for each in changed_data(runs[1]).values()] == [True]
    for damaged in ("{", '{"reward.py": 1}', "[" * 5000):
        runs[0].data_digests.write_text(damaged, encoding="utf-8")
        assert changed_data(runs[0]) == {}
    runs[0].data_digests.write_text(json.dumps({f"/{'/' * number}reward.py": "" for number in range(50)}))
    assert changed_data(runs[0]) == {"reward.py": f"->{which[-8:]}"}, "one file, however often it is named"
    runs[0].data_digests.unlink()
    assert changed_data(runs[0]) == {}, "a run of an earlier version"


def test_a_folder_named_like_a_run_has_its_files_beside_the_config(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "run_own" / "configs"
    source.parent.rename((folder.parent.mkdir(), folder)[1])
    assert actions.check_file(tmp_path / "workspace", folder / "own.toml") == []


def test_each_run_of_a_sweep_has_its_own_files(tmp_path: Path, source: Path) -> None:
    workspace = tmp_path / "workspace"
    for num_added in (2, 0):
        assert len(sweep_runs(workspace, source, ["optim.lr=1e-3,1e-4"]).added) == num_added
    assert len(list(workspace.glob("run_*/data/data-train.jsonl"))) == 2


def test_a_draft_in_the_console_has_the_files_beside_its_template_or_of_its_run(tmp_path: Path, source: Path) -> None:
    workspace, text = tmp_path / "workspace", source.read_text(encoding="utf-8")
    edited = f"seed = 7\n{text}"
    assert check_draft(workspace, edited, "run_a", source).problems == ()
    first = OutputDir(workspace).run(add_draft(workspace, edited, "run_a", source))
    (source.parent / "reward.py").unlink()
    assert "reward.py not found" in check_draft(workspace, text, "run_b", source).problems[0].text
    copy = OutputDir(workspace).run(add_draft(workspace, text, "run_b", first.orch_toml))
    assert copy.data_file("reward.py").read_text(encoding="utf-8") == REWARD


def test_parquet_and_data_sets_are_copied_as_json_lines(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands in for the hub. The copies need neither their source nor the library."""
    datasets = pytest.importorskip("datasets", reason='needs pip install "prl-multirun[data]"')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    hub.mkdir()
    rows = [{**row, "when": date(2026, 1, 2)} for row in CAPITALS]
    for file in (source.parent / "rows.parquet", hub / "train.parquet", hub / "test.parquet"):
        datasets.Dataset.from_list(rows[: 3 if file.stem == "test" else None]).to_parquet(file)
    workspace = tmp_path / "workspace"
    for named, num in (("rows.parquet", 30), (f"hub:{hub}", 30), (f"hub:{hub}:default:test", 3)):
        write_config(source, path=named)
        run = OutputDir(workspace).run(actions.add_run(workspace, source, run_id=f"run_{num}-{len(named)}"))
        assert actions.add_run(workspace, source, run_id=run.run_id) == run.run_id
        (copy,) = run.data.iterdir()
        lines = copy.read_text(encoding="utf-8").splitlines()
        assert (copy.suffix, len(lines)) == (".jsonl", num)
        assert json.loads(lines[2]) == {**CAPITALS[2], "when": "2026-01-02"}
    shutil.rmtree(hub)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert actions.check_file(workspace, run.orch_toml) == []


@pytest.mark.parametrize("named", ["rows.parquet", "hub:OWNER/NAME"])
def test_without_the_extra_the_command_that_installs_it_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (source.parent / "rows.parquet").touch()
    write_config(source, path=named)
    (problem,) = actions.check_file(tmp_path / "workspace", source)
    assert "cannot be read: not installed: datasets" in str(problem)
    assert 'pip install "prl-multirun[data]"' in str(problem)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "gone.jsonl"}, "env.0.args.path: {}/gone.jsonl not found: a path is relative to the config file"),
        ({"path": "data/train.jsonl", "prompt": "q"}, "env.0.args.path: {}/data/train.jsonl line 1: no value for 'q'"),
        ({"path": "data/train.jsonl", "reward": "gone.py:score"}, "env.0.args.reward: {}/gone.py not found"),
        ({"path": "data/train.jsonl", "reward": "reward.py:sore"}, "{}/reward.py has no function 'sore'"),
        ({"path": "data/train.jsonl", "reward": "bad.py:score"}, "{}/bad.py line 1: not valid Python: '(' was never"),
    ],
)
def test_wrong_files_are_named_before_a_run_is_added(
    tmp_path: Path, source: Path, args: dict[str, Any], message: str
) -> None:
    (source.parent / "bad.py").write_text("score = (", encoding="utf-8")
    write_config(source, **args)
    problems = actions.check_file(tmp_path / "workspace", source)
    assert message.format(source.parent) in "; ".join(map(str, problems))
    with pytest.raises(ActionError, match=r"env\.0\.args"):
        actions.add_run(tmp_path / "workspace", source)
    assert not list((tmp_path / "workspace").glob("*"))


def test_two_files_that_would_have_one_name_in_the_run_are_refused(tmp_path: Path, source: Path) -> None:
    write_rows(source.parent / "data-train.jsonl", CAPITALS)
    env = [{"id": "jsonl", "name": name, "args": {"path": f"data{name}train.jsonl"}} for name in ("-", "/")]
    env = [{**each, "name": f"e{number}"} for number, each in enumerate(env)]
    source.write_text(tomli_w.dumps(config_data(Path("none"), env=env)), encoding="utf-8")
    (problem,) = actions.check_file(tmp_path / "workspace", source)
    assert "'data/train.jsonl' and 'data-train.jsonl' would have one name in the run" in str(problem)


def test_a_package_that_is_not_installed_is_named_by_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site"
    (package / "own").mkdir(parents=True)
    (package / "own" / "__init__.py").write_text("raise RuntimeError('never run')", encoding="utf-8")
    (package / "own" / "talk.py").write_text("class Talk: pass", encoding="utf-8")
    (package / "own-1.0.dist-info").mkdir()
    points = "good = own.talk:Talk\nclass = own.talk:Tak\nmodule = own.tak:Talk\ntop = onw:Talk\n"
    text = f"[prime_rl.environments]\n{points}"
    (package / "own-1.0.dist-info" / "entry_points.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(package)
    found = {}
    for name in ("good", "class", "module", "top", "none"):
        path = tmp_path / f"{name}.toml"
        data = config_data(Path("none"), env=[{"id": f"plugin:{name}"}])
        path.write_text(tomli_w.dumps(data), encoding="utf-8")
        found[name] = "; ".join(map(str, actions.check_file(tmp_path / "workspace", path)))
    assert found["good"] == ""
    assert "talk.py has no 'Tak', which its entry point names" in found["class"]
    assert "its entry point names the module 'own.tak', which has no such file" in found["module"]
    assert "its entry point names the module 'onw', which is not installed" in found["top"]
    assert "env.0.id: found 'plugin:none': no installed package has the entry point 'none'" in found["none"]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            {"id": "jsonl", "args": {"path": "data.jsonl", "scorer": "math"}},
            "args.scorer: found 'math': {}: math_verify",
        ),
        ({"id": "jsonl", "args": {"path": "data.jsonl", "scorer": "exact"}}, ""),
        ({"id": "verifiers:gsm8k"}, "env.0.id: found 'verifiers:gsm8k': {}: verifiers; "),
        ({"id": "reasoning-gym:chain_sum"}, "env.0.id: found 'reasoning-gym:chain_sum': {}: reasoning_gym; "),
    ],
)
def test_a_library_that_an_environment_needs_is_named_by_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], told: str
) -> None:
    write_rows(tmp_path / "data.jsonl", CAPITALS)
    (tmp_path / "own.toml").write_text(tomli_w.dumps(config_data(Path("none"), env=[env])), encoding="utf-8")
    absent = {"math_verify", "verifiers", "reasoning_gym"}
    monkeypatch.setattr(runtime, "find_spec", lambda name: None if name in absent else find_spec(name))
    told = told.format("not installed")
    found = "; ".join(map(str, actions.check_file(tmp_path / "workspace", tmp_path / "own.toml")))
    assert told in found and bool(told) == bool(found) == ("pip install" in found or "EXTRAS" in found)
    if told:
        with pytest.raises(ActionError, match="not installed"):
            actions.add_run(tmp_path / "workspace", tmp_path / "own.toml")


async def test_a_run_trains_with_its_copies(tmp_path: Path) -> None:
    workspace, model = tmp_path / "workspace", make_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", CAPITALS)
    (tmp_path / "reward.py").write_text("def score(answer, row): return 0.25", encoding="utf-8")
    config = tmp_path / "own.toml"
    args = {"path": "train.jsonl", "reward": "reward.py:score"}
    async with serving(FakeInference(model)) as url:
        data = config_data(model, env=[{"id": "jsonl", "args": args}], client={"base_url": url}, max_steps=1)
        config.write_text(tomli_w.dumps(data), encoding="utf-8")
        run = OutputDir(workspace).run(actions.add_run(workspace, config))
        for path in (tmp_path / "train.jsonl", tmp_path / "reward.py"):
            path.unlink()
        trainer = asyncio.create_task(stand_in_trainer(run))
        assert await run_to_the_end(load_run_config(run.orch_toml), run, lambda: False) == 0
        trainer.cancel()
    batch = read_batch(run.rollout_file(1))
    assert {sample.reward for sample in batch.samples} == {0.25}
    assert all(sample.example_id.startswith("jsonl/") for sample in batch.samples)
