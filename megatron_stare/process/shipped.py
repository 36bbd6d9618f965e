"""Files that come with the project besides its code: `configs/`, `assets/` and `tools/`.

In a checkout they lie beside the package; a wheel carries them inside it, in `share/` (setup.py
copies them there). A config that ships names its files relative to where it ships, so that it works
from any folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_SHARE = _PACKAGE / "share"
# the repository's folder; None where a wheel was installed
CHECKOUT = None if _SHARE.is_dir() else _PACKAGE.parent
SHIPPED = CHECKOUT or _SHARE

TOOLS = (
    "check_invariance",
    "check_parity",
    "check_vectors",
    "compare_verifiers",
    "make_tiny_model",
    "plan_memory",
    "prepare_data",
)
# settings of a config that name files or folders
_PATHS = (("model", "path"), ("model", "reference_path"), ("data", "path"), ("data", "eval_path"))


def find_config(path: str | Path, beside: str | Path = ".") -> Path:
    """`path` where there is such a file, seen from the folder `beside`; else the config that ships
    under this name, with or without `configs/` before it."""
    here = Path(beside) / path
    for folder in (SHIPPED, SHIPPED / "configs"):
        shipped = (folder / path).resolve()
        if not here.exists() and _is_config(shipped) and shipped.is_file():
            return shipped
    return here


def resolve_paths(path: Path, tree: dict[str, Any]) -> None:
    """Makes what a config that ships names, and what ships with it, absolute; leaves a user's
    config as it is.

    Args:
        path: the config's file.
        tree: its sections, changed in place.
    """
    if not _is_config(path.resolve()):
        return
    for section, key in _PATHS:
        values = tree.get(section)
        if (
            isinstance(values, dict)
            and isinstance(value := values.get(key), str)
            and (SHIPPED / value).exists()
        ):
            values[key] = str(SHIPPED / value)


def tool(name: str) -> Path:
    """The script of one of TOOLS. It is to be run as one: it imports what lies beside it."""
    return SHIPPED / "tools" / f"{name}.py"


def _is_config(path: Path) -> bool:
    return path.is_relative_to(SHIPPED / "configs")
