"""The weight stream's plan and buckets, without Megatron: who gives what, how full they are, what
checksums see."""

from __future__ import annotations

import gc
import math
import weakref
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import FAMILIES, MIXTURES, save_model
from torch import Tensor

from megatron_stare.models import read_shape, rule_for
from megatron_stare.models.rules import blocks, shard
from megatron_stare.weights.files.check import rules
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.sync.stream import Bucket, RoomsByTurns, stream
from megatron_stare.weights.sync.stream_plan import Shard, held_pieces, plan_of, plan_stream

BOUND = 8 * 2**10  # bytes a bucket: above the largest tensor, far below the model


def cut(
    path: Path, tp_rank: int = 0, tp: int = 1, of_layers: int | None = None, layers: int = 2
) -> list[Shard]:
    """A folder's tensors as one rank would hold them; `of_layers`: only those of this half of the
    pipeline."""
    shape, folder, shards = read_shape(path), HfFolder(path), []
    for rule in rules(shape):
        name = rule.megatron
        layer = (
            int(name.split(".")[2]) // layers if "layers." in name else int("embedding" not in name)
        )
        if of_layers is None or of_layers == layer:
            place = (0, 1) if ".local_experts." in name else (tp_rank, tp)
            tensor = shard(rule, [folder.slice(hf) for hf in rule.hf], shape, *place)
            shards.append(Shard(name, tensor.contiguous(), *place))
    return shards


@pytest.mark.parametrize(
    ("family", "tp"),
    # experts stay whole
    [(name, tp) for name in FAMILIES for tp in (1, 2, 4, 8) if tp == 1 or name not in MIXTURES],
)
def test_blocks_put_together_are_the_whole_tensors(tmp_path: Path, family: str, tp: int) -> None:
    save_model(tmp_path, family)
    shape, folder = read_shape(tmp_path), HfFolder(tmp_path)
    held = [cut(tmp_path, rank, tp) for rank in range(tp)]
    for of_ranks in zip(*held, strict=True):
        one = of_ranks[0]
        rule = rule_for(one.name, shape)
        found = [blocks(rule, held.tensor, shape, rank, tp) for rank, held in enumerate(of_ranks)]
        whole: dict[str, list[Tensor]] = {name: [] for name in rule.hf}
        for name, *parts in zip(
            rule.sources, *(found[:1] if rule.layout == "replicated" else found), strict=True
        ):
            columns = one.tensor.shape[1:]
            whole[name] += [part.reshape(-1, *columns) if rule.cut == 0 else part for part in parts]
        for name, rows in whole.items():
            assert torch.equal(torch.cat(rows, rule.cut), folder.slice(name)[:]), name


