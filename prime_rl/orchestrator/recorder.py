"""All that one rollout asks of the policy, with every token: a tree of calls, each branch of it a training sample.

`PolicySession` is the policy that an environment or an agent sees. A call whose messages begin with those of an earlier
call and its answer goes on from these very tokens: what was sampled is never tokenised again. Any other history, or one
whose assistant turn came back changed, opens a branch at the last turn that agrees, in the limit at the root. Each
sampled token has a loss in exactly one branch, also those of an answer that nobody went on from.

Two histories are the same when they say the same: ids of calls, what the policy thought, white space at the ends and
the spacing of JSON do not count.

Legend: T = tokens of a whole branch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

from prime_rl.contract.calls import Answer, Call, Turn
from prime_rl.contract.types import MAX_BATCH_BYTES, MAX_BRANCHES, Use, sample_bytes
from prime_rl.orchestrator.client import Completion
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, RolloutError
from prime_rl.orchestrator.policy import ChatTokenizer, FirstTurn, TokenizerError, TooLong, TurnSampler

# What to do about a rollout that is too large.
_FEWER = "lower max_turns or max_tokens_total of its environment"


class SoftTarget(NamedTuple):
    """What a teacher holds likely in a token's place: int32 and float32, since many thousands wait for their batch."""

    token_ids: bytes
    logprobs: bytes

    @classmethod
    def of(cls, top: Sequence[tuple[int, float]]) -> Self:
        """That of token ids with their log-probabilities."""
        token_ids, logprobs = zip(*top, strict=True)
        return cls(array("i", token_ids).tobytes(), array("f", logprobs).tobytes())

    def told(self) -> tuple[list[int], list[float]]:
        """The token ids and their log-probabilities."""
        return array("i", self.token_ids).tolist(), array("f", self.logprobs).tolist()


