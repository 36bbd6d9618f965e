"""Hides the differences between releases of megatron-core. Each supported release has its own
module, and all modules define the same names.

Code in the package megatron/ but outside this folder must neither check the release of
megatron-core nor handle names that a release lacks. The test tests/test_structure.py checks that
only this folder depends on the release of megatron-core. For megatron-core 0.19 and later, the
package uses the newest module in this folder. Releases 0.17 and 0.18 of megatron-core are not
supported. For example, the module for 0.16 imports a name that megatron-core 0.18 does not define,
as scripts/try_release.sh shows.
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
