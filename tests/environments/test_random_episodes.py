"""A thousand random episodes of several turns and branches: what is trained is what was sampled,
under the context that it was sampled under, with the log-probs of the engine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import sglang_servers as servers
from support.runs import metrics, model, train

PROMPTS, SAMPLES = 125, 8
LIMIT = 1e-4  # nats, float32
ENGINES = {
    "local": ("runtime.runner=inline", "parallel.tensor=1"),
    "sglang": (
        "rollout.engine=sglang",
        f"sglang.python={servers.PYTHON}",
        f"sglang.start_timeout_s={servers.START_S}",
        f"sglang.agreement_limit={LIMIT}",
    ),
}
Token = tuple[str, int]  # digest of all that stands before it, and its id


def after(context: Iterable[int], token: int) -> Token:
    return hashlib.sha256(json.dumps([*context]).encode()).hexdigest(), token


def sampled(log: Path) -> dict[int, Counter[tuple[Token, ...]]]:
    """Returns the episodes of every prompt, as the environment noted them."""
    found: dict[int, Counter[tuple[Token, ...]]] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        tokens = tuple(
            after((*context, *ids[:place]), token)
            for context, ids in line["turns"]
            for place, token in enumerate(ids)
        )
        found.setdefault(line["cursor"], Counter())[tokens] += 1
    return found


def trained(batch: dict[str, Any]) -> dict[int, Counter[tuple[Token, ...]]]:
    """Returns the episodes of every group of the batch, in the same form."""
    contexts, parts = (batch[f"branch_{name}"].tolist() for name in ("contexts", "responses"))
    both = batch["tokens"].split([n for pair in zip(contexts, parts, strict=True) for n in pair])
    masks = batch["sampled"].split(parts)
    samples: dict[int, list[Token]] = {}
    for branch, of in enumerate(batch["branch_samples"].tolist()):
        context, ids = both[2 * branch].tolist(), both[2 * branch + 1].tolist()
        samples.setdefault(of, []).extend(
            after((*context, *ids[:place]), token)
            for place, (token, mine) in enumerate(zip(ids, masks[branch].tolist(), strict=True))
            if mine
        )
    found: dict[int, Counter[tuple[Token, ...]]] = {}
    for sample, tokens in samples.items():
        group = int(batch["groups"][sample])
        found.setdefault(group, Counter())[tuple(tokens)] += 1
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    "engine",
    [
        "local",
        pytest.param(
            "sglang",
            marks=[
                pytest.mark.sglang,
                pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
            ],
        ),
    ],
)
def test_what_is_trained_is_what_was_sampled(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "episodes"
    monkeypatch.setenv("EPISODES", str(log))
    settings = {
        "run.dir": tmp_path / "run",
        "run.steps": 1,
        "rollout.environment": "environments.wanders.Wanders",
        "rollout.max_new_tokens": 40,
        "batch.prompts": PROMPTS,
        "batch.samples_per_prompt": SAMPLES,
        "eval.prompts": 0,
    }
    done = train(model(), *ENGINES[engine], "--dump-step", "1", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    batch = load_file(tmp_path / "run/dump_step_1/batch.safetensors")
    wanted, found = sampled(log), trained(batch)
    assert sum(count.total() for count in wanted.values()) == PROMPTS * SAMPLES
    assert found == {group: wanted[cursor] for group, cursor in enumerate(sorted(wanted))}
    assert len(batch["branch_samples"]) > 1.2 * PROMPTS * SAMPLES
    (row,) = metrics(tmp_path / "run")
    key = "agreement/max" if engine == "sglang" else "rollout/logprob_diff_max"
    assert row[key] <= LIMIT
    tokens = sum(len(each) * n for count in wanted.values() for each, n in count.items())
    assert row["loss/tokens"] == tokens
