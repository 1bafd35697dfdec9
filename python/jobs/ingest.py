"""Landing files to the day's partition of the lake's Delta table."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("ingest", __doc__)