@dataclass(frozen=True)
class Branch:
    """One way through the tree of a rollout's messages, from its root to an answer that no call went on from.

    The lists over T have equal length. `turn_versions` has the policy version of each turn that has a loss in it, which
    is no turn of an earlier branch. `token_advantages_T` is what the environment gave in place of the advantage that
    follows from the rewards, or []. `num_shared`: tokens before its own first answer with which an earlier branch, that
    of number `shared_with`, begins as well. `turn_rewards`: posted for each turn of `turn_versions` alone, None without
    one; [] where none was. `teacher_T`: a teacher's log-probability of each token that has a loss; `soft_T`: its
    likeliest tokens there, None elsewhere; [] without.
    """

    token_ids_T: list[int]
    loss_mask_T: list[bool]
    logprobs_T: list[float]
    num_prompt_tokens: int
    turn_versions: list[int]
    token_advantages_T: list[float] = field(default_factory=list)
    num_shared: int = 0
    shared_with: int = 0
    turn_rewards: list[float | None] = field(default_factory=list)
    use: Use = ""
    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    ended: bool = False
    teacher_T: list[float] = field(default_factory=list)
    soft_T: list[SoftTarget | None] = field(default_factory=list)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the policy sampled and that have a loss here."""
        return sum(self.loss_mask_T)

    @property
    def num_before(self) -> int:
        """Tokens before the first that has a loss here."""
        return self.loss_mask_T.index(True)


@dataclass(frozen=True)
class Rollout:
    """One finished conversation, or several that are one: at least one branch, one reward; `output`: of an agent."""

    branches: list[Branch]
    reward: float
    metrics: dict[str, float]
    truncated: bool
    rewards: dict[str, float] = field(default_factory=dict)
    output: str = ""

    @property
    def turn_versions(self) -> list[int]:
        """The policy version of each turn, branch by branch."""
        return [version for branch in self.branches for version in branch.turn_versions]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that any of its tokens was sampled from."""
        return min(self.turn_versions)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the policy's first answer."""
        return self.branches[0].num_prompt_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the policy sampled, over all turns."""
        return sum(branch.num_completion_tokens for branch in self.branches)


@dataclass(eq=False)
class _Answered:
    """One call that was answered. `prompt_ids` are the tokens between the answer of `parent` and its own.

    `turn` is the answer as a message, None to a plain prompt; `call` what it answers, until a call goes on from it.
    """

    parent: _Answered | None
    prompt_ids: list[int]
    completion: Completion
    version: int
    has_next: bool = False
    turn: Turn | None = None
    call: Call | None = None

    @property
    def ended(self) -> bool:
        return self.completion.finish_reason == "stop"

    def path(self) -> list[_Answered]:
        """From the root to this one."""
        found, at = [self], self.parent
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def num_tokens(self) -> int:
        """Of all up to the end of its answer."""
        return sum(len(each.prompt_ids) + len(each.completion.token_ids) for each in self.path())

    def token_ids(self) -> list[int]:
        """All tokens up to the end of its answer."""
        return [token for each in self.path() for token in (*each.prompt_ids, *each.completion.token_ids)]


class PolicySession:
    """All that one rollout asks of the policy.

    Args:
        seed: of this rollout; every turn derives its own.
        version: the policy version for all turns; None takes the current one at each turn.
        first_turn: shared with the other rollouts of the group, of which this is number `number`. Needs `version` None.
        note_version: called with the version of each request before it goes out.
        max_bytes: all its branches together may take so much of a batch, each token with `num_soft` of a teacher.

    Attributes:
        answer_lens: tokens of each answer, in the order in which they came.
    """

    def __init__(
        self,
        turns: TurnSampler,
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        version: int | None = None,
        first_turn: FirstTurn | None = None,
        number: int = 0,
        note_version: Callable[[int], None] = lambda version: None,
        max_bytes: int = MAX_BATCH_BYTES,
        num_soft: int = 0,
    ) -> None:
        self.answer_lens: list[int] = []
        self._turns = turns
        self._tokenizer = tokenizer
        self._seed = seed
        self._version = version
        self._first_turn = first_turn
        self._number = number
        self._note_version = note_version
        self._max_bytes = max_bytes
        self._sample_bytes = partial(sample_bytes, num_soft=num_soft)
        self._num_calls = 0
        self._answered: list[_Answered] = []
        # By what was said up to the end of its answer.
        self._by_history: dict[bytes, _Answered] = {}
        self._by_text: dict[str, _Answered] = {}

    async def complete(self, messages: Sequence[Message]) -> str:
        """The policy's turn after `messages`, as text."""
        call = Call(as_turns(messages))
        answered, text = await self._answer(call, self._first_turn if not self._num_calls else None)
        self._remember(call, Turn("assistant", text), answered)
        return text

    async def call(self, call: Call) -> Answer:
        """The policy's turn as a call asks for it. Raises RolloutError for one that cannot be answered."""
        answered, text = await self._answer(call, None, is_limited=True)
        completion, turn = answered.completion, Turn("assistant", text)
        if call.messages:
            prefix = f"call_{self._seed:x}_{len(self._answered)}_"
            turn = self._tokenizer.form.read(text, call.tools, may_call=call.may_call, prefix=prefix)
        self._remember(call, turn, answered)
        return Answer(
            turn,
            "stop" if answered.ended else "length",
            answered.num_tokens - len(completion.token_ids),
            completion.token_ids,
            completion.logprobs,
            answered.version,
            completion.stop,
            pieces(completion.token_ids, self._tokenizer.decode) if call.pieces else [],
        )

    async def rollout(self, env: Environment, example: Example) -> Rollout:
        """Return the rollout that `env` makes of `example` with this session, and its score.

        Raises RolloutError when it cannot be trained on, and what the environment raises.
        """
        return self.finished(await env.rollout(example, self))

    def finished(self, outcome: Outcome) -> Rollout:
        """All calls and answers as a rollout with this outcome.

        Raises RolloutError without an answer, and for more than a batch has room for.
        """
        if not self._answered:
            raise RolloutError("the environment ended without asking the policy")
        leaves = [each for each in self._answered if not each.has_next]
        if len(leaves) > MAX_BRANCHES:
            raise RolloutError(f"it has {len(leaves)} branches, at most {MAX_BRANCHES} can be trained on: {_FEWER}")
        if (num_bytes := sum(self._sample_bytes(leaf.num_tokens) for leaf in leaves)) > self._max_bytes:
            raise RolloutError(
                f"its {len(leaves)} branches take {num_bytes:,} bytes of a batch, in which each rollout has "
                f"{self._max_bytes:,}: {_FEWER}"
            )
        branches = list(self._branches(leaves, outcome))
        truncated = any(not each.ended for each in self._answered)
        rewards = dict(outcome.rewards)
        return Rollout(branches, outcome.reward, outcome.metrics, truncated, rewards, outcome.output)

    def _branches(self, leaves: Sequence[_Answered], outcome: Outcome) -> Iterator[Branch]:
        """One for each of `leaves`, with the advantages and rewards of single answers."""
        own = dict(zip(map(id, self._answered), outcome.advantages, strict=False))
        posted = {id(each): outcome.answer_rewards.get(at) for at, each in enumerate(self._answered)}
        seen: set[int] = set()
        known: list[tuple[list[int], int]] = []  # the tokens of the earlier ones, in their order, and which it is
        for number, leaf in enumerate(leaves):
            path = leaf.path()
            ids, mask, logprobs, values = [], [], [], []
            for each in path:
                completion, length = each.completion, len(each.completion.token_ids)
                is_new = id(each) not in seen
                ids += [*each.prompt_ids, *completion.token_ids]
                mask += [False] * len(each.prompt_ids) + [is_new] * length
                logprobs += [0.0] * len(each.prompt_ids) + (completion.logprobs if is_new else [0.0] * length)
                given = own.get(id(each), 0.0) if is_new else 0.0
                values += [0.0] * len(each.prompt_ids)
                values += given if isinstance(given, Sequence) else [given] * length
            new = [each for each in path if id(each) not in seen]
            versions, rewards = [each.version for each in new], [posted[id(each)] for each in new]
            seen |= {id(each) for each in path}
            at, most = bisect.bisect(known, (ids, number)), mask.index(True)
            neighbours = known[max(at - 1, 0) : at + 1]
            shared = max(((_num_alike(ids, other, most), which) for other, which in neighbours), default=(0, 0))
            known.insert(at, (ids, number))
            num_prompt = len(path[0].prompt_ids)
            given_T, rewards = values if own else [], rewards if any(each is not None for each in rewards) else []
            turns, tools = _conversation(path)
            ended = all(each.ended and each.completion.stop is None for each in path)
            yield Branch(
                *(ids, mask, logprobs, num_prompt, versions, given_T, *shared, rewards),
                turns=turns,
                tools=tools,
                ended=ended,
            )

    async def _answer(
        self, call: Call, first_turn: FirstTurn | None, *, is_limited: bool = False
    ) -> tuple[_Answered, str]:
        """Sample what follows `call`: the answer and its text, without what stopped it. Raises RolloutError.

        `is_limited`: nothing is sampled that the rollout has no room for; else that is found at its end.
        """
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if sum(len(turn.content) for turn in call.messages) + len(call.prompt) > self._turns.max_chars:
            raise TooLong(f"the messages have more than {self._turns.max_chars} characters")
        try:
            parent, new_ids = self._new_tokens(call)
        except TokenizerError as error:
            raise RolloutError(str(error)) from error
        except RecursionError as error:
            raise RolloutError("the messages or tools are nested too deeply") from error
        before = parent.token_ids() if parent else []
        seed, prompt_ids = derive_seed(self._seed, number), before + new_ids
        if not prompt_ids:
            raise RolloutError("the prompt is empty")
        if is_limited:
            self._check_room(parent, len(prompt_ids))
        if first_turn is not None:
            version, completion = await self._turns.sample_first(
                first_turn, self._number, prompt_ids, seed=seed, note_version=self._note_version
            )
        else:
            root = parent.path()[0].prompt_ids if parent else new_ids
            version, (completion,) = await self._turns.sample(
                prompt_ids,
                seed=seed,
                num_prefix=len(root),
                version=self._version,
                max_tokens=call.max_tokens,
                stop=call.stop,
                note_version=self._note_version,
            )
        if parent is not None:
            parent.has_next, parent.call = True, None
        answered = _Answered(parent, new_ids, completion, version)
        self._answered.append(answered)
        self.answer_lens.append(len(completion.token_ids))
        return answered, self._text(completion, special=bool(call.tools))

    def _check_room(self, parent: _Answered | None, num_tokens: int) -> None:
        """Raise TooLong for a call with which the rollout would be more than a batch has room for."""
        leaves = [each.num_tokens for each in self._answered if not each.has_next and each is not parent]
        num_bytes = sum(map(self._sample_bytes, [*leaves, num_tokens]))
        if len(leaves) == MAX_BRANCHES or num_bytes > self._max_bytes:
            raise TooLong(f"the rollout has {len(leaves)} branches, as many as a batch has room for: {_FEWER}")

    def _text(self, completion: Completion, *, special: bool = False) -> str:
        """The text of an answer without what ended it; calls of tools may be written with `special` tokens."""
        ids = completion.token_ids
        has_end = special and completion.finish_reason == "stop" and completion.stop is None
        text = self._tokenizer.decode(ids[:-1] if has_end else ids, special=special)
        if completion.stop is None:
            return text
        before, found, _ = text.rpartition(completion.stop)
        return before if found else text  # a special token has no text

    def _new_tokens(self, call: Call) -> tuple[_Answered | None, list[int]]:
        """The answer that `call` goes on from, and the tokens between that and the next answer."""
        if not call.messages:
            return self._going_on(call.prompt)
        for num_seen, history in reversed(list(enumerate(_histories(call)))):
            if parent := self._by_history.get(history):
                try:
                    new_ids = self._tokenizer.continuation(call.messages, num_seen, call.tools)
                except TokenizerError:  # the template has no place for what came before: all is read anew
                    break
                # The end of the turn is already there when the policy sampled it.
                has_end = parent.ended and new_ids[:1] == parent.completion.token_ids[-1:]
                return parent, new_ids[1:] if has_end else new_ids
        return None, self._tokenizer.prompt(call.messages, call.tools)

    def _going_on(self, prompt: str) -> tuple[_Answered | None, list[int]]:
        """The same for a text: it goes on from the longest one that it begins with."""
        known = [text for text in self._by_text if prompt.startswith(text) and len(prompt) > len(text)]
        if not known:
            return None, self._tokenizer.encode(prompt)
        text = max(known, key=len)
        return self._by_text[text], self._tokenizer.encode(prompt[len(text) :])

    def _remember(self, call: Call, turn: Turn, answered: _Answered) -> None:
        """Note that `turn` is what was answered, so that later calls find it."""
        if not call.messages:
            if answered.completion.stop is not None or not answered.ended:  # no token is in it that the text has not
                self._by_text[call.prompt + self._tokenizer.decode(answered.completion.token_ids)] = answered
            return
        answered.turn, answered.call = turn, call
        *_, history = _histories(Call((*call.messages, turn), tools=call.tools))
        self._by_history[history] = answered


