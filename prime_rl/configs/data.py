"""`[[data]]`: texts that a run learns from: the files, and the keys of their lines. Nothing here needs a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.envs import Name
from prime_rl.configs.jsonl import MAX_DATA_BYTES, MAX_EVAL_EXAMPLES, held_out_first

# Of one line: far above the longest sequence of any model.
MAX_LINE_BYTES = 4 << 20

_T = TypeVar("_T")


class DataConfig(BaseConfig):
    """One source of texts; several are mixed by their weights."""

    path: str = Field(min_length=1)
    """The texts: a file of at most 256 MiB with one JSON object a line, relative to the config file, which
    `prl runs add` copies into the run. A Parquet file, or a data set of the hub, "hub:OWNER/NAME:CONFIG:SPLIT", is
    copied as JSON lines."""

    name: Name | None = None
    """Name in metrics; null takes the file's, without its ending."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the texts that come from this source, beside the weights of the others."""

    messages: str = "messages"
    """Key of a conversation: a list of messages in OpenAI's form, with calls of tools and their results."""

    tools: str = "tools"
    """Key of the tools that the conversation is about, in OpenAI's form."""

    prompt: str = "prompt"
    """Without a conversation: key of the question, text or a list of messages."""

    completion: str = "completion"
    """Key of the answer to it."""

    text: str = "text"
    """Without both: key of a text that is learned as it is, without the chat template."""

    learn: Literal["assistant", "last", "all"] = "assistant"
    """What has a loss: all that the assistant says, its last message, or every token."""

    too_long: Literal["cut", "drop"] = "cut"
    """A text of more than `seq_len` tokens is cut there, or left out."""

    num_examples: int | None = Field(None, ge=1)
    """Texts to learn, at most; null takes all after those that are held out."""

    num_held_out: int | None = Field(None, ge=0, le=1000)
    """Texts to measure on, the first of the file; null takes a tenth of them, at most 100."""

    @property
    def label(self) -> str:
        """The source's name in metrics."""
        return self.name or Path(self.path.rpartition(":")[2]).stem or "data"

    @property
    def files(self) -> dict[str, int]:
        """The file that it names, with its most bytes."""
        return {self.path: MAX_DATA_BYTES}

    def placed(self, place: Callable[[str], Path]) -> DataConfig:
        """The same, with its file at `place` of what it names."""
        return self.model_copy(update={"path": str(place(self.path))})

    def split(self, texts: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
        """(to learn, to measure on). Raises ValueError where none are left to learn."""
        train, held_out = held_out_first(texts, self.num_examples, self.num_held_out)
        if not train:
            raise ValueError(f"num_held_out = {len(held_out)} leaves none of the {len(texts)} texts to learn")
        return train, held_out

    @property
    def max_held_out(self) -> int:
        """Texts to measure on, at most."""
        return MAX_EVAL_EXAMPLES if self.num_held_out is None else self.num_held_out


class SftConfig(BaseConfig):
    """Learning from the texts of `[[data]]`."""

    share: float = Field(0.1, gt=0, le=4)
    """Of a run that learns from rollouts and has `[[data]]` as well: texts in each batch, for each rollout."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of a text's tokens in the loss, beside the advantages of rollouts."""

    held_out_interval: int = Field(10, ge=1)
    """The texts that are held out are measured before every Nth update, the first included."""
