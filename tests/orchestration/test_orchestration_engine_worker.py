"""What a worker asks of an engine that is not in front of servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import save_model

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.orchestration.engine_worker import EngineWorker


def test_an_engine_in_process_says_that_it_has_no_servers(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    worker = EngineWorker(Config.model_validate({"model": {"path": str(tmp_path)}}), 0)
    assert not worker.bring_up().served
    for call in (
        lambda: worker.prompt_log_probs([[1, 2]]),
        worker.release_memory,
        worker.resume_memory,
        worker.memory_mb,
    ):
        with pytest.raises(UserError, match="LocalEngine has no server"):
            call()
    worker.close()
