"""The day's statistics against the limits of the spec. Opens no Spark session, so plain Python runs it too."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("drift", __doc__)
