"""Messages about a day: to a webhook (connection `headrace_webhook`) and by e-mail (connection `headrace_smtp`).

A message that cannot be sent is a warning in the log: it fails no task.
"""

from __future__ import annotations

import json
import logging
import smtplib
import ssl
import urllib.request
from email.message import EmailMessage
from typing import Any

from headrace_airflow.connections import connection
from headrace_airflow.settings import SETTINGS

log = logging.getLogger("headrace.airflow")

WEBHOOK = "headrace_webhook"
SMTP = "headrace_smtp"
_TIMEOUT_SECONDS = 20


def report_url(pipeline: str, ds: str) -> str:
    """Return the address of a day's report."""
    return f"{SETTINGS.reports_url}/{pipeline}/{ds}.html"


def task_failed(context: Any) -> None:
    """Send the message of a task that has failed for good; a callback."""
    task, ti = context["task"], context["ti"]
    reason = str(context.get("exception") or "its process was killed")
    pipeline = getattr(task, "pipeline", None)
    text = f"{ti.task_id} failed: {reason}\nLog: {getattr(ti, 'log_url', '')}"
    tell("failed", pipeline.name if pipeline else ti.dag_id, _day(task, context), text)


def day_done(context: Any) -> None:
    """Send the message of a finished day; a callback of its last task."""
    task = context["task"]
    tell("done", task.pipeline.name, _day(task, context), "The day is done.")


def tell(event: str, pipeline: str, ds: str, text: str) -> None:
    """Send a message where HEADRACE_NOTIFY asks for that event and a connection says how.

    Args:
        event: failed, refused or done.
        pipeline: the pipeline.
        ds: the day.
        text: what happened.
    """
    if event not in SETTINGS.notify:
        return
    message = {"event": event, "pipeline": pipeline, "ds": ds, "text": text, "report": report_url(pipeline, ds)}
    for conn_id, send in ((WEBHOOK, _post), (SMTP, _mail)):
        try:
            conn = connection(conn_id)
            if conn is not None:
                send(conn, message)
        except Exception as e:
            log.warning("no message by '%s': %s: %s", conn_id, type(e).__name__, e)


def _post(conn: Any, message: dict[str, str]) -> None:
    extra = conn.extra_dejson
    address = f"{conn.schema or 'https'}://{conn.host}{f':{conn.port}' if conn.port else ''}{extra.get('path', '/')}"
    # Chat services show `text`.
    text = f"{_subject(message)}\n{message['text']}\n{message['report']}"
    headers = {"Content-Type": "application/json"}
    if conn.password:
        headers["Authorization"] = f"Bearer {conn.password}"
    request = urllib.request.Request(address, json.dumps({**message, "text": text}).encode(), headers)
    urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()


def _mail(conn: Any, message: dict[str, str]) -> None:
    extra = conn.extra_dejson
    mail = EmailMessage()
    mail["Subject"] = _subject(message)
    mail["From"] = extra.get("from_email") or conn.login
    to = extra.get("to") or []
    mail["To"] = ", ".join([to] if isinstance(to, str) else to)
    mail.set_content(f"{message['text']}\n\nReport: {message['report']}\n")
    encrypted = not extra.get("disable_ssl", False)
    context = ssl.create_default_context()
    server: smtplib.SMTP
    if encrypted:
        server = smtplib.SMTP_SSL(conn.host, conn.port or 465, timeout=_TIMEOUT_SECONDS, context=context)
    else:
        server = smtplib.SMTP(conn.host, conn.port or 25, timeout=_TIMEOUT_SECONDS)
    with server:
        if not encrypted and not extra.get("disable_tls", False):
            server.starttls(context=context)
        if conn.login and conn.password:
            server.login(conn.login, conn.password)
        server.send_message(mail)


def _subject(message: dict[str, str]) -> str:
    return f"headrace: {message['pipeline']} of {message['ds']}: {message['event']}"


def _day(task: Any, context: Any) -> str:
    """Return the task's day; where its process was killed, templates have not been filled in yet."""
    ds = str(getattr(task, "ds", ""))
    if "{" not in ds:
        return ds
    run = context.get("dag_run")
    return str(getattr(run, "partition_key", None) or getattr(run, "run_after", ""))[:10]
