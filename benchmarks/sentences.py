"""Draws sentences of the pages and docstrings for a reader who marks which of them took a second
reading.

    python benchmarks/sentences.py --seed 36 --out sentences.json

Half are drawn from docs/ and README.md, half from docstrings of the package. The reader sees only
the file's name and the sentence, and sets `again` to true or false. Marks that were given are in
benchmarks/results/sentences.json. Its part `beside_others` counts the marks of readers who got
sentences of this project together with sentences of TRL, verl, slime and Megatron-core, or of
PyTorch, NumPy and CPython, without names.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = {"docs/configuration.md", "docs/metrics.md"}  # of docstrings and of METRICS


def sentences(text: str) -> list[str]:
    """Returns the sentences of a paragraph that have at least six words."""
    found = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", " ".join(text.split()))
    return [each for each in found if len(each.split()) >= 6]


def of_page(page: Path) -> list[str]:
    """Returns the sentences of a page's paragraphs and list items; tables and code are left out."""
    found, paragraph, code = [], [], False
    for line in [*page.read_text().splitlines(), ""]:
        code ^= line.lstrip().startswith("```")
        begins = re.match(r"\s*(?:[-*]|\d+\.) (.*)", line)
        other = not line.strip() or line.startswith(("|", "#", "!", "<", "`" * 3, "    "))
        if begins or other or code:
            found += sentences(" ".join(paragraph))
            paragraph = [begins[1]] if begins and not code else []
        else:
            paragraph.append(line)
    return found


def of_module(module: Path) -> list[str]:
    """Returns the sentences of a module's docstrings, up to their first section or formula."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if re.match(r"(Args|Raises|Returns):", paragraph):
                    break
                if not paragraph.startswith("    "):
                    found += sentences(paragraph)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = subprocess.check_output(
        ["git", "ls-files", "README.md", "docs/*.md", "megatron_stare/*.py"], cwd=ROOT, text=True
    ).split()
    pages = [
        (f, s) for f in files if f.endswith("md") and f not in GENERATED for s in of_page(ROOT / f)
    ]
    modules = [(f, s) for f in files if f.endswith("py") for s in of_module(ROOT / f)]
    draw = random.Random(args.seed)
    drawn = [*draw.sample(pages, args.number // 2), *draw.sample(modules, args.number // 2)]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    told = {
        "commit": commit.strip(),
        "seed": args.seed,
        "drawn_from": {"pages": len(pages), "docstrings": len(modules)},
        "sentences": [{"file": f, "sentence": s, "again": None} for f, s in drawn],
    }
    args.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
