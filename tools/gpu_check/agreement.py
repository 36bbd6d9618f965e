"""How far bfloat16 log-probs of the trainer lie from float32 ones, beside transformers' in
bfloat16: the trainer's own share of what an engine and a trainer in bfloat16 disagree by."""

from __future__ import annotations

from typing import Any

from clock import exact_products
from rig import Size, expected, model_folder, trained
from verdict import Bound

GPU_ONLY: tuple[str, ...] = ()
BOUNDS: dict[str, Bound] = {
    "mean error over transformers' in bfloat16": ("<=", 1.5),
    "99th percentile over transformers' in bfloat16": ("<=", 1.5),
}


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    size = Size.of(cpu)
    with model_folder(size) as folder:
        exact, _ = expected(folder, size)
        theirs, _ = expected(folder, size, "bfloat16")
        ours = trained(folder, size, dtype="bfloat16")
    off = (ours.log_prob - exact[ours.index]).abs().double()
    peer = (theirs - exact).abs().double()
    return {
        "figures": {
            "mean error over transformers' in bfloat16": float(off.mean() / peer.mean()),
            "99th percentile over transformers' in bfloat16": float(
                off.quantile(0.99) / peer.quantile(0.99)
            ),
            "mean error (nats)": float(off.mean()),
            "99th percentile (nats)": float(off.quantile(0.99)),
            "largest error (nats)": float(off.max()),
        },
        "tokens": len(off),
    }
