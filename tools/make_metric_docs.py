"""Writes the glossary of metrics, from what is declared beside the code that logs them:
docs/metrics.md for people, and for sinks glossary.json of the package. Writes the table of the
rules that metrics are held to into docs/guards.md.

python tools/make_metric_docs.py            # writes all three
python tools/make_metric_docs.py --check    # exits 1 if one is out of date
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.observability.metrics.glossary import FILE
from megatron_stare.observability.metrics.rules import RULES
from megatron_stare.records.metric import Metric

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_stare"
PAGE = ROOT / "docs" / "metrics.md"
RULES_PAGE = ROOT / "docs" / "guards.md"
BEGIN, END = "<!-- rules: written by tools/make_metric_docs.py -->\n", "<!-- /rules -->\n"
# metrics and settings, in a cell
NAMED = re.compile(
    rf"\b(?:[a-z_]+/[a-z][a-z_0-9]*|(?:{'|'.join(Config.model_fields)})(?:\.[a-z_0-9]+)+)\b"
)

INTRO = """# Metrics

What a run logs of every step, in `metrics.jsonl`, TensorBoard and the report. This page is made by
`tools/make_metric_docs.py` from the `METRICS` beside the code that logs them; a test whose run logs
another name fails.

- A **share** lies between 0 and 1. What a unit step is:
  [diagnostics.md](diagnostics.md#the-entropy-forecast).
- A token **carries loss** if the policy sampled it, in a response whose answer was verified.
- **L+** are the rare tokens of positive advantage, **L-** those of negative advantage; **U+** and
  **U-** are the others of either sign. In `stare/` rare is the share P of highest surprisal (-ln p
  of the sampled token), in `forecast/` what lies past the critical surprisal s* of its position.
- All numbers are those of the whole batch, the same in every layout. A metric that does not apply
  to a run is missing; NaN stands where there was nothing to measure.
- An **alert** is what the console and every [sink](sinks.md) are told, by
  [these rules](guards.md#rules). How to read the `forecast/`, `agreement/` and `signal/` metrics is
  in [diagnostics.md](diagnostics.md).

[A metric of your own](howto/metric.md) needs no place here. Results of evaluations (`eval.jsonl`)
are in [tasks.md](tasks.md#what-it-gives).
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes docs/metrics.md, glossary.json and the table of rules."
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if one is out of date"
    )
    args = parser.parse_args()
    metrics = declared()
    files = {PAGE: page(metrics), FILE: listed(metrics), RULES_PAGE: rules_page()}
    if args.check:
        return int(
            any(not file.exists() or file.read_text() != text for file, text in files.items())
        )
    for file, text in files.items():
        file.write_text(text)
    return 0


def declared() -> list[Metric]:
    """Every METRICS of the package: sections by name, within them as they are declared.

    Raises:
        ValueError: a name is declared twice.
    """
    found: dict[str, Metric] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if not re.search(r"^METRICS = ", file.read_text(), re.MULTILINE):
            continue
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for metric in importlib.import_module(module).METRICS:
            if metric.name in found:
                raise ValueError(f"{metric.name} is declared twice, the second time in {module}")
            found[metric.name] = metric
    return sorted(found.values(), key=section)


def section(metric: Metric) -> str:
    """Section of a metric: its name up to the slash."""
    return metric.name.partition("/")[0]


def page(metrics: Iterable[Metric]) -> str:
    """The whole page."""
    parts = [INTRO]
    for name, members in groupby(metrics, key=section):
        rows = [
            f"| `{m.name}` | {m.unit} | {cell(m.meaning)} | {cell(m.healthy)} |" for m in members
        ]
        parts.append(
            "\n".join(
                [
                    f"## {name}\n",
                    "| metric | unit | meaning | healthy |",
                    "|---|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


def listed(metrics: Iterable[Metric]) -> str:
    """The same as JSON, a line a metric."""
    return (
        "[\n" + ",\n".join(json.dumps(dataclasses.asdict(metric)) for metric in metrics) + "\n]\n"
    )


def rules_page() -> str:
    """The page of the rules as it is, with their table in its place."""
    before, _, rest = RULES_PAGE.read_text().partition(BEGIN)
    rows = []
    for rule in RULES.values():
        figures = ", ".join(f"`{name}`" for name in rule.when.metrics)
        when = f"{rule.when}; {rule.dtype} alone" if rule.dtype else str(rule.when)
        settings = f"`{rule.setting}`" if rule.setting else ""
        rows.append(f"| {rule.name} | {figures} | {when} | {rule.action} | {settings} |")
    table = "\n".join(
        ["| rule | figure | when it is | then | settings |", "|---|---|---|---|---|", *rows]
    )
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


def cell(text: str) -> str:
    """Names of metrics and settings are set as code; a bar would end the cell."""
    return NAMED.sub(r"`\g<0>`", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
