"""The daemons that should run in a workspace now, and how each is started: from the system config and the disk.

The trainer should always run, and inference unless there are runs and none samples; an orchestrator for each run that
the trainer holds in a slot, unless its final state shows that it is done; alerts where the system file asks for them;
monitors where it does or a run that trains; the gateway where it does or a run whose rollouts are agents'. It starts
nothing (`supervisor` does). Which daemon is handed which API key is here too, by the variables that the configs name;
no key itself is read.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tomli_w

from daemons.process import DEVICES_VARIABLE, python_module, visible_devices
from daemons.workspace import replica_name
from daemons.workspace_reader import Stamp, stamp_of
from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.base import ConfigError, load_config, load_toml, without_nulls
from prime_rl.configs.reports import AlertsConfig
from prime_rl.configs.system import DaemonKind, SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.status import RunStatus
from prime_rl.utils.secrets import DEFAULT_VARIABLE, WANDB_VARIABLE

TRAINER = "trainer"
INFERENCE = "inference"
ALERTS = "alerts"
MONITORS = "monitors"
GATEWAY = "gateway"
ORCHESTRATOR = "orchestrator"
SYSTEM = "system"
# The settings that the last `prl up` was given.
UP = "up"
_MODULES = {
    TRAINER: "prime_rl.trainer.train",
    INFERENCE: "prime_rl.inference.server",
    ORCHESTRATOR: "prime_rl.orchestrator.orchestrator",
    ALERTS: "daemons.alerts",
    MONITORS: "daemons.monitors",
    GATEWAY: "prime_rl.gateway.server",
}
# Daemons that have a config only where the system file asks for them.
OPTIONAL = (ALERTS, MONITORS)
# Daemons that also run where a run needs them.
WHERE_NEEDED = (MONITORS, GATEWAY)
MAKE_BASE_MODULE = "prime_rl.base_model"
FIT_MODULE = "prime_rl.trainer.fit"
MERGE_MODULE = "prime_rl.trainer.merge"
MOVED_BY_DEVICES = frozenset({TRAINER, INFERENCE})
_ENVIRONMENT_FILE = "environment"
_FOLDER = "folder"

# Ranks wait for work by asking the store again and again; torch would warn of each time that none came.
_QUIET = "TORCH_CPP_LOG_LEVEL=ERROR"
# Of node 0, where ranks on several nodes meet: below the ports that the kernel gives to connections meanwhile, clear
# of those of Ray.
MEETING_PORTS = range(20_000, 30_000)


@dataclass(frozen=True)
class DaemonSpec:
    """The way to start one daemon. `run_id` is set for an orchestrator, which is named after its run.

    `num_nodes`: on how many machines, `min_nodes` at least; `gpus` and `ranks` are for each of them. `devices`: the
    GPUs of this machine that it sees, () for all. `replica` is the number of an inference server.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    run_id: str | None = None
    num_nodes: int = 1
    min_nodes: int = 1
    gpus: int = 0
    ranks: int = 1
    devices: tuple[int, ...] = ()
    replica: int | None = None

    @property
    def kind(self) -> str:
        """Trainer, inference, orchestrator, alerts, monitors or gateway: the same for all replicas and for all runs."""
        return ORCHESTRATOR if self.run_id else kind_of(self.name)


@dataclass(frozen=True)
class RunNow:
    """The facts about a run that decide about its orchestrator. `max_steps` is None when its config cannot be read.

    `ended`: `finished.txt` is there. `has_monitors`: its config asks for monitors, `needs_gateway`: it has an
    environment of agents. `paused`: by a person, or by the trainer for a more urgent run.
    """

    run_id: str
    in_slot: bool
    evicted: bool
    gone: bool
    status: RunStatus | None
    max_steps: int | None
    has_monitors: bool = False
    ended: bool = False
    paused: bool = False
    needs_gateway: bool = False


def kind_of(service: str) -> str:
    """The kind of a daemon that is no orchestrator: of "inference-1" it is "inference"."""
    return INFERENCE if service.startswith(f"{INFERENCE}-") else service


def saved_system(output: OutputDir) -> SystemConfig:
    """The system of the last start; the defaults without one. Read again only when its file has changed."""
    path = output.component_config(SYSTEM)
    return _read_system(path, stamp_of(path))


@lru_cache(maxsize=8)
def _read_system(path: Path, stamp: Stamp) -> SystemConfig:
    try:
        return load_config(SystemConfig, path)
    except ConfigError:  # never started, or of another version
        return SystemConfig()


