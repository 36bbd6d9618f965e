"""Calls of an environment's tools: answered ones are never made again, whatever is cut, killed or
resumed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from support.replicas import TOKENIZER, Replicas, judged
from support.runs import TIMEOUT_S, metrics, model, train
from support.runs import environment as shell

from megatron_stare.commands.bisect.rerun import prepare
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import Checkpoints
from megatron_stare.environments.environment import CallFailedError, Environment, Response
from megatron_stare.errors import DataError, UserError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.calls import CALLS, CallJournal, ResponseKey
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.under_way import UnderWay
from megatron_stare.run_dir.run_state import RunDir, RunState

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=1, stop_token_ids=(1,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})


class Search(Environment):
    """Asks its tool behind each of two turns. The tool never answers twice the same."""

    idempotent = False

    def __init__(self) -> None:
        super().__init__(CONFIG, TOKENIZER)
        self.runs, self.asked, self.numbers = 0, [], itertools.count(1)  # type: ignore[var-annotated]

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        self.runs += 1
        response = Response(prompt)
        for _ in range(2):
            turn = response.sampled(await generate(response.context, max_new_tokens=6))
            said = await generate.call(
                self.search, {"prompt": prompt.id, "text": turn.text}, idempotent=self.idempotent
            )
            response.observed(TOKENIZER(said, add_special_tokens=False).input_ids, text=said)
        response.sampled(await generate(response.context))
        return response.trajectory()

    async def search(self, request: Any, call: str) -> str:
        self.asked.append((call, request["prompt"], request["text"]))
        await asyncio.sleep(0)
        return f";{next(self.numbers) % 10}+"


def prompts(count: int = 3) -> list[Prompt]:
    texts = [f"{10 + 7 * i}+{99 - i}+{20 + i}=" for i in range(count)]
    return [
        Prompt(40 + i, str(i), t, str(i), tuple(TOKENIZER(t).input_ids))
        for i, t in enumerate(texts)
    ]


def rollouts(environment: Environment, journal: CallJournal | None = None) -> Rollouts:
    engine = LocalEngine(str(MODEL), 8)
    engine.begin_weight_update(0)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    return Rollouts(EnginePool(Replicas([engine])), environment, judged, journal or CallJournal())


def begun(count: int = 3, samples: int = 2) -> list[list[UnderWay]]:
    return [[UnderWay(prompt, index, 1) for index in range(samples)] for prompt in prompts(count)]


def grow(made: Rollouts, groups: list[list[UnderWay]], tokens: int | None = 4) -> list[UnderWay]:
    """One round; what is not finished then."""
    unfinished = [each for group in groups for each in group if each.trajectory is None]
    asyncio.run(made.carry_on(unfinished, PARAMS, tokens=tokens))
    return [each for each in unfinished if each.trajectory is None]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "step_000001.jsonl").read_text().splitlines()]


def check_once(environment: Search, groups: list[list[UnderWay]]) -> None:
    """Two calls a response, each with an id of its own, and what they answered is in the
    responses."""
    assert (
        len(environment.asked)
        == len({call for call, *_ in environment.asked})
        == 2 * sum(map(len, groups))
    )
    answers = [f";{n % 10}+" for n in range(1, len(environment.asked) + 1)]
    found = [
        each.trajectory.text for group in groups for each in group if each.trajectory is not None
    ]
    assert sum(text.count(f";{d}+") for text in found for d in range(10)) >= len(answers)


def test_a_tool_is_asked_once_whatever_rounds_its_response_takes() -> None:
    environment = Search()
    made, groups, rounds = rollouts(environment), begun(), 0
    while grow(made, groups):
        rounds += 1
        groups = from_bytes(to_bytes(groups))
    assert rounds >= 3 and environment.runs > 6 + 2 * rounds
    check_once(environment, groups)


def test_a_tool_is_not_asked_again_by_a_process_that_takes_over(tmp_path: Path) -> None:
    """Whichever checkpoint it goes on from: of before the calls, or between them."""
    environment = Search()
    groups, journal = begun(), CallJournal(tmp_path / "calls")
    made = rollouts(environment, journal)
    states = [to_bytes(groups)]
    while grow(made, groups):
        states.append(to_bytes(groups))
    check_once(environment, groups)
    asked = list(environment.asked)
    for state in states:
        again = from_bytes(state)
        taken_over = rollouts(environment, CallJournal(tmp_path / "calls"))
        while grow(taken_over, again):
            pass
        assert environment.asked == asked
        for one, other in zip(itertools.chain(*again), itertools.chain(*groups), strict=True):
            assert one.trajectory is not None and other.trajectory is not None
            assert torch.equal(one.trajectory.tokens, other.trajectory.tokens)


def test_the_intent_is_on_disk_before_the_call_and_the_answer_after(
    tmp_path: Path, monkeypatch: Any
) -> None:
    synced: dict[int, int] = {}  # bytes on disk, by file

    def sync(number: int, sync: Any = os.fsync) -> None:
        sync(number)
        synced[os.fstat(number).st_ino] = os.fstat(number).st_size

    monkeypatch.setattr(os, "fsync", sync)

    class Looks(Search):
        async def search(self, request: Any, call: str) -> str:
            file = (tmp_path / "calls" / "step_000001.jsonl").read_bytes()
            assert (
                file.find(call.encode())
                < synced[(tmp_path / "calls" / "step_000001.jsonl").stat().st_ino]
            )
            mine = [line for line in lines(tmp_path / "calls") if line["id"] == call]
            assert [sorted(line) for line in mine] == [["asked", "call", "cursor", "id", "sample"]]
            return await super().search(request, call)

    environment = Looks()
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    made.make(prompts(), 2, PARAMS)
    for call, prompt, text in environment.asked:
        intent, answer = (line for line in lines(tmp_path / "calls") if line["id"] == call)
        assert json.loads(intent["asked"]) == ["search", {"prompt": prompt, "text": text}]
        assert str(answer["answer"]).startswith(";")
        asked = intent["cursor"], intent["sample"], intent["call"], intent["asked"]
        assert (
            made.calls.find(ResponseKey(1, *asked[:2]), *asked[2:]) is None
        )  # a response that is whole needs no memory


def test_what_a_checkpoint_keeps_does_not_grow_with_the_next_step() -> None:
    response = UnderWay(prompts(1)[0], 0, 1)
    response.begin_call(0, "a", "1")
    kept = response.copy()
    response.begin_call(1, "b", "2")
    assert len(kept.calls) == 1 and len(response.calls) == 2


def unanswered(
    tmp_path: Path, idempotent: bool
) -> tuple[Search, list[list[UnderWay]], tuple[str, str, str]]:
    """State that a process leaves when it is killed at its fourth call: its journal ends before the
    call's answer."""
    environment, groups = Search(), begun()
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    state = to_bytes(groups)
    while grow(made, groups):
        pass
    file = tmp_path / "calls" / "step_000001.jsonl"
    lost = environment.asked[3]
    kept = [
        line for line in file.read_text().splitlines(True) if lost[0] not in line or "asked" in line
    ]
    file.write_text("".join(kept) + '{"id": "' + lost[0])  # its answer was being written
    environment.idempotent = idempotent
    environment.asked.clear()
    return environment, from_bytes(state), lost


