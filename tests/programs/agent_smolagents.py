"""smolagents as it is: an agent that writes code and one that calls tools, each with a plan; the model is ours."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(one: int, other: int) -> int:
    """Add two numbers.

    Args:
        one: the first.
        other: the second.
    """
    return one + other


kind = {"code": CodeAgent, "tools": ToolCallingAgent}[sys.argv[1]]
model = OpenAIServerModel(
    model_id=os.environ["PRL_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = kind(tools=[add], model=model, max_steps=2, planning_interval=2)
print(agent.run("What is 12 + 7?"))
