"""Sessions: what repeated, cancelled and excessive calls get, what is recorded of them, and the link to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemons.cli import run as prl
from prime_rl.configs.base import SamplingConfig
from prime_rl.configs.envs import SessionLimits
from prime_rl.contract.calls import (
    Answer,
    Call,
    Count,
    Delivered,
    Done,
    Invalid,
    Open,
    Refusal,
    Request,
    Reward,
    Turn,
)
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import GatewayStatus, RunStatus, StatusWriter
from prime_rl.gateway import link
from prime_rl.gateway.keys import new_secret, run_of, session_key, workspace_secret
from prime_rl.gateway.link import Beat, Hello, LinkServer
from prime_rl.orchestrator.envs.base import Outcome
from prime_rl.orchestrator.envs.checked import EnvironmentFault, Interrupted, TimedOut
from prime_rl.orchestrator.policy import ChatTokenizer, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession
from prime_rl.orchestrator.sessions import (
    MAX_ANSWERS_KEPT,
    MAX_AT_ONCE,
    MAX_POSTED,
    MAX_SHOWN,
    Link,
    OpenSession,
    Sessions,
)
from prime_rl.utils.frames import frame
from prime_rl.utils.secrets import SecretError
from tests.gateway_daemon import gateway_here
from tests.orchestrator_support import FakeInference, connected, make_model, make_run, serving, until
from tests.patience import PATIENCE_S

SECRET = b"s" * 43
LONG_S = 1000.0  # no call is cancelled in a test that does not wait for it


@dataclass
class Setting:
    """A run, the inference that it asks, and its sessions."""

    inference: FakeInference
    sampler: TurnSampler
    tokenizer: ChatTokenizer

    def sessions(self, linger_s: float = LONG_S, secret: bytes = SECRET) -> Sessions:
        made = Sessions("run_a", secret, self.tokenizer, max_model_len=64, linger_s=linger_s)
        made.served_at("http://127.0.0.1:1")
        return made

    def policy(self) -> PolicySession:
        return PolicySession(self.sampler, self.tokenizer, seed=5)


@contextlib.asynccontextmanager
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    model = make_model(tmp_path / "model")
    inference = FakeInference(model)
    async with serving(inference) as url:
        client, policy = connected(url, make_run(tmp_path), model)
        try:
            sampler = TurnSampler(client, policy, SamplingConfig(max_tokens=16), seq_len=128)
            yield Setting(inference, sampler, ChatTokenizer.load(str(model)))
        finally:
            await client.close()


def asks(text: str, **more: Any) -> Call:
    return Call((Turn("user", text),), **more)


async def ask(sessions: Sessions | LinkServer, session: OpenSession, request: Request) -> Answer:
    reply = await sessions.ask(session.id, request)
    assert isinstance(reply, Answer)
    return reply


async def refused(sessions: Sessions | LinkServer, session: str, request: Request) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await sessions.ask(session, request)
    return caught.value


async def test_a_repeated_call_is_sampled_once_until_its_answer_was_delivered(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions, policy, let_go = at.sessions(), at.policy(), asyncio.Event()
        at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
        async with sessions.open(policy) as session:
            assert session.base_url == f"http://127.0.0.1:1/s/{session.id}/v1" and run_of(session.id) == "run_a"
            assert session.key == session_key(SECRET, session.id)
            twins = [asyncio.create_task(ask(sessions, session, asks("a", again=again))) for again in (False, True)]
            await until(lambda: len(at.inference.completions) == 1, "the request")
            let_go.set()
            first, joined = await asyncio.gather(*twins)
            assert first == joined and await ask(sessions, session, asks("a")) == first
            spelled = await ask(sessions, session, asks("a", pieces=True))
            assert "".join(spelled.pieces)[:2] == first.turn.content and not first.pieces
            assert await sessions.ask(session.id, Delivered(first.number)) == Done()
            assert await ask(sessions, session, asks("a", again=True)) == first
            second = await ask(sessions, session, asks("a"))
            assert (first.number, second.number) == (0, 1) and second.turn != first.turn
            assert await ask(sessions, session, asks("a")) == second  # not delivered
            other = await ask(sessions, session, asks("b"))
            assert other.number == 2 and len(at.inference.completions) == 3
        rollout = policy.finished(Outcome(1.0))
        assert [branch.num_completion_tokens for branch in rollout.branches] == [3, 3, 3]


async def test_open_sessions_are_listed_with_what_they_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with setting(tmp_path) as at:
        sessions, let_go = at.sessions(), asyncio.Event()
        at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(sessions.open(at.policy(), example="42\x1b[31m\n"))
            before = sessions.figures()
            assert before == sessions.figures(), "nothing has changed"
            call = asyncio.create_task(ask(sessions, first, asks("a")))
            await until(lambda: len(at.inference.completions) == 1, "the request")
            for _ in range(MAX_SHOWN):
                await stack.enter_async_context(sessions.open(at.policy()))
            figures: dict[str, Any] = sessions.figures()
            assert (figures["num_sessions"], len(figures["sessions"])) == (MAX_SHOWN + 1, MAX_SHOWN)
            asked, idle, *_ = figures["sessions"]
            assert (asked.example, asked.num_calls, asked.waiting_on) == ("42", 1, "inference (1 call in flight)")
            assert (idle.num_calls, idle.waiting_on) == (0, "its client")
            writer = StatusWriter(
                RunDir(tmp_path / "run_a").status, RunStatus(run_id="run_a", state="running", **figures)
            )
            place = ["--output-dir", str(tmp_path)]
            assert prl(["runs", "sessions", "run_a", *place]) == 0
            told = capsys.readouterr().out
            assert "run_a." in told and "and 1 more" in told
            assert prl(["runs", "sessions", "--json", *place]) == 0
            told = json.loads(capsys.readouterr().out)
            rows = told["sessions"]
            assert told["num_more"] == 1 and (rows[0]["run_id"], rows[0]["id"], len(rows)) == (
                "run_a",
                first.id,
                MAX_SHOWN,
            )
            writer.update(sessions=[msgspec.structs.replace(asked, since=-1e300, used_at=1e300)])
            assert prl(["runs", "sessions", "run_a", *place]) == 0
            assert max(map(len, capsys.readouterr().out.splitlines())) < 200, "a wrong clock takes no room"
            let_go.set()
            await call
        assert sessions.figures() == {"num_sessions": 0, "sessions": []}
        writer.close(state="stopped")
        assert prl(["runs", "sessions", *place]) == 0 and capsys.readouterr().out == "no session is open\n"


async def test_a_call_goes_on_while_somebody_waits_and_ends_with_the_last(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        patient, hasty = at.sessions(), at.sessions(linger_s=0)
        let_go = asyncio.Event()
        at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
        async with patient.open(at.policy()) as session, hasty.open(at.policy()) as other:
            first, twin = (asyncio.create_task(ask(patient, session, asks("a"))) for _ in range(2))
            await until(lambda: len(at.inference.completions) == 1, "the request")
            first.cancel()
            twin.cancel()
            await asyncio.wait([first, twin])
            retry = asyncio.create_task(ask(patient, session, asks("a")))  # soon enough
            lost = asyncio.create_task(ask(hasty, other, asks("a")))
            await until(lambda: len(at.inference.completions) == 2, "the request of the hasty one")
            lost.cancel()
            await until(lambda: not other.asked, "the call to be given up")
            again = asyncio.create_task(ask(hasty, other, asks("a")))  # while the first still ends
            await until(lambda: at.inference.num_cancelled == 1, "the place to be free")
            await until(lambda: len(at.inference.completions) == 3, "the request of the next one")
            let_go.set()
            answer = await retry
            assert await ask(patient, session, asks("a")) == answer and (await again).number == 0
            assert len(at.inference.completions) == 3


async def test_what_is_beyond_a_limit_is_refused_so_that_every_client_ends(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions()
        async with (
            sessions.open(at.policy(), SessionLimits(max_turns=2)) as few,
            sessions.open(at.policy(), SessionLimits(max_tokens_total=4)) as short,
        ):
            for word in ("a", "b"):
                await ask(sessions, few, asks(word))
                await sessions.ask(few.id, Delivered(0))
            assert (await ask(sessions, few, asks("b"))).number == 1  # not sampled
            await ask(sessions, short, asks("a", max_tokens=100))
            assert len((await ask(sessions, short, asks("b"))).token_ids) == 1
            for session, request in ((few, asks("c")), (short, asks("c")), (few, Call(prompt="x" * 500))):
                refusal = await refused(sessions, session.id, request)
                assert (refusal.status, refusal.retry_after_s) == (400, None)
                assert "maximum context length" in refusal.message
        with pytest.raises(EnvironmentFault, match="no call was answered; a call was refused: The maximum context"):
            async with sessions.open(at.policy()) as session:
                assert (await refused(sessions, session.id, Call(prompt="x" * 500))).code == "context_length_exceeded"


async def test_calls_at_once_are_limited_and_old_answers_forgotten(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions, let_go = at.sessions(), asyncio.Event()
        at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
        async with sessions.open(at.policy()) as session:
            many = [asyncio.create_task(ask(sessions, session, asks(str(n)))) for n in range(MAX_AT_ONCE)]
            await until(lambda: len(at.inference.completions) == MAX_AT_ONCE, "the requests")
            refusal = await refused(sessions, session.id, asks("one more"))
            assert (refusal.status, refusal.retry_after_s) == (429, 1)
            let_go.set()
            assert sorted(answer.number for answer in await asyncio.gather(*many)) == list(range(MAX_AT_ONCE))
            for number in range(MAX_ANSWERS_KEPT):
                await ask(sessions, session, asks(f"more {number}"))
            assert len(session.asked) <= MAX_ANSWERS_KEPT


async def test_a_closed_session_refuses_and_has_its_reward(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions, posted = at.sessions(), list[Reward]()
        at.inference.gate = lambda body: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        async with sessions.open(at.policy(), on_reward=posted.append) as session:
            waiting = asyncio.create_task(ask(sessions, session, asks("a")))
            await until(lambda: len(at.inference.completions) == 1, "the request")
            bad = {"number": 3}, {"value": float("nan")}, {"rewards": {"a b": 1.0}}, {"rewards": {"x": 1e31}}
            for wrong in bad:
                assert (await refused(sessions, session.id, Reward(**{"value": 1.0, **wrong}))).status == 400  # type: ignore[arg-type]
            assert await sessions.ask(session.id, Reward(0.5, closes=False)) == Done()
            assert not session.closed.is_set() and not waiting.done()
            last = Reward(0.75, {"style": 0.5})
            assert [await sessions.ask(session.id, last) for _ in range(2)] == [Done(), Done()]  # its answer was lost
            assert session.closed.is_set() and posted == [Reward(0.5, closes=False), last] == session.rewards
            assert (await waiting_refusal(waiting)).code == "closed"
            assert (await refused(sessions, session.id, asks("a"))).code == "closed"
        gone = await refused(sessions, session.id, asks("a"))
        assert (gone.status, gone.retry_after_s) == (410, None)
        assert (await refused(sessions, "run_a", Open())).status == 404
        await until(lambda: at.inference.num_cancelled == 1, "the place to be free")


async def test_a_session_that_has_had_all_its_rewards_can_still_end(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions()
        async with sessions.open(at.policy()) as session:
            for number in range(MAX_POSTED):
                await sessions.ask(session.id, Reward(float(number), closes=False))
            assert (await refused(sessions, session.id, Reward(0.5, closes=False))).code == "limit"
            assert await sessions.ask(session.id, Reward()) == Done() and session.closed.is_set()


async def test_a_refusal_is_forgotten_once_a_later_call_is_answered(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions()

        async def rollout() -> None:
            async with sessions.open(at.policy()) as session:
                await sessions.ask(session.id, Invalid("no images"))
                await ask(sessions, session, asks("a"))
                raise EnvironmentFault("its end")

        with pytest.raises(EnvironmentFault, match=r"^its end$"):
            await rollout()


@pytest.mark.parametrize("away", ["nothing", "inference before", "inference", "the gateway"])
async def test_a_fault_has_the_last_refusal_and_counts_unless_what_it_asks_was_away(away: str, tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        for raised in (TimedOut, EnvironmentFault):
            sessions = at.sessions()
            if away == "inference before":
                sessions.note_trouble("inference at X (connection refused)")

            async def rollout(sessions: Sessions = sessions, kind: type[EnvironmentFault] = raised) -> None:
                async with sessions.open(at.policy(), SessionLimits(max_turns=1)) as session:
                    for word in ("a", "b"):
                        with contextlib.suppress(Refusal):
                            await ask(sessions, session, asks(word))
                    if away == "inference":
                        sessions.note_trouble("inference at X (connection refused)")
                        sessions.note_trouble(None)
                    elif away == "the gateway":
                        sessions.served_at(None, "the gateway")
                    raise kind("its end")

            with pytest.raises(EnvironmentFault) as caught:
                await rollout()
            counts = away == "nothing" or (away.startswith("inference") and raised is EnvironmentFault)
            assert type(caught.value) is (raised if counts else Interrupted)
            assert "its end; a call was refused: No more answers" in str(caught.value)
            assert str(caught.value).startswith("its end") is counts
        with pytest.raises(EnvironmentFault, match="no call was answered; a call was refused: messages: no images"):
            async with sessions.open(at.policy()) as session:
                await sessions.ask(session.id, Invalid("messages: no\nimages"))


async def test_an_answer_that_comes_while_nobody_waits_is_kept_for_who_asks_again(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions, let_go = at.sessions(linger_s=LONG_S), asyncio.Event()
        at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
        async with sessions.open(at.policy()) as session:
            gone = asyncio.create_task(ask(sessions, session, asks("a")))
            await until(lambda: len(at.inference.completions) == 1, "the request")
            gone.cancel()
            await asyncio.wait([gone])
            ((key, asked),) = session.asked.items()
            let_go.set()
            await asyncio.wait([asked.task])
            session.give_up(key, asked)  # as once the time for coming back is over
            assert (await ask(sessions, session, asks("a"))).number == 0 and len(at.inference.completions) == 1


async def waiting_refusal(task: asyncio.Task[Answer]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await task
    return caught.value


async def test_tokens_are_counted_without_sampling(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions()
        async with sessions.open(at.policy()) as session:
            counted = await sessions.ask(session.id, Count(asks("abc")))
            answer = await ask(sessions, session, asks("abc"))
            assert counted == Done(answer.num_prompt_tokens) and session.num_answers == 1
            assert await sessions.ask(session.id, Count(Call(prompt="abc"))) == Done(3)


async def test_the_gateway_asks_over_the_link_and_a_new_one_takes_over(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        secret = workspace_secret(OutputDir(tmp_path))
        sessions, let_go = at.sessions(secret=secret), asyncio.Event()
        sessions.served_at(None, "the gateway")
        keeping = asyncio.create_task(Link(OutputDir(tmp_path), sessions).keep())
        await until(lambda: "not started" in str(sessions.waiting_on), "the first look")
        async with gateway_here(tmp_path) as server:
            await sessions.served()
            async with sessions.open(at.policy()) as session:
                assert "/s/run_a." in session.base_url
                assert server.max_model_len(session.id) == 64 and server.num_runs == 1
                answer = await ask(server, session, asks("a", pieces=True))
                assert answer.pieces and await server.ask(session.id, Delivered(0)) == Done()
                assert (await refused(server, session.id, Call(prompt="x" * 500))).code == "context_length_exceeded"
                elsewhere = await refused(server, "run_b.12345678", asks("a"))
                assert (elsewhere.status, elsewhere.retry_after_s) == (503, 1) and "run_b" in elsewhere.message
                at.inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
                waiting = asyncio.create_task(ask(server, session, asks("b")))
                await until(lambda: len(at.inference.completions) == 2, "the request")
                server._peers["run_a"].wire.close()  # as by a gateway that dies
                assert (await waiting_refusal(waiting)).status == 503
                await until(lambda: "run_a" in server._peers, "the link to be back")
                retry = asyncio.create_task(ask(server, session, asks("b")))
                await asyncio.sleep(0)
                let_go.set()
                assert (await retry).number == 1 and len(at.inference.completions) == 2
        await until(lambda: sessions.waiting_on is not None, "the loss to be seen")
        assert "the gateway" in str(sessions.waiting_on)
        async with gateway_here(tmp_path) as server:
            await sessions.served()
            assert server.num_runs == 1
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_a_reply_that_is_too_large_to_send_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions(secret=workspace_secret(OutputDir(tmp_path)))
        async with gateway_here(tmp_path) as server, sessions.open(at.policy()) as session:
            keeping = asyncio.create_task(Link(OutputDir(tmp_path), sessions).keep())
            await until(lambda: server.num_runs == 1, "the link")
            call = asks("a", pieces=True)
            size = len(frame(link.Replied(0, await sessions.ask(session.id, call))))
            monkeypatch.setattr("prime_rl.gateway.link.MAX_MESSAGE_BYTES", size - 1)
            refusal = await refused(server, session.id, call)
            assert refusal.status == 500 and f"at most {size - 1}" in refusal.message
            assert await server.ask(session.id, Delivered(0)) == Done()
            keeping.cancel()
            await asyncio.wait([keeping])


async def test_a_hang_up_crosses_the_link(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions(linger_s=0, secret=workspace_secret(OutputDir(tmp_path)))
        at.inference.gate = lambda body: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        async with gateway_here(tmp_path) as server, sessions.open(at.policy()) as session:
            keeping = asyncio.create_task(Link(OutputDir(tmp_path), sessions).keep())
            await until(lambda: server.num_runs == 1, "the link")
            waiting = asyncio.create_task(ask(server, session, asks("a")))
            await until(lambda: len(at.inference.completions) == 1, "the request")
            waiting.cancel()
            await until(lambda: at.inference.num_cancelled == 1, "the place to be free")
            keeping.cancel()
            await asyncio.wait([keeping])


STRANGE = {
    "no frame": b"GET / HTTP/1.1\r\n\r\n",
    "too long": frame(Hello("run_a", "x" * link.MAX_HELLO_BYTES, "y")),
    "no proof": frame(Hello("run_a", "x", "y")),
    "no hello": frame(Beat()),
    "no message": frame({"type": "Else"}),
    "closed": b"",
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
async def test_a_stranger_ends_its_own_connection_only(sent: bytes, tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        sessions = at.sessions(secret=workspace_secret(OutputDir(tmp_path)))
        async with gateway_here(tmp_path) as server, sessions.open(at.policy()) as session:
            keeping = asyncio.create_task(Link(OutputDir(tmp_path), sessions).keep())
            await until(lambda: server.num_runs == 1, "the link")
            status = msgspec.json.decode(OutputDir(tmp_path).gateway_status.read_bytes(), type=GatewayStatus)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(status.link.rpartition(":")[2]))
            writer.write(sent)
            if not sent:
                writer.close()
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            writer.close()
            assert (await ask(server, session, asks("a"))).number == 0 and not server._strangers
            keeping.cancel()
            await asyncio.wait([keeping])


@pytest.mark.parametrize("is_mirror", [False, True])
async def test_a_stranger_in_the_gateways_place_is_answered_nothing(is_mirror: bool, tmp_path: Path) -> None:
    """It asks at once, or gives back the proof that it was given."""
    async with setting(tmp_path) as at:
        sessions, was_closed = at.sessions(secret=workspace_secret(OutputDir(tmp_path))), asyncio.Event()
        serving_strangers, answers = list[asyncio.Task[None]](), list[object]()
        sessions.served_at(None, "the gateway")

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire, strange = link.Wire(reader, writer), asyncio.current_task()
            assert strange is not None
            serving_strangers.append(strange)
            with contextlib.suppress(link.Lost):
                wire.send(link.Challenge("n"))
                hello = await wire.read(link.decode_replied, PATIENCE_S)
                wire.send(link.Welcome(hello.proof) if is_mirror else link.Ask(0, session.id, asks("a")))
                wire.send(link.Ask(1, session.id, asks("a")))
                answers.append(await wire.read(link.decode_replied, PATIENCE_S))
            wire.close()
            was_closed.set()

        async with sessions.open(at.policy()) as session:
            server = await asyncio.start_server(pretend, "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            status = GatewayStatus(base_url=f"http://{address}", address=address, link=address, state="running")
            write_atomic(OutputDir(tmp_path).gateway_status, msgspec.json.encode(status))
            keeping = asyncio.create_task(Link(OutputDir(tmp_path), sessions).keep())
            await asyncio.wait_for(was_closed.wait(), PATIENCE_S)
            await until(lambda: "does not prove" in str(sessions.waiting_on), "the reason to be told")
            keeping.cancel()
            server.close()
            await asyncio.wait([keeping, *serving_strangers])
            assert not answers and not at.inference.completions and not session.num_requests


async def test_the_newest_connection_of_a_run_stands(tmp_path: Path) -> None:
    async with setting(tmp_path) as at:
        secret = workspace_secret(OutputDir(tmp_path))
        old, new = at.sessions(secret=secret), at.sessions(secret=secret)
        async with gateway_here(tmp_path) as server, new.open(at.policy()) as session:
            first = asyncio.create_task(Link(OutputDir(tmp_path), old).keep())
            await until(lambda: server.num_runs == 1, "the link")
            older = server._peers["run_a"]
            second = asyncio.create_task(Link(OutputDir(tmp_path), new).keep())
            await until(lambda: server._peers.get("run_a") not in (None, older), "the newer one")
            first.cancel()
            await asyncio.wait([first])
            await until(lambda: server.num_runs == 1, "the link")

            async def answered() -> bool:
                with contextlib.suppress(Refusal):
                    return (await ask(server, session, asks("a"))).number == 0
                return False

            while not await answered():
                await asyncio.sleep(0.01)
            second.cancel()
            await asyncio.wait([second])


def test_the_secret_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    secret = workspace_secret(output)
    assert workspace_secret(output) == secret and output.gateway_secret.stat().st_mode & 0o777 == 0o600
    output.gateway_secret.chmod(0o640)
    with pytest.raises(SecretError, match=r"readable by others \(mode 0640\)"):
        workspace_secret(output)
    output.gateway_secret.unlink()
    write_atomic(output.gateway_secret, b"short", mode=0o600)
    with pytest.raises(SecretError, match="no secret"):
        workspace_secret(output)
    assert (
        session_key(secret, "run_a.b") != session_key(new_secret(), "run_a.b") and len(session_key(secret, "x")) == 43
    )
