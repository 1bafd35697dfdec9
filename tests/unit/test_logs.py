"""Log lines as JSON: one object a line, with context, without secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace import logs
from headrace.config.installation import checkout
from headrace.jobs.output import MARK, JsonLines, copy_output
from headrace.logs import HIDDEN, hide, is_secret, redact
from tests.cli_support import DS, Yard, make_yard


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    logs.set_context()
    yield
    logs.set_context()


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    fields: dict[str, Any] = json.loads(text)
    return fields


def record(message: str, *args: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("headrace.x", logging.WARNING, "f", 1, message, args, exc_info)


def test_a_line_has_its_context_and_its_exception() -> None:
    logs.set_context(pipeline="clicks", ds=DS, stage="train", run_id="")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = line_of(record("it %s", "failed", exc_info=sys.exc_info()))
    assert line["time"].endswith("Z")
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "headrace.x", "it failed")
    assert (line["pipeline"], line["ds"], line["stage"]) == ("clicks", DS, "train")
    assert "run_id" not in line
    assert line["exception"]["type"] == "builtins.ValueError"
    assert line["exception"]["message"] == "two\nlines"
    assert line["exception"]["trace"].startswith("Traceback")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:hunter22@db/x", "postgresql://me:***@db/x"),
        ("fs.s3a.secret.key=abc, next=1", "fs.s3a.secret.key=***, next=1"),
        ('{"api_key": "abc def", "rows": 3}', '{"api_key": ***, "rows": 3}'),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("Error: token=abc", "Error: token=***"),
        ("it failed: api_key : 'abc def': no", "it failed: api_key : ***: no"),
        ('{"message": "token=abc"}', '{"message": "token=***"}'),
        ("token_file: token=abc, secret==x", "token_file: token=***, secret=***"),
        (
            "https://a.blob.core.windows.net/c?sv=24&sig=ab%3D&se=9",
            "https://a.blob.core.windows.net/c?sv=24&sig=***&se=9",
        ),
        ("GET /k?X-Amz-Credential=AK/1&X-Amz-Signature=f00", "GET /k?X-Amz-Credential=***&X-Amz-Signature=***"),
        ("AccountName=a;AccountKey=ab==;EndpointSuffix=x", "AccountName=a;AccountKey=***;EndpointSuffix=x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII+/=\n-----END RSA PRIVATE KEY-----.", "***."),
        ("password_file=/run/secrets/pw", "password_file=/run/secrets/pw"),
        ("step 3 of 4, loss=0.25", "step 3 of 4, loss=0.25"),
    ],
)
def test_what_may_be_a_secret_is_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAREHOUSE_PASSWORD", "s3cr3t-value")
    monkeypatch.setenv("WAREHOUSE_PASSWORD_FILE", "/run/pw-file")
    line = line_of(record("connect with s3cr3t-value, not /run/pw-file"))
    assert line["message"] == "connect with ***, not /run/pw-file"
    assert (is_secret("WAREHOUSE_PASSWORD"), is_secret("WAREHOUSE_PASSWORD_FILE")) == (True, False)


def test_the_variables_of_clouds() -> None:
    secret = [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "GOOGLE_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
    ]
    harmless = [
        "AWS_PROFILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "OLDPWD",
        "PWD",
    ]
    assert [name for name in [*secret, *harmless] if is_secret(name)] == secret


#: Characters of secrets: those that formats, addresses, JSON, `repr` and lines write otherwise, and any.
SECRETS = st.text(
    st.sampled_from("ab%s{}'\"\\\n\r\t/+ @:=é\u2028\x1b\U0001f511") | st.characters(), min_size=4, max_size=24
)


@settings(max_examples=300)
@given(secret=SECRETS.filter(str.strip), words=st.lists(st.text("xyz %", max_size=4), min_size=2, max_size=2))
def test_no_line_has_a_secret(secret: str, words: list[str]) -> None:
    """The message, its arguments, fields and a trace are hidden as text and as JSON; another rule searches the text."""
    prefix, suffix = words
    # Lines of tracebacks name files and code of this test, which short texts stand in.
    assume(all(secret not in text for text in (__file__, "Traceback (most recent call last):", "ValueError", prefix)))

    class Value:
        def __repr__(self) -> str:
            return f"<{secret!r}>"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.logs._values", set())
        hide(secret)
        try:
            raise ValueError(f"{prefix}{secret}{suffix}", "two")
        except ValueError as e:
            e.add_note(f"note {secret}")
            log_record = record(
                f"{prefix.replace('%', '')}{secret.replace('%', '%%')} %s %r %s", secret, secret, Value()
            )
            log_record.exc_info = sys.exc_info()
            log_record.fields = {"a": [f"{prefix}{secret}", {"b": secret}], secret: 1, "c": Value()}
            trace = io.StringIO()
            with redirect_stderr(trace):
                logs.print_trace(e)
        text = logs.TextFormatter().format(log_record)
        line = json.loads(logs.JsonFormatter().format(log_record))
        foreign = json.loads(logs.as_json_line(json.dumps({"m": f"x {secret}", "n": [secret]}), {"stage": "train"}))
    written = [secret, repr(secret)[1:-1], ascii(secret)[1:-1], repr(f"{secret}'\"")[1:-4], logs.visible(secret)]
    for leaf in (text, trace.getvalue(), *leaves(line), *leaves(foreign)):
        assert not [form for form in written if form in leaf and form.strip(" *")], (leaf, secret)
    assert HIDDEN in text
    assert text.startswith(logs.visible(prefix.replace("%", "")))
    assert foreign["stage"] == "train"


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str):
        yield value


@given(secret=st.text(st.characters(exclude_categories=["Cs"]), max_size=3))
def test_short_secrets_are_left_alone(secret: str) -> None:
    """Three characters stand in other words: hidden there, the gaps would tell them and spoil what is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.logs._values", set())
        hide(secret)
        assert redact(f"it was {secret}, then") == f"it was {secret}, then"


