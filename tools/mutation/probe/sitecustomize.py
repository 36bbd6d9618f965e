"""Python runs this at the start of every process that has this folder on its PYTHONPATH, as those have that tests start
while their lines are followed."""

import os
import sys
from pathlib import Path

if "MUTATION_LINES" in os.environ:
    sys.path.append(str(Path(__file__).parent.parent.parent))
    from mutation.lines import follow

    follow()
    sys.path.pop()
