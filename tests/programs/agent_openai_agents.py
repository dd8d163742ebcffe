"""openai-agents as it is, on chat completions or on responses, streamed or not; the model is ours."""

import asyncio
import os
import sys

from agents import (
    Agent,
    AsyncOpenAI,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)


@function_tool
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


async def main(form: str, way: str) -> None:
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[form]
    agent = Agent(
        name="calculator",
        instructions="Use the tool.",
        tools=[add],
        model=model(model=os.environ["PRL_MODEL"], openai_client=AsyncOpenAI()),
    )
    said: object = "What is 12 + 7?"
    for _ in range(2):
        try:
            if way == "stream":
                result = Runner.run_streamed(agent, said, max_turns=2)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, said, max_turns=2)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            print(type(error).__name__)
            return
        print(result.final_output)
        said = [*result.to_input_list(), {"role": "user", "content": "And one more?"}]


asyncio.run(main(*sys.argv[1:]))
