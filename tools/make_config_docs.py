"""Writes docs/configuration.md from the typed configuration, so that the page cannot say anything
else than the code.

python tools/make_config_docs.py            # writes the page
python tools/make_config_docs.py --check    # exits 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_stare.config.schema import Config
from megatron_stare.registry import Extension

NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true \\| false",
    type(None): "null",
} | {
    list[int]: "list of integer",
    Extension: "name",
}
PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRO = """# Configuration

A run is one YAML file of the sections below; any setting may be replaced on the command line as
`section.key=value`. Unknown keys are refused with a suggestion. `--dry-run` checks all that a run
checks before its workers start - model, prompts, method, engine, verifier (in a process of its
own), run directory, what is to be resumed - and prints the whole resolved configuration, with
absolute paths; the same text is written to `config.yaml` in the run directory. A cluster to be
joined is asked where it would place the run. What only starting can show is left: whether servers
to be joined answer, and whether memory suffices. This page is made by `tools/make_config_docs.py`.

`algorithm` holds `name` (a method's short name, or the dotted path of your own) and the method's
own settings, which are the documented fields of its class in `megatron_stare/algorithms/`.
`algorithm: stare` is short for `algorithm: {name: stare}`.

A setting of type **name** is a short name or a path in Python, or `{name: ..., setting: value}`
with settings of its own: those are the keyword-only parameters of the function or class that it
names. See [howto](howto/README.md).

## Layers

A file may lie over others. `defaults` lists them, the lowest first; the file itself lies on top,
and the command line on top of that.

```yaml
defaults: [quickstart.yaml, algorithm/gtpo.yaml]
algorithm:
  alpha2: 0.2
rollout:
  max_prompt_tokens: 16
  max_new_tokens: 32
```

- A name is a file relative to the one that names it, or a config that ships (`configs/` may be left
  out). So every method of `configs/algorithm/` is a layer, with the sizes and rates it was
  published with.
- Sections are merged key by key, sections in them too; a list is one value. Naming another method
  (`algorithm: gtpo`, or a `name` in the section) lets go of all settings of the method beneath;
  without a `name` they are changed.
- Layers may have layers. One that is named more than once counts where it is named first.
- Paths that a config which ships sets, and which ship too, hold in any folder; all others are
  relative to the current one.
- What is wrong is blamed on the layer that set it. `--dry-run` prints what all of them come to,
  without `defaults`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/configuration.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the page is out of date"
    )
    args = parser.parse_args()
    text = page()
    if args.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for name, info in Config.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(f"## {name}\n\n{paragraph(section)}\n\n{table(section)}")
            parts += below(name, section)
    return "\n".join(parts)


def paragraph(section: type[BaseModel]) -> str:
    """Wraps a section's docstring to the width of a page."""
    return textwrap.fill(
        " ".join((section.__doc__ or "").split()),
        100,
        break_long_words=False,
        break_on_hyphens=False,
    )


def below(name: str, section: type[BaseModel]) -> list[str]:
    """The sections in a section, and those in them."""
    parts = []
    for key, each in inner(section).items():
        parts.append(f"### {name}.{key}\n\n{paragraph(each)}\n\n{table(each)}")
        parts += below(f"{name}.{key}", each)
    return parts


def inner(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The keys of a section that hold sections, or lists of them, and what stands there."""
    found = {}
    for key, info in section.model_fields.items():
        held = info.annotation
        if get_origin(held) is list:
            held = next(iter(get_args(held)), None)
        if isinstance(held, type) and issubclass(held, BaseModel):
            found[key] = held
    return found


def table(section: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, info in section.model_fields.items():
        rows.append(f"| `{key}` | {kind(info)} | {default(info)} | {info.description} |")
    return "\n".join(rows) + "\n"


def kind(info: FieldInfo) -> str:
    """The type and its bounds, as a reader of YAML would say it."""
    annotation = info.annotation
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{spelled(choice)}`" for choice in get_args(annotation))
    if get_origin(annotation) is list:
        inner = get_args(annotation)[0]
        if get_origin(inner) is Literal:
            return "list of " + ", ".join(f"`{spelled(choice)}`" for choice in get_args(inner))
        return (
            "list of sections"
            if issubclass(inner, BaseModel)
            else f"list of {NAMES.get(inner, str(inner))}"
        )
    if get_origin(annotation) is dict:
        return "text by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    options = get_args(annotation) or (annotation,)
    bounds = [b for b in (bound(m) for m in info.metadata) if b]
    return " or ".join(NAMES.get(option, str(option)) for option in options) + (
        f" {', '.join(bounds)}" if bounds else ""
    )


def bound(limit: Any) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (value := getattr(limit, attribute, None)) is not None:
            return f"{sign} {value}"
    return ""


def default(info: FieldInfo) -> str:
    """Default of a setting, in Markdown; "see below" for a section whose defaults are those of its
    own table."""
    if info.is_required():
        return "required"
    value = info.default
    return (
        "see below"
        if isinstance(value, BaseModel) and value == type(value)()
        else f"`{spelled(value)}`"
    )


def spelled(value: Any) -> str:
    """Spells a value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {spelled(each)}" for key, each in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
