"""Guess a number with a tool. The endpoint, its key and the name of the model are in the environment."""

import json
import os
import sys

from openai import OpenAI

MAX_TRIES = 6
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Try a number. The answer is: higher, lower or right.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}

example = json.load(sys.stdin)
secret = int(example["fields"]["answer"])
messages = list(example["messages"])
client, tries, found = OpenAI(), 0, False
while tries < MAX_TRIES and not found:
    answer = client.chat.completions.create(model=os.environ["PRL_MODEL"], messages=messages, tools=[TOOL])
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print("no call of the tool")
        break
    for call in message.tool_calls:
        tries += 1
        try:
            number = int(json.loads(call.function.arguments)["number"])
            found = number == secret
            result = "right" if found else "higher" if number < secret else "lower"
        except (ValueError, TypeError, KeyError):
            result = "Call guess with a whole number."
        print(call.function.arguments, "->", result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

reward = max(1.0 - (tries - 1) / MAX_TRIES if found else 0.0, 0.1 if tries else 0.0)
with open("reward.json", "w", encoding="utf-8") as file:
    json.dump({"reward": reward, "metrics": {"tries": tries}}, file)
