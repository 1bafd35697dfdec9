"""Quality on real data, beside what papers report: `make quality` fills docs/quality.md.

    make quality                               # all parts, seeds 1, 2 and 3
    make quality PARTS=beauty,adult SEEDS=1,2  # some
    python -m bench.quality.page               # docs/quality.md from what is there

A part is an object of a module of this package, rankings.py (items for users) or clicks.py (one label):

    BEAUTY = QualityPart(
        title="Amazon Beauty",
        data=("beauty",),                    # folders of ../shared/data; where one is missing the part is skipped
        protocol="Each user's last item ...",  # Markdown: split, candidates, ties, what is measured; above the table
        cases=(
            pipeline_case(                   # bench.quality.cases: a spec of conf/pipelines, run as a user would
                "SASRec, sampled softmax",
                "beauty",
                overrides=("train.negatives.per_positive=3000",),
                goals={"hr_at_k": Goal(floor=0.0338, aim=0.0490)},
            ),
            QualityCase("popularity", run_popularity, settings={...}),  # or any function of a seed and a folder
        ),
        published=(PublishedResult("SASRec", {"hr_at_k": 0.0490}, "Klenitskiy and Vasilev, RecSys 2023"),),
    )

and its name stands in the module's `PARTS`. `QualityCase.run(seed, folder)` returns a `CaseResult`. `folder` is the
part's below build/quality, which all its cases share: a workspace there (`folder / "home"`) is ingested and made a
dataset of once, and what a case trains is kept under keys of its settings.

Each finished (case, seed) is a file of build/quality/results; it stands while the fingerprint of the case's settings is
the same, so that a run that was stopped goes on with the same command. build/quality/quality.json has all of them.
"""
