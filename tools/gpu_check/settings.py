"""Every setting of `performance` alone against none of them, and together all that are on by
themselves: the gradients' difference, time and memory.

A setting whose needs are not there is `not run`, by its name, and proves nothing. On one device a
setting that overlaps communication has none to overlap: its figures show that it does no harm, not
that it is faster.
"""

from __future__ import annotations

from collections.abc import Collection
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


TOGETHER = "all that are on by themselves"


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    size, dtype, near = Size.of(cpu), "float32" if cpu else "bfloat16", 1e-5 if cpu else NEAR
    repeats = 1 if cpu else 5
    found: dict[str, dict[str, Any]] = {}
    with model_folder(size) as folder:
        plain = trained(folder, size, dtype=dtype, repeats=repeats)

        def beside_none(names: Collection[str], distributed: bool) -> dict[str, Any]:
            with_it = trained(
                folder,
                size,
                dtype=dtype,
                performance=PerformanceConfig(**dict.fromkeys(names, True)),  # type: ignore[arg-type]
                distributed=distributed,
                repeats=repeats,
            )
            error = gradient_error(with_it.gradients, plain.gradients)
            time = with_it.seconds / plain.seconds
            return {
                "verdict": "pass" if error <= near and (cpu or time <= SLOWER) else "fail",
                "gradient, largest difference": error,
                "time over none": time,
                "peak memory over none": with_it.peak / plain.peak if plain.peak else None,
            }

        for feature in FEATURES:
            lacking = missing(feature)
            if feature.check != "settings" or lacking:
                why = f"{', '.join(lacking)} missing" if lacking else f"`{feature.check}` does"
                found[feature.name] = {"verdict": f"not run: {why}"}
                continue
            sections = [wanted.partition(".") for wanted in feature.wants]
            beside = [name for section, _, name in sections if section == "performance"]
            found[feature.name] = beside_none(
                [feature.name, *beside], distributed="optimizer.distributed" in feature.wants
            )
        gains = [each.name for each in FEATURES if each.covered and not missing(each)]
        found[TOGETHER] = beside_none(gains, distributed=True)
    verdicts = [each["verdict"] for each in found.values()]
    figures = {
        "settings that were run": float(
            sum(not verdict.startswith("not run") for verdict in verdicts)
        ),
        "settings that failed": float(verdicts.count("fail")),
    }
    return {"figures": figures, "settings": found}
