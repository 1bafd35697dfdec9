"""Errors of boto3, as what a user can do about them."""

from __future__ import annotations

from contextlib import suppress

from headrace.errors import UserError
from headrace.logs import redact
from headrace.storage import StoreAway

#: Answers that say "later", as headrace.storage has them: these, and 5xx but those that say "never".
_LATER, _NEVER = {408, 429}, {501, 505}


def s3_fault(error: Exception, place: str) -> UserError | StoreAway:
    """Return the error to raise in place of one of boto3 (`S3UploadFailedError`) or botocore.

    Args:
        error: as it was caught.
        place: the URI of what was to be written.

    Returns:
        StoreAway where there was no answer, or one that says to come later; else a UserError.
    """
    from botocore.exceptions import ConnectionError, HTTPClientError, ProxyConnectionError, SSLError

    # `upload_file` tells what the store has answered in a text alone; the answer is the error before its own.
    answered = error if hasattr(error, "response") else error.__context__
    cause = answered if isinstance(answered, Exception) and hasattr(answered, "response") else error
    status = 0
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # not answered at all
        status = int(getattr(cause, "response")["ResponseMetadata"]["HTTPStatusCode"])  # noqa: B009  (not of the type)
    detail = redact((str(cause).splitlines() or [type(cause).__name__])[0]).rstrip(".")
    is_silent = isinstance(cause, HTTPClientError | ConnectionError)
    is_never = isinstance(cause, SSLError | ProxyConnectionError)
    if (is_silent and not is_never) or status in _LATER or (status >= 500 and status not in _NEVER):
        return StoreAway(
            f"{place}: the store is away ({detail}). Run this again later; or that is not its address: see "
            f"publish.warehouse.stage, AWS_REGION and AWS_ENDPOINT_URL"
        )
    return UserError(
        f"cannot write to {place}, below publish.warehouse.stage: {detail}. The credentials are those that boto3 finds "
        f"on this host (the environment, a profile, the machine's role); they must allow to write and delete there"
    )