def test_an_unanswered_call_is_made_again_under_its_id_where_that_does_no_harm(
    tmp_path: Path,
) -> None:
    environment, groups, lost = unanswered(tmp_path, True)
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    while grow(made, groups):
        pass
    assert environment.asked[0] == lost
    assert all(call != lost[0] for call, *_ in environment.asked[1:])
    assert len(environment.asked) <= 2  # what comes behind another answer is another call
    assert all(
        each.trajectory is not None and each.trajectory.reward == 1.0
        for group in groups
        for each in group
    )
    last = rollouts(environment, CallJournal(tmp_path / "calls"))  # and it is answered now
    environment.asked.clear()
    last.make(prompts(), 2, PARAMS)
    assert environment.asked == []


def test_else_its_response_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    environment, groups, lost = unanswered(tmp_path, False)
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    while grow(made, groups):
        groups = from_bytes(to_bytes(groups))
    assert environment.asked == []
    ended = [each.trajectory for group in groups for each in group]
    (gone,) = [t for t in ended if t is not None and t.reward_status == "given_up"]
    assert gone.prompt.id == lost[1] and (len(gone), gone.reward, gone.finish_reason) == (
        0,
        None,
        "abort",
    )
    assert sum(t is not None and t.reward_status == "ok" for t in ended) == 5
    batch = RolloutBatch.from_trajectories([t for t in ended if t is not None])
    assert batch.verified.tolist().count(False) == 1 and batch.response_lengths.min() == 0


