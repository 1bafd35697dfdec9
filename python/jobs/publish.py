"""Write, audit, publish: the day's scores to the warehouse."""

from headrace.jobs._main import job_main

if __name__ == "__main__":
    job_main("publish", __doc__)
