"""Environment variables under which Python finds PyTorch, what comes with it, and what is carried
to a bare machine (tools/gpu_check/wheels.py); nothing else that is installed here."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distributions, requires
from sysconfig import get_path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.runs import ROOT

WHEELS = runpy.run_path(str(ROOT / "tools" / "gpu_check" / "wheels.py"))


def closure(names: Iterable[str]) -> set[str]:
    """Packages with all that they require, by canonical name, as far as they are installed."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
        left += [
            canonicalize_name(each.name)
            for each in wanted
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found


def without_the_rest() -> dict[str, str]:
    """See support/carried/sitecustomize.py."""
    kept = closure(["torch"]) | {canonicalize_name(name) for name in WHEELS["CARRIED"]}
    kept.add("megatron-stare")
    there: dict[str, set[str]] = {}  # packages by module
    # not of sys.path, on which setuptools puts what it brings for itself
    for package in distributions(path=sorted({get_path("purelib"), get_path("platlib")})):
        for file in package.files or ():
            module = file.parts[0].partition(".")[0]
            there.setdefault(module, set()).add(canonicalize_name(package.name))
    gone = [
        module
        for module, packages in there.items()
        if module.isidentifier() and kept.isdisjoint(packages)
    ]
    folders = [ROOT / "tests" / "support" / "carried", ROOT]
    return {"NOT_CARRIED": " ".join(gone), "PYTHONPATH": ":".join(map(str, folders))}
