"""Connections to buckets. Credentials are found by the cloud's own chain, in each process, and are never handed on.

S3: the environment (AWS_ACCESS_KEY_ID, ...), a web identity's token, the keys of a profile (AWS_PROFILE, or
`default`), the container's or the machine's role. GCS: GOOGLE_APPLICATION_CREDENTIALS, the machine's account. Azure:
AZURE_STORAGE_..., a managed or workload identity. An endpoint of another vendor's S3: AWS_ENDPOINT_URL.

Profiles of AWS's shared files are read here, since the library of the stores does not read them. The order is that of
the default chain of AWS's SDK for Java 2, which Spark asks
(https://docs.aws.amazon.com/sdk-for-java/latest/developer-guide/credentials-chain.html).

A store that is away or busy (an answer of 5xx, a connection that is refused or lost) is asked again for RETRY_SECONDS.
The library's own ten tries are over after two or three seconds: its waits, each drawn between the first one and twice
the one before, hardly grow.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from headrace.errors import UserError, nearest
from headrace.errors.stores import region_of
from headrace.logs import hide

#: Variables that take precedence over a profile.
_OVERRIDES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: Settings of a profile that name a source of credentials: those that take precedence over its keys, and the others.
_ROLES = ("role_arn", "sso_session", "sso_start_url")
_ELSEWHERE = ("credential_process", "login_session")
#: The client library's names of a profile's keys -> the profile's.
_KEYS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}


def profile_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of AWS_PROFILE, or of the profile `default`; empty where others precede it, or there is no
    `default`.

    Raises:
        UserError: a file is none of profiles; AWS_PROFILE is not there or has no keys; the profile gets its credentials
            in another way, which Spark would go and this process would not.
    """
    if any(environ.get(name) for name in _OVERRIDES):
        return {}
    files = {
        Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(): "profile ",
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(): "",
    }
    profiles: dict[str, dict[str, str]] = {}
    for file, prefix in files.items():
        for name, settings in _profiles(file, prefix).items():
            # The second file takes precedence.
            profiles.setdefault(name, {}).update(settings)
    named = environ.get("AWS_PROFILE")
    names = " and ".join(map(str, files))
    profile = profiles.get(named or "default")
    if profile is None:
        if named:
            raise UserError(
                f"AWS_PROFILE names the profile '{named}', which is not in {names}{nearest(named, profiles)}"
            )
        return {}
    keys = {argument: profile[key] for argument, key in _KEYS.items() if profile.get(key)}
    for key in keys.values():
        hide(key)
    unsupported = [key for key in (*_ROLES, *(() if keys else _ELSEWHERE)) if profile.get(key)]
    is_whole = {"access_key_id", "secret_access_key"} <= keys.keys()
    if (unsupported or keys or named) and (unsupported or not is_whole):
        reason = (
            f"gets its credentials by {unsupported[0]}"
            if unsupported
            else "lacks aws_access_key_id or aws_secret_access_key"
        )
        raise UserError(
            f"the profile '{named or 'default'}' of {names} {reason}: of profiles headrace reads keys alone. Put its "
            f"credentials into the environment: aws configure export-credentials --profile {named or 'default'} "
            f"--format env"
        )
    return keys


def _profiles(file: Path, prefix: str) -> dict[str, dict[str, str]]:
    """Return the profiles of a file; `prefix` stands before their names, but for `default`."""
    read = configparser.ConfigParser(interpolation=None, strict=False, default_section="\0")
    try:
        read.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # `from None`: the parser's message would quote the line, which may be a secret.
        raise UserError(f"{file} is no file of AWS profiles") from None
    return {
        section.removeprefix(prefix).strip(): dict(read[section])
        for section in read.sections()
        if section.startswith(prefix) or section == "default"
    }


#: Scheme of a Location -> scheme of Hadoop's file system for Spark. `s3a`, `gcs`, `az`, ... are read as these.
HADOOP = {"s3": "s3a", "gs": "gs", "abfss": "abfss"}
#: Domain of accounts in URIs of Azure's public cloud.
AZURE = "dfs.core.windows.net"
#: Seconds after which a store that is away is an error. Credentials are not renewed in between.
RETRY_SECONDS = 180.0
#: Seconds of the first and of the longest wait. A lease is renewed every 15 s for 60 s (`lease`), so its holder
#: survives an outage of half a minute.
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
#: Largest ratio of a wait to the one before.
_GROWTH = 4
#: Never reached: RETRY_SECONDS ends the tries.
_TRIES = 10_000


def open_bucket(scheme: str, bucket: str) -> Any:
    """Open the connection to a bucket; Azure's buckets are `CONTAINER@ACCOUNT`."""
    # Late: 15 MB of native code, which file systems do not need.
    from obstore.store import AzureStore, GCSStore, S3Store

    if scheme == "s3":
        arguments: dict[str, Any] = {**profile_keys(os.environ), **_endpoint(os.environ)}
        return S3Store(bucket, **arguments, **retries())
    if scheme == "gs":
        return GCSStore(bucket, **retries())
    container, separator, account = bucket.partition("@")
    if not separator:
        raise UserError(f"{scheme}://{bucket}: write {scheme}://CONTAINER@ACCOUNT.{AZURE}/FOLDER")
    name, dot, domain = account.partition(".")
    arguments = {}
    if dot and domain != AZURE:
        # Other clouds (China, government, OneLake): the library needs the endpoint of the blob service.
        arguments = {"endpoint": f"https://{name}.{domain.replace('dfs.', 'blob.', 1)}"}
    return AzureStore(container, account_name=name, **arguments, **retries())


def retries() -> dict[str, Any]:
    """Return how long and how often the library retries a store that is away, as arguments of its stores."""
    backoff = {
        "init_backoff": timedelta(seconds=_FIRST_WAIT),
        "max_backoff": timedelta(seconds=_LONGEST_WAIT),
        "base": _GROWTH,
    }
    limit = timedelta(seconds=RETRY_SECONDS)
    return {"retry_config": {"max_retries": _TRIES, "retry_timeout": limit, "backoff": backoff}}


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """Return the S3 server that AWS's own tools would call, or None for AWS."""
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None


def _endpoint(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return an endpoint as AWS's own tools read it; plain HTTP only where its URL says so."""
    endpoint = endpoint_of(environ)
    arguments: dict[str, Any] = {}
    if endpoint:
        arguments = {"endpoint": endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}
    if region := region_of(environ):
        arguments["region"] = region
    return arguments
