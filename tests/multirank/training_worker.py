"""One rank of a launch of the training cases.

python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.multirank.training_worker DIRECTORY PHASE...
"""

from __future__ import annotations

import sys

from .training_state_cases import PHASES
from .worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PHASES))
