"""SGLang imports torchvision, whose library defines operators that a CPU wheel lacks: a server
starts with either.

Stand-ins for torchvision's package do what its wheels do at import; the real CPU wheel is imported
by every test with a real server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT, environment

NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# as the library's static initialiser, whose exception leaves dlopen and ends the process
LOADS = f"""
import os, torch
try:
    kept = torch.library.Library("torchvision", "DEF")
    kept.define("{NMS}")
except RuntimeError:
    os.abort()
"""
# as torchvision/_meta_registrations.py where the library did not load
LACKS = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""


@pytest.mark.parametrize("package", [LOADS, LACKS], ids=["loads_by_itself", "lacks_its_library"])
def test_torchvision_imports_after_the_server_s_module(tmp_path: Path, package: str) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(package)
    code = (
        "import megatron_stare.rollout.engines.sglang.serve, torchvision, torch; "
        "print(torch.ops.torchvision.nms.default)"
    )
    paths = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "torchvision.nms.default"), done.stderr
