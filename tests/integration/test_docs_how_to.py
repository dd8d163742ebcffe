"""The how-to pages: what they tell to type and to write is taken from them and run, on one small workspace.

A block of code that begins with ```sh is run. A command in a block without a language is not; it is in `NOT_RUN` with
its reason. Files are made from the pages too: a block is a file where the line before names one, and each block of TOML
must be valid in a run's file. The tutorial and its two neighbours: test_docs_commands.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from prime_rl.configs.reports import AlertsConfig
from tests.integration.test_docs_commands import BIN, PAGES, ROOT, bash, blocks, prl
from tests.patience import PATIENCE_S
from tests.unit.test_alerts_targets import Server
from tests.warm import warm

# In the order in which they are run, on a workspace with the living run_a and the invalid run_b.
HOW_TO = (
    "data.md",
    "environments.md",
    "sft.md",
    "forks.md",
    "distill.md",
    "sharing.md",
    "usage.md",
    "export.md",
    "results.md",
    "evaluate.md",
    "learning.md",
    "alerts.md",
)
DRY = "several nodes that run until Ctrl-C: here with --dry-run; test_multinode_group.py starts real ones"
EXTRAS = "the extra's packages come with make install-test; pip would look for them on the package index"
GPU = "needs a GPU and a model of the Hugging Face hub"
UNIT = "changes the user's services: tests/integration/test_deploy.py checks the unit"
CONTAINER = "needs Docker: tests/unit/test_container.py"
CLUSTER = "needs a cluster: tests/unit/test_kubernetes.py"
SLURM = "needs Slurm or Ray: tests/integration/test_slurm_workspace.py, test_ray_workspace.py"
TERMINAL = "needs a terminal: tests/integration/test_tui_terminal.py"
FINISHED = "needs a finished run, or files of one's own: tests/integration/test_forks_live.py, test_eval.py"
REWARDED = "needs a run with such rewards: tests/unit/test_kept_texts.py"
AGENTS = "tests/integration/test_agent_run.py tries the example and runs programs; its model calls tools"
NOT_RUN = {
    "deploy.md": {
        **dict.fromkeys(("mkdir ", "ln ", "cp ", "install ", "systemctl ", "loginctl "), UNIT),
        **dict.fromkeys(("docker build", "docker run", "docker exec"), CONTAINER),
        **dict.fromkeys(("prl deploy kubernetes", "kubectl create", "kubectl apply"), CLUSTER),
        "prl up @ system.toml": SLURM,
    },
    "tui.md": {"prl-tui": TERMINAL},
    "agents.md": {
        "pip install openai": EXTRAS,
        **dict.fromkeys(("prl config examples", "prl runs validate", "prl env try", "prl runs add"), AGENTS),
    },
    "sft.md": dict.fromkeys(("prl runs samples run_a --export", "prl runs fork run_a"), REWARDED),
    "data.md": {'pip install "prl-multirun[math]"': EXTRAS},
    "environments.md": {'pip install "prl-multirun[environments]"': EXTRAS},
    "export.md": {"prl runs export run_a --out my-adapter --push ORG/NAME": "writes to the Hugging Face hub"},
    "evaluate.md": dict.fromkeys(("prl runs set", "prl serve", "prl eval"), FINISHED),
    "multinode.md": {"prl multinode": DRY, "NODE_RANK=0 prl multinode": DRY},
    "tutorial.md": {
        "make install": "installs; `make docs-check` begins with it",
        "source .venv/bin/activate": "of the shell of a person",
        "prl-tui": TERMINAL,
        "prl fit @ configs/recipes/qwen3-0.6b-gsm8k": "tests/unit/test_recipes.py fits every recipe",
        "prl up @ configs/recipes/qwen3-0.6b-gsm8k": GPU,
        "prl runs sweep configs/recipes/qwen3-0.6b-gsm8k": GPU,
    },
}
PROGRAM = re.compile(
    r"^(?:[A-Z_]+=\S+ )?(?:prl|prl-tui|pip|make|source|echo|mkdir|ln|cp|install|docker|systemctl|loginctl|kubectl)\b"
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Keys of a run's file; other TOML is of the system file or of a package.
OF_A_RUN = {"env", "eval", "init", "budget", "stop"}

WORKSPACE = """
prl config examples --copy configs
export PRL_OUTPUT_DIR=outputs/how_to
cat configs/demo/system.toml alerts.toml > system.toml
prl up @ system.toml --max_concurrent_runs 3 --seq_len 128
prl runs add configs/demo/reverse.toml --id run_a --set max_steps=1000000 --set batch_size=16 \
  --set ckpt.interval=20 --set ckpt.keep_interval=20
