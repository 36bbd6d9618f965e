"""Every setting of `performance` alone against none of them: the gradients' difference, and time
and memory beside it.

A setting whose needs are not there is `not run`, by its name, and proves nothing. On one device a
setting that overlaps communication has none to overlap: its figures show that it does no harm, not
that it is faster.
"""

from __future__ import annotations

from typing import Any

from clock import exact_products
from rig import Size, gradient_error, model_folder, trained
from verdict import Bound

from megatron_stare.config.performance import FEATURES, missing
from megatron_stare.config.schema import PerformanceConfig

GPU_ONLY: tuple[str, ...] = ()
# in bfloat16, where another order of sums is another rounding; float32 on a CPU is nearer
NEAR, SLOWER = 1e-2, 1.05
BOUNDS: dict[str, Bound] = {
    "settings that were run": (">=", 3.0),
    "settings that failed": ("<=", 0.0),
}


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    size, dtype, near = Size.of(cpu), "float32" if cpu else "bfloat16", 1e-5 if cpu else NEAR
    found: dict[str, dict[str, Any]] = {}
    with model_folder(size) as folder:
        plain = trained(folder, size, dtype=dtype, repeats=1 if cpu else 5)
        for feature in FEATURES:
            lacking = missing(feature)
            if feature.check != "settings" or lacking:
                why = f"{', '.join(lacking)} missing" if lacking else f"`{feature.check}` does"
                found[feature.name] = {"verdict": f"not run: {why}"}
                continue
            on = {feature.name: True}
            on |= {
                name.partition(".")[2]: True
                for name in feature.wants
                if name.startswith("performance.")
            }
            distributed = "optimizer.distributed" in feature.wants
            with_it = trained(
                folder,
                size,
                dtype=dtype,
                performance=PerformanceConfig(**on),  # type: ignore[arg-type]
                distributed=distributed,
                repeats=1 if cpu else 5,
            )
            error, time = (
                gradient_error(with_it.gradients, plain.gradients),
                with_it.seconds / plain.seconds,
            )
            right = error <= near and (cpu or time <= SLOWER)
            found[feature.name] = {
                "verdict": "pass" if right else "fail",
                "gradient, largest difference": error,
                "time over none": time,
                "peak memory over none": with_it.peak / plain.peak if plain.peak else None,
            }
    verdicts = [each["verdict"] for each in found.values()]
    figures = {
        "settings that were run": float(
            sum(not verdict.startswith("not run") for verdict in verdicts)
        ),
        "settings that failed": float(verdicts.count("fail")),
    }
    return {"figures": figures, "settings": found}