def test_a_checkpoint_knows_of_calls_that_its_journal_has_lost(tmp_path: Path) -> None:
    """The checkpoint is continued without its journal, as one that was moved alone."""
    for idempotent in (True, False):
        environment, groups = Search(), begun(1, 1)
        made = rollouts(environment)
        grow(made, groups, 8)  # behind the first call
        ((call, *_),) = environment.asked
        environment.idempotent = idempotent
        again = from_bytes(to_bytes(groups))
        other = rollouts(environment, CallJournal(tmp_path / str(idempotent)))
        if not idempotent:
            while grow(other, again):
                pass
            assert (
                again[0][0].trajectory.reward_status == "given_up" and len(environment.asked) == 1
            )  # type: ignore[union-attr]
            continue
        # it answers otherwise, which is said
        with pytest.raises(DataError, match="did not repeat its messages"):
            grow(other, again)
        assert [each for each, *_ in environment.asked] == [call, call]


def test_an_environment_that_asks_something_else_is_refused_before_it_acts() -> None:
    class Fickle(Search):
        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            self.runs += 1
            response = Response(prompt)
            await generate.call(
                self.search, {"prompt": prompt.id, "text": str(self.runs)}, idempotent=True
            )
            response.sampled(await generate(prompt.token_ids))
            return response.trajectory()

    class Forgetful(Fickle):
        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            self.runs += 1
            response = Response(prompt)
            if self.runs == 1:
                await generate.call(self.search, {"prompt": prompt.id, "text": ""})
            response.sampled(await generate(prompt.token_ids))
            return response.trajectory()

    for environment in (Fickle(), Forgetful()):
        made, groups = rollouts(environment), begun(1, 1)
        assert grow(made, groups)
        with pytest.raises(DataError, match="did not repeat its messages"):
            grow(made, groups, None)
        assert len(environment.asked) == 1


class Failing(Search):
    """Its tool fails for the first prompt. `catches`: and it goes on."""

    catches = True
    caught: ClassVar[list[str]] = []

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        response = Response(prompt)
        try:
            said = await generate.call(
                self.search, {"prompt": prompt.id, "text": ""}, idempotent=True
            )
        except CallFailedError as error:
            if not self.catches:
                raise
            self.caught.append(error.what)
            said = ";0+"
        response.observed(TOKENIZER(said, add_special_tokens=False).input_ids, text=said)
        response.sampled(await generate(response.context))
        return response.trajectory()

    async def search(self, request: Any, call: str) -> str:
        said = await super().search(request, call)
        if request["prompt"] == "0" and len(self.asked) <= 3:
            raise OSError("nobody is there")
        return said


def test_the_error_of_a_tool_is_its_answer_for_who_catches_it(tmp_path: Path) -> None:
    environment, groups = Failing(), begun(3, 1)
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    assert grow(made, groups)
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    while grow(made, groups):
        pass
    assert len(environment.asked) == 3
    assert len(environment.caught) > 1 and set(environment.caught) == {
        "the tool failed: OSError: nobody is there"
    }
    assert groups[0][0].trajectory is not None and groups[0][0].trajectory.text.startswith(";0+")


def test_an_error_that_ends_the_run_is_not_answered_to_the_one_that_is_resumed(
    tmp_path: Path,
) -> None:
    environment = Failing()
    environment.catches = False
    with pytest.raises(
        CallFailedError, match="prompt 0, tool search: the tool failed: OSError: nobody is there"
    ):
        rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(), 1, PARAMS)
    failed = [call for call, prompt, _ in environment.asked if prompt == "0"]
    made = rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(), 1, PARAMS)
    # under the same id
    assert [call for call, prompt, _ in environment.asked if prompt == "0"] == failed * 2
    assert [t.reward for t in made] == [1.0] * 3


