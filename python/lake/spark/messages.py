"""Errors of Spark by their text: what a Python task has ended with, and what a store has answered.

Of a task, only the text of its trace reaches the driver. Messages of stores are those of Hadoop 3.4.1, and of Google's
connector those of 2.2.26: `S3AUtils.translateException` of hadoop-aws, to which 401, 403 and missing credentials are
an AccessDeniedException; `NetUtils` of hadoop-common, whose words HDFS's client uses; and `AbfsRestOperationException`
of hadoop-azure, which prints no name of its class.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from importlib import import_module
from urllib.parse import unquote

from pyspark.errors.exceptions.captured import CapturedException

from headrace.errors import UserError
from headrace.storage import StoreAway, StoreError, StoreRefused
from headrace.storage.objects.clients import of_another_region

#: Spark 4's error conditions of a scan: the condition, and the file as a URI.
_FAILED_READ = re.compile(r"\[FAILED_READ_FILE\.(\w+)\] Encountered error while reading file (\S+?)\.?\s")
_CAUSE = re.compile(r"\nCaused by: (?:[\w$]+\.)+([\w$]+(?:: [^\n]*)?)")
_HINTS = {"CANNOT_READ_FILE_FOOTER": "it has no footer", "NO_HINT": "no reason is given"}
#: Causes that say nothing of a file.
_NOT_OF_THE_FILE = ("OutOfMemoryError", "No space left", "InterruptedException", "InterruptedIOException")
#: Characters of a cause that a message shows.
_SHOWN = 300
_BEGIN = re.compile(r"Traceback \(most recent call last\):\n|PythonException: (?=\w[\w.]*: )")
#: What Java says behind it.
_END = re.compile(r"\n\s*at [\w$.]+|\n\n(?:Driver stacktrace|JVM stacktrace):")
#: How Python joins the traces of errors that were raised one for another.
_FOR = "The above exception was the direct cause of the following exception"
_WHILE = "During handling of the above exception, another exception occurred"
_JOINED = re.compile(rf"\n\n({_FOR}|{_WHILE}):\n\n(?=Traceback )")
#: The lines of a trace before it are indented, but for the first.
_ERROR = re.compile(r"^(?!Traceback \(|\s)([\w.]+)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)
_NUMBERED = re.compile(r"\[Errno (\d+)\] ([^\n]*?)(?:: '([^'\n]+)')?")
#: The exception, the URI, and what Amazon's client says (once: it stands there twice).
_OF_S3A = re.compile(
    r"\b(?:java\.net\.|org\.apache\.hadoop\.net\.|org\.apache\.hadoop\.fs\.s3a\.)"
    r"((?:Connect|ConnectTimeout|NoRouteToHost|SocketTimeout|UnknownHost|Socket|AWSServiceThrottled|AWSStatus500|"
    r"AWSNoResponse|AWSApiCallTimeout|AWSClientIO)Exception): [^\n]*? on (s3a?://[^\s:,]+)(?::[^\S\n]*([^\n]*))?"
)
#: Of AWSClientIOException, which says other things, too; and of a certificate that is not trusted.
_UNANSWERED, _UNTRUSTED = "Unable to execute HTTP request", "PKIX path "
_REPEATED = re.compile(r":\s{2,}.*|:null: .*")
_CLASS = re.compile(r"^(?:[\w$]+\.)+\w+Exception: ")
#: The NameNode's address, and why.
_OF_HDFS = re.compile(
    r"\b(?:Call From \S+|No Route to Host from \s*\S+) to (\S+:\d+) failed on (?:connection|socket timeout) exception: "
    r"([^;\n]+)"
)
#: That no DataNode has a block or takes one, or that the NameNode is not ready: what is said.
_OF_HDFS_DATA = re.compile(
    r"\borg\.apache\.hadoop\.(?:hdfs\.BlockMissing|hdfs\.server\.namenode\.SafeMode|ipc\.Standby|ipc\.Retriable)"
    r"Exception\)?: ([^\n]*)"
)
#: Running, excluded by the client, since they did not take it: others are full.
_NO_DATANODE = re.compile(r"There are (\d+) datanode\(s\) running and (\d+|no) node\(s\) are excluded")
#: The codes of HTTP that say "later".
_LATER = r"(?:408|429|5(?!01|05)\d\d)"
#: What it was answered, the account's host, the container, the path.
_OF_ABFS = re.compile(
    rf'\bOperation failed: "([^"\n]*)", ({_LATER}), [A-Z]+, https?://([^/\s]+)/([^/?\s]+)([^?,\s]*)[^\n]*\brId: '
)
#: No answer, of the store or of who gives tokens for it, in a trace of this file system's; the file is not named.
_OF_ABFS_UNANSWERED = re.compile(
    rf"\bStatus code: -1 error code: null error message: [^\n]*?(HTTP Error {_LATER}\b|"
    r"java\.net\.(?:Connect|NoRouteToHost|SocketTimeout|UnknownHost|Socket)Exception: .*?)(?=java\.net\.|[;\n]|$)"
)
_AZURE = "org.apache.hadoop.fs.azurebfs."
#: The object; a code that says "later", or that there was no answer.
_OF_GCS = re.compile(
    rf"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=({_LATER} [^\n]*|[^\n]*(?:Connection refused|Connection reset|"
    r"timed out)[^\n]*)"
)
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
_GCS_DENIED = re.compile(r"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=(40[13] [^\n]*)")
#: What the store says, its code of HTTP and its name for that; "null" where it says nothing, as to HEAD.
_ANSWER = re.compile(r"^(.*?)(?:(?:^|: )null)? \(Service: [^,)]+, Status Code: (\d+)[^)]*\)(?::(\w+))?")
#: Amazon's client says why it has no answer twice.
_TWICE = re.compile(r"^(.+?): \1$")
_CREDENTIALS = (
    "Credentials are those of the environment or of the machine (docs/storage.md): the driver finds its own, and each "
    "executor, which needs them, too, on its host. They must allow to read, write, list and delete there"
)


def error_in_spark(error: BaseException) -> Exception | None:
    """The error that Spark has wrapped in one of its own; None: it is Spark's, or unknown here."""
    texts = [str(error)]
    if isinstance(error, CapturedException):
        # It says what it is alone, and in Java's trace what it comes of.
        texts.append(error._stackTrace)
    for text in texts:
        if (found := task_error(text) or store_away_of_spark(text) or refusal_of_spark(text)) is not None:
            return found
    # Last: a store that is away says mostly that a file cannot be read.
    return next((found for text in texts if (found := _unreadable_file(text)) is not None), None)


