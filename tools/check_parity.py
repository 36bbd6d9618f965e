"""Checks that Megatron computes what transformers does: the logits of a Hugging Face checkpoint,
and its round trip.

    python tools/check_parity.py HF_DIR --tp 2 --pp 2

Random token sequences go through transformers and through the project's Megatron model, in float32,
in the layout asked for; then the weights are gathered back under their Hugging Face names. Prints
the largest differences. Exits 1 where logits differ by more than the threshold or a weight came
back changed, 2 where the checkpoint or layout cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from megatron_stare.errors import DataError, UserError
from megatron_stare.process.silence_upstreams import quiet_upstreams


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    quiet_upstreams()
    # transformers and Megatron come with what follows: seconds
    from pydantic import ValidationError

    try:
        return check(args)
    except (UserError, ValidationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hf_dir", help="Hugging Face folder")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a stage")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--padded", action="store_true", help="padded instead of packed micro-batches"
    )
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--longest", type=int, default=48, help="tokens of the longest sequence")
    parser.add_argument(
        "--threshold",
        type=float,
        default=1e-4,
        help=(
            "largest difference of two logits, as a share of the largest logit, which counts as 1"
            " where it is less"
        ),
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> int:
    """Compares and prints. Returns the exit code; raises UserError or ValidationError for what
    cannot be compared."""
    from parity import TIMEOUT_S, Task, compare, one_rank
    from rank_processes import rank_processes

    from megatron_stare.config.rules import check_layout
    from megatron_stare.config.schema import ParallelConfig
    from megatron_stare.models import read_shape
    from megatron_stare.weights.files.check import check_folder
    from megatron_stare.weights.files.torch_dist import is_checkpoint

    parallel = ParallelConfig(
        tensor=args.tp,
        pipeline=args.pp,
        virtual_pipeline=args.vpp,
        context=args.cp,
        expert=args.ep,
        data=max(args.ep // (args.tp * args.cp), 1),
        sequence=args.sp or (args.ep > 1 and args.tp > 1),
    )
    if is_checkpoint(Path(args.hf_dir)):
        raise DataError(
            "this is a distributed checkpoint, which transformers cannot read",
            where=args.hf_dir,
            fix=(
                f"make a Hugging Face folder of it first: megatron-stare convert {args.hf_dir}"
                " HF_DIR"
            ),
        )
    shape = read_shape(args.hf_dir)
    check_layout(parallel, shape)
    check_folder(args.hf_dir, shape)
    longest = min(args.longest, shape.max_positions)
    task = Task(args.hf_dir, parallel, args.sequences, longest, not args.padded, args.seed)
    with tempfile.TemporaryDirectory() as meeting, rank_processes(parallel.world_size) as pool:
        jobs = [(rank, f"file://{meeting}/ranks", task) for rank in range(parallel.world_size)]
        ranks = pool.starmap_async(one_rank, jobs, chunksize=1).get(timeout=TIMEOUT_S)
    difference, largest, changed = compare(task, shape, ranks)
    allowed = args.threshold * max(1.0, largest)  # float32 rounds in proportion
    print(
        f"logits: largest difference {difference:.2e} (threshold {allowed:.0e}, of logits up to"
        f" {largest:.3g})"
    )
    print(
        "weights: "
        + (
            f"{len(changed)} changed: {', '.join(changed[:5])}"
            if changed
            else "come back bit for bit"
        )
    )
    return int(not difference <= allowed or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
