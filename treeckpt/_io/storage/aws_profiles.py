"""Credentials, region and endpoint for S3 from the profiles in `~/.aws`; obstore itself reads the environment alone.

The order is that of the AWS tools: options, keys or a web identity in the environment, the profile, then the
container's and the instance's credentials. A profile that signs on, assumes a role or runs a program needs boto3.
"""

from __future__ import annotations

import configparser
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ...errors import StoreError

HOW = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run where the instance has a role"

_GIVEN = ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature", "aws_skip_signature")
_PLAIN = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_BEFORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_AFTER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_BY_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "credential_source", "login_session")


def s3_options(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options together with the credentials, region and endpoint of the profile.

    Raises:
        StoreError: the profile that AWS_PROFILE names does not exist, or needs boto3.
    """
    merged = dict(options)
    name = env.get("AWS_PROFILE", "default")
    profile = _profile(name, env)
    if not any(key in options for key in _GIVEN) and not any(key in env for key in _BEFORE):
        if not profile and "AWS_PROFILE" in env:
            raise StoreError(url, expected=f"the profile {name} of AWS_PROFILE", found="no such profile in ~/.aws")
        if "aws_access_key_id" in profile:
            merged.update({key.removeprefix("aws_"): profile[key] for key in _PLAIN if key in profile})
        elif any(key in profile for key in _BY_BOTO3):
            merged["credential_provider"] = _boto3_provider(url, name)
    for option, variables in (
        ("region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
        ("endpoint_url", ("AWS_ENDPOINT_URL",)),
    ):
        given = (option, f"aws_{option}", option.removesuffix("_url"))
        if option in profile and not any(key in options for key in given) and not any(v in env for v in variables):
            merged[option] = profile[option]
    return merged


def check_instance(url: str, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Raises StoreError if there are no credentials; obstore would ask for those of an instance for a minute."""
    if any(name in options for name in _GIVEN) or any(name in env for name in (*_BEFORE, *_AFTER)):
        return
    place = urlsplit(options.get("metadata_endpoint") or env.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    try:
        socket.create_connection((place.hostname or "", place.port or 80), timeout=1).close()
    except OSError as error:
        raise StoreError(
            url,
            expected="credentials",
            found="none in the options, the environment or ~/.aws, and no instance that gives them",
            hint=HOW,
        ) from error


def _profile(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a profile in both files; those in credentials override those in config."""
    home = os.path.join(env.get("HOME", os.path.expanduser("~")), ".aws")
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(env.get(variable, os.path.join(home, file)), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeError):
            continue
        if parser.has_section(section):
            found.update(parser.items(section))
    return found


def _boto3_provider(url: str, name: str) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StoreError(
            url,
            expected=f"plain keys in the profile {name}, or boto3 to sign on with it",
            found="a profile without keys, and no boto3",
            hint="pip install boto3, or export the keys: aws configure export-credentials --format env",
        ) from error
    return Boto3CredentialProvider(boto3.Session(profile_name=name))
