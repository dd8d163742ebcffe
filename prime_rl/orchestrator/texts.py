"""Texts to learn as training samples: tokens with the model's template, and which of them have a loss.

`TextWorker` makes a group of each text of the run's order, as `rollout` does of an example, so everything behind it is
the same. A conversation is one sample where the template only ever adds to what was said. Where it takes something away
(most that think do, from earlier turns), each message of the assistant is a sample with what stood before it then.

Legend: T = tokens of a sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.base import ConfigError, ConfigProblem
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.types import HELD_OUT, MAX_BRANCHES, TrainingSample, Use, max_rollout_bytes, sample_bytes
from prime_rl.gateway.texts import Text, read_texts
from prime_rl.orchestrator.envs.base import Example, Split
from prime_rl.orchestrator.envs.checked import EnvironmentBroken, ExampleUnusable
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TokenizerError
from prime_rl.orchestrator.recorder import Branch, Rollout
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.sampler import ExampleSampler


@dataclass(frozen=True)
class Tokens:
    """The T tokens of a text, and true where one has a loss."""

    ids_T: list[int]
    mask_T: list[bool]

    def cut(self, seq_len: int) -> Tokens:
        """The first `seq_len` of them."""
        return Tokens(self.ids_T[:seq_len], self.mask_T[:seq_len])


def tokens_of(text: Text, tokenizer: ChatTokenizer, learn: str) -> list[Tokens]:
    """The samples of a text. Raises TokenizerError."""
    if not text.text:
        return _conversation(text, tokenizer, learn)
    ids = tokenizer.encode_text(text.text)
    return [Tokens(ids, [False] + [True] * (len(ids) - 1))]


def _conversation(text: Text, tokenizer: ChatTokenizer, learn: str) -> list[Tokens]:
    chat = tokenizer.form.chat(text.turns, text.tools)
    whole = tokenizer.render(chat, text.tools)
    if learn == "all":
        ids, _ = tokenizer.encode_spans(whole)
        return [Tokens(ids, [False] + [True] * (len(ids) - 1))]
    answers = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
    spans = [_span(chat[: at + 1], text, tokenizer) for at in (answers[-1:] if learn == "last" else answers)]
    if all(whole.startswith(said) for said, _, _ in spans):
        return [_learned(whole, [(start, end) for _, start, end in spans], tokenizer)]
    return [_learned(said, [(start, end)], tokenizer) for said, start, end in spans]


def _span(chat: Sequence[Mapping[str, Any]], text: Text, tokenizer: ChatTokenizer) -> tuple[str, int, int]:
    """A conversation that ends with the assistant, as the model reads it, and from where to where that is its own."""
    asked, said = tokenizer.render(chat[:-1], text.tools, asks=True), tokenizer.render(chat, text.tools)
    alike = next((at for at, (one, other) in enumerate(zip(asked, said, strict=False)) if one != other), len(asked))
    return said, alike, len(said.rstrip())


def _learned(said: str, spans: Sequence[tuple[int, int]], tokenizer: ChatTokenizer) -> Tokens:
    ids, places = tokenizer.encode_spans(said)
    mask = [any(start <= begin and end <= stop for start, stop in spans) and begin < end for begin, end in places]
    return Tokens(ids, [False, *mask[1:]])


@dataclass(frozen=True)
class _Order:
    """The texts of a source as examples, of which only the order counts."""

    ids: Iterable[str]

    def examples(self, split: Split) -> list[Example]:
        """All of them."""
        return [Example(each, [], "") for each in self.ids]


class Texts:
    """The texts of a run, by source. Raises ConfigError for files that are not as the config names them.

    Args:
        place: the files that the config names.

    Attributes:
        unusable: why not, by the name of each text that could not be learned.
        num_tokens: of those of which groups were made.
    """

    def __init__(
        self, config: OrchestratorConfig, place: Callable[[str], Path], tokenizer: ChatTokenizer, seq_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._max_bytes = max_rollout_bytes(config.max_rollouts, config.max_branches, seq_len)
        self._max_unusable_share = config.max_env_failure_share
        self.unusable: dict[str, str] = {}
        self._unlearned = set[str]()
        self.num_tokens = 0
        self._weight = config.sft.weight
        self._interval = config.sft.held_out_interval
        self._sources = {each.label: each for each in config.data}
        self._train: dict[str, dict[str, Text]] = {}
        self._held: list[TrainingSample] = []
        for number, (name, source) in enumerate(self._sources.items()):
            try:
                train, held_out = source.split(read_texts(place(source.path), source))
            except (ValueError, OSError) as error:
                raise ConfigError("orch.toml", [ConfigProblem(f"data.{number}.path", str(error))]) from error
            self._train[name] = {text.id: text for text in train}
            for text in held_out:
                with contextlib.suppress(ExampleUnusable):  # it is measured on the others
                    found, _ = self._tokens(name, text)
                    self._held += self._samples(f"{name}/{text.id}", found, 0, "held out", HELD_OUT)
        weights = {name: each.weight for name, each in self._sources.items()}
        orders = {name: _Order(texts) for name, texts in self._train.items()}
        self.sampler = ExampleSampler(orders, config.seed, weights)

    @property
    def num_texts(self) -> int:
        """The number of texts to learn."""
        return sum(map(len, self._train.values()))

    def group(self, index: int, version: int) -> Group:
        """The text at `index` of the order, as a group of one rollout without a reward.

        Raises ExampleUnusable, and EnvironmentBroken when too many are that.
        """
        name, text = self._pick(index)
        found, is_cut = self._learned(name, text)
        branches = [
            Branch(
                each.ids_T, each.mask_T, [0.0] * len(each.ids_T), each.mask_T.index(True), [version], use="supervised"
            )
            for each in found
        ]
        return Group(index, name, f"{name}/{text.id}", [Rollout(branches, 0.0, {}, is_cut)])

    def worker(self, policy: PolicyVersions) -> Callable[[int, Callable[[int], None]], Awaitable[Group]]:
        """What makes the groups of a run that learns texts alone, at the version that is the newest then."""

        async def make(index: int, note_version: Callable[[int], None]) -> Group:
            note_version(policy.version)
            return self.group(index, policy.version)

        return make

    def beside(self, step: int, number: int) -> list[TrainingSample]:
        """The samples of the texts that batch `step` has beside its rollouts, `number` of them in each."""
        found = list[TrainingSample]()
        for index in range((step - 1) * number, step * number):
            name, text = self._pick(index)
            with contextlib.suppress(ExampleUnusable):
                tokens, _ = self._learned(name, text)
                found += self._samples(f"{name}/{text.id}", tokens, step - 1, f"text {index}", "supervised")
        return found

    def held_out(self, step: int) -> list[TrainingSample]:
        """The samples that batch `step` has to measure the policy before it; [] when that is not due."""
        if (step - 1) % self._interval:
            return []
        return [msgspec.structs.replace(each, policy_version=step - 1, turn_versions=[step - 1]) for each in self._held]

    def _pick(self, index: int) -> tuple[str, Text]:
        """The text at `index` of the order, and its source."""
        pick = self.sampler.pick(index)
        return pick.env_name, self._train[pick.env_name][pick.example.id]

    def _learned(self, name: str, text: Text) -> tuple[list[Tokens], bool]:
        """As `_tokens`, counted. Raises EnvironmentBroken too, when too many texts cannot be learned."""
        try:
            found, is_cut = self._tokens(name, text)
        except ExampleUnusable as error:
            self._unlearned.add(f"{name}/{text.id}")
            num = len(self._unlearned)
            if num > self._max_unusable_share * self.num_texts or num == self.num_texts:
                words = f"{num} of {self.num_texts} texts cannot be learned; the last: {error}"
                raise EnvironmentBroken(words) from error
            raise
        self.num_tokens += sum(len(each.ids_T) for each in found)
        return found, is_cut

    def _samples(
        self, example_id: str, found: Sequence[Tokens], version: int, rollout: str, use: Use
    ) -> list[TrainingSample]:
        """Those of one text. `rollout` and `example_id` name it beside its neighbours in a batch."""
        return [
            TrainingSample(
                token_ids=each.ids_T,
                loss_mask=each.mask_T,
                logprobs=[0.0] * len(each.ids_T),
                advantage=self._weight,
                reward=0.0,
                temperature=1.0,
                policy_version=version,
                example_id=example_id,
                turn_versions=[version],
                rollout_id=f"{rollout} {example_id}" if len(found) > 1 else "",
                use=use,
            )
            for each in found
        ]

    def _tokens(self, name: str, text: Text) -> tuple[list[Tokens], bool]:
        """What is learned of a text, and true where some of it was cut off. Raises ExampleUnusable."""
        source, problem = self._sources[name], ""
        whole, found = list[Tokens](), list[Tokens]()
        try:
            whole = tokens_of(text, self._tokenizer, source.learn)
            found = [each for each in (one.cut(self._seq_len) for one in whole) if any(each.mask_T)]
        except TokenizerError as error:
            problem = str(error)
        longest = max((len(each.ids_T) for each in whole), default=0)
        num_bytes = sum(sample_bytes(len(each.ids_T)) for each in found)
        if longest > self._seq_len and source.too_long == "drop":
            problem = f"{longest} tokens: longer than seq_len = {self._seq_len}"
        elif not found:
            problem = problem or f"nothing to learn in the first seq_len = {self._seq_len} tokens"
        elif len(found) > MAX_BRANCHES or num_bytes > self._max_bytes:
            problem = f"{len(found)} samples of {num_bytes:,} bytes: more than a batch has room for"
        if problem:
            self.unusable[f"{name}/{text.id}"] = problem
            raise ExampleUnusable(f"{source.path} line {text.id}: {problem}")
        return found, longest > self._seq_len
