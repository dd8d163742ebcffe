"""What a run's sampling and the log-probabilities of inference mean for the importance ratio, before any training.

The trainer's own log-probabilities have the run's temperature and no other setting (docs/inference.md).
"""

from __future__ import annotations

import logging

from prime_rl.configs.sampling import SamplingConfig
from prime_rl.orchestrator.guard import RunFailed

logger = logging.getLogger("orchestrator")


def check_temperature(sampling: SamplingConfig, *, raw: bool) -> None:
    """Raises RunFailed when inference has `raw` log-probabilities, which have no temperature, and the run has one."""
    if raw and sampling.temperature != 1.0:
        raise RunFailed(
            f"sampling.temperature: found {sampling.temperature:g}: must be 1 with this inference server, whose "
            'logprobs_mode is "raw_logprobs": its log-probabilities have no temperature, those of the trainer have; '
            'or set inference.logprobs_mode = "processed_logprobs" and restart inference'
        )


def warn_of_narrow_sampling(sampling: SamplingConfig, *, raw: bool) -> None:
    """One warning with the settings because of which answers are not sampled from the policy itself."""
    if not sampling.narrows:
        return
    consequence = (
        'and with logprobs_mode = "raw_logprobs" importance ratios begin at 1 and do not correct for that: updates are '
        "biased"
        if raw
        else "so importance ratios begin away from 1"
    )
    names = ", sampling.".join(sampling.narrows)
    logger.warning("sampling.%s: answers are not sampled from the policy itself, %s", names, consequence)
