"""Defines the numbers that a plan uses for a GPU: data-sheet values with their source, and
coefficients.

Coefficients are numbers that the time model needs but that no data sheet contains. The default
values of the coefficients are assumptions. A calibration fits the coefficients to the measured
times of runs, and stores the fitted coefficients in a JSON file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_stare.errors import ConfigError, DataError, unknown_name


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    `memory`: bytes of memory according to the data sheet. The GPU's driver reports slightly more
        bytes than the data sheet.
    `flops`: dense bfloat16 FLOP/s.
    `bandwidth`: memory bandwidth, bytes/s.
    `link`: bandwidth to the other GPUs of the node, bytes/s in one direction. Data sheets give the
        bandwidth of both directions together.
    `source`: publication from which the numbers are taken.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    source: str


_SXM = "NVIDIA's data sheet, SXM"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80g", 80 * 10**9, 312e12, 2.039e12, 300e9, f"{_SXM}: A100 80GB"),
        Gpu("h100-80g", 80 * 10**9, 989e12, 3.35e12, 450e9, f"{_SXM}: H100, without sparsity"),
        Gpu("h200-141g", 141 * 10**9, 989e12, 4.8e12, 450e9, f"{_SXM}: H200, without sparsity"),
        Gpu(
            "b200-180g",
            180 * 10**9,
            2250e12,
            8.0e12,
            900e9,
            "NVIDIA's data sheet, DGX B200: an eighth of it, dense",
        ),
        Gpu("cpu-core", 8 * 10**9, 200e9, 50e9, 50e9, "nominal: only of use with --calibrate"),
    )
}
CPU = GPUS["cpu-core"]
# assumed bytes/s of a GPU to other nodes: 400 Gbit/s per GPU, as in a DGX H100
NETWORK = 50e9
# assumed bytes/s between a GPU and host memory: PCIe 5.0 x16 at 40 %
HOST_LINK = 25e9


def find_gpu(name: str, where: str = "--gpu") -> Gpu:
    """Returns the GPU with the given name. Raises ConfigError, with a suggestion, for an unknown
    name."""
    if name not in GPUS:
        raise unknown_name(name, GPUS, where)
    return GPUS[name]


def named(name: str) -> Gpu:
    """Returns the GPU for a name that nvidia-smi reports, such as `NVIDIA H100 80GB HBM3`. Raises
    ConfigError for an unknown GPU."""
    words = name.replace("-", " ").split()
    for gpu in GPUS.values():
        kind, _, memory = gpu.name.upper().partition("-")
        sizes = [word for word in words if word.endswith("GB")]
        if kind in words and (not sizes or sizes == [f"{memory}B"]):
            return gpu
    raise ConfigError(
        f"the GPU {name} is unknown", fix=f"set plan.gpu to the nearest of {', '.join(GPUS)}"
    )


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of the model that predicts the time of a step. Each coefficient whose name ends
    in `_mfu` or `_efficiency` is the share of a GPU's peak rate that a run reaches. Each
    coefficient whose name ends in `_bytes_s` is a rate in bytes/s. The coefficients
    `decode_layer_s` and `fixed_s` are times in seconds. The coefficients `log_prob_moves` and
    `update_moves` are numbers of memory accesses. One memory access reads or writes one hidden
    state at full memory bandwidth.

    `log_prob_mfu`, `update_mfu`: share of peak FLOP/s that a rank reaches in matrix products.
    `log_prob_moves`, `update_moves`: number of memory accesses that would take as long as all
        operations except matrix products, for each token in each layer. If `log_prob_moves` is 0,
        the predicted time of the log-prob pass contains no separate term for these operations. A
        calibration then fits a lower `log_prob_mfu`, which makes up for the missing term. The same
        holds for `update_moves` and `update_mfu`.
    `prefill_mfu`: share of peak FLOP/s that servers reach in prefill and in compute-bound decoding.
    `decode_efficiency`: share of memory bandwidth that decoding reaches.
    `decode_layer_s`: seconds that each layer adds to a decoding step, whatever the batch size. If
        `decode_layer_s` is 0, the predicted time of decoding contains no separate term for the
        layers. A calibration then fits a lower `decode_efficiency`, which makes up for the missing
        term.
    `link_efficiency`: share of link bandwidth that collectives reach.
    `sync_bytes_s`: bytes/s of a whole weight sync, including the time to gather and load the
        weights.
    `fixed_s`: seconds of a step outside all of its phases.
    `checkpoint_bytes_s`: bytes/s that all ranks together write into a checkpoint.
    """

    log_prob_mfu: float = 0.4
    update_mfu: float = 0.4
    log_prob_moves: float = 0.0
    update_moves: float = 0.0
    prefill_mfu: float = 0.4
    decode_efficiency: float = 0.6
    decode_layer_s: float = 0.0
    link_efficiency: float = 0.7
    sync_bytes_s: float = 2e9 * 355 / 48
    fixed_s: float = 5.0
    checkpoint_bytes_s: float = 10e9