def test_errors_of_an_outage_are_taken_back_from_responses_that_another_one_cancels(
    tmp_path: Path,
) -> None:
    """All calls fail; the error of prompt 0 ends the run when the others' errors are on disk."""

    class Down(Search):
        up, idempotent = False, True

        async def search(self, request: Any, call: str) -> str:
            said = await super().search(request, call)
            if self.up:
                return said
            while request["prompt"] == "0" and errors(tmp_path / "calls") < 2:
                await asyncio.sleep(0)
            raise OSError("nobody is there")

    def errors(folder: Path) -> int:
        return sum("error" in each for each in lines(folder)) if folder.exists() else 0

    class Waits(Down):
        """Whose responses but the first have been told of their error, and have not ended."""

        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            try:
                return await super().run(prompt, generate)
            except CallFailedError:
                if prompt.id != "0":
                    await asyncio.Event().wait()
                raise

    environment = Waits()
    with pytest.raises(CallFailedError, match="nobody is there"):
        rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(), 1, PARAMS)
    assert errors(tmp_path / "calls") == 3
    environment.up = True
    made = rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(), 1, PARAMS)
    assert [t.reward for t in made] == [1.0] * 3


def test_a_later_turn_keeps_the_errors_that_the_environment_caught(tmp_path: Path) -> None:
    """They are in the context of that turn, which would otherwise not be repeated."""

    class Leaves(Failing):
        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            found = await super().run(prompt, generate)
            if prompt.id == "0":
                raise OSError("the environment itself fails")
            return found

    environment = Leaves()
    with pytest.raises(OSError, match="itself fails"):
        rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(1), 1, PARAMS)
    written = lines(tmp_path / "calls")
    assert any("error" in each for each in written)
    assert not any("taken_back" in each for each in written)


def test_what_an_environment_keeps_serves_in_every_step() -> None:
    """A semaphore belongs to the event loop in which it first made somebody wait."""

    class Limited(Search):
        async def search(self, request: Any, call: str) -> str:
            async with self.limit:
                await asyncio.sleep(0)
                return await super().search(request, call)

    environment = Limited()
    environment.limit = asyncio.Semaphore(1)
    made = rollouts(environment)
    for _ in range(3):
        assert len(made.make(prompts(), 2, PARAMS)) == 6


def test_an_environment_or_a_tool_that_exits_is_an_error() -> None:
    """Otherwise the process ends with the code of a run that is done."""

    class Exits(Search):
        where = "run"

        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            if self.where == "run":
                sys.exit()
            return await super().run(prompt, generate)

        async def search(self, request: Any, call: str) -> str:
            sys.exit()

    environment = Exits()
    with pytest.raises(UserError, match="the environment tried to end the process"):
        rollouts(environment).make(prompts(), 1, PARAMS)
    environment.where = "search"
    with pytest.raises(CallFailedError, match="SystemExit"):
        rollouts(environment).make(prompts(), 1, PARAMS)


def test_calls_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    class Both(Search):
        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            self.runs += 1
            response = Response(prompt)
            asked = [
                generate.call(self.search, {"prompt": prompt.id, "text": text})
                for text in ("a", "a", "b")
            ]
            said = "".join(await asyncio.gather(*asked))
            response.observed(TOKENIZER(said, add_special_tokens=False).input_ids, text=said)
            response.sampled(await generate(response.context))
            return response.trajectory()

    environment, groups = Both(), begun()
    made = rollouts(environment, CallJournal(tmp_path / "calls"))
    while grow(made, groups):
        made = rollouts(environment, CallJournal(tmp_path / "calls"))
    assert (
        environment.runs > 6
        and len(environment.asked) == len({call for call, *_ in environment.asked}) == 18
    )


