"""An environment that people write: questions and answers from a file with one JSON object a line."""

import json

from prime_rl.orchestrator.envs import Example, Outcome


class Rows:
    """`path`: the file. Its first row is for evaluations. Each start of the process leaves a line beside it."""

    id = "rows"

    def __init__(self, args, seed):
        with open(args["path"], encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        self.splits = {"eval": rows[:1], "train": rows[1:]}
        with open(f"{args['path']}.starts", "a", encoding="utf-8") as starts:
            starts.write("started\n")

    def examples(self, split):
        return [
            Example(row["id"], [{"role": "user", "content": row["question"]}], row.get("answer", ""), row)
            for row in self.splits[split]
        ]

    async def rollout(self, example, policy):
        answer = await policy.complete(example.messages)
        wanted = example.info["answer"]
        return Outcome(sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted))
