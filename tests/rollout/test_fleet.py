"""A pool whose replicas are lost and come back: who is sent which weights, by which way, and who is
asked for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.fleet import Run, transitions
from support.replicas import TOKENIZER, judged
from support.sglang_fake import STOP, FakeServer
from support.sglang_groups import JoiningServer

from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.rollout.engines import engine_worker
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang import target
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.sync import Sent
from megatron_stare.rollout.engines.sglang.target import ServersTarget, make_sync
from megatron_stare.rollout.fleet.health import Health, NoEngineError
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.turns import check_versions
from megatron_stare.run_dir.heartbeat import watch_progress

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
TENSORS = load_file(MODEL / "model.safetensors")
CONFIG = Config.model_validate(
    {
        "model": {"path": str(MODEL)},
        "rollout": {"max_new_tokens": 4},
        "faults": {"engines": {"back_off_s": 0.0, "most": 9, "losses": 3}},
    }
)
PROMPTS = [Prompt(40 + i, str(i), "", "", (2, 3 + i)) for i in range(10)]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, seed=1, step=1, stop_token_ids=(STOP,))
HEALTHY, STARTING, DEAD = Health.HEALTHY, Health.STARTING, Health.DEAD


class Mortal(JoiningServer):
    """Dies when it is asked for `fatal`, once it has taken weights: it answers nothing any more,
    and the kernel closes its connections."""

    def __init__(self, name: str, fatal: str = "") -> None:
        super().__init__(name, 1)
        self.fatal, self.echo, self._armed = fatal, True, False
        # prompts' requests, by their names; stop tokens are probed with others
        self.asked_for: list[str] = []

    async def request(
        self, method: str, path: str, headers: Any, body: bytes | None
    ) -> tuple[int, bytes]:
        if path == self.fatal and self._armed:
            self.die()
        if path == "/generate" and not (rid := json.loads(body or b"{}")["rid"]).startswith(
            "probe"
        ):
            self.asked_for.append(rid)
        answer = await super().request(method, path, headers, body)
        self._armed |= path == "/continue_generation"
        return answer

    def die(self) -> None:
        self.dead = True
        self.groups.clear()

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        return (
            {"weight_version": self.version}
            if path == "/model_info"
            else super()._answer(path, body)
        )


class Fakes:
    """A run over fakes, of each replica one after the other; None: one that does not come up until
    it is closed."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *replicas: Sequence[FakeServer | None],
        sync: str = "distributed",
        config: Config = CONFIG,
        **settings: Any,
    ) -> None:
        by_url = {
            f"http://{fake.name}": fake for fakes in replicas for fake in fakes if fake is not None
        }
        monkeypatch.setattr(target, "SGLangClient", lambda url, key, timeout: by_url[url].client())
        left = [list(fakes) for fakes in replicas]

        class Coming:
            """Brings the next of a replica's fakes up."""

            def __init__(self, number: int) -> None:
                self._number, self._closed = number, threading.Event()

            def engine(self) -> SGLangEngine:
                if not left[self._number]:
                    raise ConfigError("there is no other")
                if (fake := left[self._number].pop(0)) is None:
                    self._closed.wait(60.0)
                    raise ConfigError("it was closed")
                client = fake.client()
                own, to = (
                    make_sync(sync, [client], str(MODEL), 60.0),
                    ServersTarget(sync, 60.0, str(MODEL)),
                )
                return SGLangEngine(
                    client,
                    own,
                    str(MODEL),
                    "float32",
                    2,
                    asyncio.new_event_loop(),
                    target=to,
                    probe_s=5.0,
                )

            def close(self) -> None:
                self._closed.set()

        monkeypatch.setattr(
            engine_worker, "make_replica", lambda config, number, beside: Coming(number)
        )
        self.run = Run(config, len(replicas), tensors=lambda version: TENSORS, **settings)
        self.run.publish()
        self.run.pool.news()

    def roll_out(self) -> None:
        """Every sample of every prompt once, each with the answer to its own prompt, of the newest
        weights."""
        found = Rollouts(self.run.pool, SingleTurn(CONFIG, TOKENIZER), judged).make(
            PROMPTS, 2, PARAMS
        )
        assert [(t.prompt.cursor, t.sample_index) for t in found] == [
            (p.cursor, i) for p in PROMPTS for i in range(2)
        ]
        assert [t.tokens.tolist() for t in found] == [
            [p.token_ids[-1], STOP] for p in PROMPTS for _ in range(2)
        ]
        check_versions(found, self.run.version)


def news_of(run: Run, number: int = 0) -> list[str]:
    return transitions(run.pool.news(), number)


BACK = ["dead", "starting", "dirty", "healthy"]
SYNC_CALLS = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/continue_generation",
]


