"""Which tests reach which lines: found once a test file, on the package as it stands, and kept until it changes."""

from __future__ import annotations

import ast
import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutation import lines
from mutation.judge import Checkout
from mutation.sites import Mutant

# what it measures of a process moves with what else the machine does (docs/results.md), so its failures say nothing
UNSTEADY = {"tests/megatron/test_offload.py::test_the_process_gives_memory_back"}
FILE_S = 600.0  # that following one file may take


class Reach:
    """Tests by the lines of the package that they reach, and how long each took."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._files: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def follow(self, checkout: Checkout, test_file: str) -> None:
        """Runs a file of tests and keeps what it reaches; nothing where that is known."""
        text = _text(checkout.folder, test_file)
        if self._files.get(test_file, {}).get("text") == text:
            return
        with tempfile.TemporaryDirectory() as folder:
            found = checkout.run([test_file], FILE_S, lines=Path(folder), first=False)
            reached = lines.read(Path(folder))
        begun = found["begun"]
        by_test: dict[str, Any] = {}
        for number, files in reached.items():
            if number and begun[number - 1] in found["tests"]:
                by_test[begun[number - 1]] = {name: sorted(numbers) for name, numbers in files.items()}
        failed = [f"{test} {error}: {message}" for test, error, message in found["failed"]]
        if found["code"] is None:
            failed.append(f"{(begun or ['collection'])[-1]} was not done after {FILE_S:.0f} s")
        self._files[test_file] = {"text": text, "seconds": found["tests"], "reached": by_test, "failed": failed}
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        self._kept.write_text(json.dumps(self._files))
        took = sum(found["tests"].values())
        print(f"followed {test_file}: {len(found['tests'])} tests, {took:.1f} s, failed: {failed}", flush=True)

    def text_of(self, test: str) -> str:
        """What tells the file of a test, as it was followed, from its other versions."""
        return str(self._files[test.partition("::")[0]]["text"])

    def named(self, said: str) -> str | None:
        """The test that passes on the package as it stands and that a verdict's words begin with, or None."""
        tests = [test for file in self._files.values() for test in file["seconds"] if said.startswith(f"{test} ")]
        return max(tests, key=len, default=None)

    def tests_for(self, folder: Path, mutant: Mutant) -> list[tuple[float, str]]:
        """Seconds and names of the tests that reach a mutant, quickest first.

        A line that runs as its file is imported is reached by every test that reaches a function of the file, and
        by those whose own file imports it.
        """
        wanted = statement_of((folder / mutant.file).read_text(), mutant)
        module = mutant.file.removesuffix(".py").replace("/", ".")
        found = []
        for name, file in self._files.items():
            if not (folder / name).exists():
                continue
            names_it = wanted is None and module in _imports(folder / name)
            for test in file["seconds"].keys() - UNSTEADY:
                here = set(file["reached"].get(test, {}).get(mutant.file, ()))
                if names_it or (here and (wanted is None or here & wanted)):
                    found.append((file["seconds"][test], test))
        return sorted(found)


def statement_of(source: str, mutant: Mutant) -> set[int] | None:
    """The lines of the statement that a mutant is in, of a compound one those of its head; None where it runs at the
    import."""
    tree = ast.parse(source)
    inner: ast.stmt | None = None
    in_function = False
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or node.lineno):
            head = range(node.lineno, _head_end(node) + 1)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and mutant.line not in head:
                in_function = True
            inner = node
    if inner is None or not in_function:
        return None
    return set(range(inner.lineno, _head_end(inner) + 1))


def _head_end(node: ast.stmt) -> int:
    bodies: Iterable[Any] = (getattr(node, name, None) for name in ("body", "cases"))
    starts = [body[0].lineno if hasattr(body[0], "lineno") else body[0].pattern.lineno for body in bodies if body]
    return max(node.lineno, min(starts) - 1) if starts else (node.end_lineno or node.lineno)


def _text(folder: Path, test_file: str) -> str:
    """Tells a file of tests, and the package whose lines it reaches, from their other versions."""
    followed = (path for name in lines.FOLLOWED for path in folder.glob(f"{name.strip('/')}/**/*.py"))
    found = hashlib.sha256((folder / test_file).read_bytes())
    for path in sorted(followed):
        found.update(path.read_bytes())
    return found.hexdigest()


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
