"""The stages by name. Each is imported when asked for, so that whoever needs one does not pay for all."""

from __future__ import annotations

from headrace.stage import Stage


def load_stage(name: str) -> Stage:
    """The stage of that name (one of `headrace.stage.ORDER`).

    Raises:
        KeyError: there is none.
    """
    match name:
        case "ingest":
            from headrace.lake.ingest.stage import Ingest

            return Ingest()
        case "features":
            from headrace.drift.count_day import count_day
            from headrace.features.build.stage import BuildFeatures

            return BuildFeatures(count_day)
        case "drift":
            from headrace.drift.stage import JudgeDrift

            return JudgeDrift()
        case "train":
            from headrace.train.stage import Train

            return Train()
        case "baseline":
            from headrace.train.baseline.stage import TrainBaseline

            return TrainBaseline()
        case "score":
            from headrace.score.stage import ScoreCandidates

            return ScoreCandidates()
        case "publish":
            from headrace.publish.stage import Publish

            return Publish()
        case "report":
            from headrace.monitor.stage import Report

            return Report()
    raise KeyError(name)
