"""What a node really does in each phase, and its inference server.

Every piece of work is a process of another package or a file; the master alone writes plans and proofs. A proof that
holds is never made again, so a phase can be done again after a restart or in a new round. What the work is stands in
`rollouts` and `training`; when the group is in which phase is not decided here (`decide`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w

from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.children import END_TIMEOUT_S, Child
from prime_rl.multinode.member import Report
from prime_rl.multinode.phases import Phase, Position, RlPhase
from prime_rl.multinode.place import Place, WorkSetting
from prime_rl.multinode.records import GroupRecord
from prime_rl.multinode.rollouts import Rollouts
from prime_rl.multinode.tasks import InferenceServer, Now, Serving, Task
from prime_rl.multinode.training import Training


class PhaseWork:
    """The work of one node; see `Work` in `member`."""

    def __init__(self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir) -> None:
        self.place = Place(setting, config, output)
        self._task: Task | None = None
        self._given_up: Task | None = None
        self._server = InferenceServer(self._start_server, self._status_file)
        self._rollouts = Rollouts(self.place, self._server)
        self._training = Training(self.place, self._server)

    def begin(self, position: Position, group: GroupRecord) -> None:
        if self._task is not None:
            self._task.give_up()
        self.place.move(position, group)
        self._given_up, self._task = self._task, None

    def look(self) -> Report:
        try:
            if self._task is None:
                if self._given_up is not None and not self._given_up.has_ended:
                    return Report()
                self.place.iteration.path.mkdir(parents=True, exist_ok=True)
                self._task = self._make_task(self.place.position.phase)
            return self._task.look()
        except OSError as error:  # a full disk, a shared folder that is gone for a while
            return Report(error=str(error), may_heal=True)
        except ValueError as error:  # nothing to train on, a damaged file, nobody left who may make rollouts
            return Report(error=str(error))

    def stop(self) -> None:
        """End everything that this node has started, and wait for it."""
        for task in (self._task, self._given_up, self._server):
            if task is not None:
                task.give_up()
        wait_for(lambda: self._is_idle, "what this node has started to end", timeout_s=END_TIMEOUT_S)

    @property
    def _is_idle(self) -> bool:
        return all(task is None or task.has_ended for task in (self._task, self._given_up, self._server))

    def _make_task(self, phase: Phase) -> Task:
        rollouts, training = self._rollouts, self._training
        works: Mapping[Phase, Callable[[], Task]] = {
            Phase.TRAIN_ROLLOUT: lambda: rollouts.make("train"),
            Phase.EVAL_ROLLOUT: lambda: rollouts.make("eval"),
            Phase.STOP_INFERENCE: self._stop_serving,
            Phase.TRAIN: training.train,
            Phase.RESTART_INFERENCE: self._restart,
        }
        of_master: Mapping[Phase, Callable[[], Task]] = {
            Phase.START: self._open,
            Phase.FILES_READY: lambda: rollouts.files_are_ready("train"),
            Phase.AGGREGATE: rollouts.aggregate,
            Phase.EVAL_AGGREGATE: rollouts.aggregate_eval,
            Phase.PREPARE: training.prepare,
            Phase.COPY_CHECKPOINT: training.copy_checkpoint,
            Phase.FINAL: self._finish,
        }
        of_workers: Mapping[Phase, Callable[[], Task]] = {Phase.CONFIG_READY: training.config_is_ready}
        make = works.get(phase) or (of_master if self.place.is_master else of_workers).get(phase)
        return make() if make else Now(lambda: True)

    def _open(self) -> Task:
        self.place.write_run()
        return Now(lambda: True)

    def _finish(self) -> Task:
        return Now(lambda: self.place.prove("done", {"iteration": self.place.position.iteration}))

    # -- the server ----

    @property
    def _status_file(self) -> Path:
        return self.place.output.multinode / f"inference_{self.place.setting.rank}.json"

    def _stop_serving(self) -> Task:
        self._server.give_up()
        return Now(lambda: self._server.has_ended, "this node's inference server to end")

    def _restart(self) -> Task:
        """Not after the last iteration, and not where no rollouts are made."""
        setting = self.place.setting
        is_needed = setting.rl_phase is RlPhase.BOTH and setting.weights[setting.rank] > 0
        if not is_needed or self.place.position.iteration == setting.max_iterations:
            return Now(lambda: True)
        self._server.start()
        return Serving(self._server)

    def _start_server(self) -> Child:
        place, toml = self.place, self._status_file.with_suffix(".toml")
        write_atomic(toml, tomli_w.dumps(place.config.inference_toml(place.output.path, self._status_file)))
        return place.child("inference", [sys.executable, "-m", "prime_rl.inference.server", "@", str(toml)])
