"""Pipeline stages send to the engines themselves: between them every tensor once, as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerGroup, TrainerWeights, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.weights.sync.stream import Bucket


class Collected:
    """A sender that keeps what it is sent; fails at the bucket of this number."""

    def __init__(self, sender: int, fail_at: int | None) -> None:
        self._sender, self._fail_at = sender, fail_at
        self._tensors: dict[str, Tensor] = {}
        self._sizes: list[int] = []
        self._first: dict[str, Tensor] | None = None  # that was announced

    def expect(self, prove: bool, first: Bucket | None) -> None:
        assert prove
        self._first = (
            None if first is None else {name: tensor.clone() for name, tensor in first.tensors()}
        )

    def begin(self) -> None:
        self._tensors, self._sizes = {}, []

    def send(self, bucket: Bucket) -> None:
        if len(self._sizes) == self._fail_at:
            self._fail_at = None
            raise UserError("lost")
        if self._first is not None:  # as it was, and nothing before it
            sent = dict(bucket.tensors())
            assert sent.keys() == self._first.keys() and all(
                torch.equal(sent[n], self._first[n]) for n in sent
            )
            self._first = None
        self._sizes.append(bucket.layout.nbytes)
        self._tensors |= {name: tensor.clone() for name, tensor in bucket.tensors()}

    def end(self) -> Any:
        assert self._first is None
        return self._sender, self._tensors, self._sizes

    def forget(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Collecting:
    """A target that is nowhere."""

    one_sender_at_a_time: bool = True
    owners_send: bool = False
    fail_at: int | None = None
    shares_devices: bool = False

    def sender(self, rank: int) -> Collected:
        return Collected(rank, self.fail_at)


def trainer_of(rank: int, init: str, config: Config) -> Trainer:
    trainer = Trainer(resolve_run(config), rank, init)
    with torch.no_grad():
        for _, parameter in named_parameters(trainer.policy.model):
            parameter.mul_(2)  # other weights than those of the folder
    return trainer


def sent_twice(
    rank: int, init: str, config: Config, target: Collecting
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Sends two updates, each of changed weights. Returned are what this rank tells of each (an
    error in its words), and the weights."""
    trainer = trainer_of(rank, init, config)
    told = []
    for _ in range(2):
        with torch.no_grad():
            for _, parameter in named_parameters(trainer.policy.model):
                parameter.add_(1)
        trainer.prepare_weights(target, prove=True)
        try:
            told.append(trainer.send_weights())
            if target.owners_send:
                own = trainer.send_own_weights()
                assert told[-1] is None or own is None
                told[-1] = told[-1] or own
        except UserError as error:
            told.append(str(error))
    result = told[0], told[1], trainer.export()
    trainer.close()
    return result


