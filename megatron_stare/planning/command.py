"""Implements the command `megatron-stare plan`. Torch and Megatron are imported only when the
command runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from megatron_stare.config.load import load_config
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.planning.gpus import GPUS, Coefficients, find_gpu, read_coefficients, store
from megatron_stare.process.signs_of_life import say_loading

DEFAULT = "h100-80g"


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    plan.add_argument("config", help="YAML file; of the model only config.json is read")
    plan.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the file's settings: section.key=value",
    )
    plan.add_argument(
        "--gpu", help=f"{', '.join(GPUS)}; default: plan.gpu of the configuration, or {DEFAULT}"
    )
    plan.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=(
            "number of nodes; the number of data-parallel replicas is adapted; default: as many"
            " as the run needs"
        ),
    )
    plan.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node; default 8"
    )
    plan.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help=(
            "mean length of prompts; default: plan.prompt_tokens, or a quarter of"
            " rollout.max_prompt_tokens"
        ),
    )
    plan.add_argument(
        "--response-tokens",
        type=float,
        metavar="N",
        help=(
            "mean length of responses; default: plan.response_tokens, or half of"
            " rollout.max_new_tokens"
        ),
    )
    plan.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the whole plan as JSON, in bytes and seconds",
    )
    plan.add_argument(
        "--launch",
        action="store_true",
        help=(
            "print only what a launch script needs: the number of nodes, the seconds to reserve for"
            " the last step and its save, and the settings of the layout over --nodes"
        ),
    )
    plan.add_argument(
        "--calibrate",
        type=Path,
        action="append",
        metavar="RUN_DIR",
        help=(
            "first fit the time model to the measured times of a run on this GPU, and store the"
            " result in --coefficients; repeat the option for several runs: runs of different"
            " widths and batches also give the costs that do not grow with matrix products"
        ),
    )
    plan.add_argument(
        "--coefficients",
        type=Path,
        metavar="FILE",
        help=(
            "file of earlier calibrations, by GPU, read if it exists; default: plan.coefficients"
            " of the configuration"
        ),
    )


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 1 in two cases: a phase of the planned run needs more memory than a
    GPU has, or the KV cache of a server is too small for the longest possible sequence. Returns 0
    otherwise. Raises UserError."""
    for name in ("nodes", "gpus_per_node", "prompt_tokens", "response_tokens"):
        if (value := getattr(args, name)) is not None and not value >= 1:
            raise ConfigError(f"{value} is below 1", where=f"--{name.replace('_', '-')}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ConfigError(
            "there is no such folder", where=f"--json {args.json}", fix="make it first"
        )
    config = load_config(
        args.config, args.overrides, before_method=say_loading, beneath=args.beneath
    )
    gpu = find_gpu(args.gpu or config.plan.gpu or DEFAULT)
    coefficients = args.coefficients or Path(config.plan.coefficients)
    # do not compile Megatron's fused functions
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # planning needs no device

    from megatron_stare.planning.calibrate import calibrate
    from megatron_stare.planning.phase_times import Lengths
    from megatron_stare.planning.run_plan import Site, as_json, for_launch, make_plan, text
    from megatron_stare.process.silence_upstreams import quiet_upstreams

    quiet_upstreams()
    try:
        if args.calibrate:
            store(
                coefficients,
                gpu.name,
                calibrate(args.calibrate, gpu, Coefficients(), args.prompt_tokens),
            )
        fitted = read_coefficients(coefficients, gpu.name)
        lengths = Lengths.of(config, args.prompt_tokens, args.response_tokens)
        plan = make_plan(config, Site(gpu, args.nodes, args.gpus_per_node), lengths, fitted)
        if args.json:
            args.json.write_text(json.dumps(as_json(plan), indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(error.filename)
        ) from error
    print(for_launch(plan) if args.launch else text(plan))
    return int(bool(plan.faults))
