"""Memory that a step frees stays with the process: counted by the pages that it has to be given
anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

# as a step does: pieces all held at once, then all freed, the last first; pages that 20 have to be
# given, when the heap has settled: what else is allocated between the pieces decides where they
# fit, in the first steps and seldom later
STEPS = """
import resource, torch
from megatron_stare.process import memory
memory.keep_freed()
def step():
    held = []
    for mb in %s:
        held.append(torch.ones(mb * 2**18))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    while held:
        held.pop()
    return faults
for _ in range(5):
    before = step()
for _ in range(20):
    after = step()
print(after - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize("pieces", [[1, 3, 7, 12, 20, 30], [2] * 40], ids=["large", "many"])  # MB
def test_what_is_freed_is_used_again(pieces: list[int]) -> None:
    """Large pieces are the ones that glibc gives pages of their own, many the ones whose end it
    gives back."""
    pages = sum(pieces) * 2**20 // 4096
    given = int(subprocess.check_output([sys.executable, "-c", STEPS % pieces], text=True))
    assert given < 20 * pages // 10
