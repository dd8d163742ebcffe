"""The numbers that "auto" stands for in a trainer's config: slots first, then the micro-batch takes the rest."""

from __future__ import annotations

from dataclasses import replace

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.fit.capacity import GIB, most_runs, most_tokens
from prime_rl.trainer.fit.predict import predict, setting_of

# More runs would wait for each other's passes; a larger number can be set.
MOST_AUTO_SLOTS = 64
# Larger passes are no quicker, and a run that comes late waits for the pass to end.
MOST_TOKENS = 131_072
# Of the memory of a machine without a GPU, where inference and the runs' own processes need some too.
CPU_SHARE = 0.5


class DoesNotFit(ValueError):
    """Not even the least fits; the message is one line that names what to lower."""


def with_numbers(
    config: TrainerConfig, device_type: str, num_ranks: int, usable: float, most_slots: int = MOST_AUTO_SLOTS
) -> TrainerConfig:
    """`config` with numbers in the place of "auto". Raises UnknownModel or DoesNotFit.

    Args:
        device_type: "cuda" or "cpu".
        usable: bytes of a rank's device that the trainer may fill.
        most_slots: what inference has room for, if that is less than MOST_AUTO_SLOTS.
    """
    beside = 0
    if config.num_slots == 0:
        slots, beside = _slots(config, device_type, num_ranks, usable)
        config = config.model_copy(update={"max_concurrent_runs": min(slots, most_slots)})
    if config.max_tokens_per_micro_batch == "auto":
        tokens = _tokens(config, device_type, num_ranks, usable, beside)
        config = config.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"max_concurrent_runs": config.num_slots})


def _slots(config: TrainerConfig, device_type: str, num_ranks: int, usable: float) -> tuple[int, int]:
    """(slots, tokens of the pass beside them): of the configured size; if that is auto, the default, or else a row."""
    one = config.model_copy(update={"max_concurrent_runs": 1})
    setting = setting_of(one, device_type, num_ranks)
    sizes = {setting.tokens, config.seq_len} if config.max_tokens_per_micro_batch == "auto" else {setting.tokens}
    for tokens in sorted(sizes, reverse=True):
        setting = replace(setting, tokens=tokens)
        if slots := min(MOST_AUTO_SLOTS, most_runs(setting, predict(setting), usable)):
            # Rows of many runs take a little more than rows of one.
            mixed = replace(setting, num_runs=slots)
            return max(1, min(slots, most_runs(mixed, predict(mixed), usable))), tokens
    raise DoesNotFit(
        f"max_concurrent_runs = 'auto': one run with a pass of {setting.tokens:,} tokens does not fit into "
        f"{usable / GIB:.1f} GiB: lower max_tokens_per_micro_batch, seq_len or model.lora.rank"
    )


def _tokens(config: TrainerConfig, device_type: str, num_ranks: int, usable: float, at_least: int) -> int:
    """`at_least` tokens fit for certain."""
    setting = setting_of(config, device_type, num_ranks)
    tokens = max(at_least, min(MOST_TOKENS, most_tokens(setting, predict(setting), usable)))
    if not tokens:
        lower = "max_concurrent_runs or model.lora.rank" if config.model.lora else "or train on more GPUs"
        raise DoesNotFit(
            f"max_tokens_per_micro_batch = 'auto': a row of seq_len = {config.seq_len} does not fit into "
            f"{usable / GIB:.1f} GiB: lower seq_len, {lower}"
        )
    return max(tokens, config.seq_len)
