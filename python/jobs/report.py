"""One HTML page about the day. Opens no Spark session, so plain Python runs it too."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("report", __doc__)
