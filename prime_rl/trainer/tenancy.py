"""What the runs train: an adapter each, or, where `model.lora` is unset, the one run the model itself.

The one place that distinguishes the two after the model is loaded. Everything else works on what it returns.
"""

from __future__ import annotations

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.model import PolicyModel, dtype_on
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.scheduler import MultiLoRAScheduler
from prime_rl.trainer.snapshot import AdapterSnapshots, Snapshots
from prime_rl.trainer.whole_model import ModelFiles, WholeModel
from prime_rl.trainer.whole_run import ModelSnapshots, WholeModelOptimizer
from prime_rl.trainer.world import World


def set_up_weights(
    config: TrainerModelConfig,
    model: PolicyModel,
    manager: MultiRunManager,
    scheduler: MultiLoRAScheduler,
    world: World,
) -> tuple[MultiLoRAOptimizer, Snapshots]:
    """Register with the manager what the runs train; returns the optimizers and snapshots of that."""
    if config.lora is not None:
        for name, layer in model.layers.items():
            layer.register_with_runs(manager, name)
        optimizer = MultiLoRAOptimizer(manager, world)
        return optimizer, AdapterSnapshots(manager, optimizer, scheduler, config.name, config.lora)
    manager.register_model(WholeModel(model.module, keeps=world.is_master))
    whole = WholeModelOptimizer(manager, world)
    files = ModelFiles.of(config.name, model.module.config, dtype_on(config, world))
    snapshots = ModelSnapshots(manager, whole, scheduler, files)
    manager.register_deletion_hook(snapshots.deletion_hook)
    return whole, snapshots
