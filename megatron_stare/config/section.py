"""Defines the base class of all configuration sections, and the checks that several sections
share."""

from __future__ import annotations

import os
from string import Formatter

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Typed, immutable settings of a run. Unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def expand_path(path: str | list[str] | None) -> str | list[str] | None:
    """Returns a path, or each path of a list, with the home folder in place of a leading ~. Raises
    ValueError if a path begins with $, because an environment variable can have a different value
    in each shell."""
    if isinstance(path, list):
        return [str(expand_path(each)) for each in path]
    if path is not None and path.startswith("$"):
        raise ValueError("variables are not replaced here; write the path itself")
    return path and os.path.expanduser(path)


def check_template(template: str | None) -> str | None:
    """Returns a prompt template unchanged. Raises ValueError if the template does not contain
    {prompt} exactly once, or if it contains another placeholder."""
    if template is None:
        return None
    doubled = "; a brace that is meant as one is written twice: {{ or }}"
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:  # a brace without its partner
        raise ValueError(f"not a template: {error}{doubled}") from error
    places = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    if places != [("prompt", "", None)]:
        raise ValueError(f"a template has the place {{prompt}} once, and no other{doubled}")
    return template
