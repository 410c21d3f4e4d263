"""Structs are decoded by several threads at once, and what is no Unicode is an error as any other."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from treeckpt._core.format.decoding import decode_json, decode_msgpack

PROGRAM = """
import sys, threading
import msgspec
from treeckpt._core.format.decoding import decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
CODECS = ((msgspec.json.encode, decode_json), (msgspec.msgpack.encode, decode_msgpack))
for number in range(30):
    tree = None
    for n in range(12):  # classes that nothing has decoded yet
        exec(f"class S{n}(msgspec.Struct):\\n    a: int\\n" + f"    b: 'S{n - 1}'\\n" * (n > 0))
        tree = {"a": n} | ({"b": tree} if n else {})
    encode, decode = CODECS[number % 2]
    data, start, found = encode(tree), threading.Barrier(4), []

    def run():
        start.wait()
        found.append(msgspec.to_builtins(decode(data, S11)) == tree)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4, found
"""


def test_threads_that_decode_a_struct_for_the_first_time_at_once_do_not_crash() -> None:
    """With `msgspec.json.decode(data, type=...)` this process died by SIGSEGV in six of six runs."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


def test_a_key_that_is_no_unicode_is_an_error_of_msgspec() -> None:
    """msgspec itself raises a UnicodeDecodeError, which is none of its own errors."""
    with pytest.raises(msgspec.MsgspecError):
        decode_json(b'{"a\xff":"x"}', dict[str, str])
    with pytest.raises(msgspec.MsgspecError):
        decode_msgpack(b"\x81\xa1\xff\xa1x", dict[str, str])