def saved_devices(output: OutputDir) -> str | None:
    """CUDA_VISIBLE_DEVICES as `prl up` saved it; None when it was never set. Raises ConfigError."""
    path = output.component_config(_ENVIRONMENT_FILE)
    return _read_devices(path, stamp_of(path))


@lru_cache(maxsize=8)
def _read_devices(path: Path, stamp: Stamp) -> str | None:
    value = load_toml(path).get(DEVICES_VARIABLE) if path.exists() else None
    return None if value is None else str(value)


def save_devices(output: OutputDir, devices: str | None) -> None:
    """Save CUDA_VISIBLE_DEVICES for later starts; None: not set. Raises OSError."""
    text = tomli_w.dumps({} if devices is None else {DEVICES_VARIABLE: devices})
    write_atomic(output.component_config(_ENVIRONMENT_FILE), text)


def saved_folder(output: OutputDir) -> Path | None:
    """The folder in which a workspace was started first, which relative names in its configs and runs mean.

    None when it is not known or gone. Raises ConfigError.
    """
    path = output.component_config(_ENVIRONMENT_FILE)
    value = load_toml(path).get(_FOLDER) if path.exists() else None
    return Path(value) if isinstance(value, str) and Path(value).is_dir() else None


def save_folder(output: OutputDir, folder: Path) -> None:
    """Save the folder for later starts. Raises OSError and ConfigError."""
    path = output.component_config(_ENVIRONMENT_FILE)
    write_atomic(path, tomli_w.dumps({**load_toml(path), _FOLDER: str(folder)}))


def find_model(name: str, folder: Path | None) -> str:
    """The name under which a process in any folder finds a model whose relative name means `folder`."""
    return str(folder / name) if folder is not None and (folder / name).is_dir() else name


def settle_devices(
    saved: str | None, environ: Mapping[str, str], say: Callable[[str], None] = lambda line: None
) -> str | None:
    """CUDA_VISIBLE_DEVICES from now on: one that is set wins over the saved one."""
    now = environ.get(DEVICES_VARIABLE, saved)
    if now != saved:
        say(f"{DEVICES_VARIABLE}: {now!r}" + (f" (was {saved!r})" if saved is not None else ""))
    elif now is not None and DEVICES_VARIABLE not in environ:
        say(f"{DEVICES_VARIABLE}: {now!r} (saved by an earlier prl up; set it to change it)")
    return now


def module_of(daemon: str, own: Mapping[DaemonKind, str] | None = None) -> str:
    """The module that `python -m` runs for a daemon, by its kind; `own`: those of `deployment.modules`."""
    return dict[str, str]((own or {}).items()).get(daemon, _MODULES[daemon])


def service_specs(
    output: OutputDir, system: SystemConfig | None = None, visible: str | None = None
) -> list[DaemonSpec]:
    """Inference, trainer, and what else the system file asks for, in the order in which they are started.

    Defaults: the system and the visible devices of the last start.
    """
    system = system or saved_system(output)
    specs = [inference_spec(output, system, n, visible) for n in range(system.deployment.inference.replicas)]
    specs.append(trainer_spec(output, system, visible))
    if output.component_config(ALERTS).exists():
        module = module_of(ALERTS, system.deployment.modules)
        argv = python_module(module, "@", str(output.component_config(ALERTS)))
        specs.append(DaemonSpec(ALERTS, tuple(argv), output.log(ALERTS)))
    if output.component_config(MONITORS).exists():
        specs.append(monitors_spec(output, system))
    if system.gateway.enabled:
        specs.append(gateway_spec(output, system))
    return specs


def inference_spec(output: OutputDir, system: SystemConfig, replica: int = 0, visible: str | None = None) -> DaemonSpec:
    """One inference server."""
    table, port, name = system.deployment.inference, system.inference.port, replica_name(replica)
    module = module_of(INFERENCE, system.deployment.modules)
    argv = python_module(module, "@", str(output.component_config(INFERENCE)))
    if replica:
        argv += ["--replica", str(replica), "--port", str(port + replica if port else 0)]
    if table.tensor_parallel > 1:
        argv += ["--vllm.extra_args.tensor_parallel_size", str(table.tensor_parallel)]
    devices = table.devices(replica)
    argv = [*_only_on(output, devices, visible), *argv]
    return DaemonSpec(
        name, tuple(argv), output.log(name), gpus=table.gpus_per_replica, devices=devices, replica=replica
    )


