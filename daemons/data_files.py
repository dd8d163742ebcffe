"""Files that a run's config names, data and rewards: checked, and copied into the run when it is added.

So a run trains with what they were then. Also, for `prl runs validate`: environments of packages that are not there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from prime_rl.configs.agents import AgentArgs, missing_program, read_tasks
from prime_rl.configs.base import ConfigProblem
from prime_rl.configs.envs import MODULES, PLUGIN, PLUGIN_GROUP, EnvConfig
from prime_rl.configs.jsonl import MAX_CODE_BYTES, MAX_FOLDER_BYTES, Place, RowsArgs, read_rows
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import read_file, write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.contract.notes import digest_of
from prime_rl.gateway.texts import read_texts
from prime_rl.utils.runtime import missing


def data_problems(config: OrchestratorConfig, place: Place) -> list[ConfigProblem]:
    """Problems of the files, and libraries that environments lack. Reads the files, and runs no code."""
    problems, taken = [], dict[Path, str]()
    for number, source in enumerate(config.data):
        try:
            read_texts(place(source.path), source)
        except FileNotFoundError:
            problems.append(ConfigProblem(f"data.{number}.path", _not_found(place(source.path))))
        except (ValueError, OSError) as error:
            problems.append(ConfigProblem(f"data.{number}.path", str(error)))
    for key, env in _envs(config):
        if sentence := missing("environments", *MODULES.get(env.id.partition(":")[0], [])):
            problems.append(ConfigProblem(f"{key}.id", f"found {env.id!r}: {sentence}"))
        if env.rows is None:
            continue
        if found := _first_problem(env.rows, place):
            problems.append(ConfigProblem(f"{key}.args.{found[0]}", found[1]))
    for key, named in _all_keys(config):
        other = taken.setdefault(RunDir(Path()).data_file(named), named)
        if other != named:
            words = f"{named!r} and {other!r} would have one name in the run: rename one of them"
            problems.append(ConfigProblem(key, words))
    return problems


def _first_problem(args: RowsArgs, place: Place) -> tuple[str, str] | None:
    """The first problem of the files: the argument that names it, and what is wrong. Runs no code of them."""
    name, path = "path", Path(args.path)
    try:
        if args.path:
            read_rows(path := place(args.path), args)
        if isinstance(args, AgentArgs):
            for name, named in (("cwd", args.cwd), ("tasks", args.tasks)):  # noqa: B007 - the last one is named
                if named and not (path := place(named)).is_file():
                    raise FileNotFoundError
            if args.tasks:
                read_tasks(read_file(path, limit=2 * MAX_FOLDER_BYTES), args)
        if args.code:
            name, path = "reward", place(args.code)
            _check_code(path, args.function)
    except FileNotFoundError:
        return name, _not_found(path)
    except (ValueError, OSError) as error:
        return name, str(error)
    sentence = missing("math", "math_verify") if args.scoring == "math" else None
    return ("reward" if isinstance(args, AgentArgs) else "scorer", f"found 'math': {sentence}") if sentence else None


def _not_found(path: Path) -> str:
    return f"{path} not found: a path is relative to the config file, and prl runs add copies it into the run"


def _check_code(path: Path, function: str) -> None:
    """Raises ValueError unless the file is Python and binds `function` at its top level, as far as a look shows."""
    try:
        tree = ast.parse(read_file(path, limit=MAX_CODE_BYTES))
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{path}{line}: not valid Python: {getattr(error, 'msg', error)}") from None
    if not _binds(tree, function):
        raise ValueError(f"{path} has no function {function!r}")


def copy_data(config: OrchestratorConfig, place: Place, run: RunDir, mode: int) -> None:
    """Copy the files into the run, with `mode`, and note what they are. Raises OSError."""
    digests = {}
    for named, limit in _all_named(config).items():
        write_atomic(run.data_file(named), text := read_file(place(named), limit=limit), mode=mode)
        digests[named] = digest_of(text)
    if digests:
        write_atomic(run.data_digests, msgspec.json.encode(digests), mode=mode)


def has_data(config: OrchestratorConfig, place: Place, run: RunDir) -> bool:
    """True when the run's copies are the files as they are now."""
    try:
        return all(
            read_file(run.data_file(named), limit=limit) == read_file(place(named), limit=limit)
            for named, limit in _all_named(config).items()
        )
    except OSError:
        return False


