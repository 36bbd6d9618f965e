"""Legibility of the report and the page of responses: contrast of every text in both schemes,
colours for the colour-blind, sizes on a phone, and tokens by keyboard."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.browser import Tab, needs_browser, tab
from support.runs import ROOT
from support.synthetic_runs import synthetic_run

from megatron_stare.observability.report import page as report
from megatron_stare.observability.report.page import write_report
from megatron_stare.observability.report.rollouts_page import write_rollouts
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.rollout_files import rollout_files

READY = """new Promise(done => {
  const look = () => !document.querySelector('.filters') || document.body.dataset.ready
    ? done(true) : setTimeout(look, 5);
  look();
})"""
# visible texts whose contrast with what lies behind them is below WCAG's 4.5
PALE = """(() => {
  const pixel = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const linear = v => v <= 10.31 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement)
      layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const pale = {}, texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, e = text.parentElement;
    if (!text.textContent.trim() || /SCRIPT|OPTION/.test(e.tagName)) continue;
    if (!e.checkVisibility()) continue;
    const style = getComputedStyle(e), under = behind(e);
    const ink = over(rgba(e instanceof SVGElement ? style.fill : style.color), under);
    const [dark, bright] = [light(ink), light(under)].sort((a, b) => a - b);
    const contrast = (bright + .05) / (dark + .05);
    if (contrast < 4.5) pale[`${e.tagName} ${e.className.baseVal ?? e.className}`] = contrast;
  }
  return pale;
})()"""
UNFOLD = "(b => b && b.click())(document.querySelector('.unfold'))"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
COLOUR_BY = "document.querySelectorAll('.by button')[{}].click()"


@pytest.mark.slow
@needs_browser
def test_every_text_stands_out_in_both_schemes(tmp_path: Path) -> None:
    runs = [synthetic_run(tmp_path / kind, kind, 60) for kind in ("held", "collapsed")]
    pages = [
        write_report(runs[:1], tmp_path / "one.html"),
        write_report(runs, tmp_path / "comparison.html"),
        write_rollouts(runs[:1], tmp_path / "rollouts.html"),
    ]

    async def looked() -> dict[str, Any]:
        seen = {}
        async with tab() as here:
            for page in pages:
                for dark in (False, True):
                    await here.open(page, 1280, dark=dark)
                    await here.settled(READY)
                    await here.value(UNFOLD)
                    for by in range(4):
                        await here.value(COLOUR_BY.format(by))
                        seen[f"{page.name} dark={dark} by={by}"] = await here.value(PALE)
        return seen

    seen = asyncio.run(looked())
    assert seen == {key: {} for key in seen} and len(seen) == 24


@pytest.mark.slow
@needs_browser
def test_on_a_phone_axes_have_letters_of_ten_pixels_and_fields_fit(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 60)
    page = write_report([run], tmp_path / "one.html")
    height = """Math.min(...[...document.querySelectorAll('svg .tick')].map(text => {
      const svg = text.closest('svg'), scale = svg.clientWidth / svg.viewBox.baseVal.width;
      return parseFloat(getComputedStyle(text).fontSize) * scale; }))"""
    outside = """[...document.querySelectorAll('.choose label')].filter(label =>
      label.getBoundingClientRect().right > label.parentElement.getBoundingClientRect().right + 1
    ).length"""
    # labels of ticks that run into the next one, or out of the figure
    clipped = """[...document.querySelectorAll('figure.chart')].flatMap(figure => {
      const edge = figure.getBoundingClientRect();
      const boxes = [...figure.querySelectorAll('.tick:not(.name)')]
        .map(t => t.getBoundingClientRect());
      const meet = (a, b) =>
        a.left < b.right && b.left < a.right && Math.abs(a.top - b.top) < 3;
      return boxes.filter((b, i) => b.left < edge.left || b.right > edge.right
        || boxes.slice(0, i).some(other => meet(b, other))); }).length"""

    async def looked() -> list[Any]:
        async with tab() as here:
            await here.open(page, 390, 844)
            await here.value(UNFOLD)
            return [await here.value(each) for each in (height, outside, clipped)]

    size, fields, labels = asyncio.run(looked())
    assert size >= 9.9 and [fields, labels] == [0, 0]


@pytest.mark.slow
@needs_browser
def test_the_keyboard_goes_from_token_to_token(tmp_path: Path) -> None:
    page = write_rollouts([synthetic_run(tmp_path / "run", "held", 60)], tmp_path / "all.html")
    tip = "document.querySelector('.tokens .tip')"

    async def press(here: Tab, key: str) -> None:
        code = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}[key]
        for kind in ("rawKeyDown", "keyUp"):
            await here.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def looked() -> list[Any]:
        seen = []
        async with tab() as here:
            await here.open(page, 1280)
            await here.settled(READY)
            await here.value("[...document.querySelectorAll('.by button')].at(-1).focus()")
            for key in ("Tab", "ArrowRight", "ArrowRight", "ArrowLeft"):
                await press(here, key)
                seen.append(await here.value(f"{tip}.firstChild.textContent.split('\"')[0]"))
            await here.value("document.activeElement.blur()")
            return [*seen, await here.value(f"{tip}.hidden")]

    first, second, third, back, hidden = asyncio.run(looked())
    assert [first, second, third] == [f"token {number} of 21" for number in (1, 2, 3)]
    assert back == second and hidden


# red, green and blue as the colour-blind see them: Machado, Oliveira and Fernandes 2009, severity 1
SEEN = {
    "all colours": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def lab(colour: str, seen: list[list[float]]) -> torch.Tensor:
    """CIELAB of a colour of the style sheet."""
    value = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = torch.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    linear = (torch.tensor(seen, dtype=torch.float32) @ linear).clamp(0, 1)
    to_xyz = [[0.4339, 0.3763, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8727]]
    x, y, z = (torch.tensor(to_xyz) @ linear).pow(1 / 3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_of_lines_differ_for_the_colour_blind() -> None:
    css = (Path(report.__file__).parent / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", part))
        for part in css.split("@media (prefers-color-scheme: dark)", 1)
    )
    for scheme in (light, {**light, **dark}):
        for one, two in (("plus", "minus"), *combinations(("c0", "c1", "c2", "c3"), 2)):
            for whose, seen in SEEN.items():
                apart = float((lab(scheme[one], seen) - lab(scheme[two], seen)).norm())
                assert apart > 15, (one, two, whose, apart)


@pytest.mark.slow
@needs_browser
def test_rows_of_fine_tuning_are_not_called_sampled_or_unverified(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "twin", 60)
    steps = [{"step": step, "loss/policy": 2.0 - step / 60} for step in range(1, 61)]
    for step in steps[19::20]:
        step["heldout/loss"] = step["loss/policy"] + 0.1
    write_atomically(run / "metrics.jsonl", steps)
    file = rollout_files(run / "rollouts")[-1]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row |= {"reward": None, "reward_status": "pending", "answer": ""}
        trained = [mark if mark == " " else "." for mark in row["by_token"]["selected"]]
        row["by_token"]["selected"] = "".join(trained)
    write_atomically(file, rows)
    write_atomically(run / "eval.jsonl", [])

    async def looked() -> list[Any]:
        shown = "document.querySelector('main').innerText"
        marks = "[...document.querySelectorAll('.key i')].filter(i => i.checkVisibility())"
        texts = []
        async with tab() as here:
            for page in (
                write_report([run], tmp_path / "one.html"),
                write_rollouts([run], tmp_path / "all.html"),
            ):
                await here.open(page, 1280)
                await here.settled(READY)
                await here.value(UNFOLD)
                marked = await here.value(f"{marks}.map(i => i.className)")
                texts.append((await here.value(shown), marked))
            assert here.errors == []
        return texts

    (report, marks), (rows_page, others) = asyncio.run(looked())
    page = (tmp_path / "one.html").read_text()
    for text in (report, rows_page):
        for wrong in ("ampled", "erified", "pending", "(answer", "method selects", "L+", "Reward"):
            assert wrong not in text, wrong
    held_out = re.search(r"Held-out loss .*?</figure>", page, re.DOTALL)
    joined = re.findall(r'class="line c0" d="([^"]*)"', held_out[0] if held_out else "")
    assert len(joined) == 1 and joined[0].count("L") == 2  # of steps 20, 40 and 60
    assert "Rows by token" in report and "ROWS TRAINED ON" in rows_page
    assert marks == others == ["rare", "untrained"]


@pytest.mark.slow
@needs_browser
def test_tables_of_the_site_break_no_word_of_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = "<code>agreement.window_of_steps_whose_name_is_long</code>"
    cells = f"<td><code>a.metric</code></td><td>ratio</td><td>a median over {code}</td>"
    name = "<td><code>quickstart</code></td>"
    css = (ROOT / "docs/site.css").read_text()
    page.write_text(
        f"<!doctype html><style>{css} * {{ font: 14px monospace; box-sizing: border-box }}"
        " body { margin: 0 }</style>"
        f'<body class="md-typeset"><table><tr>{cells}{name}</table>'
    )
    lines = """[...document.querySelectorAll('td')].flatMap(cell =>
      [...cell.childNodes].map(node => {
        const range = document.createRange();
        range.selectNodeContents(node);
        return [node.textContent, range.getClientRects().length];
      }))"""

    async def looked() -> Any:
        async with tab() as here:
            await here.open(page, 390)
            return dict(await here.value(lines)), await here.value(OVERFLOW)

    found, wide = asyncio.run(looked())
    assert found["ratio"] == found["quickstart"] == found["a.metric"] == 1 and wide == 0
