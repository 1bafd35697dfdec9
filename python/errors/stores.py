"""Errors of stores of objects: one that is away, one that refuses, and what obstore's errors mean.

What a store answers that is neither "not there" nor "the condition does not hold" is a StoreRefused where it is about
permissions or the bucket, a StoreAway where it is no answer or says to come later, else a StoreError; none quotes more
than the store's first line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.errors import UserError

#: Variables with S3's region, in order of precedence, and the default of the client library and of AWS.
_REGIONS, DEFAULT_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"
#: The library's texts, after its last try, for no answer or that of a busy or broken server. Of the codes 5xx, 501 and
#: 505 are final.
_BUSY = r"Server returned error response|non-2xx status code: (?:408|429|5(?!01|05)\d\d)"
_AWAY = re.compile(rf"HTTP error: |{_BUSY}")
#: The library's texts for connections that no later try makes: an invalid URL, an untrusted certificate. No URL in its
#: messages matches, since spaces and brackets are quoted there.
_NEVER = re.compile(r"builder error|InvalidCertificate\(|invalid peer certificate", re.IGNORECASE)
#: Addresses of clouds' metadata services: the library asks them where it has found no other credentials.
_METADATA = re.compile(r"//(?:169\.254\.\d+\.\d+|\[?fd00:ec2::254\]?|metadata\.google\.internal)[/: ]")
#: The library's texts for a connection that was not made, and for a time-out. Only the second: no answer came.
_NOT_CONNECTED, _TIMEOUT = "ConnectError(", "kind: Timeout"
#: Texts of errors for which listings have no class of their own: not allowed, and no such bucket.
_REFUSED, _NO_BUCKET = re.compile(r"non-2xx status code: 40[13]\b"), re.compile(r"non-2xx status code: 404\b")
#: S3's answers for a bucket in another region: its own text (keys are quoted there), or a redirect without an
#: address; and the text that names the region.
_REGION = re.compile(
    r"- Received redirect without LOCATION\b|"
    r"<Code>(?:PermanentRedirect|IllegalLocationConstraintException)</Code>|"
    r"<Code>AuthorizationHeaderMalformed</Code>[^\n]*\bexpecting '"
)
_NAMED_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>|expecting '([a-z0-9-]+)'")
#: Noise in the first line of the library's messages: its settings for retries, a server's error page.
_NOISE = re.compile(r"Generic \S+ error: |, max_retries: \d+, retry_timeout: \S+ *|:(?: <.*)?$")
#: The reason of a missing answer, in the lines after the first.
_REASON = re.compile(r'(?:message|error): "([^"]+)"|kind: (Timeout|Interrupted)')
_CREDENTIALS = (
    "Credentials are those of the environment or of this machine (docs/storage.md); they must allow to read and list "
    "there, and in lake and store to write and delete, too"
)


class StoreError(OSError):
    """The store did not do as asked, after its client tried again."""


class StoreAway(StoreError):
    """The store cannot be reached: nothing to mend, try later; exit code 75."""


class StoreRefused(UserError):
    """The store does not let whoever this process is do this there, or has no such bucket."""


class ChangedInPlace(OSError):
    """An object is not the one that its folder's list, or a look just before, has named."""


def error_of_store(
    error: Exception, place: str, s3_bucket: str | None, environ: Mapping[str, str], writes: bool
) -> StoreError | StoreRefused | None:
    """Return what an error of obstore means; None: there is no such object, which its caller expects.

    Args:
        error: an `obstore.exceptions.BaseError`, or a FileNotFoundError.
        place: the object, for the message.
        s3_bucket: its bucket's name in S3; None: another store's.
        environ: of this process.
        writes: whether the call writes: it then misses a bucket, not an object.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    message = str(error).partition("\n")[0].strip()
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return StoreRefused(f"the store refuses {place}: {message}. {_CREDENTIALS}")
    if isinstance(error, FileNotFoundError):
        if not writes:
            return None
        return StoreRefused(f"{place} cannot be written: there is no such bucket, and headrace makes none")
    if _METADATA.search(message) and not _metadata_away(message, str(error)):
        return StoreRefused(
            f"there are no credentials for {place}: none are in the environment, and the machine has no account of "
            f"its own ({message}). {_CREDENTIALS}"
        )
    if s3_bucket is not None and _REGION.search(str(error)):
        named = _NAMED_REGION.search(str(error))
        region = None if named is None else named[1] or named[2]
        return StoreRefused(of_another_region(f"s3://{s3_bucket}", s3_bucket, region, environ))
    if _REFUSED.search(message):
        return StoreRefused(f"the store refuses {place}: {_NOISE.sub('', message)}. {_CREDENTIALS}")
    if _NO_BUCKET.search(message):
        return StoreRefused(f"{place}: there is no such bucket, and headrace makes none")
    if _AWAY.search(message) and not _NEVER.search(str(error)):
        return _away(place, message, str(error))
    return StoreError(f"{place}: {message}")


def _metadata_away(message: str, text: str) -> bool:
    """Return whether the machine's metadata service is busy: elsewhere nobody listens at its address."""
    return re.search(_BUSY, message) is not None or (_TIMEOUT in text and _NOT_CONNECTED not in text)


def _away(place: str, message: str, text: str) -> StoreAway:
    reason, advice = "", "Run this again later"
    if "HTTP error: " in message:
        match = _REASON.search(text)
        reason = f": {match[1] or match[2]}" if match else ""
        advice += "; or that is not its address: see `lake`, `store` and `source.path`, and AWS_ENDPOINT_URL for S3"
    return StoreAway(f"{place}: the store is away ({_NOISE.sub('', message)}{reason}). {advice}")


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
