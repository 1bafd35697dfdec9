"""Lanes of tests: which tests `make test`, `make test-all` and `make test-long` run, and how many examples.

Each of these targets sets HEADRACE_TEST_LANE to a key of LANES. A lane selects tests by their markers, which stand at
tests, and below for folders, fixtures and files. Without the variable pytest runs what its command line names.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
from _pytest.reports import BaseReport

VARIABLE = "HEADRACE_TEST_LANE"
SEED = "HEADRACE_TEST_SEED"
#: The path of a file with a node id a line: tests that passed or skipped. A run leaves them out, and adds its own.
PASSED = "HEADRACE_TEST_PASSED"
#: How many lines of that file the run goes by, for all processes of the run: the file grows while they start.
_PASSED_LINES = "HEADRACE_TEST_PASSED_LINES"

_Report = TypeVar("_Report", bound=BaseReport)


@dataclass(frozen=True)
class Lane:
    """A selection of tests.

    Attributes:
        expression: markers of its tests, as pytest's option -m reads them.
        examples: factor for the `max_examples` of each property test.
        draws: whether a run takes one part of the drawn tests; else all of its tests that the expression selects.
    """

    expression: str
    examples: float = 1.0
    draws: bool = False


LANES: Mapping[str, Lane] = {
    "quick": Lane("not (slow or service or rack or long or extra)", examples=0.3),
    "all": Lane("not long", examples=0.3, draws=True),
    # `hypothesis` is the marker that hypothesis itself gives to property tests.
    "long": Lane("long or drawn or hypothesis", examples=10),
}

#: A shorter lane runs at least this many examples, or all of a test that has fewer.
FEWEST_EXAMPLES = 5

#: Markers of all tests below a folder.
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "tests/spark/": ("jvm",),
    "tests/fault/": ("jvm", "slow"),
    "tests/gpu_plan/": ("jvm", "slow", "extra"),
    "tests/rack/": ("jvm", "rack", "extra"),
}

#: Markers of all tests that use a fixture.
FIXTURES: Mapping[str, tuple[str, ...]] = {
    "spark": ("jvm",),
    "finished_day": ("jvm",),
    "hdfs_server": ("jvm", "service", "extra"),
}

#: Tests that the quick lane leaves out for their processor time, by the beginning of their node ids. Other tests,
#: which it keeps, show the same of smaller models, of fewer kills or of one case.
SLOW: tuple[str, ...] = (
    "tests/dags/test_dags.py::test_a_worker_that_reaches_neither_store_nor_environment",
    "tests/dist/test_horovod_",
    "tests/unit/test_bench_",
    "tests/unit/test_delta_log_retention.py::test_a_table_that_keeps_more_days_than_a_checkpoint_apart",
    "tests/unit/test_export_onnx.py::test_a_program_of_torch_needs_nothing_of_headrace",
    "tests/unit/test_export_onnx.py::test_a_registered_model_is_exported_by_the_command",
    "tests/unit/test_export_onnx.py::test_a_model_that_two_ranks_saved[hstu",
    "tests/unit/test_export_onnx.py::test_a_model_that_two_ranks_saved[sasrec",
    "tests/unit/test_export_onnx.py::test_memory_does_not_grow_with_the_tables",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[din, ",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[dlrm, ",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[esmm",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[final_mlp",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[hstu",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[lightgcn",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[masknet",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[matrix_factorization, cosine",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[mult_vae",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[neumf",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[ple",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[sasrec",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[shared_bottom",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[simplex",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[two_tower, ",
    "tests/unit/test_export_onnx.py::test_onnxruntime_gives_what_torch_gives[wide_deep",
    "tests/unit/test_export_onnx.py::test_programs_of_torch_give_what_the_model_gives[din",
    "tests/unit/test_export_onnx.py::test_programs_of_torch_give_what_the_model_gives[sasrec",
    "tests/unit/test_export_onnx.py::test_programs_of_torch_give_what_the_model_gives[two_tower",
    "tests/unit/test_embeddings_planner.py::test_the_shipped_tables_fit[64",
    "tests/unit/test_export_triton.py::test_a_server_that_polls_never_sees_a_part",
    "tests/unit/test_features_memory.py::test_what_goes_by_is_held_within_the_least_of_a_spec[long",
    "tests/unit/test_forget.py::test_killed_at_many_calls",
    "tests/unit/test_forget_uploads.py::test_models_on_a_server_are_uploaded_again_and_those_that_cannot_be_are_named",
    "tests/unit/test_gpu.py::test_by_the_interpreter",
    "tests/unit/test_housekeeping.py::test_killed_at_any_call",
    "tests/unit/test_housekeeping.py::test_the_log_of_a_table_that_keeps_some_days_does_not_grow",
    "tests/unit/test_jobs.py::test_exit_codes_of_a_job",
    "tests/unit/test_list_memory.py::test_memory_follows_the_values",
    "tests/unit/test_models_mapped.py::test_workers_share_one_copy",
    "tests/unit/test_publication_faults.py::test_the_nth_call[dataset",
    "tests/unit/test_registry_server.py::test_a_champion_on_a_server_is_loaded_where_its_requirements_alone_are",
    "tests/unit/test_search.py::test_a_search_over_several_models",
    "tests/unit/test_search.py::test_a_stopped_search_goes_on_as_if_it_had_not_stopped",
    "tests/unit/test_search.py::test_it_finds_a_better_rate_than_a_bad_default",
    "tests/unit/test_search.py::test_what_is_worse_than_the_median_ends_early",
    "tests/unit/test_train_launch.py::test_a_rank_whose_store_does_not_answer_names_the_object",
    "tests/unit/test_train_resume.py::test_killed_and_run_again_equals_undisturbed",
    "tests/unit/test_train_sequences.py::test_a_model_of_histories_trains_resumes_and_answers[hstu",
    "tests/unit/test_train_sequences.py::test_a_model_of_histories_trains_resumes_and_answers[sasrec",
)

#: The tests of the JVM that are in the quick lane, by what they show: how their node ids begin. All others are `slow`:
#: a session takes a minute of processor time to start and to compile its code.
QUICK_JVM: Mapping[str, str] = {
    "tests/spark/test_ingest.py::test_rows_and_quarantine_equal_a_plain_reading": "landing text",
    "tests/spark/test_source_tables.py::test_partitions_of_a_delta_table_are_days": "a table read in place",
    "tests/spark/test_features_engines.py::test_by_position_and_column": "features, by Spark and by Arrow",
    "tests/spark/test_score_stage.py::test_equals_brute_force_and_reruns": "scores",
    "tests/spark/test_publish_stage.py::test_publish_replace_and_heal": "publication",
    "tests/e2e/test_day.py::test_every_stage_is_done_and_shown": "a small day by the command line",
    "tests/e2e/test_day.py::test_row_counts_equal_the_generators": "a small day by the command line",
    "tests/e2e/test_day.py::test_running_again_changes_nothing": "a small day by the command line",
}

#: Slow tests that every run of lane `all` takes, by the beginning of their node ids. They show each reported fault
#: mended (docs/faults.md), and at least one path of what has servers or processes of its own. The other slow tests are
#: `drawn`: a run takes one of DRAWN_PARTS parts, as the run's seed says. Lane `long` takes all of them.
EACH_RUN: tuple[str, ...] = (
    "plugins/headrace-hdfs/tests/test_hdfs.py::test_one_holder_of_a_lease_and_commits_of_a_table",
    "plugins/headrace-hdfs/tests/test_hdfs.py::test_who_sleeps_between_its_look_and_its_rename",
    "tests/dags/test_service.py::test_killed_tasks_and_a_killed_scheduler",
    "tests/dags/test_service.py::test_secrets_are_in_the_jobs_environment_and_nowhere_else",
    "tests/dist/test_horovod_collective.py::test_ten_steps_equal_threads_and_one_process",
    "tests/e2e/test_day.py::test_status_and_lineage",
    "tests/e2e/test_day.py::test_malformed_commands_exit_with_2",
    "tests/fault/test_kill.py::test_killed_anywhere_then_rerun_equals_undisturbed",
    "tests/fault/test_power_cut.py::test_what_is_done_is_on_the_disk",
    "tests/fault/test_recorded_disk.py",
    "tests/reported/test_01_nested_name.py",
    "tests/reported/test_02_year_57000.py",
    "tests/reported/test_03_nanoseconds.py",
    "tests/reported/test_04_unsigned.py",
    "tests/reported/test_05_day_types.py::test_every_pair_of_types",
    "tests/reported/test_06_year_month_day.py::test_landing_files",
    "tests/reported/test_07_ga4.py",
    "tests/reported/test_09_nul.py",
    "tests/reported/test_09_surrogate.py",
    "tests/reported/test_12_spark_csv.py",
    "tests/reported/test_15_utc_suffix.py",
    "tests/reported/test_16_null_texts.py",
    "tests/reported/test_17_names.py::test_drift_counts_the_columns",
    "tests/reported/test_17_names.py::test_requests_name_the_columns",
    "tests/reported/test_17_names.py::test_rows_of_a_file_get_the_published_scores",
    "tests/reported/test_19_ids_as_floats.py",
    "tests/reported/test_20_decimal_comma.py",
    "tests/reported/test_21_case_twins.py::test_a_name_that_changes_its_case",
    "tests/reported/test_21_case_twins.py::test_the_declared_spelling_is_read",
    "tests/reported/test_21_case_twins.py::test_what_may_mean_either_is_refused",
    "tests/reported/test_27_type_change.py::test_loaded_days_stay_where_their_landing_files_are_gone",
    "tests/reported/test_30_stray_file.py",
    "tests/reported/test_31_ranking.py",
    "tests/reported/test_init_runs.py::test_it_runs_as_it_was_written",
    "tests/spark/test_delta_log.py::test_days_of_hostile_names",
    "tests/spark/test_features_stage.py::test_the_day",
    "tests/spark/test_ingest_bad_files.py::test_a_day_needs_a_file_that_can_be_read",
    "tests/spark/test_ingest_damage.py::test_a_damaged_day_without_its_landing_files_is_refused",
    "tests/spark/test_publish_stage.py::test_keys_that_the_warehouse_cannot_hold_are_left_out",
    "tests/spark/test_source_damage.py::test_a_damaged_file_of_a_delta_table_is_named",
    "tests/spark/test_source_damage.py::test_a_damaged_file_of_a_folder_is_named",
    "tests/spark/test_source_damage.py::test_a_landing_file_with_a_colon_in_its_name",
    "tests/spark/test_source_damage.py::test_a_torn_commit_of_a_source",
    "tests/unit/test_cli_machine.py::test_a_home_that_is_a_file",
    "tests/unit/test_cli_machine.py::test_what_spark_cannot_start_on",
    "tests/unit/test_storage_contract.py",
)
DRAWN_PARTS = 8
#: Where the checksum of a file's path begins that says its part: so the parts take the most even times (2026-11-29).
_EVEN = 131

#: What a test says that skips because an installation is missing: a target of the Makefile.
_MISSING = re.compile(r"\bmake [a-z][a-z0-9-]+")


def markers_of(nodeid: str, fixtures: Iterable[str], markers: Iterable[str]) -> set[str]:
    """Return the markers that a test has besides its own: by folder, by fixture, and by the tables above."""
    added = {m for folder, names in FOLDERS.items() if nodeid.startswith(folder) for m in names}
    added |= {m for fixture in fixtures for m in FIXTURES.get(fixture, ())}
    if nodeid.startswith(SLOW) or ("jvm" in added | set(markers) and not nodeid.startswith(tuple(QUICK_JVM))):
        added.add("slow")
    if "slow" in added | set(markers) and not nodeid.startswith(EACH_RUN):
        added.add("drawn")
    return added


def part_of(nodeid: str) -> int:
    """Return the part of its file among the drawn tests: from 0 to DRAWN_PARTS - 1.

    A file's tests are in one part: they share what its fixtures make.
    """
    return zlib.crc32(nodeid.partition("::")[0].encode(), _EVEN) % DRAWN_PARTS


def _drawn_part() -> int:
    """Return the part of DRAWN that this run takes: all processes of a run share the seed."""
    return int(os.environ.get(SEED, "0")) % DRAWN_PARTS


def scale_examples(test: Callable[..., Any], factor: float) -> None:
    """Multiply the `max_examples` of a property test, in place."""
    settings: hypothesis.settings = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    count = round(settings.max_examples * factor)
    if factor < 1:
        count = max(count, min(FEWEST_EXAMPLES, settings.max_examples))
    test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=count)  # type: ignore[attr-defined]


class LanePlugin:
    """The part of pytest's run that knows of lanes.

    Args:
        name: a key of LANES, or "" where the command line alone says what runs.
    """

    def __init__(self, name: str) -> None:
        if name and name not in LANES:
            raise pytest.UsageError(f"{VARIABLE}={name}: there is no such lane; lanes: {', '.join(LANES)}")
        self.name = name
        self._lane = LANES.get(name)
        self._passed_file = Path(os.environ[PASSED]) if os.environ.get(PASSED) else None
        self._passed: frozenset[str] = frozenset()
        self._failed: set[str] = set()
        self._records = False

    def pytest_configure(self, config: pytest.Config) -> None:
        if self._lane and not config.option.markexpr:
            config.option.markexpr = self._lane.expression
        if self._passed_file:
            lines = self._passed_file.read_text().splitlines() if self._passed_file.exists() else []
            self._records = not hasattr(config, "workerinput")  # each process of a run has all reports of its own tests
            if self._records:
                self._passed_file.parent.mkdir(parents=True, exist_ok=True)
                os.environ[_PASSED_LINES] = str(len(lines))
            self._passed = frozenset(lines[: int(os.environ[_PASSED_LINES])])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that ended without a failure: a run that is stopped loses the tests under way alone."""
        if not (self._records and self._passed_file):
            return
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._passed_file.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._passed and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # all had passed before

    def pytest_report_header(self) -> str:
        lane = f"lane: {self.name} ({self._lane.expression}); " if self._lane else ""
        if self._lane and self._lane.draws:
            lane += f"part {_drawn_part() + 1} of {DRAWN_PARTS} of the drawn tests; "
        if self._passed:
            lane += f"without the {len(self._passed):,} tests that {self._passed_file} names; "
        return f"{lane}{SEED}={os.environ.get(SEED, '')} draws the same tests and kill points again"

    @pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            for name in sorted(markers_of(item.nodeid, getattr(item, "fixturenames", ()), marks)):
                item.add_marker(name)
        if self._lane and self._lane.draws:
            of_other_runs = [i for i in items if i.get_closest_marker("drawn") and part_of(i.nodeid) != _drawn_part()]
            config.hook.pytest_deselected(items=of_other_runs)
            left_out = set(of_other_runs)
            items[:] = [item for item in items if item not in left_out]
        if self._passed:
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._passed])
            items[:] = [item for item in items if item.nodeid not in self._passed]
        scaled: set[int] = set()
        for item in items:
            test = getattr(item, "obj", None)
            test = getattr(test, "__func__", test)
            # A function may be several items, by its parameters.
            if self._lane and getattr(test, "is_hypothesis_test", False) and id(test) not in scaled:
                scaled.add(id(test))
                scale_examples(test, self._lane.examples)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        return self._refuse_skip((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        return self._refuse_skip((yield))

    def _refuse_skip(self, report: _Report) -> _Report:
        """Turn a skip for want of an installation into a failure: a lane's target installs what its tests need."""
        if self._lane and report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2])
            if _MISSING.search(reason):
                report.outcome = "failed"
                report.longrepr = f"{reason}\nThe set-up of the lane '{self.name}' lacks it: mark the test `extra`."
        return report
