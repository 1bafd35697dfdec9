"""Generator of click logs of any size with a known best AUC: users, items, drifting tastes, and faults of real logs.

    spec = load_spec("clicks")
    truths = generate(spec, Workspace(Path("var")), days_between("2026-01-01", "2026-01-08"))
    truths[-1].auc_ceiling

`population` makes users and items, `click_model` draws their clicks and purchases, and `event_lines` formats events as
JSON or CSV and adds malformed lines. `landing_files` writes a day, and `truth` is its ground truth. `site` simulates a
site that shows users their lists. Random numbers come from headrace.compute.counter_random.
"""

from headrace.lake.generate.landing_files import GenerationProgress, days_between, generate, truth_path
from headrace.lake.generate.truth import DayTruth

__all__ = ["DayTruth", "GenerationProgress", "days_between", "generate", "truth_path"]