def trainer_spec(output: OutputDir, system: SystemConfig | None = None, visible: str | None = None) -> DaemonSpec:
    """The trainer of `system`, by default of the last start."""
    system = system or saved_system(output)
    table, config = system.deployment.trainer, ("@", str(output.component_config(TRAINER)))
    module = module_of(TRAINER, system.deployment.modules)
    is_alone = table.ranks * table.nodes == 1
    argv = python_module(module, *config) if is_alone else start_ranks(table.ranks, module, config)
    return DaemonSpec(
        TRAINER,
        (*_only_on(output, table.gpus, visible), *argv),
        output.log(TRAINER),
        num_nodes=table.nodes,
        min_nodes=table.min_nodes,
        gpus=table.gpus_per_node,
        ranks=table.ranks,
        devices=tuple(table.gpus),
    )


def _only_on(output: OutputDir, gpus: Sequence[int], visible: str | None) -> list[str]:
    """In the command itself: it is seen there, and a daemon that is to have other GPUs is started again."""
    if not gpus:
        return []
    return ["env", f"{DEVICES_VARIABLE}={visible_devices(visible or saved_devices(output) or '', gpus)}"]


def monitors_spec(output: OutputDir, system: SystemConfig | None = None) -> DaemonSpec:
    """It reads its config itself: there is none where only runs ask for monitors."""
    module = module_of(MONITORS, (system or saved_system(output)).deployment.modules)
    return DaemonSpec(MONITORS, tuple(python_module(module, str(output.path))), output.log(MONITORS))


def gateway_spec(output: OutputDir, system: SystemConfig | None = None) -> DaemonSpec:
    """It has a config also where only runs need it."""
    module = module_of(GATEWAY, (system or saved_system(output)).deployment.modules)
    argv = python_module(module, "@", str(output.component_config(GATEWAY)))
    return DaemonSpec(GATEWAY, tuple(argv), output.log(GATEWAY))


def daemon_of(argv: Sequence[str]) -> tuple[str | None, str | None]:
    """(workspace, name) of the daemon that was started with `argv`; None for both when it is none of ours."""
    options = dict(itertools.pairwise(argv))
    with contextlib.suppress(ValueError, IndexError):
        if options.get("-m") == _MODULES[MONITORS]:
            return argv[-1], MONITORS
        config = Path(options["@"] if "-m" in options and "@" in options else "")
        name = config.parts[-3] if config.name == "orch.toml" else config.stem
        return str(config.parents[2]), replica_name(int(options.get("--replica", 0))) if name == INFERENCE else name
    return None, None


def orchestrator_spec(run: RunDir, system: SystemConfig | None = None) -> DaemonSpec:
    """The spec of a run's orchestrator. Default: by the system of the last start."""
    system = system or saved_system(OutputDir(run.path.parent))
    argv = python_module(module_of(ORCHESTRATOR, system.deployment.modules), "@", str(run.orch_toml))
    return DaemonSpec(run.run_id, tuple(argv), run.log, run.run_id)


def wants_orchestrator(run: RunNow) -> bool:
    """True when a run's orchestrator should live: the run has a slot, and its orchestrator is not in a final state.

    That of a paused run, too, if it was killed before it ended: another one unloads the adapters that it left.
    """
    if run.evicted or run.ended or run.gone:
        return False
    if run.paused:
        return run.status is not None and run.status.state in ("starting", "running")
    if not run.in_slot:
        return False
    return run.status is None or not (run.status.state == "failed" or has_all_steps(run))


def has_all_steps(run: RunNow) -> bool:
    """True when it has reached its last step, which was not raised since; one that ended early has a reason."""
    if run.status is None or run.status.state != "finished" or run.status.reason:
        return False
    return run.max_steps is None or not 0 < run.status.max_steps < run.max_steps


def wants_monitors(run: RunNow) -> bool:
    """True when a run has metrics to come for its own monitors: also those of its last evaluation, without a slot."""
    evaluates = not run.evicted and run.status is not None and run.status.state in ("starting", "running")
    return run.has_monitors and (run.in_slot or evaluates) and not run.gone


def wants_gateway(run: RunNow) -> bool:
    """True when a run's orchestrator is to be asked by the gateway: also one that outlives its slot for a while."""
    works = not run.evicted and run.status is not None and run.status.state in ("starting", "running")
    return run.needs_gateway and not run.gone and (works or wants_orchestrator(run))


