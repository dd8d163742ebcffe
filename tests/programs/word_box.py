"""An agent that finds out which word is in a box, with a tool that looks into it, and then asks again without one.

Two conversations, so two branches of its rollout. It needs no package.
"""

import json
import os
import sys
import urllib.request

WORDS = ["apple", "berry", "cedar", "delta", "ember", "flint", "grove", "haven"]
PARAMETERS = {"properties": {"number": {"title": "Number", "type": "integer"}}, "required": ["number"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "box_look",
        "description": "Say which word is in the box of this number.",
        "parameters": {**{"properties": PARAMETERS["properties"], "required": ["number"]}, "title": "lookArguments"},
    },
}


def ask(messages: list, tools: list) -> dict:
    body = {"model": os.environ["PRL_MODEL"], "messages": messages, **({"tools": tools} if tools else {})}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]


example = json.load(sys.stdin)
number = int(example["fields"]["answer"])
question = {"role": "user", "content": f"Which word is in box {number}?"}
messages = [{"role": "system", "content": "Answer with one word."}, question]
answer = ask(messages, [TOOL])
looks = len(answer.get("tool_calls") or [])
if looks:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"Box {number} holds the word {WORDS[number]}."}
        for call in answer["tool_calls"]
    ]
    answer = ask([*messages, answer, *results], [TOOL])
again = ask([question], [])
said = answer.get("content") or ""
reward = 0.75 * (WORDS[number] in said) + 0.25 * (len(said) < 20)
with open("reward.json", "w", encoding="utf-8") as file:
    json.dump(
        {"reward": reward, "metrics": {"looks": looks, "again": float(WORDS[number] in (again["content"] or ""))}}, file
    )
