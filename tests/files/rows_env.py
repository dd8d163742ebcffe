"""An environment that people write: questions and answers from a file with one JSON object a line."""

import json

from prime_rl.orchestrator.envs import Example, Outcome


class Rows:
    """`path`: the file. Its first `num_eval` rows are for evaluations."""

    id = "rows"

    def __init__(self, args, seed):
        with open(args["path"]) as file:
            rows = [json.loads(line) for line in file]
        self.splits = {"eval": rows[:1], "train": rows[1:]}
        with open(f"{args['path']}.starts", "a") as starts:
            starts.write("started\n")

    def examples(self, split):
        for row in self.splits[split]:
            question = [{"role": "user", "content": row["question"]}]
            yield Example(row["id"], question, row.get("answer", ""), {"has_answer": "answer" in row})

    async def rollout(self, example, policy):
        answer = await policy.complete(example.messages)
        if not example.info["has_answer"]:
            raise KeyError("answer")
        return Outcome(sum(a == b for a, b in zip(answer, example.answer, strict=False)) / len(example.answer))
