"""The page of sampled responses as a person meets it: filters, a long list, tokens and their
reasons, two runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tab, needs_browser, tab
from support.synthetic_runs import synthetic_run

from megatron_stare.observability.report.rollouts_page import write_rollouts
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.rollout_files import read_rollouts, rollout_file

pytestmark = [pytest.mark.slow, needs_browser]
STEPS, PER_STEP = 40, 50
READY = """new Promise(done => {
  const look = () => document.body.dataset.ready ? done(true) : setTimeout(look, 5);
  look();
})"""
# sets a field and waits until the list counts anew
SET = """new Promise(done => {{
  const form = document.querySelector('.filters'), field = form.elements['{name}'];
  if (field.type === 'checkbox') field.checked = {value}; else field.value = {value};
  new MutationObserver((_, seen) => {{
    const text = form.querySelector('.count').textContent;
    if (/ of /.test(text)) {{ seen.disconnect(); done(text); }}
  }}).observe(form.querySelector('.count'), {{ childList: true }});
  form.dispatchEvent(new Event('input'));
}})"""
# clicks on a row and waits for its response
OPEN = """new Promise(done => {{
  new MutationObserver((_, seen) => {{ seen.disconnect(); setTimeout(done, 0); }})
    .observe(document.querySelector('.facts'), {{ childList: true }});
  document.querySelectorAll('.row')[{row}].click();
}})"""
# waits until a question is shown
ASKED = """new Promise(done => {{
  const asked = () => document.querySelector('.one:not([hidden]) .asked').textContent;
  const look = () => asked().startsWith('{prompt}') ? done(true) : setTimeout(look, 5);
  look();
}})"""
TEXT = "document.querySelector('{}').textContent"


def stored_run(folder: Path, kind: str, seed: int = 1) -> Path:
    """A run that stored PER_STEP responses of every step; each tenth step has the numbers of its
    tokens."""
    run = synthetic_run(folder, kind, STEPS, seed)
    numbered = [
        json.loads(line) for line in rollout_file(run / "rollouts", STEPS).read_text().splitlines()
    ]
    for step in range(1, STEPS + 1):
        rows = []
        for i in range(PER_STEP):
            row = {
                **numbered[i % 4],
                "step": step,
                "cursor": step * PER_STEP + i,
                "prompt": f"{step}+{i}=",
            }
            row |= {
                "reward": float((i + step * seed) % 3 == 0),
                "answer": str(step + i),
                "tokens": 10 + i,
            }
            row["response"] = f"it is {step + i}" + (" </script><b>bold</b>" if i == 7 else "")
            if step % 10:
                del row["by_token"]
            rows.append(row)
        write_atomically(rollout_file(run / "rollouts", step), rows)
    return run


async def set_field(here: Tab, name: str, value: str) -> str:
    return await here.settled(SET.format(name=name, value=value))


def test_the_list_filters_searches_and_shows_what_the_files_hold(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", "held")
    page = write_rollouts([run], tmp_path / "page.html")
    files = [read_rollouts(rollout_file(run / "rollouts", step)) for step in range(1, STEPS + 1)]
    responses = [response for file in files for response in file]
    number = len(responses)

    async def look() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        async with tab() as here:
            for width in (390, 900, 1400):
                await here.open(page, width, dark=width == 900)
                await here.settled(READY)
                seen[f"overflow {width}"] = await here.value(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
            seen["chosen only"] = [
                await here.value(TEXT.format(s)) for s in (".count", ".only-selected")
            ]
            seen["opened"] = await here.value("document.querySelectorAll('.shown .plus').length")
            await here.value("document.querySelector('.only-selected button').click()")
            seen["all"] = await here.value(TEXT.format(".count"))
            seen["note"] = await here.value("document.querySelector('.only-selected').hidden")
            seen["rows"] = await here.value("document.querySelectorAll('.row').length")
            seen["first"] = await here.value(TEXT.format(".row"))
            seen["steps"] = await set_field(here, "step-from", "'20'")
            seen["rewards"] = await set_field(here, "reward-from", "'1'")
            seen["tokens"] = await set_field(here, "tokens-to", "'19'")
            for name in ("step-from", "reward-from", "tokens-to"):
                await set_field(here, name, "''")
            seen["search"] = await set_field(here, "search", "'SCRIPT><B'")
            seen["nothing"] = await set_field(here, "search", "'no such words'")
            await set_field(here, "search", "''")
            seen["numbers"] = await set_field(here, "numbers", "true")
            await set_field(here, "numbers", "false")
            await set_field(here, "order", "'step'")
            await here.settled(OPEN.format(row=0))
            seen["oldest"] = await here.value(TEXT.format(".facts"))
            seen["plain"] = await here.value("document.querySelector('.tokens').className")
            await set_field(here, "search", "'40+7='")
            await here.settled(ASKED.format(prompt="40+7="))
            seen["markup"] = await here.value("document.querySelectorAll('.shown b').length")
            seen["chosen"] = await here.value(TEXT.format(".facts"))
            seen["why"] = await here.value(
                "[...document.querySelectorAll('.why li')].map(l => l.textContent)"
            )
            spans = "document.querySelectorAll('.run-of-tokens span')"
            seen["marks"] = await here.value(f"[...{spans}].map(s => s.className)")
            chosen = next(
                (i for i, mark in enumerate(seen["marks"]) if mark in ("plus", "minus")), 0
            )
            await here.point_at(f"{spans}[{chosen}]")
            seen["tip"] = await here.value(TEXT.format(".tokens .tip:not([hidden])"))
            seen["requests"], seen["errors"] = here.requests, here.errors
        return seen

    seen = asyncio.run(look())
    assert [seen[f"overflow {width}"] for width in (390, 900, 1400)] == [0, 0, 0]
    assert seen["errors"] == [] and set(seen["requests"]) == {page.resolve().as_uri()}
    assert 5 <= seen["rows"] <= 40  # of the thousands, those in sight
    assert seen["first"].startswith(f"{STEPS}+0=")  # the newest step first
    evaluated = 4  # two evaluations of two samples each, without tokens

    def told(kept: int) -> str:
        return f"{kept:,} of {number + evaluated:,} responses"

    numbered = STEPS // 10 * PER_STEP  # all of those have selected tokens
    assert seen["chosen only"][0] == told(numbered) and seen["opened"] > 0
    assert f", {numbered} of {number + evaluated:,}. Show all" in seen["chosen only"][1]
    assert seen["all"] == told(number + evaluated) and seen["note"]
    late = [r for r in responses if r.step >= 20]
    right = [r for r in late if r.reward is not None and r.reward >= 1]
    assert seen["steps"] == told(len(late) + 2)  # and the later evaluation
    assert seen["rewards"] == told(len(right) + 1)
    assert seen["tokens"] == told(sum(r.record["tokens"] <= 19 for r in right))
    assert seen["search"] == told(STEPS) and seen["nothing"] == told(0)
    assert seen["numbers"] == told(STEPS // 10 * PER_STEP)
    # the first evaluation
    assert seen["oldest"].startswith("step 0 · reward") and "plain" in seen["plain"]
    (wanted,) = [r for r in responses if r.prompt == "40+7="]
    assert seen["markup"] == 0 and seen["chosen"].startswith(
        f"step 40 · prompt {40 * PER_STEP + 7} · sample 0"
    )
    names = {"+": "plus", "-": "minus", " ": "untrained"}
    assert seen["marks"] == [
        names.get(t.selected, "rare" if t.rare == "r" else "") for t in wanted.tokens
    ]
    assert seen["why"][0].startswith("stare put 305 tokens with positive advantage into L+: ")
    assert "because" in seen["tip"] and "surprisal ≥ " in seen["tip"]


def test_two_runs_show_what_they_said_to_the_same_prompt(tmp_path: Path) -> None:
    runs = [stored_run(tmp_path / "a", "closed"), stored_run(tmp_path / "b", "twin", seed=2)]
    extra = json.loads(rollout_file(runs[1] / "rollouts", 40).read_text().splitlines()[0])
    write_atomically(
        rollout_file(runs[1] / "rollouts", 50), [{**extra, "step": 50, "prompt": "only here"}]
    )
    page = write_rollouts(runs, tmp_path / "page.html")

    async def look() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        async with tab() as here:
            await here.open(page, 390)
            await here.settled(READY)
            seen["overflow"] = await here.value(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            halves = "[...document.querySelectorAll('.row')][1].querySelectorAll('.half')"
            seen["halves"] = await here.value(
                f"(row => [...{halves}].map(h => h.getBoundingClientRect()).every(h => h.right <="
                " row.right && h.bottom <="
                " row.bottom))(document.querySelectorAll('.row')[1].getBoundingClientRect())"
            )
            await here.open(page, 1400)
            await here.settled(READY)
            await set_field(here, "selected", "false")
            seen["both"] = await here.value(TEXT.format(".count"))
            seen["differ"] = await set_field(here, "differ", "true")
            await set_field(here, "differ", "false")
            await set_field(here, "search", "'13+4='")
            await here.settled(ASKED.format(prompt="13+4="))
            seen["asked"] = await here.value(
                "[...document.querySelectorAll('.asked')].map(p => p.textContent)"
            )
            seen["facts"] = await here.value(
                "[...document.querySelectorAll('.facts')].map(p => p.textContent)"
            )
            await set_field(here, "both", "false")
            seen["alone"] = await set_field(here, "search", "'only here'")
            await here.settled(ASKED.format(prompt="only here"))
            seen["hidden"] = await here.value(
                "[...document.querySelectorAll('.one')].map(s => s.hidden)"
            )
            seen["errors"] = here.errors
        return seen

    seen = asyncio.run(look())
    assert seen["overflow"] == 0 and seen["errors"] == []
    assert seen["halves"]  # what both runs said of a prompt is in sight on a telephone too
    number = STEPS * PER_STEP
    differ = sum(
        ((i + s) % 3 == 0) != ((i + 2 * s) % 3 == 0) for s in range(1, 41) for i in range(50)
    )
    assert seen["both"].startswith(f"{number + 4:,} of ")  # and what evaluations asked of both
    assert seen["differ"].startswith(f"{differ:,} of ")
    assert [text.split("\n")[0] for text in seen["asked"]] == ["13+4=", "13+4="]
    rewards = [f"reward {int((4 + 13 * seed) % 3 == 0)}" for seed in (1, 2)]
    assert all(reward in facts for reward, facts in zip(rewards, seen["facts"], strict=True))
    assert seen["alone"].startswith("1 of ") and seen["hidden"] == [True, False]


def test_a_method_that_selects_nothing_lists_all_at_once(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "twin", 10)
    file = rollout_file(run / "rollouts", 10)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["by_token"]["selected"] = "." * row["tokens"]
    write_atomically(file, rows)
    page = write_rollouts([run], tmp_path / "page.html")

    async def look() -> list[Any]:
        async with tab() as here:
            await here.open(page, 1280)
            await here.settled(READY)
            hidden = "[document.querySelector('.only-selected'), {}].map(e => e.hidden)"
            box = "document.querySelector('[name=selected]').parentElement"
            return [await here.value(TEXT.format(".count")), await here.value(hidden.format(box))]

    assert asyncio.run(look()) == ["8 of 8 responses", [True, True]]


def test_calls_of_tools_are_listed_with_their_responses(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", "held")
    file = rollout_file(run / "rollouts", STEPS)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    asked = {"code": "print('<b>1</b>')"}
    call = {"turn": 1, "name": "run", "asked": asked, "answer": "<b>1</b>", "failed": False}
    bad = {"turn": 2, "name": None, "asked": "{", "answer": "Error", "failed": True}
    rows[0]["calls"] = [
        {**call, "seconds": 0.25, "tokens": 1234},
        {**bad, "seconds": 0.0, "tokens": 0},
    ]
    rows[0]["prompt"], rows[1]["prompt"] = "with calls", "without calls"
    write_atomically(file, rows)
    page = write_rollouts([run], tmp_path / "page.html")

    async def look() -> tuple[Any, ...]:
        async with tab() as here:
            await here.open(page, 900)
            await here.settled(READY)
            found = []
            for prompt in ("with calls", "without calls"):
                await set_field(here, "search", f"'{prompt}'")
                await here.settled(ASKED.format(prompt=prompt))
                parts = "[...document.querySelectorAll('.calls {}')].map(e => e.textContent)"
                found += [await here.value(parts.format(kind)) for kind in ("summary", "pre")]
            return *found, here.errors

    heads, texts, no_heads, no_texts, errors = asyncio.run(look())
    assert heads == [
        "turn 1 · run · 0.25 s · 1,234 masked tokens",
        "turn 2 · not a call · failed · 0 s",
    ]
    assert texts == [json.dumps(asked, indent=1), "<b>1</b>", "{", "Error"]
    assert no_heads == no_texts == errors == []
