"""One rank of a launch of the cases of one host.

python -m torch.distributed.run --standalone --nproc-per-node 8 -m tests.multirank.host_worker DIRECTORY PHASE...
"""

from __future__ import annotations

import sys

from .host_cases import PHASES
from .worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PHASES))
