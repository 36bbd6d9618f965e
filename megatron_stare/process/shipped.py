"""Finds the files that ship with the project in addition to its package: `configs/`, `assets/` and
`tools/`.

In a checkout, the folders of shipped files are beside the package. In a wheel, the folders of
shipped files are in `share/`, because setup.py copies the folders into `share/`. In a shipped
config, paths are relative to the folder that contains `configs/`. Shipped configs therefore work
from any working directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_SHARE = _PACKAGE / "share"
# the repository's folder; None if installed from a wheel
CHECKOUT = None if _SHARE.is_dir() else _PACKAGE.parent
SHIPPED = CHECKOUT or _SHARE

TOOLS = (
    "check_invariance",
    "check_parity",
    "check_vectors",
    "compare_verifiers",
    "make_tiny_chat",
    "make_tiny_model",
    "plan_memory",
    "prepare_data",
)
# settings of a config that name files or folders
_PATHS = (("model", "path"), ("model", "reference_path"), ("data", "path"), ("data", "eval_path"))


def find_config(path: str | Path, beside: str | Path = ".") -> Path:
    """Returns the path of a config file. First looks for `path` in the folder `beside`, then looks
    for `path` among the shipped configs. If both searches find nothing, the function returns the
    path `beside`/`path`, although no file exists there. The path of a shipped config may omit the
    leading `configs/`."""
    here = Path(beside) / path
    for folder in (SHIPPED, SHIPPED / "configs"):
        shipped = (folder / path).resolve()
        if not here.exists() and _is_config(shipped) and shipped.is_file():
            return shipped
    return here


def resolve_paths(path: Path, tree: dict[str, Any]) -> None:
    """Changes the paths of shipped files in a shipped config to absolute paths. Does not change a
    user's config.

    Args:
        path: the config's file.
        tree: the config's sections, changed in place.
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
    """Returns the path of a script in the folder `tools/`. `name` is one of TOOLS. Run the file as
    a script instead of importing it, because the file imports other files from its own folder."""
    return SHIPPED / "tools" / f"{name}.py"


def _is_config(path: Path) -> bool:
    return path.is_relative_to(SHIPPED / "configs")
