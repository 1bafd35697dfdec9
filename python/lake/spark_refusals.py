"""That a store refuses what Spark asks, as Spark's own file systems tell it.

Messages are those of Hadoop 3.4.1: `S3AUtils.translateException` of hadoop-aws, to which 401, 403 and credentials that
are not found are an AccessDeniedException, what a NameNode answers, and `AbfsRestOperationException` of hadoop-azure;
and of Google's connector, by 2.2.26.
"""

from __future__ import annotations

import os
import re

from headrace.storage import StoreError, StoreRefused
from headrace.storage.objects.clients import of_another_region

_DENIED = re.compile(r"\bjava\.nio\.file\.AccessDeniedException: s3a?://([^\n]*?): ([^\n]*)")
_NO_CREDENTIALS = re.compile(r"\b(?:NoAuthWithAWS|NoAwsCredentials|CredentialInitialization)Exception\b")
_NO_BUCKET = re.compile(r"\borg\.apache\.hadoop\.fs\.s3a\.UnknownStoreException: `s3a?://([^/'\n]+)([^\n]*?)':")
#: S3A does not say of which bucket, and says "null" where S3 does not say which region.
_REDIRECT = re.compile(
    r"\borg\.apache\.hadoop\.fs\.s3a\.AWSRedirectException: Received permanent redirect response to region (\S+?)\.\s"
)
#: Other codes of 4xx and 501 that no later try changes.
_ANSWERED = re.compile(r"\borg\.apache\.hadoop\.fs\.s3a\.AWS(?:BadRequest|UnsupportedFeature)Exception: ([^\n]*)")
_CERTIFICATE = re.compile(
    r"\borg\.apache\.hadoop\.fs\.s3a\.AWSClientIOException: ([^\n]*PKIX path (?:building|validation) failed[^\n]*)"
)
#: What was asked, of which object.
_CALL = re.compile(r"^\w[^\n]*? on s3a?://([^\n]*?): (.*)$")
_HDFS_DENIED = re.compile(r"\borg\.apache\.hadoop\.security\.AccessControlException: ([^\n]+)")
#: The account's host, the container, the path, and what it was answered; as where it is told to come later.
_ABFS_DENIED = re.compile(
    r'\bOperation failed: "([^"\n]*)", (40[13]), [A-Z]+, https?://([^/\s]+)/([^/?\s]+)([^?,\s]*)[^\n]*\brId: '
)
#: Of who gives tokens for it, in a trace of this file system's: 400 and 401 are of a client or a secret that is wrong.
_ABFS_NO_TOKEN = re.compile(r"\berror message: Auth failure: (HTTP Error 40[013])\b")
_AZURE = "org.apache.hadoop.fs.azurebfs."
_GCS_DENIED = re.compile(r"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=(40[13] [^\n]*)")
_CLASS = re.compile(r"^(?:[\w$]+\.)+\w+Exception: ")
#: What the store says, its code of HTTP and its name for that; "null" where it says nothing, as to HEAD.
_ANSWER = re.compile(r"^(.*?)(?:(?:^|: )null)? \(Service: [^,)]+, Status Code: (\d+)[^)]*\)(?::(\w+))?")
#: Amazon's client says why it has no answer twice.
_TWICE = re.compile(r"^(.+?): \1$")
_CREDENTIALS = (
    "Credentials are those of the environment or of the machine (docs/storage.md): the driver finds its own, and each "
    "executor, which needs them, too, on its host. They must allow to read, write, list and delete there"
)


def refusal_of_spark(text: str) -> StoreRefused | StoreError | None:
    """The error as one of headrace's, by what Spark says; None: it is another one.

    Args:
        text: what Spark says, with Java's stack trace.
    """
    if (denied := _DENIED.search(text)) is not None:
        place = f"s3://{denied[1]}"
        if _NO_CREDENTIALS.search(denied[2]):
            return StoreRefused(f"Spark has found no credentials for {place}. {_CREDENTIALS}")
        return StoreRefused(f"the store refuses Spark {place}: {_said(denied[2])[1]}. {_CREDENTIALS}")
    if (nowhere := _NO_BUCKET.search(text)) is not None:
        bucket, key = nowhere.groups()
        return StoreRefused(f"s3://{bucket}{key}: there is no bucket '{bucket}', and headrace makes none")
    if (redirect := _REDIRECT.search(text)) is not None:
        region = None if redirect[1] == "null" else redirect[1]
        said = of_another_region("a bucket that Spark asked for", None, region, os.environ)
        return StoreRefused(
            f"{said}, here and on the hosts of executors (spark.hadoop.fs.s3a.endpoint.region of spark.properties goes "
            f"before it)"
        )
    if (answered := _ANSWERED.search(text) or _CERTIFICATE.search(text)) is not None:
        key, said = _said(answered[1])
        return StoreError(f"s3://{key}: {said}" if key else said)
    if (refused := _HDFS_DENIED.search(text)) is not None:
        return StoreRefused(
            f"HDFS refuses Spark: {refused[1]}. The user is HADOOP_USER_NAME, or with Kerberos that of kinit's ticket, "
            f"for which executors get tokens (docs/storage.md); it must be allowed to read, write, rename and delete "
            f"there"
        )
    if (azure := _ABFS_DENIED.search(text)) is not None:
        said, code, host, container, path = azure.groups()
        return StoreRefused(f"the store refuses Spark abfss://{container}@{host}{path}: {code} {said}. {_CREDENTIALS}")
    if _AZURE in text and (no_token := _ABFS_NO_TOKEN.search(text)) is not None:
        return StoreRefused(f"Azure gives Spark no token for abfss: {no_token[1]}. {_CREDENTIALS}")
    if (google := _GCS_DENIED.search(text)) is not None:
        return StoreRefused(f"the store refuses Spark gs://{google[1]}: {google[2].rstrip('.')}. {_CREDENTIALS}")
    return None


def _said(text: str) -> tuple[str, str]:
    """(the object, where it is named; what the store or Amazon's client has said of it)"""
    call = _CALL.match(text)
    key, said = (call[1], call[2]) if call else ("", text)
    said = _TWICE.sub(r"\1", _CLASS.sub("", said))
    if (answer := _ANSWER.match(said)) is not None:
        words = [word for word in (answer[3], answer[1]) if word and word != "null"]
        said = f"{answer[2]} {': '.join(words)}".rstrip(" .")
    return key, said
