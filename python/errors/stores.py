"""Errors of stores of objects: one that is away, one that refuses, and what obstore's errors mean.

What a store answers that is neither "not there" nor "the condition does not hold" is a StoreRefused where it is about
permissions or the bucket, a StoreAway where it is no answer or says to come later, else a StoreError; none quotes more
than the store's first line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.errors import UserError

#: The variables that name S3's region, the first of them that is set; without any it is that of the library and of AWS.
_REGIONS, DEFAULT_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"
#: How the library says, after its last try, that it had no answer, or one of a server that is busy or broken. Of the
#: codes of 5xx, 501 and 505 say that the server never will.
_BUSY = r"Server returned error response|non-2xx status code: (?:408|429|5(?!01|05)\d\d)"
_AWAY = re.compile(rf"HTTP error: |{_BUSY}")
#: What it says of a connection that no later try makes: a URL that is none, a certificate that is not trusted. No URL,
#: which stands there with its key, has a space or a bracket: they are quoted.
_NEVER = re.compile(r"builder error|InvalidCertificate\(|invalid peer certificate", re.IGNORECASE)
#: Where clouds tell a machine's own credentials: who asks there has found none elsewhere.
_METADATA = re.compile(r"//(?:169\.254\.\d+\.\d+|\[?fd00:ec2::254\]?|metadata\.google\.internal)[/: ]")
#: How it says that nobody listens there: that a connection was made and no answer came, it says without.
_NOT_CONNECTED, _TIMEOUT = "ConnectError(", "kind: Timeout"
#: What it has no errors of its own for where it lists: that it may not, and that there is no such bucket.
_REFUSED, _NO_BUCKET = re.compile(r"non-2xx status code: 40[13]\b"), re.compile(r"non-2xx status code: 404\b")
#: How S3 says that a bucket is in another region, in its own words (no key has a bracket there) or by a redirect
#: without an address; and which one it is.
_REGION = re.compile(
    r"- Received redirect without LOCATION\b|"
    r"<Code>(?:PermanentRedirect|IllegalLocationConstraintException)</Code>|"
    r"<Code>AuthorizationHeaderMalformed</Code>[^\n]*\bexpecting '"
)
_NAMED_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>|expecting '([a-z0-9-]+)'")
#: What of its first line is no news to anybody: how it was told to try, and a server's page about an error.
_NOISE = re.compile(r"Generic \S+ error: |, max_retries: \d+, retry_timeout: \S+ *|:(?: <.*)?$")
#: Why there was no answer, in the lines behind the first one.
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
