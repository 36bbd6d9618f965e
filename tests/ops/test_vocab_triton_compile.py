"""The kernels compile for the GPUs they are meant for, on a machine that has none, and keep
everything in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# in a process of its own: in this one the kernels may be defined for the interpreter
COMPILE = """
import glob, json, os, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_stare.ops import vocab_triton

(ptxas,) = glob.glob(os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"))

def types(kernel, logits, constants):
    of = {"logits": f"*{logits}", "out": "*fp32", "local": "*i64"}
    of |= {"row_stride": "i64", "out_stride": "i64"}
    of |= {name: "*fp32" for name in ("m", "a", "b", "hit")}
    of |= {name: "i32" for name in ("rows", "real", "width")}
    if "out_stride" in kernel.arg_names:
        of["out"] = f"*{logits}"
    of |= {"inverse_temperature": "fp32"} | {name: "constexpr" for name in constants}
    return {name: of[name] for name in kernel.arg_names}

found = []
for sm in (80, 90):
    for logits in ("bf16", "fp16", "fp32"):
        for kernel, options, settings in (
            (vocab_triton._sums, {}, vocab_triton.FORWARD),
            (vocab_triton._gradient, {"ENTROPY": True}, vocab_triton.BACKWARD),
        ):
            constants = {**options, "BLOCK": settings["BLOCK"]}
            signature = types(kernel, logits, constants)
            names = list(signature)
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if signature[n][0] in "*i"
            }
            values = {(names.index(n),): x for n, x in constants.items()}
            compiled = triton.compile(
                ASTSource(kernel, signature, values, aligned),
                target=GPUTarget("cuda", sm, 32),
                options={"num_warps": settings["num_warps"]},
            )
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(compiled.asm["ptx"])
                file.flush()
                told = subprocess.run(
                    [ptxas, "-v", f"--gpu-name=sm_{sm}{'a' * (sm == 90)}", file.name]
                    + ["-o", os.devnull],
                    capture_output=True, text=True, check=True,
                ).stderr
            found.append({"kernel": kernel.__name__, "sm": sm, "logits": logits, "told": told})
print(json.dumps(found))
"""


def test_what_a_program_holds_is_a_power_of_two() -> None:
    """Triton compiles no other range; its interpreter takes any."""
    from megatron_stare.ops import vocab_triton

    for settings in (vocab_triton.FORWARD, vocab_triton.BACKWARD):
        assert {number.bit_count() for number in settings.values()} == {1}


@pytest.mark.slow
def test_kernels_compile_without_spilling(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 12
    for each in found:
        assert "0 bytes spill stores, 0 bytes spill loads" in each["told"], each
