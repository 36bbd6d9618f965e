"""An SGLang server in this process, for what a real one cannot be made to do. Its answers are
shaped as recorded ones; what they hold is simple: it counts calls, keeps the weights it is sent,
and says one token a version."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_stare.models import read_shape
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

STOP = 1
SHAPE = read_shape(Path(__file__).parents[2] / "assets" / "tiny-adder")


class FakeServer:
    """Answers a client through a transport. `calls` are the paths asked for; `broken` paths are
    refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {}  # the newest of every path
        self.bodies: dict[str, Any] = {}  # likewise, of requests
        self.queries: dict[str, str] = {}  # what followed a question mark, by path
        self.broken: set[str] = set()
        self.sampling_fields: set[str] = set()
        self.under_way = self.most_under_way = 0  # responses asked for at the same time
        self.lose: str | None = None  # a parameter whose bytes do not arrive
        self.lose_on: int | None = None  # the one rank they do not arrive on; None: all
        self.version, self.device, self.ranks = "none", "cpu", 1
        self.open = False  # to who has no key
        # says the prompt's last token before the stop token, so that answers can be told apart
        self.echo = False
        self.released: set[str] = set()  # tags
        self.dead = False  # of a call that a real one dies of
        self._held = self._nothing()

    def _nothing(self) -> list[Fingerprint]:
        """One a rank, of which that rank's checksums are reported."""
        layout = ServerLayout(self.device, self.ranks)
        return [Fingerprint(SHAPE, torch.float32, layout) for _ in range(self.ranks)]

    def client(self) -> SGLangClient:
        return SGLangClient(f"http://{self.name}", "key", 10, transport=self)

    async def close(self) -> None:
        """Nothing is held."""

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """See rollout.sglang.http.Transport."""
        if self.dead:
            raise ConnectionResetError("the server is gone")
        path, _, self.queries[path.partition("?")[0]] = path.partition("?")
        self.calls.append(path)
        self.under_way += path == "/generate"
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)  # as the network does, so that one server is not asked everything
        self.under_way -= path == "/generate"
        if headers.get("Authorization") != "Bearer key" and not self.open:
            return 401, b"Unauthorized"
        if path in self.broken:
            return 400, f"{path} is broken".encode()
        self.bodies[path] = json.loads(body) if body else {}
        answer = self.answers[path] = self._answer(path, self.bodies[path])
        return 200, answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        known = {
            "/generate": self._generate,
            "/server_info": self._info,
            "/weights_checker": self._checker,
        }
        if path == "/begin_weight_update":
            self._held = self._nothing()
        known |= {
            "/update_weights_from_tensor": self._load,
            "/update_weight_version": self._publish,
        }
        known |= dict.fromkeys(
            ("/pause_generation", "/continue_generation"), lambda _: {"status": "ok"}
        )
        known |= dict.fromkeys(("/flush_cache", "/abort_request"), lambda _: "")
        known |= {
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        return known.get(path, lambda _: {"success": True})(body)

    def _info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "max_total_num_tokens": 10_000,
            "device": self.device,
            "tp_size": self.ranks,
            "enable_memory_saver": False,
            "enable_deterministic_inference": False,
        }

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = body["sampling_params"]
        self.sampling_fields |= fields.keys()
        said = body["input_ids"][-1] if self.echo else 4
        ids = [int(next(iter(fields["logit_bias"])))] if fields["logit_bias"] else [said, STOP]
        if cut := fields["max_new_tokens"] == 1:
            ids = [4]
        first, *others = body["input_ids"]
        prompt = [[None, first, None], *([-0.25, i, None] for i in others)]
        return {
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "length", "length": len(ids)}
                if cut
                else {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[-0.5, i, None] for i in ids],
                "input_token_logprobs": prompt if body["logprob_start_len"] == 0 else [],
            },
        }

    def _release(self, body: dict[str, Any]) -> None:
        # the second ends a server with the memory saver
        if self.under_way or self.released & set(body["tags"]):
            self.dead = True
            raise ConnectionResetError("the server is gone")
        self.released |= set(body["tags"])

    def _resume(self, body: dict[str, Any]) -> None:
        if not self.released >= set(body["tags"]):
            self.dead = True
            raise ConnectionResetError("the server is gone")
        self.released -= set(body["tags"])

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        for rank, (held, payload) in enumerate(
            zip(self._held, body["serialized_named_tensors"], strict=True)
        ):
            # ours, and from this process
            for name, tensor in pickle.loads(base64.b64decode(payload)):
                lost = name == self.lose and self.lose_on in (None, rank)
                held.add(name, torch.zeros_like(tensor) if lost else tensor)
        return {"success": True, "message": "Success"}

    def _checker(self, _: dict[str, Any]) -> dict[str, Any]:
        ranks = [
            {"checksums": held.checksums()[rank], "parallelism_info": [{"tp_rank": rank}]}
            for rank, held in enumerate(self._held)
        ]
        return {"success": True, "ranks": ranks[::-1]}  # in any order

    def _publish(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["new_version"]
        return {"success": True}