def config_of(path: Path, **layout: Any) -> Config:
    return Config.model_validate(
        {"model": {"path": str(path)}, "parallel": layout, "rollout": {"sync_bucket_mb": 1}}
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "senders"),
    [
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}, [0, 2]),
        ("qwen3", {"tensor": 2, "data": 2}, [0]),
        ("qwen3_moe", {"data": 2, "expert": 2, "pipeline": 2}, [0, 2]),
    ],
    ids=["tp2-pp2-tied", "tp2-dp2", "ep2-pp2"],
)
def test_the_first_rank_of_every_stage_sends_its_tensors(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict, senders: list[int]
) -> None:
    """Also of experts that other ranks of the stage hold; the last stage's copy of a tied embedding
    is not sent."""
    save_model(tmp_path, family)
    config = config_of(tmp_path, **layout)
    found = ranks.run(sent_twice, config.parallel.world_size, config, Collecting())
    assert [rank for rank, (_, told, _) in enumerate(found) if told is not None] == senders
    want = found[0][2]
    told = [found[rank][1] for rank in senders]
    assert [sender for sender, _, _ in told] == senders
    names = [name for _, tensors, _ in told for name in tensors]
    assert sorted(names) == sorted(want)
    for _, tensors, _ in told:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, want[name]), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "expert": 2, "pipeline": 2}, {"tensor": 2, "expert": 2, "sequence": True}],
    ids=str,
)
def test_owners_send_their_experts(ranks: RankPool, tmp_path: Path, layout: dict) -> None:
    """Each its own, and no rank another's; all else goes from the first rank of every stage."""
    save_model(tmp_path, "qwen3_moe")
    config = config_of(tmp_path, **layout)
    found = ranks.run(sent_twice, config.parallel.world_size, config, Collecting(owners_send=True))
    want = found[0][2]
    sent = {sender: tensors for _, (sender, tensors, _), _ in found}
    assert sorted(sent) == list(range(config.parallel.world_size))
    assert sorted(name for tensors in sent.values() for name in tensors) == sorted(want)
    for sender, tensors in sent.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, want[name]), name
        numbers = {
            int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name
        }
        assert numbers == {n for n in range(4) if n // 2 == sender % 2}
        if sender % 2:
            assert all(".experts." in name for name in tensors)


@pytest.mark.distributed
def test_an_update_after_one_that_failed_sends_whole_weights(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The stage's other rank is not left waiting, and no message of the first update is taken for
    the second's."""
    save_model(tmp_path, "qwen2_tied", hidden_size=256, intermediate_size=1024)
    config = config_of(tmp_path, tensor=2)
    (first, told, want), _ = ranks.run(sent_twice, 2, config, Collecting(fail_at=1))
    assert "lost" in first
    _, tensors, sizes = told
    assert len(sizes) > 3 and max(sizes) <= 2**20
    assert tensors.keys() == want.keys() and all(
        torch.equal(tensors[name], want[name]) for name in want
    )


def turns_taken(rank: int, init: str, config: Config) -> list[Any]:
    """By the driver's group over one rank, what the engines are told."""
    trainer = trainer_of(rank, init, config)
    group = TrainerGroup(InlineWorkers([trainer]), plan_rules(resolve_run(config)))
    stream = group.export()
    told = [stream.send_to(Collecting(at_once), True) for at_once in (True, False)]
    group.close()
    return told


@pytest.mark.distributed
def test_the_driver_hands_on_what_senders_tell(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    (told,) = ranks.run(turns_taken, 1, config_of(tmp_path))
    for ((sender, tensors, _),) in told:
        assert sender == 0 and len(tensors) == 50


class Stages:
    """Trainer ranks of two stages, that say when they are asked for what, and after what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return 4

    def start_on(self, worker: int, method: str, *args: Any) -> str:
        self.asked.append((f"{method} {worker}", args))
        return f"{method} {worker}"

    def start(self, method: str, *args: Any) -> list[str]:
        return [self.start_on(worker, method, *args) for worker in range(4)]

    def wait(self, handles: list[str]) -> list[Any]:
        self.asked.append(("wait", tuple(handles)))
        return [None if handle[-1] in "13" else handle for handle in handles]


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("owners", [True, False])
def test_stages_take_turns_where_servers_want_it(in_turn: bool, owners: bool) -> None:
    """But gather their first bucket together before; owners of experts follow. All is asked at
    once: a turn's calls take those before them as arguments, which they therefore follow, and fail
    with."""
    workers, target = Stages(), Collecting(in_turn, owners)
    told = TrainerWeights(workers, (), [0, 0, 1, 1]).send_to(target, True)  # type: ignore[arg-type]
    sends = ["send_weights", "send_own_weights"] if owners else ["send_weights"]
    assert told == [f"{send} {rank}" for send in sends for rank in (0, 2)]
    prepared = [f"prepare_weights {rank}" for rank in range(4)]
    turns = [[f"send_weights {rank}" for rank in pair] for pair in ((0, 1), (2, 3))]
    turns += [[f"send_own_weights {rank}"] for rank in range(4) if owners]
    if not in_turn:
        every = [call for turn in turns for call in turn]
        turns = [every[:4], every[4:]]
    wanted: list[tuple[str, tuple[Any, ...]]] = [(call, (target, True)) for call in prepared]
    before: list[str] = []
    for turn in turns:
        wanted += [(call, tuple(before) if in_turn else ()) for call in turn]
        before = turn
    assert workers.asked == [
        *wanted,
        ("wait", (*prepared, *(call for turn in turns for call in turn))),
    ]


def test_what_ranks_were_told_to_prepare_is_not_asked_for_again() -> None:
    """Unless it was for another target, or another proof."""
    for target, prove, again in (
        (Collecting(), True, 0),
        (Collecting(), False, 4),
        (Collecting(False), True, 4),
    ):
        workers = Stages()
        weights = TrainerWeights(workers, (), [0, 0, 1, 1])  # type: ignore[arg-type]
        weights.prepare(Collecting(), True)
        assert len(workers.asked) == 4  # and nobody waits
        weights.send_to(target, prove)
        prepared = [call for call, _ in workers.asked if call.startswith("prepare")]
        assert len(prepared) == 4 + again