def _conversation(path: Sequence[_Answered]) -> tuple[tuple[Turn, ...], tuple[dict[str, Any], ...]]:
    """The messages of a branch, its answers as they were given, and its tools; () where others answered as well."""
    call, own = path[-1].call, [each.turn for each in path]
    if call is None or sum(turn.role == "assistant" for turn in call.messages) != len(path) - 1:
        return (), ()
    answers = iter(own)
    turns = [next(answers) if turn.role == "assistant" else turn for turn in call.messages]
    found = tuple(turn for turn in (*turns, own[-1]) if turn is not None)
    return (found, call.tools) if len(found) == len(turns) + 1 else ((), ())


def as_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The messages of an environment."""
    return tuple(Turn(message["role"], message["content"]) for message in messages)


# A character of UTF-8 has at most four bytes, so its first three tokens may be unfinished.
MAX_CHAR_TOKENS = 3


def pieces(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token behind the one before it; of a character in several tokens, at the last of them."""
    found, seen, start = [], 0, 0
    for at in range(len(token_ids)):
        before, text = decode(token_ids[start:seen]), decode(token_ids[start : at + 1])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and at - seen < MAX_CHAR_TOKENS and at + 1 < len(token_ids):
            found.append("")
            continue
        found.append(text[len(before) :])
        start, seen = seen, at + 1
    return found


def _histories(call: Call) -> Iterator[bytes]:
    """For each number of its messages, from 0 on: a digest of what they and the tools say."""
    digest = hashlib.blake2b(json.dumps(call.tools, sort_keys=True).encode(), digest_size=16).digest()
    yield digest
    for turn in call.messages:
        said = [turn.role, turn.content.strip(), [(each.name, _plain(each.arguments)) for each in turn.calls]]
        digest = hashlib.blake2b(digest + json.dumps(said).encode(), digest_size=16).digest()
        yield digest


def _plain(arguments: str) -> str:
    """The arguments of a call without the spacing of their JSON; what is not JSON as it is."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _num_alike(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """The first tokens, of at most `most`, that both have."""
    return next((at for at, (a, b) in enumerate(zip(one[:most], other, strict=False)) if a != b), min(most, len(other)))


def derive_seed(*parts: object) -> int:
    """A seed that is a pure function of `parts`. 31 bits: every sampler and random generator takes that."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
