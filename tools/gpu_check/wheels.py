"""Packages that a machine with nothing but PyTorch lacks for the checks: lists them, fetches their
wheels where there is a network, and installs them where there is none.

The trainer's go to .gpu_wheels, which scripts/gpu_check.sh finds, the servers' into an environment
of their own, .venv-sglang, in front of the machine's PyTorch. Imports nothing that a bare machine
lacks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAINER, SERVERS = "trainer", "servers"  # folders of the fetched
# versions are those of constraints.txt
CARRIED = (
    "megatron-core",
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection"),
    "typing_extensions",  # pydantic wants a newer one than PyTorch brings
    *("transformers", "tokenizers", "safetensors", "regex", "numpy", "packaging", "PyYAML", "tqdm"),
    *("huggingface_hub", "hf-xet", "httpx2", "httpcore2", "h11", "anyio", "idna", "truststore"),
    *("click", "typer", "annotated-doc", "shellingham"),
    *("rich", "markdown-it-py", "mdurl", "Pygments"),
    *("psutil", "orjson"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache"),
    "yarl",
)
# the version is that of scripts/Containerfile; the last is built from its source, by nvcc
TRANSFORMER_ENGINE = (
    "transformer-engine",
    "transformer-engine-cu13",
    "transformer-engine-torch",
)
BUILT = ("transformer-engine-torch",)
IMPORTED = ("einops",)  # by Transformer Engine; the version is that of the servers' lock
# SGLang's kernels for GPUs, which its lock for CPUs leaves out, as SGLang itself asks for them
KERNELS = {
    "sglang-kernel": "0.4.10",
    "flashinfer_python": "0.7.2",
    "sgl-deep-gemm": "0.2.3.post2",
    "torch_memory_saver": "0.0.10",
}
# of the lock, what comes with PyTorch
PYTORCH = (
    *("torch", "triton", "filelock", "fsspec", "Jinja2", "MarkupSafe", "mpmath", "networkx"),
    *("setuptools", "sympy", "typing_extensions"),
)
NEWEST_GLIBC, OLDEST_GLIBC = 39, 5  # 2.39 is Ubuntu 24.04's, that of scripts/Containerfile


def trainers() -> list[str]:
    """Requirements of the trainer's checks, with their versions."""
    pins = _pins("constraints.txt")
    (version,) = re.findall(
        r"^ARG TRANSFORMER_ENGINE=(\S+)", (ROOT / "scripts/Containerfile").read_text(), re.MULTILINE
    )
    lock = _pins("scripts/sglang-cpu.lock")
    return [
        *(f"{name}=={pins[name]}" for name in CARRIED),
        *(f"{name}=={lock[name]}" for name in IMPORTED),
        *(f"{name}=={version}" for name in TRANSFORMER_ENGINE),
    ]


def servers() -> list[str]:
    """Requirements of the servers' environment beside PyTorch, with their versions."""
    pins = {
        name: version
        for name, version in _pins("scripts/sglang-cpu.lock").items()
        if name not in PYTORCH
    }
    return [f"{name}=={version}" for name, version in (pins | KERNELS).items()]


def _pins(file: str) -> dict[str, str]:
    lines = (line.partition(";")[0].strip() for line in (ROOT / file).read_text().splitlines())
    # of two, the later is for Python 3.12
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def listed() -> str:
    """Both lists, each under a comment."""
    return "\n".join(
        [
            f"# {TRAINER}; {', '.join(BUILT)} is a source that nvcc builds there",
            *trainers(),
            f"# {SERVERS}; sglang-kernel is built for the PyTorch that SGLang asks for",
            *servers(),
        ]
    )


def fetch(folder: Path) -> int:
    """Fetches both lists for Python 3.12 on Linux, x86-64. Returns 1 where one did not come, which
    is named; the others are there."""
    wheel = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for glibc in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1):
        wheel += ["--platform", f"manylinux_2_{glibc}_x86_64"]
    for platform in ("manylinux2014", "manylinux2010", "manylinux1", "linux"):
        wheel += ["--platform", f"{platform}_x86_64"]
    lost = []
    for name, wanted in ((TRAINER, trainers()), (SERVERS, servers())):
        built = [each for each in wanted if each.partition("==")[0] in BUILT]
        ready = [each for each in wanted if each not in built]
        into = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        into += ["-d", str(folder / name)]
        source = ["--no-binary=:all:", "--no-build-isolation"]
        # together, which is quicker; each by itself where one is not to be had
        together = bool(ready) and not subprocess.call([*into, *wheel, *ready])
        for each in (*(() if together else ready), *built):
            if subprocess.call([*into, *(source if each in built else wheel), each]):
                lost.append(each)
    print("".join(f"{each} did not come\n" for each in lost), end="", flush=True)
    return int(bool(lost))


def install(folder: Path, root: Path = ROOT) -> int:
    """Installs what was fetched, without a network. Returns 1 where something did not install; the
    rest is there.

    Transformer Engine comes last, and whole or not at all: without its part for PyTorch, which may
    not build or not import, the trainer would take it for usable. The servers' environment sees
    this interpreter's packages behind its own, and this project.
    """
    failed = False
    trainer, environment = _files(folder / TRAINER), root / ".venv-sglang"
    engine = [file for file in trainer if Path(file).name.startswith("transformer_engine")]
    failed |= _install([file for file in trainer if file not in engine], root / ".gpu_wheels")
    if served := _files(folder / SERVERS):
        failed |= subprocess.call([sys.executable, "-m", "venv", "--without-pip", environment]) > 0
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        failed |= _install(served, packages)
        behind = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (packages / "behind.pth").write_text("\n".join([*behind, str(root)]) + "\n")
    failed |= _install(engine, root / ".gpu_wheels")
    return int(failed | (bool(engine) and not _engine_imports(root / ".gpu_wheels")))


def _engine_imports(target: Path) -> bool:
    """Imports Transformer Engine, if it is there, and removes it where that fails: megatron-core
    cannot be imported beside one that is found and does not import."""
    found = [*target.glob("transformer_engine*")]
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = [sys.executable, "-c", "import transformer_engine.pytorch"]
    if not found or subprocess.call(code, env={**os.environ, "PYTHONPATH": path}) == 0:
        return True
    for each in found:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    print("Transformer Engine does not import, and is removed", flush=True)
    return False


def _install(files: list[str], target: Path) -> bool:
    """Returns True where pip failed, which then has installed none of them. What is built from its
    source sees the headers of cuDNN and NCCL, which only PyTorch's packages may have."""
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--upgrade"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target)]
    headers = [f"{folder}/{name}/include" for folder in _nvidia() for name in ("cudnn", "nccl")]
    path = os.pathsep.join([*headers, *filter(None, [os.environ.get("CPATH")])])
    environment = {**os.environ, **({"CPATH": path} if path else {})}
    return bool(files) and subprocess.call([*pip, *files], env=environment) > 0


def _nvidia() -> list[str]:
    """Folders of the package `nvidia`, in which CUDA's libraries for PyTorch lie."""
    found = importlib.util.find_spec("nvidia")
    return list(found.submodule_search_locations or ()) if found else []


def _files(folder: Path) -> list[str]:
    return [str(file) for file in sorted(folder.glob("*")) if file.suffix in (".whl", ".gz")]
