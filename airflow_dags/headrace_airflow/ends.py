"""Meaning of a job's or command's exit code for its task: README.md, "Tries"."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowRescheduleException

from headrace_airflow.settings import ERRORS, SETTINGS

log = logging.getLogger("headrace.airflow")


class RefusedException(AirflowFailException):
    """Exit code 3: an audit, a limit of drift or a gate has refused."""


def end(code: int | None, job: str, message: str) -> NoReturn:
    """Raise what the task of a job with this exit code (not 0) ends with; None: it is not known.

    Raises:
        RefusedException: 3.
        AirflowFailException: 2. Neither is tried again.
        AirflowRescheduleException: 69, another run of the pipeline is at work, or 75, the day is not complete or its
            store is away. The task gives its slot back and comes again, as often as the DAG's time limit allows; that
            is no try.
        AirflowException: anything else, which is tried again.
    """
    if code == ERRORS.EXIT_REFUSED:
        raise RefusedException(f"{job} was refused: {message}")
    if code == ERRORS.EXIT_USER_ERROR:
        raise AirflowFailException(f"{job}: {message}")
    if code in (ERRORS.EXIT_INCOMPLETE, ERRORS.EXIT_BUSY):
        reason = (
            "the day is not complete yet, or its store is away"
            if code == ERRORS.EXIT_INCOMPLETE
            else "another run is at work"
        )
        log.info("%s waits: %s", job, reason)
        raise AirflowRescheduleException(datetime.now(UTC) + timedelta(seconds=SETTINGS.wait_seconds))
    raise AirflowException(f"{job} failed{'' if code is None else f' with exit code {code}'}: {message}")
