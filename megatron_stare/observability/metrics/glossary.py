"""Meanings of metrics by name, as declared beside the code that logs them.

`glossary.json` is made with docs/metrics.md by tools/make_metric_docs.py, since whoever shows a
metric must not import all that logs some.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from megatron_stare.records.metric import Metric

FILE = Path(__file__).with_name("glossary.json")


@cache
def glossary() -> dict[str, Metric]:
    """Every declared metric by its name; `<n>` at the end of one stands for a number."""
    return {each["name"]: Metric(**each) for each in json.loads(FILE.read_text())}


def explained(name: str) -> Metric | None:
    """The entry of a metric as it is logged; None of one that is a user's own."""
    return glossary().get(name) or glossary().get(re.sub(r"\d+$", "<n>", name))