@pytest.mark.parametrize("what", ["request", "answer"])
def test_what_json_cannot_hold_is_refused(what: str) -> None:
    class Odd(Search):
        async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
            await generate.call(
                self.search, {"prompt": prompt.id, "text": {1} if what == "request" else ""}
            )
            raise AssertionError

        async def search(self, request: Any, call: str) -> Any:
            self.asked.append(call)
            return float("nan")

    environment = Odd()
    with pytest.raises(DataError, match="a value that JSON cannot hold"):
        rollouts(environment).make(prompts(1), 1, PARAMS)
    assert len(environment.asked) == (what == "answer")


def test_a_call_that_cannot_be_journalled_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("in the way")
    environment = Search()
    with pytest.raises(UserError, match="a call of the environment cannot be journalled"):
        rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(1), 1, PARAMS)
    assert environment.asked == []


@pytest.mark.parametrize("in_the_way", [False, True])
def test_calls_that_wait_for_the_disk_share_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: bool
) -> None:
    """Each is on disk before its caller goes on, and each caller learns that the disk refuses."""
    journal, whole = CallJournal(tmp_path / "calls"), threading.Event()
    syncs: list[bytes] = []  # the file's content at each

    def sync(number: int, sync: Any = os.fsync) -> None:
        assert whole.wait(TIMEOUT_S)
        sync(number)
        if stat.S_ISREG(os.fstat(number).st_mode):
            syncs.append((tmp_path / "calls" / "step_000001.jsonl").read_bytes())

    async def begin(number: int) -> None:
        await journal.begin(ResponseKey(1, number, 0), 0, "[]", f"call {number}")
        assert f'"call {number}"'.encode() in syncs[-1]

    async def begin_all() -> list[Any]:
        tasks = [asyncio.create_task(begin(number)) for number in range(64)]
        await asyncio.sleep(0)  # each hands its line over
        whole.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    monkeypatch.setattr(os, "fsync", sync)
    if in_the_way:
        (tmp_path / "calls").write_text("")
        assert {type(each) for each in asyncio.run(begin_all())} == {UserError}
        return
    assert asyncio.run(begin_all()) == [None] * 64
    assert len(syncs) <= 2
    assert [line["id"] for line in lines(tmp_path / "calls")] == [f"call {n}" for n in range(64)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    environment = Search()
    rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(1), 1, PARAMS)
    file = tmp_path / "calls" / "step_000001.jsonl"
    first, *rest = file.read_text().splitlines(True)
    file.write_text("".join([first, first[5:], *rest]))
    with pytest.raises(DataError, match=r"step_000001.jsonl:2: not a line of the journal"):
        rollouts(environment, CallJournal(tmp_path / "calls")).make(prompts(1), 1, PARAMS)


@pytest.mark.parametrize("in_flight", [None, 2])
def test_files_stay_as_long_as_a_kept_checkpoint_needs_them(
    tmp_path: Path, in_flight: int | None
) -> None:
    """The older of the two kept checkpoints is of step 4; in its state a response is in flight that
    began in step 2, or none is."""
    config = CONFIG.model_copy(
        update={
            "run": CONFIG.run.model_copy(
                update={"dir": str(tmp_path / "run"), "keep_checkpoints": 2}
            ),
            "checkpoint": CONFIG.checkpoint.model_copy(update={"self_test": False}),
        }
    )
    run = RunDir.create(config)
    ranks = SimpleNamespace(save=lambda *_: None, wait_saved=lambda _: None, finish_save=dict)
    checkpoints, folder = Checkpoints(config, ranks, run), run.path / CALLS  # type: ignore[arg-type]
    folder.mkdir()
    for step in range(1, 9):
        (folder / f"step_{step:06d}.jsonl").write_text("")
    (folder / "notes.jsonl").write_text("a user's own")
    kept = b"" if in_flight is None else to_bytes([[UnderWay(prompts(1)[0], 0, in_flight)]])
    for step in (2, 4, 6):
        checkpoints.save(RunState(step=step, kept=kept if step == 4 else b""))
        checkpoints.finish()
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["notes.jsonl", *(f"step_{n:06d}.jsonl" for n in range(in_flight or 4, 9))]
    run.close()