def plugin_problems(config: OrchestratorConfig) -> list[ConfigProblem]:
    """Environments `plugin:NAME` without a package here that has them. Looks at the module's source, runs nothing."""
    problems = []
    for key, env in _envs(config):
        provider, _, name = env.id.partition(":")
        if provider == PLUGIN and (reason := _why_missing(name)):
            problems.append(ConfigProblem(f"{key}.id", f"found {env.id!r}: {reason}"))
    return problems


def program_problems(config: OrchestratorConfig, place: Place) -> list[ConfigProblem]:
    """Programs of agents that are not on this machine, which need not be that of the run's orchestrator."""
    problems = []
    for key, agent in ((key, env.agent) for key, env in _envs(config)):
        if agent is not None:
            template = read_file(place(agent.cwd), limit=2 * MAX_FOLDER_BYTES) if agent.cwd else b""
            if found := missing_program(agent, template):
                problems.append(ConfigProblem(f"{key}.args.{found[0]}", f"on this machine {found[1]}"))
    return problems


def _why_missing(name: str) -> str | None:
    found = next(iter(metadata.entry_points(group=PLUGIN_GROUP, name=name)), None)
    if found is None:
        return f"no installed package has the entry point {name!r} in the group {PLUGIN_GROUP!r}: pip install it here"
    top, _, rest = found.module.partition(".")
    spec = find_spec(top)  # of the whole name, its packages would be imported
    if spec is None:
        return f"its entry point names the module {found.module!r}, which is not installed"
    if spec.submodule_search_locations:
        inner = [Path(place, *rest.split(".")) if rest else Path(place) for place in spec.submodule_search_locations]
        files = [file for path in inner for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    else:
        files = [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") and not rest else []
    if not files:
        return f"its entry point names the module {found.module!r}, which has no such file"
    try:
        tree = ast.parse(read_file(files[0], limit=MAX_CODE_BYTES, follow_links=True))
    except (SyntaxError, ValueError, OSError) as error:
        return f"its module {files[0]} cannot be read: {error}"
    attribute = found.attr.partition(".")[0]
    return None if _binds(tree, attribute) else f"{files[0]} has no {attribute!r}, which its entry point names"


def _binds(tree: ast.Module, name: str) -> bool:
    """True when a module of that source may have `name` at its top level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any(each.asname == name or each.name in (name, "*") for each in node.names):
                return True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
    return False


def _envs(config: OrchestratorConfig) -> Iterator[tuple[str, EnvConfig]]:
    """All tables of environments, by their dotted keys."""
    for table, envs in (("env", config.env), ("eval.env", (config.eval and config.eval.env) or [])):
        yield from ((f"{table}.{number}", env) for number, env in enumerate(envs))


def _named(env: EnvConfig) -> dict[str, int]:
    """The files that a table names, with the most bytes of each."""
    return env.rows.files if env.rows else {}


def _all_keys(config: OrchestratorConfig) -> Iterator[tuple[str, str]]:
    """Each file that the config names, by the key that names it."""
    yield from ((f"data.{number}.path", source.path) for number, source in enumerate(config.data))
    yield from ((f"{key}.args", named) for key, env in _envs(config) for named in _named(env))


def _all_named(config: OrchestratorConfig) -> dict[str, int]:
    of_data = {named: limit for source in config.data for named, limit in source.files.items()}
    return of_data | {named: limit for _, env in _envs(config) for named, limit in _named(env).items()}
