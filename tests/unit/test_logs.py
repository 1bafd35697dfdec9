"""Log lines as JSON: one object a line, with context, without secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import logs
from headrace.jobs.events import MARK
from headrace.jobs.output import JsonLines, copy_output
from headrace.redaction import is_secret, redact
from headrace.workspace import checkout
from tests.cli_support import DS, Yard, make_yard


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    logs.set_context()
    yield
    logs.set_context()


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def record(message: str, *args: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("headrace.x", logging.WARNING, "f", 1, message, args, exc_info)


def test_a_line_has_its_context_and_its_exception() -> None:
    logs.set_context(pipeline="clicks", ds=DS, stage="train", run_id="")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        found = line_of(record("it %s", "failed", exc_info=sys.exc_info()))
    assert found["time"].endswith("Z")
    assert (found["level"], found["logger"], found["message"]) == ("WARNING", "headrace.x", "it failed")
    assert (found["pipeline"], found["ds"], found["stage"]) == ("clicks", DS, "train")
    assert "run_id" not in found
    assert found["exception"]["type"] == "builtins.ValueError"
    assert found["exception"]["message"] == "two\nlines"
    assert found["exception"]["trace"].startswith("Traceback")


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_what_may_be_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAREHOUSE_PASSWORD", "s3cr3t-value")
    monkeypatch.setenv("WAREHOUSE_PASSWORD_FILE", "/run/pw-file")
    found = line_of(record("connect with s3cr3t-value, not /run/pw-file"))
    assert found["message"] == "connect with ***, not /run/pw-file"
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
    other = [
        "AWS_PROFILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "OLDPWD",
        "PWD",
    ]
    assert [name for name in [*secret, *other] if is_secret(name)] == secret


@given(st.lists(st.text(max_size=30), max_size=6), st.integers(1, 7))
def test_whatever_a_process_prints_becomes_objects_line_by_line(texts: list[str], size: int) -> None:
    own = json.dumps({"message": "ours", "level": "INFO"})
    data = "\n".join([*texts, own, "last"]).encode("utf-8", errors="replace")
    kept, shown = io.BytesIO(), io.StringIO()
    sink = JsonLines(kept, shown, lambda: {"stage": "train"})
    for at in range(0, len(data), size):
        sink.write(data[at : at + size])
    sink.close()
    assert kept.getvalue().decode() == shown.getvalue()
    found = [json.loads(line) for line in kept.getvalue().split(b"\n") if line]
    assert found[-1]["message"] == "last"
    assert found[-1]["stage"] == "train"
    assert found[-2] == {**json.loads(own), "stage": "train"}


def test_events_between_lines_are_none() -> None:
    read, write = os.pipe()
    event = MARK + json.dumps({"stage": "train", "kind": "run", "run_id": "7"}).encode() + b"\n"
    os.write(write, b"before\n" + event + b"after")
    os.close(write)
    heard: list[str] = []
    kept = io.BytesIO()
    sink = JsonLines(kept, io.StringIO(), lambda: {"run_id": heard[-1]} if heard else {})
    copy_output(read, sink, io.StringIO(), lambda e: heard.append(e.run_id))
    sink.close()
    os.close(read)
    found = [json.loads(line) for line in kept.getvalue().splitlines()]
    assert [(f["message"], f.get("run_id")) for f in found] == [("before", None), ("after", "7")]


def test_a_run_and_its_refusals_are_objects(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "json")
    yard: Yard = make_yard(tmp_path, monkeypatch)
    done = yard.run()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert [(f["stage"], f["event"]) for f in found][:2] == [("ingest", "run"), ("ingest", "done")]
    refused = yard("run", "clicks", "--ds", "tomorrow")
    assert refused.exit_code == 2
    (told,) = [json.loads(line) for line in refused.stderr.splitlines()]
    assert (told["level"], "tomorrow" in told["message"]) == ("ERROR", True)


def test_the_program_of_stages_says_its_errors_as_objects(tmp_path: Any) -> None:
    line = [sys.executable, str(checkout() / "python/jobs/run_stage.py"), "drift", "nowhere", "--home", str(tmp_path)]
    env = {**os.environ, logs.VARIABLE: "json"}
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    (told,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert told["level"] == "ERROR"
