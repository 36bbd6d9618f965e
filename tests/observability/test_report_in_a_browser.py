"""The report as a person meets it: no network, no overflow, and a token's numbers under the
pointer."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tab, needs_browser, tab
from support.synthetic_runs import synthetic_run

from megatron_stare.observability.report.page import write_report
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.rollout_files import Token, read_rollouts, rollout_files

pytestmark = [pytest.mark.slow, needs_browser]
RESPONSE = 1  # of those in the page
SPAN = "document.querySelectorAll('.run-of-tokens span')[{}]"


async def look(page: Path, responses: int) -> dict[str, Any]:
    """Opens the page at three widths. Returned are what it shows for the tokens of one response,
    what it asked for, and how wide it is."""
    seen: dict[str, Any] = {}
    async with tab() as here:
        for width in (390, 900, 1400):
            await here.open(page, width, dark=width == 900)
            seen[f"overflow {width}"] = await here.value(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        await here.value("document.querySelector('.unfold').click()")
        options = await here.value("document.querySelector('.tokens select').options.length")
        assert options == responses
        await here.value(
            f"(() => {{ const s = document.querySelector('.tokens select'); s.value = {RESPONSE};"
            " s.dispatchEvent(new Event('change')) })()"
        )
        number = await here.value("document.querySelectorAll('.run-of-tokens span').length")
        seen["tips"] = []
        for token in range(number):
            await here.point_at(SPAN.format(token))
            rows = "[...document.querySelectorAll('.tokens .tip:not([hidden]) div')]"
            seen["tips"].append(
                await here.value(
                    f"{rows}.map(d => [d.firstChild.textContent, d.querySelector('b').textContent])"
                )
            )
        shades = (
            "[...document.querySelectorAll('.run-of-tokens span')].map(s => s.style.background)"
        )
        seen["shades"] = await here.value(shades)
        seen["marks"] = await here.value(
            "[...document.querySelectorAll('.run-of-tokens span')].map(s => s.className)"
        )
        await here.point_at("document.querySelector('figure.chart svg')")
        seen["chart"] = await here.value("document.querySelector('figure.chart .tip').textContent")
        seen["requests"], seen["errors"] = here.requests, here.errors
    return seen


def written(value: float) -> str:
    """Writes a number of the file as JavaScript does; a dash for NaN."""
    return "–" if math.isnan(value) else json.dumps(int(value) if value == int(value) else value)


def tip(token: Token, number: int, of: int) -> list[list[str]]:
    """Rows that stand under the pointer at a token, by the stored file."""
    sets = {
        "+": "L+",
        "-": "L−",
        "p": "U+",
        "m": "U−",
        ".": "neither L+ nor L−",
        " ": "not trained on",
    }
    place = {"r": "rare at its position", "c": "common at its position"}.get(token.rare, "")
    return [
        [f"token {number + 1} of {of}", json.dumps(token.text)],
        ["surprisal, nats", written(token.surprisal)],
        ["entropy, nats", written(token.entropy)],
        ["advantage", written(token.advantage)],
        ["weight, times the advantage", written(token.weight)],
        [sets[token.selected], place],
    ]


def test_a_token_under_the_pointer_shows_the_numbers_of_the_file(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 300)
    page = write_report([run], tmp_path / "report.html")
    stored = read_rollouts(rollout_files(run / "rollouts")[-1])
    seen = asyncio.run(look(page, len(stored)))
    tokens = stored[RESPONSE].tokens
    assert seen["tips"] == [tip(token, i, len(tokens)) for i, token in enumerate(tokens)]
    marks = {"+": "plus", "-": "minus", " ": "untrained"}
    assert seen["marks"] == [marks.get(t.selected, "rare" if t.rare == "r" else "") for t in tokens]
    assert "minus" in seen["marks"] and "untrained" in seen["marks"]
    known = [t.surprisal for t in tokens if not math.isnan(t.surprisal)]
    for token, shade in zip(tokens, seen["shades"], strict=True):
        if math.isnan(token.surprisal):
            assert shade == ""
        else:  # halves of a percent may be rounded either way
            share = float(shade.split("%")[0].split()[-1])
            assert share == pytest.approx(72 * token.surprisal / max(known), abs=0.51)
    assert seen["chart"].startswith("step")
    assert seen["errors"] == []
    assert set(seen["requests"]) == {page.resolve().as_uri()}
    assert [seen[f"overflow {width}"] for width in (390, 900, 1400)] == [0, 0, 0]


def test_two_runs_side_by_side_fit_a_telephone(tmp_path: Path) -> None:
    runs = [synthetic_run(tmp_path / kind, kind, 60) for kind in ("closed", "twin")]
    page = write_report(runs, tmp_path / "comparison.html")

    async def overflow() -> Any:
        async with tab() as here:
            await here.open(page, 390)
            return await here.value(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            ), here.errors

    assert asyncio.run(overflow()) == (0, [])


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
HEIGHT = "document.documentElement.scrollHeight"
OPEN = "[...document.querySelectorAll('.part')].filter(p => p.open).map(p => p.id)"
INSIDE = "[...document.querySelectorAll('.part .inside')]"
FIRST = "['.lead', '.card:nth-child(4)', '.problems', 'figure.chart:nth-child(2)']"
# the place on the screen of what most readers want, in pixels
BOTTOMS = f"""Object.fromEntries({FIRST}
  .map(s => [s, document.querySelector(s).getBoundingClientRect().bottom]))"""


async def opened(here: Tab) -> Any:
    """The parts that are open, once any is."""
    return await here.settled(
        f"new Promise(done => {{ const look = () => {OPEN}.length ? done({OPEN})"
        " : setTimeout(look, 5); look(); })"
    )


def test_folded_the_page_is_short_and_its_first_screen_has_the_outcome(tmp_path: Path) -> None:
    runs = [synthetic_run(tmp_path / kind, kind, 300) for kind in ("held", "collapsed")]
    pages = [write_report(runs[:1], tmp_path / "one.html")]
    pages.append(write_report(runs, tmp_path / "comparison.html"))

    async def looked() -> list[Any]:
        seen = []
        async with tab() as here:
            for page in pages:
                await here.open(page, 1280, 900)
                seen.append([await here.value(HEIGHT), await here.value(OVERFLOW)])
                seen[-1].append(await here.value(BOTTOMS) if page == pages[0] else {})
                await here.open(page, 390, 844, dark=True)
                seen[-1] += [await here.value(OVERFLOW), here.errors]
                await here.value("document.querySelector('.unfold').click()")
                seen[-1].append(await here.value(OVERFLOW))
        return seen

    for height, wide, bottoms, narrow, errors, unfolded in asyncio.run(looked()):
        assert height < 3000 and [wide, narrow, unfolded] == [0, 0, 0] and errors == []
        assert all(bottom < 900 for bottom in bottoms.values()), bottoms


def test_contents_unfold_what_they_name_and_paper_shows_all(tmp_path: Path) -> None:
    page = write_report([synthetic_run(tmp_path / "run", "held", 60)], tmp_path / "a.html")

    async def looked() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        async with tab() as here:
            await here.open(page, 1280, 900)
            seen["parts"] = await here.value(f"{INSIDE}.length")
            seen["at first"] = await here.value(OPEN)
            link = "[...document.querySelectorAll('.contents a')].find(a => a.hash === '#times')"
            await here.value(f"{link}.click()")
            seen["clicked"] = await opened(here)
            place = "document.getElementById('times').getBoundingClientRect().top"
            seen["place"] = await here.value(place)
            seen["sticky"] = await here.value(
                "document.querySelector('.contents').getBoundingClientRect().top"
            )
            await here.value("document.getElementById('times').open = false")
            await here.value(f"{link}.click()")  # once more, with the address unchanged
            seen["again"] = await opened(here)
            # a browser that prints without telling the page, and one that tells it
            await here.call("Emulation.setEmulatedMedia", media="print")
            seen["printed"] = await here.value(
                f"{INSIDE}.filter(e => e.checkVisibility() && e.offsetHeight > 20).length"
            )
            await here.call("Emulation.setEmulatedMedia", media="")
            await here.value("dispatchEvent(new Event('beforeprint'))")
            seen["told"] = await here.value(
                "[...document.querySelectorAll('details')].every(d => d.open)"
            )
            await here.value("dispatchEvent(new Event('afterprint'))")
            seen["after"] = await here.value(OPEN)
        return seen

    seen = asyncio.run(looked())
    assert seen["at first"] == [] and seen["clicked"] == seen["again"] == ["times"]
    assert seen["after"] == ["times"]
    assert seen["parts"] > 5 and seen["printed"] == seen["parts"] and seen["told"]
    assert seen["sticky"] == 0 < seen["place"] < 900


def test_the_view_by_token_opens_on_a_response_with_selected_tokens(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 60)
    file = rollout_files(run / "rollouts")[-1]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in (rows[0], rows[2], rows[3]):
        row["by_token"]["selected"] = "".join(
            " " if mark == " " else "." for mark in row["by_token"]["selected"]
        )
    write_atomically(file, rows)
    none = synthetic_run(tmp_path / "none", "twin", 60)
    other = rollout_files(none / "rollouts")[-1]
    write_atomically(other, [rows[0], rows[2]])
    options = "[...document.querySelectorAll('.tokens select')[0].options].map(o => o.value)"
    which = "document.querySelectorAll('.tokens select')[1]"

    async def looked() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        async with tab() as here:
            await here.open(write_report([run], tmp_path / "a.html"), 1280)
            await here.value("document.querySelector('.unfold').click()")
            seen["first"] = await here.value(options)
            seen["marks"] = await here.value(
                "document.querySelectorAll('.run-of-tokens .plus, .run-of-tokens .minus').length"
            )
            seen["offered"] = await here.value(f"[...{which}.options].map(o => o.textContent)")
            await here.value(
                f"{which}.value = 'all', {which}.dispatchEvent(new Event('change')), 0"
            )
            seen["all"] = await here.value(options)
            seen["kept"] = await here.value("document.querySelector('.tokens select').value")
            await here.open(write_report([none], tmp_path / "b.html"), 1280)
            seen["none"] = await here.value(options)
            seen["hidden"] = await here.value("document.querySelector('.which').hidden")
            seen["errors"] = here.errors
        return seen

    seen = asyncio.run(looked())
    assert seen["first"] == ["1"] and seen["marks"] > 0 and seen["kept"] == "1"
    assert seen["offered"] == ["with selected tokens (1)", "all (4)"]
    assert seen["all"] == ["0", "1", "2", "3"]
    assert seen["none"] == ["0", "1"] and seen["hidden"] and seen["errors"] == []
