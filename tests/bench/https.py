"""A certificate for a server on this machine, of a CA made for it, which clients of this process trust meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

VARIABLES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""By which obstore, botocore with s3fs, and other clients take the certificates that they trust."""
_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


class Certificate(msgspec.Struct, frozen=True):
    """Paths of files in the PEM form."""

    authority: str
    """The CA."""
    chain: str
    """The certificate for 127.0.0.1."""
    key: str


@contextlib.contextmanager
def certificate(directory: Path) -> Iterator[Certificate]:
    """Makes a CA and a certificate in a directory, with the command openssl; the environment names the CA meanwhile."""
    authority, made = directory / "authority", directory / "server"
    _request(authority, "treeckpt bench CA", "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
    names = ("subjectAltName=IP:127.0.0.1,DNS:localhost", "basicConstraints=critical,CA:FALSE")
    _request(made, "127.0.0.1", *names, "extendedKeyUsage=serverAuth", signed_by=authority)
    found = Certificate(*(f"{path}.pem" for path in (authority, made)), f"{made}.key")
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, found.authority))
    try:
        yield found
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _request(path: Path, name: str, *extensions: str, signed_by: Path | None = None) -> None:
    """Writes PATH.pem and PATH.key."""
    added = [word for extension in extensions for word in ("-addext", extension)]
    signed = ["-CA", f"{signed_by}.pem", "-CAkey", f"{signed_by}.key"] if signed_by else []
    files = ["-keyout", f"{path}.key", "-out", f"{path}.pem"]
    command = ["openssl", "req", "-x509", *_KEY, "-subj", f"/CN={name}", *added, *signed, *files]
    subprocess.run(command, check=True, capture_output=True)
