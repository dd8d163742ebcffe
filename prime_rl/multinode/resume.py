"""Where a new epoch goes on: after the last proof that is complete. Reads the proofs, writes nothing."""

from __future__ import annotations

from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.phases import Phase, Position, RlPhase, first_position

# Proofs, the last first, and where a group goes on that has it and none before it in this list.
_AFTER = (
    ("checkpoint", Phase.RESTART_INFERENCE),
    ("update", Phase.CONFIG_READY),
    ("eval", Phase.STOP_INFERENCE),
    ("train", Phase.EVAL_ROLLOUT),
)


def find_resume(output: OutputDir, rl_phase: RlPhase) -> Position:
    """The first position that is not proven to be done."""
    last = "eval" if rl_phase is RlPhase.ROLLOUT else "done"
    iteration = 1
    while output.iteration(iteration).proof(last).exists() or output.iteration(iteration).proof("done").exists():
        iteration += 1
    folder = output.iteration(iteration)
    opening = first_position(rl_phase, iteration)
    for name, phase in _AFTER:
        if folder.proof(name).exists():
            return max(Position(iteration, phase), opening)
    return opening
