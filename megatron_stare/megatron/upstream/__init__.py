"""Differences between releases of megatron-core: a module a release, the same names in each.

The rest of the package neither asks for the release nor looks for what it may lack.
tests/test_structure.py holds both. A newer release is served by the newest module. Those between
the two are not served: 0.18 lacks a name that the older module imports (scripts/try_release.sh).
"""

from __future__ import annotations

from megatron.core import __version__

RELEASE = tuple(map(int, __version__.split(".")[:2]))

if RELEASE >= (0, 19):
    from megatron_stare.megatron.upstream.core_0_19 import (
        UNDEFINED,
        begin_save,
        load,
        load_common,
        mlp_submodules,
    )
else:
    from megatron_stare.megatron.upstream.core_0_16 import (
        UNDEFINED,
        begin_save,
        load,
        load_common,
        mlp_submodules,
    )

__all__ = [
    "RELEASE",
    "UNDEFINED",
    "begin_save",
    "load",
    "load_common",
    "mlp_submodules",
]
