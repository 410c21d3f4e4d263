"""The objects of the S3 server: bytes in memory files, their tags, and listings of them by pages."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zlib
from dataclasses import dataclass, field
from xml.sax.saxutils import escape


@dataclass
class S3Segment:
    """Bytes in a memory file."""

    file: io.FileIO
    nbytes: int


@dataclass
class S3Object:
    """What a key holds: the parts in which it was uploaded."""

    segments: list[S3Segment]
    etag: str
    modified: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


def list_objects(objects: dict[str, S3Object], bucket: str, query: dict[str, str], page: int, tokens: str) -> str:
    """Returns a page of a listing, at most `page` keys, as XML; `tokens` as in `S3Settings`."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    token = query.get("continuation-token", "")
    after = "" if token == "first" or tokens == "repeated" else token or query.get("start-after", "")
    if tokens == "empty" and token:
        objects = {}
    rows, folders, last, more = list[str](), list[str](), "", ""
    for path in sorted(p for p in objects if p.startswith(f"{bucket}/{prefix}")):
        key = path[len(bucket) + 1 :]
        rest = key[len(prefix) :]
        folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""
        if (folder or key) <= after or folder in folders[-1:]:
            continue
        if len(rows) + len(folders) == min(page, int(query.get("max-keys", 1000))):
            more = last
            break
        last = folder or key
        folders += [folder] if folder else []
        if not folder:
            found = objects[path]
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{found.nbytes}</Size></Contents>"
            )
    if tokens != "honoured":
        more = more or "first"
    common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
    token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
    return (
        f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        f"{token}{''.join(rows)}{common}</ListBucketResult>"
    )


def new_etag(body: S3Segment) -> str:
    """Returns a tag by size and a few bytes: hashing everything would be what is measured."""
    ends = os.pread(body.file.fileno(), 4096, 0) + os.pread(body.file.fileno(), 4096, max(body.nbytes - 4096, 0))
    return f'"{hashlib.md5(f"{body.nbytes} {time.monotonic_ns()}".encode() + ends).hexdigest()}"'


def new_generation(etag: str) -> str:
    """Returns the number by which Google's interface names the version with a tag."""
    return str(zlib.crc32(etag.encode()) + 1)


def flipped_copy(body: list[tuple[io.FileIO, int, int]]) -> io.FileIO:
    """Returns a memory file with the bytes of parts of others, and one bit changed."""
    data = bytearray(b"".join(os.pread(file.fileno(), nbytes, offset) for file, offset, nbytes in body))
    data[len(data) // 2] ^= 1
    file = io.FileIO(os.memfd_create("flipped"), "r+")
    file.write(data)
    return file
