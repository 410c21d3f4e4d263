"""What importing the core has to bring along."""

from __future__ import annotations

import subprocess
import sys


def test_what_numpy_imports_at_its_first_unique_is_there_already() -> None:
    """Two threads that import it at the same moment can end in a RecursionError of numpy 2.4."""
    program = "import treeckpt._core.sharding.region, sys; assert 'numpy.ma' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