SOURCES = {
    "log_prob_mfu": "assumed; Megatron-LM's README reports 41 to 48 % for pretraining on H100",
    "update_mfu": "assumed, as log_prob_mfu",
    "log_prob_moves": "included in log_prob_mfu until runs of several widths are calibrated",
    "update_moves": "included in update_mfu until runs of several widths are calibrated",
    "prefill_mfu": "assumed",
    "decode_efficiency": "assumed",
    "decode_layer_s": "included in decode_efficiency until runs of several sizes are calibrated",
    "link_efficiency": "assumed",
    "sync_bytes_s": "slime's 355B in 48 s, published; benchmarks/sync_model.py",
    "fixed_s": "the driver took 4.4 s for 8,192 responses of 16,384 tokens, benchmarks/driver.py",
    "checkpoint_bytes_s": "assumed for a shared file system",
}


@dataclass(frozen=True)
class Fitted:
    """Coefficients of a device.

    `run`: directories of the runs to which the coefficients were fitted, or None if the
        coefficients are assumed.
    """

    coefficients: Coefficients
    run: str | None = None


def read_coefficients(path: Path, gpu: str) -> Fitted:
    """Reads the coefficients that were fitted for a device. Returns the assumed coefficients if the
    file contains none for the device.

    Raises:
        DataError: `store` did not write the file.
    """
    if not path.exists():
        return Fitted(Coefficients())
    found = _entries(path).get(gpu)
    if found is None:
        return Fitted(Coefficients())
    try:
        return Fitted(Coefficients(**found["coefficients"]), found["run"])
    except (KeyError, TypeError) as error:
        raise _unreadable(path, str(error)) from error


def store(path: Path, gpu: str, fitted: Fitted) -> None:
    """Writes the coefficients of one device to the file. The coefficients of other devices stay in
    the file."""
    entries = _entries(path) if path.exists() else {}
    entries[gpu] = {"run": fitted.run, "coefficients": asdict(fitted.coefficients)}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(entries, indent=2) + "\n")
    part.replace(path)


def changed(start: Coefficients, found: dict[str, float]) -> Coefficients:
    """Returns a copy of `start`, updated with the coefficients in `found`. Raises ConfigError if
    the value of a coefficient `*_mfu` or `*_efficiency` in `found` is above 1. The value of such a
    coefficient is the share of the GPU's peak rate that the run reached. No GPU exceeds its own
    peak rate, so a share above 1 means that the user named a slower GPU than the GPU of the run."""
    for name, value in found.items():
        if name.endswith(("_mfu", "_efficiency")) and value > 1:
            raise ConfigError(
                f"{name} would be {value:.3g}, more than this GPU can do",
                where="--calibrate",
                fix="check --gpu",
            )
    return replace(start, **found)


def _entries(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    known = {field.name for field in fields(Coefficients)}
    if not isinstance(found, dict) or not all(
        isinstance(entry, dict)
        and isinstance(values := entry.get("coefficients"), dict)
        and values.keys() <= known
        and all(isinstance(value, int | float) and value >= 0 for value in values.values())
        for entry in found.values()
    ):
        raise _unreadable(path, "no coefficients by GPU")
    return found


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        f"not a file of coefficients: {why}", where=str(path), fix="delete it, and calibrate again"
    )
