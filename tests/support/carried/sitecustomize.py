"""Takes the modules named in NOT_CARRIED away from a process, and from those that it starts, as if
they were not installed."""

import os
import sys

sys.modules.update(dict.fromkeys(os.environ.get("NOT_CARRIED", "").split()))
