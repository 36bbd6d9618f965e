"""The engine's state machine, and the bookkeeping of a weight-update session."""

import pytest
import torch

from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.local import WeightLedger
from megatron_stare.rollout.engines.state import (
    MEMORY,
    EngineState,
    EngineStateError,
    advance,
    release,
    require,
    resume,
)
from megatron_stare.weights.sync.stream import tensor_checksum

DIRTY, UPDATING, HEALTHY, UNPROVED, RELEASED, DEAD = EngineState
LEGAL = {
    (DIRTY, UPDATING),
    (DIRTY, RELEASED),
    (DIRTY, DEAD),
    (UPDATING, HEALTHY),
    (UPDATING, UNPROVED),
    (UPDATING, DIRTY),
    (UPDATING, DEAD),
    (HEALTHY, UPDATING),
    (HEALTHY, DIRTY),
    (HEALTHY, RELEASED),
    (HEALTHY, DEAD),
    (UNPROVED, UPDATING),
    (UNPROVED, DIRTY),
    (UNPROVED, RELEASED),
    (UNPROVED, DEAD),
    (RELEASED, DIRTY),
    (RELEASED, DEAD),
    (DEAD, DIRTY),
}


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("to", EngineState)
def test_only_legal_transitions_are_made(state, to):
    if (state, to) in LEGAL:
        assert advance(state, to) is to
    else:
        with pytest.raises(EngineStateError, match=f"from {state.name} to {to.name}"):
            advance(state, to)


def test_healthy_is_reached_through_a_weight_update_alone():
    assert [s for s, to in LEGAL if to is HEALTHY] == [UPDATING]
    assert [s for s, to in LEGAL if to is UNPROVED] == [UPDATING]


def test_unproved_weights_generate_and_no_others():
    for state in EngineState:
        if state in (HEALTHY, UNPROVED):
            require(state, HEALTHY, "generate")
        else:
            with pytest.raises(EngineStateError):
                require(state, HEALTHY, "generate")


@pytest.mark.parametrize(
    ("state", "needed", "hint"),
    [
        (DIRTY, HEALTHY, "complete weight sync"),
        (DIRTY, UPDATING, "begin a new one"),
        (UPDATING, HEALTHY, "end it first"),
        (HEALTHY, UPDATING, "begin one first"),
        (UNPROVED, UPDATING, "begin one first"),
        (RELEASED, HEALTHY, "sync all weights"),
        (DEAD, HEALTHY, "closed"),
    ],
)
def test_a_refusal_says_the_way_out(state, needed, hint):
    require(needed, needed, "act")
    with pytest.raises(EngineStateError, match=hint):
        require(state, needed, "act")


def test_memory_is_released_once_and_its_weights_come_back_first():
    everything = frozenset(MEMORY)
    assert release((), MEMORY) == everything
    assert release(release((), ("cache",)), ("weights",)) == everything
    assert resume(everything, ("weights",)) == {"cache"}
    assert resume({"cache"}, ("cache",)) == resume(everything, MEMORY) == frozenset()
    with pytest.raises(EngineStateError, match="cannot release cache: released already"):
        release({"cache"}, MEMORY)
    with pytest.raises(EngineStateError, match="cannot resume weights: not released"):
        resume({"cache"}, ("weights",))
    with pytest.raises(EngineStateError, match="the weights come first"):
        resume(everything, ("cache",))


def test_the_ledger_wants_every_parameter_once_in_its_shape():
    ledger = WeightLedger(3, {"a": torch.Size([2, 3]), "b": torch.Size([4])})
    ledger.receive("a", torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(WeightUpdateError, match="sent twice"):
        ledger.receive("a", torch.zeros(2, 3))
    with pytest.raises(WeightUpdateError, match="no parameter 'c'"):
        ledger.receive("c", torch.zeros(1))
    with pytest.raises(WeightUpdateError, match=r"sent as \[5\], the model has \[4\]"):
        ledger.receive("b", torch.zeros(5))
    with pytest.raises(
        WeightUpdateError, match="1 of 2 parameters were not sent in the update to version 3: b"
    ):
        ledger.require_complete()
    ledger.receive("b", torch.zeros(4))
    ledger.require_complete()
    assert ledger.received == {"a": torch.bfloat16, "b": torch.float32}


def test_the_checksum_sees_every_bit_the_order_the_dtype_and_the_shape():
    x = torch.arange(6, dtype=torch.float32)
    seen = {
        tensor_checksum(t)
        for t in (
            x,
            x.flip(0),
            x.reshape(2, 3),
            x.bfloat16(),
            x.view(torch.int32),
            x.index_fill(0, torch.tensor(0), -0.0),
        )
    }
    assert len(seen) == 6
    assert all(len(c) == 16 and int(c, 16) >= 0 for c in seen)


def test_the_checksum_is_of_the_values_whatever_the_strides():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(x.T) == tensor_checksum(x.T.contiguous()) != tensor_checksum(x)
    assert tensor_checksum(torch.zeros(0)) != tensor_checksum(torch.zeros(()))
    assert tensor_checksum(x.requires_grad_()) == tensor_checksum(x.detach())
