"""Versions of runs that do not train, kept at inference under their names: `prl serve`.

`control/served.txt` names the version. Inference loads it when it is asked for and a slot is free, also after a
restart; it gives way to a run that trains. That needs no process: this one only asks for the first load.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from daemons.actions import view_of_run
from daemons.chat import Refused, Server, connect, living_inference
from daemons.details import find_version, parse_version
from daemons.errors import ActionError, WrongUseError, one_line_errors, record_act
from daemons.trash import existing_run
from prime_rl.contract.files import remove, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.served import kept_name
from prime_rl.contract.status import RunState


def served_names(output_dir: Path) -> list[str]:
    """The names of all versions that are kept, ascending."""
    return sorted(name for run in scan_runs(output_dir)[0] if (name := kept_name(run)))


def serve_run(output_dir: Path, target: str) -> tuple[str, list[str]]:
    """Keep a version served: its name, and the addresses that have it; none while inference is down.

    `target` is a run (its newest version) or RUN@vN; another version of it is kept no more. Raises ActionError.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"serving {target}"):
        run, wanted = _run_of(output, target)
        if (state := view_of_run(output, run.run_id).state) in (RunState.ACTIVE, RunState.WAITING):
            raise ActionError(f"{run.run_id} is {state}: while it trains its newest version is served under its name")
        version = find_version(run, wanted)
        if version.adapter is None:
            raise ActionError(f"{version.name} is a version of a whole model: only adapters are served beside others")
        stop_serving(output_dir, run.run_id)
        servers = _servers(output)
        for _, server in servers:
            models = [str(model.get("id")) for model in server.get("/v1/models").get("data", [])]
            if version.name not in models:
                body = {"lora_name": version.name, "lora_path": str(version.adapter.resolve())}
                server.post("/v1/load_lora_adapter", body)
        write_atomic(run.served, version.name)
        record_act(output, "serve", run.run_id, detail=f"version {version.step}")
        return version.name, [url for url, _ in servers]


def stop_serving(output_dir: Path, target: str) -> str | None:
    """Keep the run's version no more, and unload it; returns its name, None when none is kept. Raises ActionError."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"unloading {target}"):
        run, _ = _run_of(output, target)
        name = kept_name(run)
        remove(run.served)
        if name is None:
            return None
        for _, server in _servers(output):
            with contextlib.suppress(Refused):  # it gave way, or inference was restarted
                server.post("/v1/unload_lora_adapter", {"lora_name": name})
        record_act(output, "serve --stop", run.run_id, detail=name)
        return name


def _run_of(output: OutputDir, target: str) -> tuple[RunDir, int | None]:
    parsed = parse_version(target)
    if parsed is None:
        raise WrongUseError(f"invalid version {target!r}: expected a run or RUN@vN")
    return existing_run(output, parsed[0]), parsed[1]


def _servers(output: OutputDir) -> list[tuple[str, Server]]:
    """The living servers by address; [] while inference is down."""
    try:
        living = living_inference(output)
    except ActionError:
        return []
    return [(status.base_url, connect(output, status)) for status in living]
