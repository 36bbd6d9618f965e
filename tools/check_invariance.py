"""Checks that a layout trains as one process does: one step on a fixed batch, in the layout and on
one rank.

    python tools/check_invariance.py --world 4 --tp 2 --pp 2 --micro-batch-tokens 64
    python tools/check_invariance.py --cp 2 --tp 2 --algorithm gspo --off-policy 0.5
    python tools/check_invariance.py --all --out benchmarks/results/invariance.json

--all checks every method in every layout.

Exits 1 unless
- given equal log-probs and entropies, the selected tokens are identical bit for bit;
- end to end they are identical, but for tokens within 1e-5 of a threshold, which are listed;
- loss, gradient norm and every tensor's gradient agree within 1e-5 relative (float32);
- the weights after a step of SGD agree within 1e-5 of what the step moves them, and the rounding of
the sum. Exits 2 for a layout that does not exist or is not supported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stare.errors import UserError
from megatron_stare.process.silence_upstreams import quiet_upstreams

if TYPE_CHECKING:
    from invariance.case import Case
    from invariance.compare import Difference


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    quiet_upstreams()
    import torch  # transformers and Megatron come with what follows: seconds
    from invariance.case import write_model
    from invariance.compare import compare
    from invariance.step import take
    from invariance.table import ALGORITHMS, LAYOUTS, table, write
    from rank_processes import rank_processes

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        if args.all:
            rows, faults = table(
                folder, args.layouts or tuple(LAYOUTS), args.methods or tuple(ALGORITHMS)
            )
            if args.out is not None:
                write(rows, args.out)
        else:
            try:
                case = case_of(args)
                world = case.config(folder).parallel.world_size
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            with rank_processes(world) as pool:
                whole = take(pool, case.alone(), folder, None)
                found = compare(whole, take(pool, case, folder, whole["scores"]))
            show(found)
            faults = found.faults
    for fault in faults:
        print("FAIL", fault)
    print("FAILED" if faults else "ok", " ".join(argv))
    return int(bool(faults))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, help="ranks; default tp x pp x dp")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a stage")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--padded", action="store_true", help="padded instead of packed micro-batches"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=64)
    parser.add_argument("--algorithm", default="stare", help="method, with its default settings")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the method"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the batch")
    parser.add_argument(
        "--off-policy", type=float, default=0.0, help="spread of ln(p / p_old); 0: on-policy"
    )
    parser.add_argument("--lr", type=float, help="learning rate of the step of SGD; default 1")
    parser.add_argument(
        "--trainer", metavar="CLASS", help="class that is checked; default: the project's own"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="check every method in every layout; other options are ignored",
    )
    parser.add_argument(
        "--layouts",
        nargs="*",
        metavar="NAME",
        help="with --all: layouts to check; default: all",
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        metavar="NAME",
        help="with --all: methods to check; default: all",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="with --all: file for the table of errors"
    )
    return parser.parse_args(argv)


def case_of(args: argparse.Namespace) -> Case:
    """The case that the command line describes. Raises UserError where the ranks do not fit the
    layout."""
    import yaml
    from invariance.case import TRAINER, Case

    fixed = args.tp * args.pp * args.cp
    world = args.world or fixed
    if world % fixed:
        raise UserError(
            f"{world} ranks are not a multiple of tp x pp x cp = {fixed}", where="--world"
        )
    settings = dict(each.split("=", 1) for each in args.set)
    return Case(
        algorithm={
            "name": args.algorithm,
            **{key: yaml.safe_load(value) for key, value in settings.items()},
        },
        parallel={
            "tensor": args.tp,
            "pipeline": args.pp,
            "virtual_pipeline": args.vpp,
            "context": args.cp,
            "sequence": args.sp,
            "data": world // fixed,
        },
        budget=args.micro_batch_tokens,
        packed=not args.padded,
        seed=args.seed,
        off_policy=args.off_policy,
        lr=Case.lr if args.lr is None else args.lr,
        trainer=args.trainer or TRAINER,
    )


def show(found: Difference) -> None:
    if "selections" in found.where:
        print(found.where["selections"])
    for key, largest in found.largest.items():
        print(f"{key}: largest difference {largest:.2e} ({found.where[key]})")


if __name__ == "__main__":
    sys.exit(main())
