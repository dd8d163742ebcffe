"""A taskset of `verifiers` for the tests: a question behind an earlier turn, and a score for any answer."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SmallTalkTaskset"]


class SmallTalkTask(vf.Task[vf.TaskData]):
    """Right when something was said."""

    @vf.reward
    async def says_something(self, trace: vf.Trace) -> float:
        return float(bool(trace.messages[-1].content))

    @vf.metric
    async def branches(self, trace: vf.Trace) -> float:
        return float(len(trace.branches))


class SmallTalkConfig(vf.TasksetConfig):
    """`earlier`: what the assistant has said already, without which there is nothing to compact in a first turn."""

    num_tasks: int = 5
    earlier: str = ""


class SmallTalkTaskset(vf.Taskset[SmallTalkTask, SmallTalkConfig]):
    """One question, asked again and again."""

    def load(self) -> Iterator[SmallTalkTask]:
        for number in range(self.config.num_tasks):
            question = f"Write a long story about {number + 2} brothers."
            prompt: str | list[vf.Message] = question
            if self.config.earlier:
                earlier = [vf.UserMessage(content="Who are you?"), vf.AssistantMessage(content=self.config.earlier)]
                prompt = [*earlier, vf.UserMessage(content=question)]
            yield SmallTalkTask(vf.TaskData(prompt=prompt, system_prompt="You tell stories."), self.config.task)
