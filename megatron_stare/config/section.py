"""The base of all sections of a configuration, and checks of values that several sections have."""

from __future__ import annotations

from string import Formatter

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Some settings of a run, typed. Unknown keys are refused, and nothing changes once it is
    read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def check_template(template: str | None) -> str | None:
    """A prompt template as it is. Raises ValueError unless it has the place {prompt} once, and no
    other."""
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
