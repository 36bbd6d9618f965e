"""The checks of a run are one list: a run makes each once, and so does its rehearsal."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import SMALL, command, model

from megatron_stare.cli import main
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning import preflight

INLINE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 1,
    **SMALL,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each check of a run is made."""
    counts: Counter[str] = Counter()

    def counted(
        name: str, check: Callable[[preflight.Asked], None]
    ) -> Callable[[preflight.Asked], None]:
        def counting(asked: preflight.Asked) -> None:
            counts[name] += 1
            check(asked)

        return counting

    monkeypatch.setattr(
        preflight, "RUN", {name: counted(name, check) for name, check in preflight.RUN.items()}
    )
    return counts


@pytest.mark.parametrize("how", [["--dry-run"], []], ids=["rehearsed", "trained"])
def test_a_run_makes_each_check_once(made: Counter[str], tmp_path: Path, how: list[str]) -> None:
    settings = {**INLINE, "run.steps": 1}
    assert main([*command(model(), f"run.dir={tmp_path / 'run'}", **settings)[3:], *how]) == 0
    assert made == dict.fromkeys(preflight.RUN, 1)


def test_what_is_wrong_is_told_by_the_first_check_that_finds_it(
    made: Counter[str], tmp_path: Path
) -> None:
    settings = {**INLINE, "optimizer.name": "sgd", "parallel.data": 2}  # not saved, and not inline
    assert (
        main([*command(model(), f"run.dir={tmp_path / 'run'}", **settings)[3:], "--dry-run"]) == 2
    )
    names = list(preflight.RUN)
    assert list(made) == names[: names.index("checkpoints") + 1]


def test_every_check_of_the_module_is_in_the_list() -> None:
    """But those that others call by name: of one task, of an evaluation's checkpoint."""
    tree = ast.parse(inspect.getsource(preflight))
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        if node.name.startswith("check_")
    }
    listed = {
        call.func.id
        for node in tree.body
        if isinstance(node, (ast.AnnAssign, ast.FunctionDef))
        and not ast.unparse(node).startswith("def check_")
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    assert defined - listed == {"check_run", "check_task", "check_checkpoint_of", "check_positions"}


@pytest.mark.parametrize(
    ("setting", "value", "held"),
    [("kv_cache_dtype", "fp8_e4m3", "a cache of fp8_e4m3"), ("quantization", "fp8", "weights of")],
)
@pytest.mark.parametrize("algorithm", [{"name": "stare"}, {"name": "dg"}, {"name": "gspo"}])
def test_eight_bits_need_a_correction(
    algorithm: dict[str, object], setting: str, value: str, held: str
) -> None:
    def check(**more: object) -> None:
        config = Config.model_validate(
            {
                "model": {"path": "m"},
                "rollout": {"engine": "sglang"},
                "sglang": {setting: value},
                "algorithm": {**algorithm, **more},
            }
        )
        preflight.check_eight_bits(config, config.algorithm.method)

    with pytest.raises(ConfigError, match=rf"with {held} .* nothing corrects") as error:
        check()
    assert error.value.where == f"sglang.{setting}"
    check(correction={"mode": "truncate", "level": "sequence"})
