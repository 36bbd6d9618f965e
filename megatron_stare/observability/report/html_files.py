"""Templates of pages, and pages as files that appear whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_stare.errors import DataError

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def write_page(page: str, out: Path, what: str) -> Path:
    """Writes a page, and returns `out`; whoever reads it meanwhile sees the old one or the new one.

    Args:
        what: it is, in an error.

    Raises:
        DataError: it cannot be written.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"{what} cannot be written ({error.strerror})", where=str(out), fix="name another file: --out FILE"
        ) from error
    return out