def test_blocks_are_views_where_query_groups_are_whole(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    shape = read_shape(tmp_path)
    for one in cut(tmp_path, 1, 2):
        for block in blocks(rule_for(one.name, shape), one.tensor, shape, 1, 2):
            assert block.untyped_storage().data_ptr() == one.tensor.untyped_storage().data_ptr()


def test_what_servers_take_in_one_call_is_in_one_bucket(tmp_path: Path) -> None:
    """Projections into both latents, between which other tensors lie, whatever a bucket's bound."""
    save_model(tmp_path, "deepseek_v3")
    for bound in (1, 2000, 5000, BOUND):
        plan = plan_stream(cut(tmp_path), read_shape(tmp_path), bound)
        buckets = [{slot.name for slot in layout.slots} for layout in plan.layouts]
        assert (
            sum(map(len, buckets)) == len(set().union(*buckets)) == len(HfFolder(tmp_path).names())
        )
        for layer in range(4):
            pair = {
                f"model.layers.{layer}.self_attn.{name}.weight"
                for name in ("q_a_proj", "kv_a_proj_with_mqa")
            }
            assert sum(pair <= names for names in buckets) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_streams_every_tensor_once(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    shards, folder = cut(tmp_path), HfFolder(tmp_path)
    plan = plan_stream(shards, read_shape(tmp_path), BOUND)
    named = [
        pair for bucket in stream(plan, shards) if bucket is not None for pair in bucket.tensors()
    ]
    assert sorted(name for name, _ in named) == sorted(folder.names())
    for name, tensor in named:
        assert torch.equal(tensor, folder.slice(name)[:]), name


@pytest.mark.parametrize("bound", [1, 3000, BOUND, 10**9])
def test_buckets_are_as_full_as_their_bound_lets_them(tmp_path: Path, bound: int) -> None:
    save_model(tmp_path, "qwen2_tied")
    layouts = plan_stream(cut(tmp_path), read_shape(tmp_path), bound).layouts
    assert all(layout.nbytes <= bound or len(layout.slots) == 1 for layout in layouts)
    for one, following in pairwise(layouts):
        first = math.prod(following.slots[0].shape) * following.dtype.itemsize
        assert one.nbytes + first > bound  # it did not fit
    assert (len(layouts) == 1) == (bound == 10**9)


def test_the_last_stages_copy_of_a_tied_embedding_is_not_sent(tmp_path: Path) -> None:
    """The first stage gives it, and nobody a second time."""
    save_model(tmp_path, "qwen2_tied")
    shape = read_shape(tmp_path)
    whole = cut(tmp_path)
    (embedding,) = (each for each in whole if "embedding" in each.name)
    copy = Shard("output_layer.weight", embedding.tensor.clone(), embedding.part, embedding.parts)
    stages = [cut(tmp_path, of_layers=0), [*cut(tmp_path, of_layers=1), copy]]
    plan = plan_of(
        [held_pieces(shards, shape, rank) for rank, shards in enumerate(stages)], shape, BOUND
    )
    tensors = {tensor.name: tensor for bucket in plan.buckets for tensor in bucket.tensors}
    assert [piece.rank for piece in tensors["model.embed_tokens.weight"].pieces] == [0]
    assert not any(
        piece.parameter == copy.name for tensor in tensors.values() for piece in tensor.pieces
    )


def test_a_bucket_holds_one_dtype(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    shards = cut(tmp_path)
    mixed = [
        Shard(s.name, s.tensor.bfloat16() if s.tensor.dim() > 1 else s.tensor, s.part, s.parts)
        for s in shards
    ]
    plan = plan_stream(mixed, read_shape(tmp_path), BOUND)
    dtypes = [layout.dtype for layout in plan.layouts]
    assert set(dtypes) == {torch.bfloat16, torch.float32}
    assert dtypes == sorted(dtypes, key=str)  # all of one, then all of the other
    for bucket in stream(plan, mixed):
        assert bucket is not None
        assert all(tensor.dtype == bucket.flat.dtype for _, tensor in bucket.tensors())


def test_a_part_that_no_rank_holds_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    with pytest.raises(
        ValueError, match=r"no rank holds part 0 of 2 of model\.embed_tokens\.weight"
    ):
        plan_stream(cut(tmp_path, 1, 2), read_shape(tmp_path), BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_any_changed_element(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path, "qwen2")
    shards = [Shard(s.name, s.tensor.to(dtype), s.part, s.parts) for s in cut(tmp_path)]
    plan = plan_stream(shards, read_shape(tmp_path), BOUND)
    for bucket in stream(plan, shards):
        assert bucket is not None
        sent = bucket.checksums()
        name, tensor = bucket.tensors()[-1]
        # one bit
        tensor.view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)[-1] ^= 1
        held = Bucket(bucket.layout, bucket.flat).checksums()
        assert [n for n in sent if sent[n] != held[n]] == [name]


def test_two_rooms_take_turns_and_grow() -> None:
    rooms, cpu = RoomsByTurns(), torch.device("cpu")
    first, second = rooms(6, torch.float32, cpu), rooms(6, torch.float32, cpu)
    first.fill_(1.0)
    second.fill_(2.0)
    third = rooms(4, torch.bfloat16, cpu)  # in the first one's memory, of which it takes less
    third.fill_(3.0)
    assert third.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert second.tolist() == [2.0] * 6 and first.tolist()[2:] == [1.0] * 4
    larger = rooms(7, torch.float32, cpu)
    larger.fill_(4.0)
    assert second.tolist() == [2.0] * 6 and len(larger) == 7


def stream_on(rank: int, init: str, path: str, bound: int) -> dict:
    """TP2 x PP2 by hand: ranks 0 and 1 hold the first half of the layers. What the sender saw, and
    its memory."""
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=4, timeout=timedelta(seconds=120)
    )
    shards = cut(Path(path), rank % 2, 2, of_layers=rank // 2)
    group = dist.group.WORLD
    live, peak, real_empty = 0, 0, torch.empty

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal live, peak
        made = real_empty(*args, **kwargs)
        if kwargs.get("device") != "meta":
            live += made.nbytes
            peak = max(peak, live)
            weakref.finalize(made, freed, made.nbytes)
        return made

    def freed(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    plan = plan_stream(shards, read_shape(path), bound, group)
    tensors, nones = {}, 0
    with mock.patch.object(torch, "empty", counted):
        for bucket in stream(plan, shards, group):
            if bucket is None:
                nones += 1
                continue
            assert not tensors.keys() & dict(bucket.tensors()).keys()
            tensors |= {name: tensor.clone() for name, tensor in bucket.tensors()}
            del bucket
    gc.collect()
    dist.destroy_process_group()
    largest = max(layout.nbytes for layout in plan.layouts)
    return {
        "tensors": tensors,
        "nones": nones,
        "live": live,
        "peak": peak,
        "largest": largest,
        "plan": plan.layouts,
    }


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3"])
def test_no_rank_holds_more_than_a_few_buckets(ranks, tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    folder = HfFolder(tmp_path)
    sender, *others = ranks.run(stream_on, 4, str(tmp_path), BOUND)
    assert sender["tensors"].keys() == folder.names()
    for name, tensor in sender["tensors"].items():
        assert torch.equal(tensor, folder.slice(name)[:]), name
    model = sum(tensor.nbytes for tensor in sender["tensors"].values())
    assert sender["largest"] <= BOUND
    # a bucket, the next one's messages, and the next one while it fills
    assert sender["peak"] <= 3 * BOUND < model / 3
    assert sender["live"] == 0
    for rank in others:
        assert rank["tensors"] == {} and rank["nones"] == len(sender["plan"]) > 10
        assert rank["plan"] == sender["plan"]
        assert 0 < rank["peak"] <= 2 * BOUND and rank["live"] == 0
