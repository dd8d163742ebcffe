"""A taskset of `verifiers` for the tests: a word is in a box, and one tool looks into it."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["WordBoxTaskset"]

WORDS = ["apple", "berry", "cedar", "delta", "ember", "flint", "grove", "haven"]


class WordBoxTools(vf.Toolset[vf.SharedToolsetConfig]):
    """Served once for all rollouts."""

    TOOL_PREFIX = "box"

    @vf.tool
    def look(self, number: int) -> str:
        """Say which word is in the box of this number."""
        return f"Box {number} holds the word {WORDS[number]}."


class WordBoxData(vf.TaskData):
    """`word` is the right answer."""

    word: str
    fault: str = ""
    credits: str = ""


class WordBoxTask(vf.Task[WordBoxData]):
    """Right when the last thing said is the word."""

    @vf.reward(weight=0.75)
    async def says_the_word(self, trace: vf.Trace) -> float:
        if self.data.fault == "raise":
            raise ValueError("a reward that fails")
        if self.data.fault == "lose":
            raise ConnectionResetError("a reward that asks elsewhere")
        self.assign(trace)
        return float(self.data.word in (trace.messages[-1].content or ""))

    def assign(self, trace: vf.Trace) -> None:
        """0.5 for the first turn; with `tokens`, for the second as many numbers as it has tokens."""
        sampled = [node for node in trace.nodes if node.sampled]
        if self.data.credits:
            sampled[0].advantages = [0.5]
        if self.data.credits == "tokens":
            num_tokens = trace.calls[-1].usage.completion_tokens
            sampled[1].advantages = [float(at) for at in range(num_tokens)]

    @vf.reward(weight=0.25)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.messages[-1].content or "") < 20)

    @vf.metric
    async def looks(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "tool" for message in trace.messages))


class WordBoxConfig(vf.TasksetConfig):
    """`faults` are those of every third task; with `credits` two tasks assign advantages."""

    num_tasks: int = 6
    faults: tuple[str, ...] = ()
    credits: bool = False
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class WordBoxTaskset(vf.Taskset[WordBoxTask, WordBoxConfig]):
    """One task a box."""

    @classmethod
    def toolsets(cls, config: WordBoxConfig) -> list[vf.Toolset]:
        return [WordBoxTools(config.tools)]

    def load(self) -> Iterator[WordBoxTask]:
        for number in range(self.config.num_tasks):
            data = WordBoxData(
                prompt=f"Which word is in box {number}?",
                system_prompt="Answer with one word.",
                word=WORDS[number],
                fault=self.config.faults[number // 3] if number % 3 == 2 and self.config.faults else "",
                credits={1: "tokens", 4: "turn"}.get(number, "") if self.config.credits else "",
            )
            yield WordBoxTask(data, self.config.task)


if __name__ == "__main__":
    WordBoxTools.run()
