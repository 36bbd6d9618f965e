"""Defines CpuPlatform, a platform class. The module cpu_platform.py returns this class's name to
SGLang. This module imports sglang, so only the server's environment can import this module."""

from __future__ import annotations

import psutil
import torch
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

from megatron_stare.rollout.engines.sglang.cpu_platform import ATTENTION


class CpuPlatform(SRTPlatform):
    """SGLang platform that runs SGLang's plain torch code on a CPU. The platform reports the memory
    of the whole machine."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """Does nothing, because there is only one device."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total