mkdir -p outputs/how_to/run_b/control
echo "max_steps =" > outputs/how_to/run_b/control/orch.toml
"""
INTO = "--no-index --no-deps --no-build-isolation --target"
STEP_40 = "until test -e outputs/how_to/run_a/checkpoints/step_40/STABLE; do sleep 0.5; done"
LEARNED = "until prl runs list --state finished | grep run_notes; do sleep 0.5; done"
TROUBLE = "until prl alerts --json | grep run_invalid; do sleep 0.5; done"


def text(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def commands_not_run(page: str) -> list[str]:
    """Lines of its blocks without a language that begin with a program."""
    lines = [line for language, block in FENCED.findall(text(page)) if not language for line in block.splitlines()]
    return [line for line in lines if PROGRAM.match(line)]


@pytest.mark.parametrize("page", sorted({*HOW_TO, *PAGES, *NOT_RUN}))
def test_what_is_not_run_has_its_reason(page: str) -> None:
    """Every command that is not run begins as a line of `NOT_RUN`, and every line of `NOT_RUN` is still in the page."""
    listed, found = NOT_RUN.get(page, {}), commands_not_run(page)
    assert [line for line in found if not line.startswith(tuple(listed))] == []
    assert [start for start in listed if not any(line.startswith(start) for line in found)] == []


def test_every_how_to_page_with_commands_is_looked_at() -> None:
    section = (ROOT / "mkdocs.yml").read_text().partition("- How-to:\n")[2].partition("\n  - ")[0]
    pages = re.findall(r": (\w+\.md)$", section, re.MULTILINE)
    with_commands = {page for page in pages if blocks(page) or commands_not_run(page)}
    assert len(pages) > 10 and with_commands <= {*HOW_TO, *PAGES, *NOT_RUN}


def test_the_targets_of_alerts_are_valid() -> None:
    (block,) = (block for language, block in FENCED.findall(text("alerts.md")) if language == "toml")
    AlertsConfig.model_validate(tomllib.loads(block)["alerts"])


@pytest.mark.release
def test_the_how_to_pages_work_as_they_stand(tmp_path: Path, untaught_model: Path) -> None:
    server = Server()
    write_files(tmp_path, untaught_model)
    script = [WORKSPACE]
    for page in HOW_TO:
        own = blocks(page)
        script += {"forks.md": [STEP_40], "alerts.md": [TROUBLE]}.get(page, [])
        script += [*own[:1], *({"sft.md": [LEARNED]}.get(page, [])), *own[1:]]
        script += [f"prl runs validate {path.name}" for path in write_runs(tmp_path, page)]
        if page == "environments.md":
            script += [
                "pip install ./my_package",
                "prl runs add own.toml",
                "until prl runs list --state finished | grep own; do sleep 0.5; done",
            ]
    environment = {**os.environ, "SLACK_WEBHOOK": f"{server.url}/hook"}
    environment["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(BIN), os.environ["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", str(ROOT))])
    try:
        done = bash(tmp_path, script, environment)
        assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-2000:]
        check_workspace(tmp_path)
        assert any(path == "/hook" for path, _ in server.got), "prl alerts --test sends a message"
    finally:
        prl(tmp_path, "down", "--output-dir", "outputs/how_to")
        server.close()


def write_files(folder: Path, model: Path) -> None:
    """The base model, what the pages name, their package, and a `pip` that installs into a folder of the test."""
    (folder / "bin").mkdir()
    (folder / "bin" / "pip").write_text(f'#!/bin/sh\n{BIN}/python -m pip "$@" {INTO} "{folder}/packages"\n')
    (folder / "bin" / "pip").chmod(0o755)
    (folder / "models").mkdir()
    (folder / "models" / "base").symlink_to(model)
    (folder / "alerts.toml").write_text('\n[alerts]\nwebhooks = ["$SLACK_WEBHOOK"]\n')
    small = {"batch_size = 64": "batch_size = 16", "max_steps = 24": "max_steps = 9"}
    (folder / "grpo.toml").write_text(replaced((ROOT / "configs/demo/sort.toml").read_text(), small))
    for page in ("data.md", "sft.md", "distill.md"):
        for name, block in NAMED_FILE.findall(text(page)):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block)
    rows = FENCED.findall(text("data.md"))[0][1]
    (folder / "capitals.jsonl").write_text(60 * rows)
    (echo,) = (block for language, block in FENCED.findall(text("environments.md")) if "class Echo" in block)
    (entry,) = (block for language, block in FENCED.findall(text("environments.md")) if "entry-points" in block)
    (folder / "my_package" / "my_package").mkdir(parents=True)
    (folder / "my_package" / "my_package" / "echo.py").write_text(echo)
    (folder / "my_package" / "pyproject.toml").write_text(f'[project]\nname = "my-package"\nversion = "0.1"\n\n{entry}')


def write_runs(folder: Path, page: str) -> list[Path]:
    """One file for each block of TOML that belongs into a run's file, in which it takes the place of `[[env]]`."""
    demo = (ROOT / "configs/demo/reverse.toml").read_text()
    without, model = demo.partition("[[env]]")[0], '\n[model]\nname = "models/base"\n'
    found = []
    for language, block in FENCED.findall(text(page)):
        if language == "toml" and tomllib.loads(block).keys() & OF_A_RUN:
            found.append(folder / f"{page.removesuffix('.md')}-{len(found)}.toml")
            head = "" if "batch_size" in block else without if "[[env]]" in block else demo
            found[-1].write_text(f"{head}\n{block}{'' if head or '[model]' in block else model}")
    if page == "environments.md":
        own = replaced(without, {"batch_size = 64": "batch_size = 16", "max_steps = 24": "max_steps = 2"})
        (data,) = (block for _, block in FENCED.findall(text("data.md")) if "reward.py:score" in block)
        (folder / "own.toml").write_text(f'{own}\n[[env]]\nid = "plugin:echo"\n\n{data}\n[eval]\ninterval = 20\n')
    return found


