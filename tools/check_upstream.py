"""Names what another release of megatron-core or SGLang changes of what this project uses. Nothing is installed or run.

    .venv/bin/pip download --no-deps megatron-core==0.19.2
    python tools/check_upstream.py megatron_core-0.19.2-*.whl

Both releases are read as source, from wheels or from the folders they are installed in: by default the given one is
held against the one that this project's environments have. What is used is read from the project's own source:
imports, calls with their arguments, members of what is made or annotated, methods that are overridden, what is
substituted on a CPU, and SGLang's paths, bodies and flags; what cannot be read there is declared in
tools/upstream/declared.py. docs/upstreams.md says what is compared and what is not.

Exit status: 0 nothing that is used has changed; 1 something has; 2 no release can be read there, or they are of two
upstreams.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
from pathlib import Path

from upstream import table
from upstream.compare import Comparison
from upstream.declared import CONCRETE
from upstream.definitions import Definitions
from upstream.own_source import PACKAGE
from upstream.project import uses_of
from upstream.release import Release, open_release, pinned_release

from megatron_stare.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        after = open_release(args.release)
        before = open_release(args.against) if args.against else pinned_release(after.distribution, ROOT)
        return check(before, after, args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", type=Path, help="wheel of the other release, or the folder it is installed in")
    parser.add_argument(
        "--against", type=Path, metavar="RELEASE", help="what to hold it against, instead of the pinned"
    )
    parser.add_argument(
        "--uses", type=Path, action="append", default=[], metavar="FILE.py", help="read this too for what is used"
    )
    parser.add_argument("--alone", action="store_true", help="read the files of --uses, and not the project")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print a section of docs/upstreams.md")
    args = parser.parse_args(arguments)
    if args.alone and not args.uses:
        parser.error("--alone needs --uses")
    return args


def check(before: Release, after: Release, args: argparse.Namespace) -> int:
    """Compares and prints. Returns the exit status; raises UserError where the two cannot be compared."""
    if before.distribution != after.distribution:
        raise UserError(
            f"{after.title} cannot be held against {before.title}",
            where=str(args.release),
            fix="name two releases of one upstream",
        )
    if not args.alone and not (ROOT / PACKAGE).is_dir():
        raise UserError(
            "the project's source is not beside this tool, so nothing would be found to be used",
            where=str(ROOT),
            fix="run it in a checkout, or name what uses the upstream with --uses and --alone",
        )
    for file in args.uses:
        _check_python(file)
    old, new = Definitions(before), Definitions(after)
    uses = uses_of(ROOT, old, tuple(file.resolve() for file in args.uses), args.alone)
    found = Comparison(old, new, CONCRETE).findings(uses)
    if args.json:
        about = {"upstream": after.distribution, "from": before.version, "to": after.version, "uses": len(uses)}
        unread = sorted({*old.unread, *new.unread})
        print(
            json.dumps({**about, "findings": [dataclasses.asdict(each) for each in found], "unread": unread}, indent=1)
        )
    elif args.markdown:
        print(table.markdown(before, after, found), end="")
    else:
        print(table.terminal(before, after, found, len(uses)), end="")
    for file in sorted({*old.unread, *new.unread}):
        print(f"warning: {file} cannot be read by this Python, so its names count as absent", file=sys.stderr)
    return 1 if found else 0


def _check_python(file: Path) -> None:
    try:
        ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"this is not a Python file: {error}", where=str(file), fix="name one that uses the upstream"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
