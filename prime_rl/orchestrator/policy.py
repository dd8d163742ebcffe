"""The policy of one run: the versions of it that inference serves, and one turn that is sampled with one of them.

`PolicyVersions` has which version is current, which are in use, and what is restored. A `Publication` brings a version
to the servers and finds which version an answer comes from. The scheduler decides when to switch. `TurnSampler`
samples.

`ChatTokenizer` makes token ids of messages, without transformers: `tokenizers` and the model's chat template. Token-in,
token-out: a conversation is never rendered twice for the model. The first turn is rendered whole; each later turn
appends only the new messages, so that the tokens the policy sampled stay exactly as it sampled them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.calls import Turn
from prime_rl.contract.served import MAX_STOPS
from prime_rl.orchestrator.client import AdapterRefused, Completion, CompletionRequest, RequestRefused, UnknownModel
from prime_rl.orchestrator.envs.base import PolicyError, RolloutError
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import Publication
from prime_rl.orchestrator.tools import ToolForm, Tools
from prime_rl.utils.chat_template import SPECIAL_TOKENS, ChatTemplate, model_file, token_text
from prime_rl.utils.chat_template import TokenizerError as TokenizerError

logger = logging.getLogger(__name__)

# What a run leaves on the servers is taken back within this when the orchestrator ends; well below the supervisor's
# grace.
CLOSE_TIMEOUT_S = 5.0
# A current version that is refused may be had a moment later, or a newer one is: for so long requests wait for that.
RESTORE_LIMIT_S = 120.0
RESTORE_RETRY_S = 1.0
# A server that keeps losing what it has just loaded is broken, not restarted.
MAX_RESTORES = 5
# Some prompts may bring out what is wrong with an adapter; one that has refused so many and answered none is broken.
MAX_ADAPTER_REFUSALS = 3
# The longest tokens of the models that are known are runs of spaces.
MAX_CHARS_A_TOKEN = 128


class PolicyVersions:
    """The versions of this run that inference serves. `version` is what new requests use.

    Args:
        client: the run's servers; those that come back are equipped by `publication`.
        base_model: the name under which inference serves version 0, unless the run starts from an adapter.
    """

    def __init__(self, publication: Publication, client: InferenceClient, base_model: str) -> None:
        self._publication = publication
        self._client = client
        self._base_model = base_model
        self.version = publication.first
        self._users: Counter[int] = Counter()
        self._switched = asyncio.Condition()
        self._refusal = ""

    async def begin(self) -> None:
        """Before the first request: what an earlier orchestrator of this run left (it was killed) goes."""
        await self._publication.begin(self._client)

    async def switch_to(self, version: int) -> None:
        """Have `version` served and use it for all new requests. Requests under way go on.

        Raises RequestRefused, or AdapterRefused when that is for good.
        """
        async with self._publication.unchanged():
            await self._publication.publish(self._client, version)
            before, self.version = self.version, version
        logger.info("policy version %d (before: %d)", version, before)
        self._sweep()
        async with self._switched:
            self._switched.notify_all()

    @contextlib.asynccontextmanager
    async def pin(self, at_least: int) -> AsyncIterator[int]:
        """Wait until new requests use `at_least` or a newer version, and have that one until the end of the block."""
        async with self._switched:
            await self._switched.wait_for(lambda: self.version >= at_least)
        async with self._publication.unchanged():
            with self.use() as (version, _):
                yield version

    @contextlib.contextmanager
    def use(self, version: int | None = None) -> Iterator[tuple[int, str]]:
        """Keep a version (default: the current one) for as long as the block runs: (version, model name)."""
        held = self.version if version is None else version
        self._users[held] += 1
        try:
            yield held, self._publication.model_name(held) or self._base_model
        finally:
            self._users[held] -= 1
            self._sweep()

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version behind an answer to a request for `asked`: that one, or unless `exactly` a newer one.

        `weights` is from the server's answer. Raises UnknownModel when it is neither: the server has lost it.
        """
        return self._publication.answered_by(asked, weights, exactly=exactly)

    async def restore(self, version: int | None = None) -> None:
        """Give a version (default: the current one) to the servers that have lost it.

        Raises InferenceError when that is not available, for example because its broadcast folder is gone. The current
        one is tried for a while: a switch to a newer one fixes it too.
        """
        if version is not None:
            await self._publication.restore(self._client, version)
            return
        give_up_s = asyncio.get_running_loop().time() + RESTORE_LIMIT_S
        while True:
            try:
                await self._publication.restore(self._client, self.version)
                return
            except RequestRefused as error:
                if asyncio.get_running_loop().time() > give_up_s:
                    raise
                # A warning once: many requests get the same refusal.
                level = logging.DEBUG if self._refusal == str(error) else logging.WARNING
                self._refusal = str(error)
                logger.log(level, "%s is lost for now: %s", self.label(self.version), error)
            await asyncio.sleep(RESTORE_RETRY_S)

    async def close(self) -> None:
        """Leave the servers as they were before the run, as far as they answer in time."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._publication.withdraw(self._client)
        except TimeoutError:
            logger.warning("inference did not unload %s in time", self.label(self.version))

    def label(self, version: int) -> str:
        """The name of `version` for people and logs."""
        return self._publication.label(version)

    def _sweep(self) -> None:
        """Let go of what is older than the current version and not in use."""
        self._publication.retain(self._client, lambda version: version >= self.version or self._users[version] > 0)


class TooLong(RolloutError):
    """A prompt that leaves no room for an answer."""


@dataclass(eq=False)
class FirstTurn:
    """The first turn of `num_rollouts` rollouts of one example: one request, made by the first that needs it."""

    num_rollouts: int
    prompt_ids: Sequence[int] = ()
    answer: asyncio.Future[tuple[int, list[Completion]]] | None = None


class TurnSampler:
    """Samples turns with the policy version of the moment, or with a given one: prompt tokens in, completions out."""

    def __init__(
        self, client: InferenceClient, policy: PolicyVersions, sampling: SamplingConfig, *, seq_len: int
    ) -> None:
        self._client = client
        self._policy = policy
        self._sampling = sampling
        self._seq_len = seq_len
        # No token is longer; more text is not even rendered.
        self.max_chars = seq_len * MAX_CHARS_A_TOKEN
        self._answered: set[int] = set()  # versions
        self._num_refused = 0  # requests to versions that have answered none

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        num_choices: int = 1,
        num_prefix: int = 0,
        version: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        note_version: Callable[[int], None] = lambda version: None,
    ) -> tuple[int, list[Completion]]:
        """The version that answered (default: the current one) and its completions, from one seed.

        `max_tokens` and `stop` stand beside those of the run.

        `num_prefix` tokens of the prompt are those of the whole conversation and of its group.
        `note_version` gets the version before the request; the answer's may be newer, unless `version` was given. What
        a restarted server has lost is loaded again. Raises TooLong when the prompt fills `seq_len`.
        """
        sampling = self._sampling
        if stop:
            sampling = sampling.model_copy(update={"stop": [*dict.fromkeys((*sampling.stop, *stop))][:MAX_STOPS]})
        longest = min(sampling.max_tokens, max_tokens or sampling.max_tokens, self._seq_len - len(prompt_ids))
        if longest < 1:
            wanted = 1 << (len(prompt_ids) + self._sampling.max_tokens - 1).bit_length()
            raise TooLong(
                f"{len(prompt_ids)} prompt tokens leave no room in seq_len = {self._seq_len} (to raise it, unless the "
                f"run's config sets it: prl down; prl up --seq_len {wanted}; prl runs readmit ID)"
            )
        async with self._client.places.hold(num_choices):
            for attempt in itertools.count():
                with self._policy.use(version) as (used, model):
                    note_version(used)
                    try:
                        request = CompletionRequest(model, prompt_ids, sampling, longest, seed, num_choices, num_prefix)
                        completions = await self._client.complete(request)
                        self._answered.add(used)
                        exactly = version is not None
                        return self._policy.answered_by(used, completions[0].weights, exactly=exactly), completions
                    except AdapterRefused as error:
                        self._num_refused += used not in self._answered
                        if self._num_refused >= MAX_ADAPTER_REFUSALS:
                            raise
                        raise PolicyError(f"the policy is at fault, not the example: {error}") from error
                    except UnknownModel:
                        if attempt == MAX_RESTORES:
                            raise
                    await self._policy.restore(version)
        raise AssertionError("unreachable")

    async def sample_first(
        self,
        first: FirstTurn,
        number: int,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        note_version: Callable[[int], None] = lambda version: None,
    ) -> tuple[int, Completion]:
        """The first turn of rollout `number` of a group, with the current version.

        All rollouts of a group begin with the same prompt, so this is one request with as many choices: the prompt is
        read once. Its error is raised in every rollout. One whose prompt is another one has a request of its own.
        """

        async def ask(num_choices: int) -> tuple[int, list[Completion]]:
            num_prefix = len(prompt_ids)
            return await self.sample(
                prompt_ids, seed=seed, num_choices=num_choices, num_prefix=num_prefix, note_version=note_version
            )

        if first.answer is None:
            first.prompt_ids, first.answer = prompt_ids, asyncio.get_running_loop().create_future()
            try:
                first.answer.set_result(await ask(first.num_rollouts))
            except Exception as error:
                first.answer.set_exception(error)
            except BaseException:
                first.answer.cancel()
                raise
        elif prompt_ids != first.prompt_ids:
            version, (completion,) = await ask(1)
            return version, completion
        # Shielded: a rollout that is cancelled must not take the answer from the others.
        version, completions = await asyncio.shield(first.answer)
        return version, completions[number]


# All rollouts of a group ask for the same prompt, one after the other; rendering it is a fifth of what a rollout costs.
NUM_PROMPTS_KEPT, MAX_KEPT_BYTES = 32, 1 << 20
TOKEN_FIELDS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


class ChatTokenizer:
    """The tokenizer and the chat template of one model. `form`: how it calls tools."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.form = ToolForm.of(template)
        self._tokenizer = tokenizer
        self._template = template
        self._prompts: dict[bytes, list[int]] = {}
        # Replaces the policy's message where only the text behind it is needed. Random, so that no message
        # can contain it by intent.
        self._stand_in = f"assistant-turn-{secrets.token_hex(16)}"

    @classmethod
    def load(cls, model: str, template_kwargs: Mapping[str, Any] | None = None) -> ChatTokenizer:
        """Load from a model folder, or from the local hub cache (else the hub) when `model` is not a folder.

        Raises TokenizerError that names the missing file, or the argument of the template that may not be set.
        """
        tokenizer_file = model_file(model, "tokenizer.json")
        if tokenizer_file is None:
            raise TokenizerError(f"model {model!r}: tokenizer.json not found")
        template = ChatTemplate.load(model, template_kwargs)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        _add_missing(tokenizer, template.config)
        return cls(tokenizer, template)

    def prompt(self, turns: Sequence[Turn], tools: Tools = ()) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn. Raises TokenizerError."""
        key = msgspec.msgpack.encode((turns, tools))
        if key not in self._prompts:
            if len(self._prompts) == NUM_PROMPTS_KEPT or sum(map(len, self._prompts)) > MAX_KEPT_BYTES:
                self._prompts.clear()
            self._prompts[key] = self.encode(self.render(self.form.chat(turns, tools), tools, asks=True))
        return list(self._prompts[key])

    def continuation(self, turns: Sequence[Turn], num_seen: int, tools: Tools = ()) -> list[int]:
        """Token ids that follow the assistant turn `turns[num_seen - 1]`, up to the assistant's next turn.

        They begin with the end-of-turn tokens of that turn, whether or not the policy sampled those itself.
        """
        before = self.form.chat(turns[: num_seen - 1], tools)
        after = self.form.chat(turns[num_seen:], (), begins=False)
        masked = [*before, {"role": "assistant", "content": self._stand_in}, *after]
        _, found, rest = self.render(masked, tools, asks=True).partition(self._stand_in)
        if not found:
            raise TokenizerError("the chat template drops earlier assistant turns")
        return self.encode(rest)

    def render(self, chat: Sequence[Mapping[str, Any]], tools: Tools, *, asks: bool = False) -> str:
        """The text of a conversation as the template has it; `asks`: it ends where the assistant begins."""
        offered = {"tools": list(tools)} if tools and self.form.native else None
        return self._template.render(chat, offered, add_generation_prompt=asks)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters that each stands for, from and to."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that is no conversation, between those with which the model begins and ends one."""
        ids = list(self._tokenizer.encode(text).ids)
        end = token_text(self._template.config.get("eos_token"))
        end_ids = [] if end is None else self.encode(end)
        return ids if not end_ids or ids[-len(end_ids) :] == end_ids else [*ids, *end_ids]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of sampled tokens, without special tokens unless `special`."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, which has every special token in it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def last_id(self) -> int:
        """The highest id of a token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def without_special(self, text: str) -> str:
        """The text with a space in each special token that is written out in it, so that it is read as text."""
        for token in self._tokenizer.get_added_tokens_decoder().values():
            text = text.replace(token.content, f"{token.content[:1]} {token.content[1:]}") if token.special else text
        return text


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the config has, in transformers' order: else text is split where it is one token."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = [decoder[index] for index in sorted(decoder, key=int)] + [config.get(key) for key in SPECIAL_TOKENS]
    for token in listed + (extra if isinstance(extra, list) else []):
        if (text := token_text(token)) and text not in known:
            known.add(text)
            fields = {"special": True, **(token if isinstance(token, dict) else {})}
            tokenizer.add_tokens([AddedToken(text, **{name: fields[name] for name in TOKEN_FIELDS & fields.keys()})])
