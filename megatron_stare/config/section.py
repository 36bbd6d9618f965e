"""Defines the base class of all configuration sections, and the checks that several sections
share."""

from __future__ import annotations

from string import Formatter

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Typed, immutable settings of a run. Unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def check_template(template: str | None) -> str | None:
    """Returns a prompt template unchanged. Raises ValueError unless the template contains {prompt}
    exactly once and contains no other placeholder."""
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
