"""A click log of any size with a known best: users, items, tastes that drift, and everything that real logs get wrong.

    spec = load_spec("clicks")
    truths = generate(spec, Workspace(Path("var")), days_between("2026-01-01", "2026-01-08"))
    truths[-1].auc_ceiling

`click_model` draws the events, `population` users and items, `faults` what is broken on purpose; `auc` and `truth` are
the ground truth of a day, `serialize` and `landing_files` the files, `writers` and `run` the work;
`site` and `site_files` are a site that shows users their lists; headrace.counter_random has the random numbers.
"""

from headrace.generate.landing_files import truth_path
from headrace.generate.run import Progress, days_between, generate
from headrace.generate.truth import DayTruth

__all__ = ["DayTruth", "Progress", "days_between", "generate", "truth_path"]