def _unreadable_file(text: str) -> UserError | None:
    """That a data file is damaged or gone, as Spark's scans tell it."""
    failed = _FAILED_READ.search(text)
    causes = [cause.strip() for cause in _CAUSE.findall(text)]
    if failed is None or any(word in cause for cause in causes for word in _NOT_OF_THE_FILE):
        return None
    kind, file = failed.groups()
    path = unquote(re.sub("^file:/+", "/", file))
    if kind == "FILE_NOT_EXIST":
        return UserError(f"the data file {path} is gone. Restore it, or have its table written again")
    why = causes[-1] if causes else _HINTS.get(kind, kind.replace("_", " ").lower())
    return UserError(
        f"the data file {path} is damaged: Spark cannot read it ({why[:_SHOWN]}). Restore it, or have it delivered "
        f"again"
    )


class TaskError(Exception):
    """An error of a task that is neither one of headrace's own nor about reading."""


def task_error(text: str) -> Exception | None:
    """The error of a Python task that a job has failed with; None: it has failed otherwise.

    It is of its own class, with its message, where that is one of headrace's (or of an operator's, derived from them)
    or an OSError; what it was raised for, or while it was handled, is its `__cause__` or `__context__`.

    Args:
        text: what Spark says, with the stack traces of Java and Python.
    """
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    end = _END.search(text, begin.start())
    trace = text[begin.start() if "Traceback" in begin[0] else begin.end() : end.start() if end else None]
    error: Exception | None = None
    parts = _JOINED.split(trace)
    for joined, part in zip(("", *parts[1::2]), parts[::2], strict=True):
        found = _ERROR.search(part.strip("\n"))
        before, error = error, TaskError(part) if found is None else _made(found[1], (found[2] or "").strip())
        if joined == _FOR:
            error.__cause__ = before
        else:
            error.__context__ = before
    return error


def _made(name: str, message: str) -> Exception:
    """An error of that class, as far as it may be one that ends a program without its trace."""
    found = _class(name)
    if found is None:
        return TaskError(f"{name}: {message}")
    if issubclass(found, OSError) and (numbered := _NUMBERED.fullmatch(message)) is not None:
        return OSError(int(numbered[1]), numbered[2], numbered[3])
    # Those that are made of more than their message are told by a class above theirs.
    special = [i for i, c in enumerate(found.__mro__) if "__init__" in vars(c) and c.__module__ != "builtins"]
    made = found.__mro__[special[-1] + 1 if special else 0](message)
    assert isinstance(made, Exception)
    return made


def _class(name: str) -> type[Exception] | None:
    module, _, of = name.rpartition(".")
    if module.startswith("headrace."):
        import_module(module)
    found = getattr(sys.modules.get(module) if module else builtins, of, None)
    kinds = (UserError, StoreError, OSError)
    return found if isinstance(found, type) and issubclass(found, kinds) else None


def store_away_of_spark(text: str) -> StoreAway | None:
    """The error as one of headrace's, by what Spark says; None: it is another one."""
    for found in _OF_S3A.finditer(text):
        kind, uri, rest = found[1], found[2], found[3] or ""
        if kind != "AWSClientIOException" or (_UNANSWERED in rest and _UNTRUSTED not in rest):
            said = _CLASS.sub("", _REPEATED.sub("", rest))
            where = f"s3://{uri.partition('://')[2]}"
            return StoreAway(f"{where}: the store is away ({kind} in Spark: {said}). Run this again later")
    if (found_hdfs := _OF_HDFS.search(text)) is not None:
        address, why = found_hdfs.groups()
        return StoreAway(f"hdfs://{address} does not answer Spark ({_CLASS.sub('', why)}). Run this again later")
    return _hdfs_data_away(text) or _azure_or_google_away(text)


def _hdfs_data_away(text: str) -> StoreAway | None:
    found = _OF_HDFS_DATA.search(text)
    said = None if found is None else found[1]
    for written in _NO_DATANODE.finditer(text):
        if written[1] == written[2] or written[1] == "0":
            said = written[0]
    return (
        None
        if said is None
        else StoreAway(f"HDFS serves Spark no blocks, or is not ready ({said}). Run this again later")
    )


def _azure_or_google_away(text: str) -> StoreAway | None:
    if (abfs := _OF_ABFS.search(text)) is not None:
        said, code, host, container, path = abfs.groups()
        place = f"abfss://{container}@{host}{path}"
        return StoreAway(f"{place}: the store is away ({code} {said} in Spark). Run this again later")
    if _AZURE in text and (unanswered := _OF_ABFS_UNANSWERED.search(text)) is not None:
        return StoreAway(f"abfss: the store is away ({_CLASS.sub('', unanswered[1])} in Spark). Run this again later")
    if (gcs := _OF_GCS.search(text)) is not None:
        return StoreAway(f"gs://{gcs[1]}: the store is away ({gcs[2]} in Spark). Run this again later")
    return None


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