def test_calls_of_responses_that_are_not_needed_are_forgotten() -> None:
    """Once a group is enough, the others are cancelled, between calls or before their verdict."""
    environment, journal = Search(), CallJournal()
    made = rollouts(environment, journal)
    answered = asyncio.run(made.made(prompts(), 2, PARAMS, enough=lambda group: True))
    assert len(answered) < 6 and len(environment.asked) > 2 * len(answered)
    assert not any(journal._steps.values())


def test_a_response_that_is_given_up_names_no_experts() -> None:
    prompt = prompts(1)[0]
    experts = torch.zeros(len(prompt.token_ids) + 1, 1, 2, dtype=torch.uint8)
    one = sampled_trajectory(prompt, 0, [4, 9], [-0.5, -0.25])
    one.experts, one.reward_status = experts, "ok"
    gone = UnderWay(prompt, 1, 1).give_up()
    batch = RolloutBatch.from_trajectories([one, gone])
    assert batch.experts is not None and len(batch.experts) == 2 * len(prompt.token_ids) + 2
    gone.reward_status, one.experts = "ok", experts
    with pytest.raises(DataError, match="do not name the experts"):
        RolloutBatch.from_trajectories([one, gone])


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("kind", ["AsksOutside", "AsksIdempotently"])
def test_a_run_killed_in_a_call_goes_on(
    kind: str, partial: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    log, order = tmp_path / "log", tmp_path / "order"
    monkeypatch.setenv("TOOL_LOG", str(log))
    monkeypatch.setenv("KILL_IN", str(order))
    order.write_text("14")  # of the fourth step, behind the checkpoint of the second
    settings = {
        "run.dir": tmp_path / "run",
        "run.steps": 5,
        "run.rollouts_every": 1,
        "rollout.environment": f"environments.asks_outside.{kind}",
        "rollout.max_new_tokens": 24,
        "run.checkpoint_every": 2,
        "batch.prompts": 4,
        "batch.samples_per_prompt": 2,
        "eval.prompts": 0,
        **(
            {"partial.tokens": 8, "partial.prompts": 5, "algorithm.correction": "{mode: truncate}"}
            if partial
            else {}
        ),
    }
    layout = ("runtime.runner=inline", "parallel.tensor=1")
    killed = train(model(), *layout, cwd=tmp_path, **settings)
    assert killed.returncode == -signal.SIGKILL and not order.exists()
    before = [json.loads(line) for line in log.read_text().splitlines()]
    noted = [
        json.loads(line)
        for file in (tmp_path / "run/calls").iterdir()
        for line in file.read_text().splitlines()
    ]
    unknown = {line["id"] for line in noted} - {line["id"] for line in noted if "answer" in line}
    assert before[-1][0] in unknown  # and intents that no call followed
    done = train(model(), *layout, "--resume", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    after = [json.loads(line) for line in log.read_text().splitlines()][len(before) :]
    lost = before[-1]
    ids = [call for call, *_ in before + after]
    if kind == "AsksIdempotently":
        assert ids.count(lost[0]) == 2
        assert all(ids.count(call) == 1 for call in ids if call != lost[0])
    else:
        assert len(set(ids)) == len(ids)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["environment/given_up"] for row in rows) == (
        len(unknown) if kind == "AsksOutside" else 0
    )
    assert all(row["update/finite"] == 1.0 for row in rows)
    if partial:
        return
    # `bisect` makes the last step again, in a folder of its own, and asks nobody
    again = tmp_path / "again"
    prepare(tmp_path / "run", tmp_path / "run/checkpoints/step_000004", again, {})
    asked = log.read_text()
    go_on = [
        sys.executable,
        "-m",
        "megatron_stare.cli",
        "train",
        str(again / "config.yaml"),
        f"run.dir={again}",
        "--resume",
    ]
    made = subprocess.run(
        go_on, cwd=tmp_path, env=shell(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert made.returncode == 0, made.stderr
    assert metrics(again)[-1]["loss/tokens"] == rows[-1]["loss/tokens"]
    assert log.read_text() == asked
