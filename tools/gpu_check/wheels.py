"""Packages that a machine with nothing but PyTorch lacks for the checks: lists them, fetches their
wheels where there is a network, and installs them where there is none.

The trainer's go to .gpu_wheels, which scripts/gpu_check.sh finds, the servers' into an environment
of their own, .venv-sglang, in front of the machine's PyTorch. Imports nothing that a bare machine
lacks.
"""

from __future__ import annotations

import re
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
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def trainers() -> list[str]:
    """Requirements of the trainer's checks, with their versions."""
    pins = _pins("constraints.txt")
    (version,) = re.findall(
        r"^ARG TRANSFORMER_ENGINE=(\S+)", (ROOT / "scripts/Containerfile").read_text(), re.MULTILINE
    )
    return [
        *(f"{name}=={pins[name]}" for name in CARRIED),
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
    """Fetches both lists for Python 3.12 on Linux, x86-64. Returns pip's first status that is not
    0; all are tried."""
    wheel = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        wheel += ["--platform", f"manylinux_{platform}_x86_64"]
    for platform in ("manylinux2014", "manylinux1", "linux"):
        wheel += ["--platform", f"{platform}_x86_64"]
    statuses = []
    for name, wanted in ((TRAINER, trainers()), (SERVERS, servers())):
        for requirement in wanted:
            built = requirement.partition("==")[0] in BUILT
            how = ["--no-binary=:all:", "--no-build-isolation"] if built else wheel
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *how]
            status = subprocess.call([*command, "-d", str(folder / name), requirement])
            if status:
                print(f"{name}: {requirement} did not come", flush=True)
            statuses.append(status)
    return next(filter(None, statuses), 0)


def install(folder: Path, root: Path = ROOT) -> int:
    """Installs what was fetched, without a network. Returns pip's first status that is not 0.

    The servers' environment sees this interpreter's packages behind its own, and this project.
    """
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--upgrade"]
    pip = [sys.executable, "-m", "pip", "install", *offline]
    statuses = []
    if files := _files(folder / TRAINER):
        statuses.append(subprocess.call([*pip, "--target", str(root / ".gpu_wheels"), *files]))
    if files := _files(folder / SERVERS):
        environment = root / ".venv-sglang"
        statuses.append(
            subprocess.call([sys.executable, "-m", "venv", "--without-pip", str(environment)])
        )
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        statuses.append(subprocess.call([*pip, "--target", str(packages), *files]))
        behind = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (packages / "behind.pth").write_text("\n".join([*behind, str(root)]) + "\n")
    return next(filter(None, statuses), 0)


def _files(folder: Path) -> list[str]:
    return [str(file) for file in sorted(folder.glob("*")) if file.suffix in (".whl", ".gz")]
