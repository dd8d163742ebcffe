"""Where a group goes on by its proofs, and what a worker finds at the master's address."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import msgspec
import pytest

from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import mark_stable, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.types import JoinResult, RankEntry, RankFileWriter, Split
from prime_rl.multinode.member import Prober, ProbeServer, answers
from prime_rl.multinode.place import Child, InferenceServer, Place, Proofs, TrainProof, WorkSetting
from prime_rl.multinode.records import GroupRecord, NodeRecord, Phase, Position, RlPhase
from prime_rl.multinode.work import Plan, Rollouts, Training
from tests.patience import PATIENCE_S

KEY = "5e771465"
TRAIN = b'{"policy_version": 1, "key": "5e771465", "sources": {}}'
EVAL = b'{"rewards": {}, "num_rollouts": 1, "steps": [1]}'
PROOFS = {"train": TRAIN, "eval": EVAL, "update": b"{}", "checkpoint": b"{}", "done": b"{}"}
BOTH: frozenset[Split] = frozenset({"train", "eval"})
RUN = {"rollouts_per_example": 2, "env": [{"id": "reverse-text"}]}
CONFIG = MultinodeConfig(groups_per_iteration=2, run=RUN)
NO_SERVER = InferenceServer(lambda: pytest.fail("no server"), Path())


def place_of(output: OutputDir, mode: RlPhase) -> Place:
    """Of node 0, in the first iteration of a group of two."""
    setting = WorkSetting(
        rank=0,
        incarnation="a",
        rl_phase=mode,
        weights=(1.0, 1.0),
        address="",
        master=lambda: None,
        eval_interval=None,
        splits=BOTH,
        max_iterations=1,
    )
    place = Place(setting, CONFIG, output)
    place.move(Position(1, Phase.FILES_READY), GroupRecord(1, "a", 1, members={0: "a"}))
    return place


def proofs_of(output: OutputDir, mode: RlPhase, splits: frozenset[Split] = BOTH, interval: int | None = 1) -> Proofs:
    return Proofs(output, mode, splits, interval, 1, KEY)


def prove(output: OutputDir, iteration: int, **content: bytes) -> None:
    for name, data in content.items():
        path = output.iteration(iteration).proof(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def publish(output: OutputDir, version: int) -> None:
    folder = output.run(RUN_ID).broadcast_dir(version)
    folder.mkdir(parents=True)
    mark_stable(folder)


@pytest.mark.parametrize(
    ("mode", "proven", "phase"),
    [
        (RlPhase.BOTH, 0, Phase.START),
        (RlPhase.BOTH, 1, Phase.EVAL_ROLLOUT),
        (RlPhase.BOTH, 2, Phase.STOP_INFERENCE),
        (RlPhase.BOTH, 3, Phase.CONFIG_READY),
        (RlPhase.BOTH, 4, Phase.RESTART_INFERENCE),
        (RlPhase.ROLLOUT, 0, Phase.START),
        (RlPhase.ROLLOUT, 1, Phase.EVAL_ROLLOUT),
        (RlPhase.UPDATE, 0, Phase.STOP_INFERENCE),
        (RlPhase.UPDATE, 2, Phase.STOP_INFERENCE),
        (RlPhase.UPDATE, 4, Phase.RESTART_INFERENCE),
    ],
)
def test_a_group_goes_on_after_its_last_proof(tmp_path: Path, mode: RlPhase, proven: int, phase: Phase) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, **PROOFS)
    publish(output, 1)
    prove(output, 2, **dict(list(PROOFS.items())[:proven]))
    assert proofs_of(output, mode).resume() == Position(2, phase)


def test_rollouts_alone_end_with_their_evaluation(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, train=TRAIN.replace(b"1,", b"0,"), eval=EVAL.replace(b"[1]", b"[0]"))
    assert proofs_of(output, RlPhase.ROLLOUT).resume() == Position(2, Phase.START)
    assert proofs_of(output, RlPhase.UPDATE).resume() == Position(1, Phase.STOP_INFERENCE)
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(1, Phase.STOP_INFERENCE)


def test_rollouts_of_a_policy_that_was_trained_since_are_made_again(tmp_path: Path) -> None:
    """Rollouts alone, without an end, are ahead of the policy; the next update makes the later ones stale."""
    output = OutputDir(tmp_path)
    for iteration in (1, 2):
        prove(output, iteration, train=TRAIN.replace(b"1,", b"0,"), eval=EVAL.replace(b"[1]", b"[0]"))
    assert proofs_of(output, RlPhase.ROLLOUT).resume() == Position(3, Phase.START)
    prove(output, 1, update=b"{}", checkpoint=b"{}", done=b"{}")
    publish(output, 1)
    assert proofs_of(output, RlPhase.ROLLOUT).resume() == Position(2, Phase.START)
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(2, Phase.START)
    prove(output, 2, train=TRAIN)
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(2, Phase.EVAL_ROLLOUT)


def test_the_two_splits_of_the_rollouts_complete_each_other(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, eval=EVAL.replace(b"[1]", b"[0]"))
    assert proofs_of(output, RlPhase.ROLLOUT, frozenset({"eval"})).resume() == Position(2, Phase.EVAL_ROLLOUT)
    assert proofs_of(output, RlPhase.ROLLOUT, frozenset({"train"}), None).resume() == Position(1, Phase.START)
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(1, Phase.START)
    prove(output, 1, train=TRAIN.replace(b"1,", b"0,"), eval=b'{"due": false}')
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(1, Phase.EVAL_ROLLOUT)
    assert proofs_of(output, RlPhase.BOTH, interval=None).resume() == Position(1, Phase.STOP_INFERENCE)


def test_a_damaged_proof_is_none(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, train=b"{", eval=b"[]")
    assert proofs_of(output, RlPhase.BOTH).resume() == Position(1, Phase.START)


def test_a_worker_recognizes_its_master_by_its_answer() -> None:
    port = ProbeServer("first").port
    assert answers(NodeRecord(0, "first", 1, address="127.0.0.1", port=port), PATIENCE_S)
    assert not answers(NodeRecord(0, "second", 1, address="127.0.0.1", port=port), 5.0)
    assert not answers(NodeRecord(0, "first", 1, address="127.0.0.1", port=1), 5.0)


def test_the_probe_server_outlives_a_time_without_free_files(caplog: pytest.LogCaptureFixture) -> None:
    server = ProbeServer("word")
    trouble = f"workers get no answer at port {server.port}:"
    master = NodeRecord(0, "word", 1, address="127.0.0.1", port=server.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # what is open stays open, and nothing more is opened
        try:
            caller.connect(("127.0.0.1", server.port))  # takes the descriptor that a waiting `accept` has reserved
            wait_for(lambda: trouble in caplog.text, "the probe server to fail", timeout_s=PATIENCE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers(master, PATIENCE_S)
    assert caplog.text.count(trouble) == 1, "once for each time of trouble"


def test_a_server_that_ends_unasked_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "inference.log"
    server = InferenceServer(lambda: Child("inference", ["true"], log, {}), tmp_path / "status.json")
    assert server.failure() is None
    server.start()
    wait_for(lambda: server.has_ended, "the server to end", timeout_s=PATIENCE_S)
    assert server.failure() == f"inference ended with code 0 ({log})"


def test_misses_are_counted_until_there_is_an_answer() -> None:
    server = ProbeServer("word")
    known = [NodeRecord(0, "word", 1, address="127.0.0.1", port=1)]
    prober = Prober(lambda: known[0], 0.01)
    wait_for(lambda: prober.count("1-word") >= 3, "three misses", timeout_s=PATIENCE_S)
    assert prober.count("2-next") == 0, "misses of one master do not count for another"
    known[0] = NodeRecord(0, "word", 1, address="127.0.0.1", port=server.port)
    wait_for(lambda: prober.count("1-word") == 0, "an answer", timeout_s=PATIENCE_S)


def test_rollouts_with_other_settings_count_as_none(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    prove(
        output, 1, train=TRAIN.replace(b"1,", b"0,").replace(KEY.encode(), b"07e3"), eval=EVAL.replace(b"[1]", b"[0]")
    )
    for mode in (RlPhase.BOTH, RlPhase.ROLLOUT):
        assert proofs_of(output, mode).resume() == Position(1, Phase.START)
    place = place_of(output, RlPhase.UPDATE)
    with pytest.raises(ValueError, match=r"rollouts with other settings .* use the TOML that they were made with"):
        Training(place, NO_SERVER).prepare()


@pytest.mark.parametrize("is_gone", [True, False])
def test_rollouts_that_are_lost_are_made_again_and_not_trained_on(tmp_path: Path, is_gone: bool) -> None:
    output = OutputDir(tmp_path)
    place = place_of(output, RlPhase.UPDATE)
    name = output.iteration(1).rank_file("train", 0, 0, place.proofs.key, "a").name
    proof = TrainProof(policy_version=0, key=place.proofs.key, sources={"0": name, "1": name})
    prove(output, 1, train=msgspec.json.encode(proof), eval=b'{"due": false}')
    path = output.iteration(1).path / name
    writer = RankFileWriter(path)
    for task in ("0", "1", "not of this proof"):
        writer.append(RankEntry(task, b"group"))
    writer.close()
    assert place.proofs.holds("train", 1) and place_of(output, RlPhase.BOTH).proofs.resume().phase > Phase.START
    if is_gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:40])
    for mode in (RlPhase.BOTH, RlPhase.ROLLOUT):
        assert place_of(output, mode).proofs.resume() == Position(1, Phase.START)
    with pytest.raises(ValueError, match=f"has lost task . in .*{name}: make it again with --rl-phase rollout"):
        Training(place_of(output, RlPhase.UPDATE), NO_SERVER).prepare()


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ({"sampling": {"temperature": 0.7}}, True),
        ({"env": [{"id": "reverse-text", "args": {"max_len": 5}}]}, True),
        ({"rollouts_per_example": 4}, True),
        ({"seed": 7}, True),
        ({"settled_share": 0.5}, True),
        ({"env": [{"id": "reasoning-gym:chain_sum", "args": {"curriculum": {}}}]}, True),
        ({"sampling": {"temperature": 1.0}}, False),
        ({"optim": {"lr": 1e-3}, "ckpt": {"interval": 2}, "loss": {"type": "gspo"}}, False),
    ],
    ids=str,
)
def test_settings_are_other_ones_when_a_rollout_would_be(changed: dict[str, object], is_other: bool) -> None:
    other = MultinodeConfig(groups_per_iteration=2, run={**RUN, **changed})
    assert (other.rollouts_key() != CONFIG.rollouts_key()) == is_other
    twice = MultinodeConfig(groups_per_iteration=4, updates_per_iteration=2, run={**RUN, **changed})
    assert twice.rollouts_key() == other.rollouts_key(), "how many there are does not make them others"


def test_the_plan_tells_every_node_what_the_last_update_left_known_of_the_examples(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    place = place_of(output, RlPhase.BOTH)
    place.move(Position(2, Phase.TRAIN_ROLLOUT), place.group)
    place.iteration.path.mkdir(parents=True)
    with pytest.raises(OSError, match=r"update\.json: not found or damaged: .*: put it back"):
        Rollouts(place, NO_SERVER).make("train")
    known = {"next_index": 2, "pools": {"reverse-text": {"right": "AQ==", "wrong": "AA=="}}}
    result = JoinResult(rewards={"1": 0.5}, num_rollouts=4, steps=[1], sampler_state=known)
    prove(output, 1, update=msgspec.json.encode(result))
    Rollouts(place, NO_SERVER).make("train")
    plan = msgspec.json.decode(place.iteration.plan("train", place.group.epoch, 0).read_bytes(), type=Plan)
    assert plan.sampler_state == known and plan.policy_version == 1


def test_the_files_are_ready_by_the_plan_of_the_last_round(tmp_path: Path) -> None:
    """Node 1 was lost with its task open; the round in which node 0 made it is over when the files are looked at."""
    output = OutputDir(tmp_path)
    place = place_of(output, RlPhase.BOTH)
    place.iteration.path.mkdir(parents=True)
    for number, plan in enumerate(
        [Plan({}, {0: ["0"], 1: ["1"]}), Plan({"train_rank_0_v0_k_a.msgpack": ["0"]}, {0: ["1"]})]
    ):
        place.iteration.plan("train", place.group.epoch, number).write_bytes(msgspec.json.encode(plan))
    ready = Rollouts(place, NO_SERVER).files_are_ready("train")
    other = RankFileWriter(place.iteration.rank_file("train", 0, 0, "other", "a"))
    for task in ("0", "1"):
        other.append(RankEntry(task, b""))
    other.close()
    writer = RankFileWriter(place.iteration.rank_file("train", 0, 0, place.proofs.key, "a"))
    for task in ("0", "1"):
        assert not ready.look().done
        writer.append(RankEntry(task, b""))
    assert ready.look().done
    writer.close()