@pytest.mark.distributed
@pytest.mark.parametrize("fatal", SYNC_CALLS)
def test_a_server_lost_anywhere_in_a_sync_leaves_the_other_with_all_weights_proved(
    monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    """By the same call; and groups are made anew, for one and then for two, so that nobody waits
    for who is gone."""
    other, spare = Mortal("localhost:2"), Mortal("localhost:3")
    fakes = Fakes(monkeypatch, [Mortal("localhost:1", fatal), spare], [other])
    run = fakes.run
    other.calls.clear()
    run.publish()
    assert run.health == [STARTING, HEALTHY] and other.version == "2"
    proof = other.calls.index("/weights_checker")
    assert "/update_weight_version" in other.calls[proof:]
    fakes.roll_out()
    assert not spare.asked_for
    run.bring_back(0)
    assert news_of(run) == BACK
    assert spare.version == other.version == str(run.version)
    assert other.worlds[0] == (2, 3) and other.worlds[-1] == (2, 3) and spare.worlds == [(1, 3)]
    assert len(other.groups) == len(spare.groups) == 1
    fakes.roll_out()
    assert spare.asked_for
    run.publish()
    assert [info.weight_version for info in run.pool.infos()] == [run.version] * 2
    run.close()


def test_one_that_comes_back_is_proved_whatever_was_proved_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two proofs, which are far apart."""
    first, spare, other = (
        Mortal("localhost:1", "/generate"),
        Mortal("localhost:3"),
        Mortal("localhost:2"),
    )
    fakes = Fakes(monkeypatch, [first, spare], [other], sync="tensor", prove_every=9)
    run = fakes.run
    proofs = other.calls.count("/weights_checker")
    run.publish()
    assert other.calls.count("/weights_checker") == proofs
    fakes.roll_out()
    assert first.dead and run.health == [STARTING, HEALTHY]
    run.bring_back(0)
    assert (
        spare.calls.count("/weights_checker") == 1
        and other.calls.count("/weights_checker") == proofs + 1
    )
    run.publish()
    assert spare.calls.count("/weights_checker") == 1
    run.close()


def test_engines_are_given_one_copy_of_what_senders_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy for each engine, of the reports of all senders."""
    fakes = Fakes(monkeypatch, [Mortal("localhost:1")], [Mortal("localhost:2")], sync="tensor")
    shared: list[Any] = []
    monkeypatch.setattr(fakes.run.workers, "share", lambda value: shared.append(value) or value)
    fakes.run.publish()
    assert [[type(one) for one in told] for told in shared] == [[Sent]]
    fakes.run.close()


@pytest.mark.distributed
def test_what_is_sent_anew_is_proved_whatever_was_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two proofs, too: the first attempt has left a mixture."""
    first, other = Mortal("localhost:1", "/update_weights_from_distributed"), Mortal("localhost:2")
    fakes = Fakes(monkeypatch, [first], [other], prove_every=9)
    proofs = other.calls.count("/weights_checker")
    fakes.run.publish()
    assert first.dead and other.calls.count("/weights_checker") == proofs + 1
    assert "engine 1 is dirty (it was healthy): the weight update is begun anew" in " ".join(
        fakes.run.pool.news()
    )
    fakes.roll_out()
    fakes.run.close()


def test_one_that_comes_back_with_wrong_weights_is_not_asked_for_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, spare = Mortal("localhost:1", "/generate"), Mortal("localhost:3")
    fakes = Fakes(
        monkeypatch, [first, spare], [Mortal("localhost:2")], sync="tensor", prove_every=9
    )
    fakes.roll_out()
    spare.lose = "model.norm.weight"
    run = fakes.run
    run.pool._fleet._coming[0].result(60.0)
    with pytest.raises(
        WeightUpdateError, match=r"http://localhost:3: .* model\.norm\.weight has other values"
    ):
        run.publish()
    assert Health.HEALTHY not in run.health  # what the run holds of any of them is not one version
    spare.lose = None
    run.publish()
    assert run.health == [HEALTHY] * 2
    run.close()


def test_a_server_that_was_started_anew_in_between_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that answers under its old address, with weights that nobody sent, is found when
    given the next."""
    first, other = Mortal("localhost:1"), Mortal("localhost:2")
    fakes = Fakes(monkeypatch, [first, first], [other])
    run = fakes.run
    first.die()
    first.dead, first.version = False, "default"
    run.publish()
    assert run.health == [STARTING, HEALTHY]
    assert any("weights of version default, not 1" in line for line in run.pool.news())
    run.bring_back(0)
    assert first.version == other.version == "3" and len(first.groups) == 1
    run.close()


def test_one_that_does_not_come_up_is_begun_again_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes = Fakes(
        monkeypatch, [Mortal("localhost:1", "/generate")], [Mortal("localhost:2")], sync="tensor"
    )
    run = fakes.run
    fakes.roll_out()
    for _ in range(9):
        run.pool._fleet._coming[0].exception(60.0)
        run.publish()
    assert run.health == [DEAD, HEALTHY] and not run.pool._fleet._coming
    told = run.pool.news()
    assert transitions(told, 0) == ["dead", "starting"] * 9 + ["dead"]
    assert "engine 0 is dead (it was starting): it did not come up: there is no other" in told
    fakes.roll_out()
    run.close()


COLOCATED = CONFIG.model_copy(
    update={"sglang": CONFIG.sglang.model_copy(update={"colocated": True, "sync": "tensor"})}
)


@pytest.mark.parametrize("allowed", [True, False], ids=["in a rollout", "while the trainer works"])
def test_one_beside_the_trainer_restarts_only_while_the_trainer_is_away(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Lost in a rollout it restarts at once; lost at another time it waits for the next rollout.
    Whoever needs the device waits for it, takes its memory, and the next weights make it serve."""
    mortal = Mortal("localhost:1", "/generate")
    other = Mortal("localhost:2")
    fakes = Fakes(
        monkeypatch, [mortal, Mortal("localhost:3")], [other], sync="tensor", config=COLOCATED
    )
    run, pool = fakes.run, fakes.run.pool
    if allowed:
        pool.allow_restarts()
    fakes.roll_out()
    if not allowed:
        assert run.health == [DEAD, HEALTHY]
        run.publish()
        assert run.health == [DEAD, HEALTHY]
        pool.allow_restarts()
    assert run.health == [STARTING, HEALTHY]
    pool.hold_restarts()
    assert run.health == [Health.DIRTY, HEALTHY] and not pool._fleet._coming
    pool.release_memory()
    assert run.health == [Health.RELEASED] * 2
    pool.resume_memory()
    run.publish()
    assert run.health == [HEALTHY] * 2
    fakes.roll_out()
    other.die()
    run.publish()
    assert run.health == [HEALTHY, DEAD]  # held again
    assert news_of(run) == BACK
    run.close()


def test_whoever_needs_the_device_waits_for_a_server_that_does_not_come_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is lost then, and does not restart while the device is needed. Meanwhile the run's
    phase makes progress: the start has a limit of its own."""
    told: list[None] = []
    watch_progress(lambda: told.append(None))
    fakes = Fakes(
        monkeypatch,
        [Mortal("localhost:1", "/generate")],
        [Mortal("localhost:2")],
        sync="tensor",
        config=COLOCATED,
    )
    fakes.run.pool.allow_restarts()
    fakes.roll_out()
    told.clear()
    fakes.run.pool.hold_restarts()
    watch_progress(None)
    assert fakes.run.health == [DEAD, HEALTHY] and told
    fakes.run.close()


def test_servers_of_their_own_devices_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(
        monkeypatch,
        [Mortal("localhost:1", "/generate"), None],
        [Mortal("localhost:2")],
        sync="tensor",
    )
    fakes.roll_out()
    fakes.run.pool.hold_restarts()
    assert fakes.run.health == [STARTING, HEALTHY]
    fakes.run.close()


def test_one_that_loses_request_after_request_is_begun_again_though_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose GPU has failed answers each with 500."""

    class Failing(Mortal):
        async def request(
            self, method: str, path: str, headers: Any, body: bytes | None
        ) -> tuple[int, bytes]:
            if path == "/generate" and self.version != "none":
                return 500, b"an illegal memory access was encountered"
            return await super().request(method, path, headers, body)

    fakes = Fakes(
        monkeypatch,
        [Failing("localhost:1"), Mortal("localhost:3")],
        [Mortal("localhost:2")],
        sync="tensor",
    )
    for _ in range(3):
        fakes.roll_out()
    run = fakes.run
    assert run.health == [STARTING, HEALTHY]
    run.bring_back(0)
    assert news_of(run) == ["suspect", *BACK]
    run.close()


def test_no_engine_left_ends_a_rollout_and_a_sync_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for act, fatal in (("roll_out", "/generate"), ("publish", "/weights_checker")):
        fakes = Fakes(
            monkeypatch,
            [Mortal("localhost:1", fatal)],
            [Mortal("localhost:2", fatal)],
            sync="tensor",
        )
        with pytest.raises(
            NoEngineError,
            match=r"no engine is left: engine 0 is .*does not answer(?s:.*)engine 1 is",
        ):
            getattr(fakes if act == "roll_out" else fakes.run, act)()
        fakes.run.close()


def test_a_run_that_ends_ends_who_is_on_its_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(
        monkeypatch,
        [Mortal("localhost:1", "/generate"), None],
        [Mortal("localhost:2")],
        sync="tensor",
    )
    fakes.roll_out()
    fakes.run.publish()
    assert fakes.run.health == [STARTING, HEALTHY]
    coming = fakes.run.pool._fleet._coming[0]
    fakes.run.close()
    assert "it was closed" in str(coming.exception(0.0))


def test_replicas_are_not_held_from_the_loop_that_asks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hold from the event loop would wait for itself: it is refused, and holds nobody."""
    fakes = Fakes(monkeypatch, [Mortal("localhost:1")], sync="tensor")
    pool = fakes.run.pool

    async def ask() -> None:
        async with pool.serving(PARAMS, 1):
            with pytest.raises(RuntimeError, match="from the event loop that asks them"):
                pool.infos()

    asyncio.run(ask())
    assert not pool._held
    fakes.roll_out()
    fakes.run.close()
