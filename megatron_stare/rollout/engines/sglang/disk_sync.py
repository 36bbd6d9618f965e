"""Transfers buckets of weights through a folder that all servers can read."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_stare.errors import UserError
from megatron_stare.rollout.engines.sglang.broadcast import flat_bytes
from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, WeightSync, open_sessions
from megatron_stare.weights.files.safetensors_file import lay_out

PREFIX = "megatron-stare-weights-"


class DiskSync(WeightSync):
    """Writes the weights to a Hugging Face folder, which the servers then load. Every sender writes
    its own files, one per bucket. A file gets its final name only after it is complete.

    Args:
        companions: model folder whose config files are copied into the folder of the weights.
        folder: folder of the weights, the same for all senders of an update; None: a new folder in
            the system's temporary folder.
        sender: number in the names of this sender's files.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        companions: str,
        folder: Path | None = None,
        sender: int = 0,
    ) -> None:
        super().__init__(clients)
        self._companions, self._sender = Path(companions), sender
        self._folder = folder or drawn_folder(None)
        self._files: list[Path] = []

    async def open(self) -> None:
        """Does nothing, because a server needs no weight-update session to load weights from a
        folder."""

    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        self._files = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritten(self._folder, error) from error
        for name in ("config.json", "generation_config.json"):
            if (self._companions / name).is_file():
                with _whole(self._folder / name, f".{self._sender}") as writing:
                    shutil.copy(self._companions / name, writing.path)

    async def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        await asyncio.to_thread(self._write, bucket)

    def _write(self, bucket: Bucket) -> None:
        file = self._folder / f"model-{self._sender:05d}-{len(self._files) + 1:05d}.safetensors"
        self._files.append(file)
        header, _ = lay_out(
            file,
            {name: tuple(tensor.shape) for name, tensor in bucket},
            bucket[0][1].dtype,
            {},
            {name: tensor.dtype for name, tensor in bucket},
        )
        flat = flat_bytes([tensor for _, tensor in bucket]).cpu()
        with _whole(file, ".part") as writing, writing.path.open("wb") as stream:
            stream.write(header)
            stream.write(flat.numpy().data)
            stream.flush()
            os.fsync(stream.fileno())  # other nodes see only data that reached the file system

    def left(self) -> str | None:
        return str(self._folder)

    async def load(self, folder: str | None) -> None:
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        await everywhere(
            *(client.post("/update_weights_from_disk", body) for client in self._clients)
        )
        # Only the first rank answers. If the files vanish while another rank reads them, its server
        # crashes. All ranks open a session together, so this waits for all of them.
        await open_sessions(self._clients)
        await super().load(folder)

    def forget(self) -> None:
        files, self._files = self._files, []
        for file in files:
            file.unlink(missing_ok=True)
        if not any(self._folder.glob("*.safetensors*")):  # the last sender removes the folder
            shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self) -> None:
        self.forget()


class _whole:
    """Keeps a file under a temporary name during a `with` block. If the `with` block ends without
    an error, the file gets its final name. If the `with` block raises an error, the file is
    deleted."""

    def __init__(self, file: Path, ending: str) -> None:
        self._file, self.path = file, file.with_name(file.name + ending)

    def __enter__(self) -> _whole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.path.replace(self._file)
            return
        self.path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritten(self._file, error) from error


def _unwritten(where: Path, error: OSError) -> UserError:
    return UserError(
        f"weights for the servers cannot be written ({error.strerror})",
        where=str(where),
        fix="sglang.sync_folder names the folder, which needs room for the whole model",
    )


def drawn_folder(parent: str | None) -> Path:
    """Returns a unique path for a new folder, but does not create the folder.

    Args:
        parent: parent of the folder; None: the system's temporary folder.
    """
    return Path(parent or tempfile.gettempdir()).resolve() / f"{PREFIX}{secrets.token_hex(4)}"
