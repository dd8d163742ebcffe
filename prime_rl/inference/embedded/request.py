"""What the engine works on: a job (one prompt, n choices) and its rows (one choice each). Plain data, no torch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from prime_rl.inference.embedded.sampling import SamplingParams, stream_key

TopLogprobs = list[tuple[int, float]]


@dataclass
class Completion:
    """One finished choice.

    Attributes:
        token_ids: what was generated, the end-of-sequence token included when it ended the choice.
        logprobs: of each token, in the distribution it was drawn from.
        top: the most likely tokens at each position; empty when not asked for.
        finish_reason: "stop" (end of sequence, a stop token or a stop string) or "length".
        stop_at: length of the text before the stop string, None when no stop string ended it.
        stop_reason: the stop string or stop token that ended it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_at: int | None = None
    stop_reason: str | int | None = None


class Job:
    """One prompt with n choices. `future` gets the completions in order when the last one ends."""

    def __init__(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, *, num_choices: int, seed: int, slot: int | None
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.slot = slot
        self.cancelled = False
        self.future: Future[list[Completion]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on only the engine ends it
        self.rows = [Row(self, stream_key(seed, idx)) for idx in range(num_choices)]
        self.num_open = num_choices


@dataclass(eq=False)
class Row:
    """One choice while it is generated. `key` is its random stream."""

    job: Job
    key: int
    completion: Completion = field(default_factory=Completion)

    @property
    def max_length(self) -> int:
        return len(self.job.prompt_ids) + self.job.params.max_tokens

    @property
    def slot_order(self) -> int:
        """Sort key that puts rows of one adapter together, rows of the base model first."""
        return -1 if self.job.slot is None else self.job.slot
