"""Plans a layout: builds every rank of it without data, and says what each holds and whether they
hold the whole model.

    python tools/plan_memory.py assets/architectures/qwen2.5-32b --tp 8 --pp 4 --dp 4 --processes 2

Neither GPUs nor weights are needed: a folder with a config.json is enough. Every rank's model,
gradient buffers and optimizer are built on torch's meta device; then names, Hugging Face tensors,
the checkpoint and the weight stream are held against each other over the whole world. Exits 1 where
something does not fit together, 2 where the layout or the model cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from typing import Any

# Megatron's fused functions would be compiled, for nothing here
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from megatron_stare.errors import UserError
from megatron_stare.process.silence_upstreams import quiet_upstreams

GIB = 2**30


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    quiet_upstreams()
    # torch comes with what follows, and then Megatron: seconds
    from pydantic import ValidationError

    try:
        plan = make_plan(args)
    except (UserError, ValidationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan, indent=2) if args.json else table(plan))
    return int(bool(plan["faults"]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="folder with a Hugging Face config.json; weights are not read"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a stage")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument(
        "--cp",
        type=int,
        default=1,
        help="context-parallel ranks, each with all parameters of its stage",
    )
    parser.add_argument("--dp", type=int, default=1, help="data-parallel replicas")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--first-stage-layers", type=int, help="layers of the first pipeline stage")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--whole-optimizer", action="store_true", help="without Megatron's DistributedOptimizer"
    )
    parser.add_argument(
        "--bucket-mb", type=int, default=512, help="size of a bucket of the weight stream, MiB"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that build ranks in parallel"
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON, rank by rank, in bytes"
    )
    return parser.parse_args(argv)


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Plan that --json prints. Raises UserError or ValidationError for what cannot be planned."""
    from megatron_stare.config.rules import check_layout
    from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from megatron_stare.models import read_shape

    parallel = ParallelConfig(
        tensor=args.tp,
        pipeline=args.pp,
        virtual_pipeline=args.vpp,
        first_stage_layers=args.first_stage_layers,
        context=args.cp,
        expert=args.ep,
        data=args.dp,
        sequence=args.sp,
    )
    model = ModelConfig(path=args.model, dtype=args.dtype)
    optimizer = OptimizerConfig(distributed=not args.whole_optimizer)
    shape = read_shape(args.model)
    check_layout(parallel, shape)

    from megatron_stare.megatron.dry.planned_layout import (
        assumptions,
        extremes,
        faults,
        plan_layout,
    )
    from megatron_stare.weights.files.check import expected

    started = time.monotonic()
    plans = plan_layout(shape, model, parallel, optimizer, processes=max(args.processes, 1))
    wrong = faults(plans, shape, parallel, args.bucket_mb * 2**20)
    sizes = expected(shape).values()
    return {
        "model": args.model,
        "family": shape.family,
        "tensors": len(sizes),
        "parameters": sum(map(math.prod, sizes)),
        "layout": parallel.model_dump() | {"world": parallel.world_size},
        "bytes": {
            item: {
                which: {
                    "rank": plan.rank,
                    "bytes": plan.nbytes.get(item, sum(plan.nbytes.values())),
                }
                for which, plan in zip(("max", "min"), found, strict=True)
            }
            for item, found in extremes(plans).items()
        },
        "ranks": [
            {"rank": p.rank, "tensor": p.tp_rank, "pipeline": p.pp_rank, "bytes": p.nbytes}
            for p in plans
        ],
        "faults": wrong,
        "assumed": assumptions(shape, model, parallel, optimizer),
        "seconds": round(time.monotonic() - started, 1),
    }


def table(plan: dict[str, Any]) -> str:
    layout = plan["layout"]
    cuts = ", ".join(
        f"{name} {layout[name]}"
        for name in ("tensor", "pipeline", "context", "data", "expert")
        if layout[name] > 1
    )
    lines = [
        (
            f"{plan['model']} ({plan['family']}): {plan['parameters']:,} parameters in"
            f" {plan['tensors']:,} tensors"
        ),
        f"{layout['world']} ranks ({cuts or 'not cut'}), all of them built, in {plan['seconds']} s",
        "",
        f"{'GiB a rank':18}{'most':>10}{'':12}{'least':>10}",
    ]
    for item, found in plan["bytes"].items():
        most, least = found["max"], found["min"]
        at = f"  rank {most['rank']}"
        lines.append(
            f"{item:18}{most['bytes'] / GIB:10.2f}{at:12}{least['bytes'] / GIB:10.2f}  rank"
            f" {least['rank']}"
        )
    lines += ["", *(f"assumed: {what}" for what in plan["assumed"]), ""]
    shown = plan["faults"][:20]
    if not shown:
        lines.append("names, tensors, checkpoint and weight stream: complete, nothing twice")
    lines += [f"wrong: {fault}" for fault in shown]
    if more := len(plan["faults"]) - len(shown):
        lines.append(f"wrong: and {more} more; --json has all")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