def replaced(source: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        assert old in source, old
        source = source.replace(old, new)
    return source


def check_workspace(folder: Path) -> None:
    listed = json.loads(prl(folder, "runs", "list", "--json", "--output-dir", "outputs/how_to").stdout)["runs"]
    runs = {run["run_id"]: run for run in listed}
    assert {"run_a", "run_a-fork", "run_slower", "run_same", "run_own"} < runs.keys()
    assert len([run_id for run_id in runs if run_id.startswith("run_grpo-lr")]) == 6
    assert runs["run_own"]["state"] == "finished" and runs["run_own"]["step"] == 2
    assert (folder / "my-adapter" / "adapter_model.safetensors").is_file()
    assert (folder / "my-model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_of_several_nodes_are_valid(tmp_path: Path, untaught_model: Path) -> None:
    """With --dry-run: each prints its phases, but the one that needs something to resume."""
    write_files(tmp_path, untaught_model)
    prl(tmp_path, "config", "examples", "--copy", "configs")
    commands = [line.partition("#")[0] for line in commands_not_run("multinode.md")]
    assert len(commands) == 9
    for command in commands:
        words = shlex.split(command.removeprefix("NODE_RANK=0 "))
        env = {**os.environ, **({"NODE_RANK": "0"} if command.startswith("NODE_RANK") else {})}
        assert words[0] == "prl"
        done = warm("daemons.cli").run([*words[1:], "--dry-run"], cwd=tmp_path, env=env, timeout_s=PATIENCE_S)
        if "--resume" in words:
            assert done.returncode == 2 and "nothing to resume" in done.stderr, command
        else:
            assert done.returncode == 0 and "phase" in done.stdout, f"{command}\n{done.stderr}{done.stdout}"
