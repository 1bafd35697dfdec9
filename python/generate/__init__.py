"""A click log of any size with a known best: users, items, tastes that drift, and everything that real logs get wrong.

    spec = load_spec("clicks")
    truths = generate(spec, Workspace(Path("var")), days_between("2026-01-01", "2026-01-08"))
    truths[-1].auc_ceiling

`clicks` has the model, `population` who is in it, `faults` what is broken on purpose, `ceiling` and `truth` what is
known about a day, `lines` and `landing` the files, `writers` and `run` the work.
"""

from headrace.generate.landing import truth_path
from headrace.generate.run import Progress, days_between, generate
from headrace.generate.truth import DayTruth

__all__ = ["DayTruth", "Progress", "days_between", "generate", "truth_path"]
