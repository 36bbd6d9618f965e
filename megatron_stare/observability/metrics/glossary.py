"""Meanings of metrics by name, as declared beside the code that logs them.

tools/make_metric_docs.py makes `glossary.json` together with docs/metrics.md, so that code which
shows a metric need not import all code that logs metrics.
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
    """Returns every declared metric by its name; a trailing `<n>` stands for a number,
    `<tool>` for the name of a tool."""
    return {each["name"]: Metric(**each) for each in json.loads(FILE.read_text())}


def explained(name: str) -> Metric | None:
    """Returns the entry of a logged metric; None for a user's own metric."""
    tried = (name, re.sub(r"\d+$", "<n>", name), re.sub(r"(?<=_of_).+$", "<tool>", name))
    return next((found for each in tried if (found := glossary().get(each))), None)
