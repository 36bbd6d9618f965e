"""Checks that SGLang's own parser accepts the flags that the user adds (sglang.flags). Also checks
that the user's flags do not change arguments that this project sets itself.

The function `refused_flag` starts a process in SGLang's Python environment. The process runs this
module with the following command:

    python -m megatron_stare.rollout.engines.sglang.flag_check '{"own": [...], "flags": [...]}'
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

# `serve` must be imported before transformers asks for torchvision
from megatron_stare.rollout.engines.sglang.serve import NOT_KEPT

TIMEOUT_S = 300
# Forbidden flags, besides the run's own. The run generates its key, and weights are compared for
# one model, sharded over tensor-parallel ranks, in its serving dtype.
_NOT_TO_BE_SET = {
    *("api_key", "admin_api_key", "quantization"),
    *("ep_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "moe_dense_tp_size"),
    *("enable_dp_attention", "nnodes", "node_rank", "dist_init_addr"),
}


@lru_cache(8)
def refused_flag(python: str, own: Sequence[str], flags: Sequence[str]) -> str | None:
    """Returns a description of the problem with the flags, or None if the flags are valid. The call
    takes about ten seconds, because it starts a Python process that imports SGLang.

    Args:
        python: Python of SGLang's environment.
        own: arguments that the run sets itself.
    """
    order = json.dumps({"own": own, "flags": flags})
    command = [python, "-m", __name__, order]
    kept = {k: v for k, v in os.environ.items() if k not in NOT_KEPT}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=kept
        )
    except subprocess.TimeoutExpired:
        return f"SGLang did not read its arguments within {TIMEOUT_S} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return f"SGLang's arguments could not be read there: {done.stderr.strip()[-500:]}"
    found: str | None = json.loads(lines[-1])
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _problem(
    parser: argparse.ArgumentParser, own: Sequence[str], flags: Sequence[str]
) -> str | None:
    try:
        without, given = vars(parser.parse_args([*own])), vars(parser.parse_args([*own, *flags]))
    except ValueError as error:
        return f"SGLang does not take them: {error}"
    set_here = {action.dest for action in parser._actions if set(action.option_strings) & set(own)}
    changed = sorted(
        name for name in set_here | _NOT_TO_BE_SET if given.get(name) != without.get(name)
    )
    return f"they change {', '.join(changed)}, which this project sets itself" if changed else None


def main() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    order, parser = json.loads(sys.argv[1]), _Parser()
    ServerArgs.add_cli_args(parser)
    print(json.dumps(_problem(parser, order["own"], order["flags"])))


if __name__ == "__main__":
    main()
