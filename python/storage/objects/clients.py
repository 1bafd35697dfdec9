"""Connections to buckets. Credentials are found by the cloud's own chain, in each process, and are never handed on.

S3: the environment (AWS_ACCESS_KEY_ID, ...), a web identity's token, the keys of a profile (AWS_PROFILE, or
`default`), the container's or the machine's role. GCS: GOOGLE_APPLICATION_CREDENTIALS, the machine's account. Azure:
AZURE_STORAGE_..., a managed or workload identity. An endpoint of another vendor's S3: AWS_ENDPOINT_URL.

A store that is away or busy (an answer of 5xx, a connection that is refused or lost) is asked again for RETRY_SECONDS.
The library's own ten tries are over after two or three seconds: its waits, each drawn between the first one and twice
the one before, hardly grow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from headrace.errors import UserError
from headrace.storage.objects.aws_profile import profile_keys

#: By the scheme of a Location: that of Hadoop's file systems for Spark. `s3a`, `gcs`, `az`, ... are read as these.
HADOOP = {"s3": "s3a", "gs": "gs", "abfss": "abfss"}
#: What follows an account's name in URIs, unless another cloud than Azure's public one has it.
AZURE = "dfs.core.windows.net"
#: After this a store that is away is an error. Credentials are not asked for anew in between.
RETRY_SECONDS = 180.0
#: Seconds of the first wait, and of the longest: a lease is renewed every 15 s for 60 s (`lease`), so that its holder
#: is back in time from an outage of half a minute.
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
#: A wait is at most so many times the one before.
_GROWTH = 4
#: More than there is time for.
_TRIES = 10_000

#: The variables that name S3's region, the first of them that is set; without any it is that of the library and of AWS.
_REGIONS, DEFAULT_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"


def open_bucket(scheme: str, bucket: str) -> Any:
    """Open the connection to a bucket; Azure's buckets are `CONTAINER@ACCOUNT`."""
    # 15 MB of native code, which no other store needs.
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
        # Another cloud's (China's, a government's, OneLake's): the library calls them by the service of blobs.
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


def region_of(environ: Mapping[str, str]) -> str | None:
    """Return the region that the environment names."""
    return next((environ[variable] for variable in _REGIONS if environ.get(variable)), None)


def of_another_region(place: str, name: str | None, region: str | None, environ: Mapping[str, str]) -> str:
    """Return the message for an S3 bucket that is not in the requested region.

    Args:
        place: the bucket or object, for the message.
        name: the bucket's; None: nobody knows it.
        region: its own; None: the store does not say it.
        environ: of this process.
    """
    own_region = region_of(environ)
    variable = next((v for v in _REGIONS if environ.get(v)), _REGIONS[0])
    requested = f"'{own_region or DEFAULT_REGION}' ({variable}{'' if own_region else ' is not set'})"
    if region is not None:
        return f"{place} is in the region '{region}' and was asked for in {requested}: set {variable}={region}"
    tells = f", which `aws s3api get-bucket-location --bucket {name}` tells" if name else ""
    return f"{place} is in another region than {requested}: set {variable} to the bucket's own{tells}"


def _endpoint(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return an endpoint as AWS's own tools read it; plain HTTP only where its URL says so."""
    endpoint = endpoint_of(environ)
    arguments: dict[str, Any] = {}
    if endpoint:
        arguments = {"endpoint": endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}
    if region := region_of(environ):
        arguments["region"] = region
    return arguments
