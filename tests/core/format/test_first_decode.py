"""Several threads may decode a file of one kind for the first time: msgspec by itself crashes then."""

import subprocess
import sys

from tests.helpers.large import write_many

PROGRAM = """
import sys, threading
from pathlib import Path
from treeckpt._core.format.index import decode_index
from treeckpt._core.format.timings import decode_timings

index, timings = (Path(path).read_bytes() for path in sys.argv[1:])
sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
decoded = []

def decode():
    start.wait()
    decoded.append((decode_index(index, "index").save_id, decode_timings(timings, "timings").save_id))

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(decoded) == 8 and len(set(decoded)) == 1, decoded
"""


def test_many_threads_decode_the_first_index_and_the_first_timings(tmp_path):
    [checkpoint] = write_many(tmp_path, 1).iterdir()
    files = str(checkpoint / "index.json"), str(next(checkpoint.glob("timings*")))
    done = subprocess.run([sys.executable, "-c", PROGRAM, *files], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
