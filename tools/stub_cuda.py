"""Writes a stand-in for NVIDIA's driver libraries, so that CUDA wheels load where there is none.

    python tools/stub_cuda.py /path/to/environment /tmp/stubs
    LD_LIBRARY_PATH=/tmp/stubs /path/to/environment/bin/python -c 'import sgl_kernel'

The driver, libcuda.so.1, comes with a GPU and no wheel has it. The stand-in exports the functions
that the shared libraries of the environment ask for, and each returns CUDA_ERROR_NO_DEVICE: wheels
load, and find no device. It shows that modules import, and nothing about what they compute. Needs
gcc and nm.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

LIBRARIES = {"libcuda.so.1": r"cu[A-Z]\w*", "libnvidia-ml.so.1": r"nvml[A-Z]\w*"}
# names that begin alike and are of CUDA's other libraries, which the wheels bring
OTHERS = re.compile(
    r"cu(da|blas|dnn|fft|rand|solver|sparse|file|pti|Tensor|ptiAct)|cudnn|cufile", re.IGNORECASE
)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, cuda.h; of NVML's codes none that means success


def asked_for(environment: Path) -> set[str]:
    """Returns the undefined symbols of every shared library of an environment."""
    found: set[str] = set()
    for library in environment.rglob("*.so*"):
        if library.is_file() and not library.is_symlink():
            done = subprocess.run(
                ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True
            )
            found |= {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}
    return found


def write(folder: Path, name: str, functions: set[str]) -> None:
    """Compiles a library of functions that find no device."""
    source = folder / f"{name}.c"
    body = "".join(f"int {each}() {{ return {NO_DEVICE}; }}\n" for each in sorted(functions))
    source.write_text(body)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", str(source), "-o", folder / name],
        check=True,
    )
    source.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    symbols = asked_for(args.environment)
    for name, pattern in LIBRARIES.items():
        functions = {
            each for each in symbols if re.fullmatch(pattern, each) and not OTHERS.match(each)
        }
        always = "cuInit" if name == "libcuda.so.1" else "nvmlInit_v2"
        write(args.folder, name, functions | {always})
        print(f"{args.folder / name}: {len(functions)} functions")


if __name__ == "__main__":
    main()
