"""Pictures for README and docs: a figure from the committed results, and a run as a person sees it.

python benchmarks/pictures.py                   # docs/pictures/entropy.svg, from benchmarks/results
python benchmarks/pictures.py --run runs/stare --against runs/grpo --log stare.log \\
    --replace /home/me/runs/=runs/              # and screenshots of pages, and the terminal's lines

site.png is the first page of the site, taken by hand. Screenshots want a Chromium (apt-get install
chromium). A page is drawn of copies of the runs, in
which --replace shortens folders; nothing else of them is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from entropy_figure import figure

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.browser import Tab, tab

from megatron_stare.observability.metrics.figures import closing
from megatron_stare.observability.report.page import write_report
from megatron_stare.observability.report.rollouts_page import write_rollouts

PICTURES = Path(__file__).parent.parent / "docs/pictures"
MOST_BYTES = 250_000  # of a picture
COPIED = ("config.yaml", "metrics.jsonl", "eval.jsonl", "starts.jsonl", "rollouts")
LISTED = 4  # steps that the terminal's picture shows at the start, and at the end
COLUMNS, CHARACTER, LINE = 122, 7.3, 18.5  # of the terminal, px
READY = """new Promise(done => {
  const look = () => document.body.dataset.ready ? done(true) : setTimeout(look, 5);
  look();
})"""
# a response in which the gate was open, so that its tokens have weights
WEIGHED = """new Promise(async done => {
  const settled = () => new Promise(d => setTimeout(d, 60));
  for (let i = 0; i < document.querySelectorAll('.row').length; i++) {
    document.querySelectorAll('.row')[i].click(); await settled();
    if (/gate was open/.test(document.querySelector('.why').textContent)) break;
  }
  done(1);
})"""


@dataclass(frozen=True)
class Shot:
    """A picture of a page. then: what a script does first."""

    name: str
    page: str
    width: int
    height: int
    dark: bool = False
    then: str = ""


SHOTS = (
    Shot("report", "report.html", 1280, 900),
    Shot("report-dark", "report.html", 1280, 900, dark=True),
    Shot("report-phone", "report.html", 390, 844),
    Shot("comparison", "comparison.html", 1280, 1330),
    Shot("responses", "rollouts.html", 1280, 680, then=f"{READY}.then(() => {WEIGHED})"),
)


def copied(run: Path, folder: Path, replacements: Sequence[tuple[str, str]]) -> Path:
    """A copy of what pages read of a run, with shortened folders."""
    target = folder / "runs" / run.name
    target.mkdir(parents=True)
    for name in COPIED:
        if (run / name).is_dir():
            shutil.copytree(run / name, target / name)
        elif (run / name).exists():
            shutil.copy(run / name, target / name)
    config = target / "config.yaml"
    config.write_text(shortened(config.read_text(), replacements))
    return target


def shortened(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    """A text with folders replaced."""
    for old, new in replacements:
        text = text.replace(old, new)
    return text


def terminal_lines(log: str, end: str) -> list[str]:
    """Lines of a run's console, without most of its steps, and its closing figures.

    Args:
        log: of the run.
        end: its closing figures, as they are said today.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    steps = [i for i, line in enumerate(lines) if re.match(r"step +\d+/\d+ ", line)]
    first, last = steps[:LISTED], steps[-LISTED:]
    left = f"      ... {len(steps) - 2 * LISTED:,} steps ..."
    trained = next(i for i in range(last[-1], len(lines)) if "trained policy" in lines[i])
    figures = end.split("\n\n")[0].splitlines()
    return [
        *lines[: first[-1] + 1],
        left,
        *lines[last[0] : trained + 1],
        *figures,
    ]


def terminal(lines: Sequence[str]) -> str:
    """Lines of a terminal as SVG, of one look on light and dark pages."""
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    width, height = COLUMNS * CHARACTER + 40, LINE * len(lines) + 62
    style = (
        "text{font:12.1px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#d7dade;white-space:pre}.bg{fill:#14161a;stroke:#3a4048}.dim{fill:#818993}"
        ".on{fill:#4cc38a}.end{fill:#fff}"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
        ' aria-label="The lines that a run prints">',
        f"<style>{style}</style>",
        f'<rect class="bg" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="9"/>',
    ]
    for i, colour in enumerate(("#ff7b6e", "#f0a04b", "#4cc38a")):
        out.append(f'<circle cx="{22 + 18 * i}" cy="20" r="5.5" fill="{colour}"/>')
    for number, line in enumerate(lines):
        kind = "dim" if line.lstrip().startswith("...") else "end" if "pass@1" in line else ""
        marked = escape(line).replace("gate on ", '<tspan class="on">gate on </tspan>')
        out.append(
            f'<text class="{kind}" x="20" y="{56 + LINE * number:g}" xml:space="preserve"'
            f' textLength="{CHARACTER * len(line):.1f}">{marked}</text>'
        )
    return "\n".join([*out, "</svg>\n"])


async def shoot(folder: Path, out: Path) -> None:
    """Takes the pictures of the pages in a folder."""
    async with tab() as here:
        await here.call("Emulation.setScrollbarsHidden", hidden=True)
        for shot in SHOTS:
            await here.open(folder / shot.page, shot.width, shot.height, dark=shot.dark)
            if shot.then:
                await here.settled(shot.then)
            await picture(here, out / f"{shot.name}.png")
            assert here.errors == [], here.errors


async def picture(here: Tab, out: Path) -> None:
    """Writes the visible part of the page as PNG."""
    found = await here.call("Page.captureScreenshot", optimizeForSpeed=False)
    out.write_bytes(base64.b64decode(found["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    parser.add_argument("--run", type=Path, help="run directory of the report")
    parser.add_argument("--against", type=Path, help="run directory that it is compared with")
    parser.add_argument("--log", type=Path, help="what the run printed")
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "entropy.svg").write_text(figure())
    replacements = [tuple(each.split("=", 1)) for each in args.replace]
    if args.run:
        if not (args.against and args.log):
            parser.error("--run wants --against and --log too")
        with tempfile.TemporaryDirectory() as folder:
            top, before = Path(folder), Path.cwd()
            run, other = (
                copied(each, top, replacements).relative_to(top)
                for each in (args.run, args.against)
            )
            log = shortened(args.log.read_text(), replacements)
            os.chdir(top)  # so that pages name folders from here
            lines = terminal_lines(log, closing(run))
            write_report([run], top / "report.html")
            write_report([run, other], top / "comparison.html")
            write_rollouts([run], top / "rollouts.html")
            os.chdir(before)
            asyncio.run(shoot(top, args.out))
        (args.out / "terminal.svg").write_text(terminal(lines))
    for file in sorted(args.out.iterdir()):
        size = file.stat().st_size
        print(f"{file}: {size / 1000:.0f} kB{' (too large)' if size > MOST_BYTES else ''}")


if __name__ == "__main__":
    main()
