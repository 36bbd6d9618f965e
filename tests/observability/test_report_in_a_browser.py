"""The report as a person meets it: no network, no overflow, and a token's numbers under the
pointer."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser, tab
from support.synthetic_runs import synthetic_run

from megatron_stare.observability.report.page import write_report
from megatron_stare.run_dir.rollout_files import Token, read_rollouts, rollout_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser() is None, reason="there is no Chromium here: apt-get install chromium"
    ),
]
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
        options = await here.value("document.querySelectorAll('.tokens option').length")
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
