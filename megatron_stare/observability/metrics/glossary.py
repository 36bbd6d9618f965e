"""Returns the meanings of metrics by name. The code that logs a metric declares the metric's
meaning.

tools/make_metric_docs.py writes all meanings to `glossary.json` and docs/metrics.md. Code that
shows metrics reads `glossary.json` and need not import all code that logs metrics.
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
    """Returns every declared metric by its name. In a name, a trailing `<n>` stands for a number,
    and `<tool>` stands for the name of a tool."""
    return {each["name"]: Metric(**each) for each in json.loads(FILE.read_text())}


def explained(name: str) -> Metric | None:
    """Returns the glossary entry for a logged metric, or None for a user's own metric."""
    tried = (name, re.sub(r"\d+$", "<n>", name), re.sub(r"(?<=_of_).+$", "<tool>", name))
    return next((found for each in tried if (found := glossary().get(each))), None)