@given(
    secret=st.text(st.sampled_from("ab%é\"'\\ z\U0001f511"), min_size=6, max_size=20).filter(
        lambda s: len(s.strip()) > 5
    ),
    size=st.integers(1, 9),
)
def test_no_application_prints_a_secret(secret: str, size: int) -> None:
    """Whatever cuts its output has: prints, the JVM's lines, half a line before an event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_PASSWORD", secret)
        data = f"first {secret}\nx\rsecond: {secret}".encode()
        chunks = iter([*(data[start : start + size] for start in range(0, len(data), size)), b""])
        patch.setattr(os, "read", lambda *_: next(chunks))
        log_file, console = io.BytesIO(), io.StringIO()
        copy_output(0, log_file, console, lambda event: None)
    assert log_file.getvalue().decode() == "first ***\nx\rsecond: ***"
    assert console.getvalue() == "first ***\nsecond: ***\n"


@pytest.mark.parametrize("form", logs.FORMATS)
def test_no_process_prints_a_secret(form: str) -> None:
    """A thread, a log line of another library before any set-up of its own, an exception that nobody catches."""
    program = """
import logging, sys, threading
from headrace import logs
from headrace.logs import hide
logs.configure()
hide("pass%word\\nof two lines")
logging.getLogger("their.library").warning("with %s", "pass%word\\nof two lines")
def work():
    raise OSError("no access by pass%word\\nof two lines")
thread = threading.Thread(target=work)
thread.start()
thread.join()
raise KeyError("pass%word\\nof two lines", "second-" + "secret")
"""
    env = {**os.environ, logs.VARIABLE: form, "DB_PASS": "second-secret"}
    env["PUBLISH_PASSWORD"] = "second-secret"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert completed.returncode == 1
    assert (completed.stderr.count("OSError"), completed.stderr.count("KeyError")) == (
        (1, 1) if form == "text" else (2, 2)
    )
    for part in ("pass%", "of two lines", "second-secret"):
        assert part not in completed.stderr.replace('raise OSError("no access by pass', ""), completed.stderr
    if form == "json":
        assert [json.loads(line)["level"] for line in completed.stderr.splitlines()] == ["WARNING", "ERROR", "ERROR"]


def test_errors_name_keys_and_hide_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter-22")
    stderr = io.StringIO()
    logs.print_error(
        "a.yaml: publish.warehouse.password: unknown key\n'token': no such column; hunter-22, pwd.x=1", stderr
    )
    assert stderr.getvalue().splitlines() == [
        "error: a.yaml: publish.warehouse.password: unknown key",
        "'token': no such column; ***, pwd.x=1",
    ]
    stderr = io.StringIO()
    logs.print_error("Error: token=abc of https://me:hunter23@host, Bearer abcdef123456", stderr)
    assert stderr.getvalue() == "error: Error: token=*** of https://me:***@host, Bearer ***\n"


@given(st.lists(st.text(max_size=30), max_size=6), st.integers(1, 7))
def test_whatever_a_process_prints_becomes_objects_line_by_line(texts: list[str], size: int) -> None:
    own_line = json.dumps({"message": "ours", "level": "INFO"})
    data = "\n".join([*texts, own_line, "last"]).encode("utf-8", errors="replace")
    log_file, console = io.BytesIO(), io.StringIO()
    sink = JsonLines(log_file, console, lambda: {"stage": "train"})
    for start in range(0, len(data), size):
        sink.write(data[start : start + size])
    sink.close()
    assert log_file.getvalue().decode() == console.getvalue()
    objects = [json.loads(line) for line in log_file.getvalue().split(b"\n") if line]
    assert objects[-1]["message"] == "last"
    assert objects[-1]["stage"] == "train"
    assert objects[-2] == {**json.loads(own_line), "stage": "train"}


def test_events_between_lines_are_none() -> None:
    read, write = os.pipe()
    event = MARK + json.dumps({"stage": "train", "kind": "run", "run_id": "7"}).encode() + b"\n"
    os.write(write, b"before\n" + event + b"after")
    os.close(write)
    heard: list[str] = []
    log_file = io.BytesIO()
    sink = JsonLines(log_file, io.StringIO(), lambda: {"run_id": heard[-1]} if heard else {})
    copy_output(read, sink, io.StringIO(), lambda e: heard.append(e.run_id))
    sink.close()
    os.close(read)
    objects = [json.loads(line) for line in log_file.getvalue().splitlines()]
    assert [(f["message"], f.get("run_id")) for f in objects] == [("before", None), ("after", "7")]


def test_a_run_and_its_refusals_are_objects(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "json")
    yard: Yard = make_yard(tmp_path, monkeypatch)
    result = yard.run()
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert [(f["stage"], f["event"]) for f in events][:2] == [("ingest", "run"), ("ingest", "done")]
    refused = yard("run", "clicks", "--ds", "tomorrow")
    assert refused.exit_code == 2
    (error,) = [json.loads(line) for line in refused.stderr.splitlines()]
    assert (error["level"], "tomorrow" in error["message"]) == ("ERROR", True)


def test_the_program_of_stages_says_its_errors_as_objects(tmp_path: Any) -> None:
    line = [sys.executable, str(checkout() / "python/jobs/run_stage.py"), "drift", "nowhere", "--home", str(tmp_path)]
    env = {**os.environ, logs.VARIABLE: "json"}
    completed = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    assert completed.returncode == 2
    (error,) = [json.loads(line) for line in completed.stderr.splitlines()]
    assert error["level"] == "ERROR"