def wanted_daemons(output: OutputDir, runs: Iterable[RunNow], *, samples: bool = True) -> Mapping[str, DaemonSpec]:
    """The daemons that should run now, by name; `runs` decide about orchestrators, monitors and the gateway.

    `samples`: a run needs inference, or there is none yet.
    """
    runs, system = list(runs), saved_system(output)
    specs = [spec for spec in service_specs(output, system) if samples or spec.kind != INFERENCE]
    if any(wants_monitors(run) for run in runs):
        specs.append(monitors_spec(output, system))
    if any(wants_gateway(run) for run in runs):
        specs.append(gateway_spec(output, system))
    paths = [RunDir(output.path / run.run_id) for run in runs if wants_orchestrator(run)]
    specs += [orchestrator_spec(path, system) for path in paths]
    return {spec.name: spec for spec in specs}


def component_texts(system: SystemConfig, output: OutputDir) -> dict[str, str]:
    """Each daemon's complete config as TOML: later changes of defaults or of the current folder do not matter."""
    path = str(output.path.resolve())
    configs = {
        TRAINER: system.trainer.model_dump(mode="json") | {"output_dir": path},
        INFERENCE: system.inference.model_dump(mode="json") | {"output_dir": path},
        SYSTEM: system.model_dump(mode="json") | {"output_dir": path},
        GATEWAY: system.gateway.model_dump(mode="json") | {"output_dir": path},
    }
    if system.alerts is not None:
        configs[ALERTS] = system.alerts.model_dump(mode="json") | {"output_dir": path}
    if system.monitors.any_on:
        configs[MONITORS] = system.monitors.model_dump(mode="json")
    return {name: tomli_w.dumps(without_nulls(config)) for name, config in configs.items()}


def write_component_configs(system: SystemConfig, output: OutputDir) -> None:
    """Write each daemon's config file, and remove those of optional daemons that `system` does not ask for."""
    output.component_config(SYSTEM).parent.mkdir(parents=True, exist_ok=True)
    texts = component_texts(system, output)
    for name, text in texts.items():
        write_atomic(output.component_config(name), text)
    for name in OPTIONAL:
        if name not in texts:
            output.component_config(name).unlink(missing_ok=True)


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """argv that starts so many ranks of a module on this machine; see `on_nodes` for several."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return ["env", _QUIET, *torchrun, "-m", module, *arguments]


def on_nodes(argv: Sequence[str], num_nodes: int, endpoint: str, start_id: str) -> tuple[str, ...]:
    """The argv of torchrun for one machine (`--standalone`), for several that meet at `endpoint` (HOST:PORT of node 0).

    Each finds its number in NODE_VARIABLE, so rank 0 is on node 0. A command of another kind is returned as it is: it
    runs on each of the nodes.
    """
    rendezvous = ["--nnodes", str(num_nodes), "--rdzv-backend", "static", "--rdzv-endpoint", endpoint]
    rendezvous += ["--rdzv-id", start_id]
    return tuple(word for each in argv for word in (rendezvous if each == "--standalone" else (each,)))


def keys_of(spec: DaemonSpec, output: OutputDir) -> list[str]:
    """The variables whose keys a daemon is handed: inference and each orchestrator its own, alerts its URLs.

    Monitors are handed that of W&B, also before a run asks for it: a daemon is handed keys only when it starts.
    """
    if spec.run_id:
        return _run_variables(RunDir(output.path / spec.run_id))
    if spec.name == ALERTS:
        return _alerts_variables(output)
    if spec.name == MONITORS:
        return [WANDB_VARIABLE]
    return [inference_variable(output)] if spec.kind == INFERENCE else []


def all_keys(output: OutputDir) -> list[str]:
    """The keys that the supervisor is handed, to hand them on."""
    variables = [name for run in scan_runs(output.path)[0] for name in _run_variables(run)]
    return sorted({inference_variable(output), *variables, *_alerts_variables(output), WANDB_VARIABLE})


def inference_variable(output: OutputDir) -> str:
    """The variable of the key that inference asks its clients for."""
    try:
        value = load_toml(output.component_config(INFERENCE)).get("api_key_var")
    except ConfigError:
        value = None
    return value if isinstance(value, str) and value else DEFAULT_VARIABLE


def _alerts_variables(output: OutputDir) -> list[str]:
    try:
        return load_config(AlertsConfig, output.component_config(ALERTS)).variables()
    except ConfigError:  # most workspaces have none
        return []


def _run_variables(run: RunDir) -> list[str]:
    try:
        return config_in_effect(run).key_variables
    except (ConfigError, OSError):  # reported to the run's owner elsewhere
        return [DEFAULT_VARIABLE]
