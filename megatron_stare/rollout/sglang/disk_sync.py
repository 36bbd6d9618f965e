"""Buckets of weights through a folder that all servers can read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from megatron_stare.rollout.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.sglang.server_layout import ServerLayout
from megatron_stare.rollout.sglang.sync import Bucket, WeightSync


class DiskSync(WeightSync):
    """A Hugging Face folder that the servers load: one file a bucket, in a folder all of them can read.

    Args:
        companions: folder whose config the servers find beside the weights.
        parent: where the folder is made and removed again; None: the system's folder for temporary files.
    """

    def __init__(self, clients: Sequence[SGLangClient], companions: str, parent: str | None = None) -> None:
        super().__init__(clients)
        self._companions, self._parent = Path(companions), parent
        self._folder: Path | None = None
        self._files: dict[str, str] = {}  # name of a tensor to the file it is in

    async def begin(self, layouts: Sequence[ServerLayout]) -> None:
        await self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-stare-weights-", dir=self._parent))
        self._files = {}
        for name in ("config.json", "generation_config.json"):
            if (self._companions / name).is_file():
                shutil.copy(self._companions / name, self._folder)

    async def send(self, bucket: Bucket) -> None:
        assert self._folder is not None
        file = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        save_file({name: tensor.clone() for name, tensor in bucket}, self._folder / file, {"format": "pt"})
        self._files |= {name: file for name, _ in bucket}

    async def end(self) -> None:
        assert self._folder is not None
        index = {"metadata": {}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))
        body = {"model_path": str(self._folder), "load_format": "safetensors", "flush_cache": False}
        try:
            await everywhere(*(c.post("/update_weights_from_disk", body) for c in self._clients))
        finally:
            await self.close()

    async def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
