"""Jobs and their submission: commands, properties, logs, exit codes, and nobody left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import storage
from headrace.config import Spark, load_spec
from headrace.config.installation import checkout
from headrace.config.operations import settings_agree
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs import run_stage, submit
from headrace.jobs.output import MARK, StageEvent, copy_output
from headrace.jobs.process import PROGRAM, run_logged
from headrace.jobs.stages import applications, load_stage, require_stage
from headrace.lake.spark import session
from headrace.stage import run_lock
from headrace.stage.protocol import PACKAGE_NEEDS
from tests.support import CLICKS_STAGES

DS = "2026-01-03"


def wait_for(condition: Callable[[], bool], event: str) -> None:
    """Poll; the limit only ends a test that has failed."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"did not happen: {event}")


def test_each_stage_has_a_class_that_needs_only_earlier_ones() -> None:
    for position, name in enumerate(ORDER):
        stage = load_stage(name)
        assert stage.name == name
        # What is no part of a day may have run before any of its stages.
        needs = {need.rstrip("?") for need in stage.needs if need != PACKAGE_NEEDS}
        assert needs <= {*ORDER[:position], *(STAGES.keys() - set(ORDER))}
    with pytest.raises(KeyError):
        load_stage("cook")


def test_a_pipeline_has_the_stages_of_its_sections() -> None:
    lean = load_spec("clicks", ["drift=null", "baseline=null", "publish=null"])
    assert [n for n in ORDER if STAGES[n].applies(lean)] == [
        "ingest",
        "features",
        "train",
        "promote",
        "score",
        "report",
    ]
    with pytest.raises(UserError, match="has no 'baseline' section"):
        require_stage(lean, "baseline")


def test_help_of_a_job_loads_no_stack() -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
        "except SystemExit as e:\n"
        "    heavy = {'pyspark', 'torch', 'mlflow', 'xgboost', 'matplotlib'}\n"
        "    print('exit', e.code, sorted(heavy & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--ds DS" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "exit 0 []"


def run_job(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(PROGRAM), name, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_exit_codes_of_a_job(ws: Workspace) -> None:
    """The report needs no Spark, so its job can be run as it is."""
    first = run_job("report", "clicks", "--ds", DS, "--home", str(ws.home))
    assert first.returncode == 0, first.stderr
    assert "report: done in" in first.stdout
    second_run = run_job("report", "clicks", "--ds", DS, "--home", str(ws.home))
    assert (second_run.returncode, second_run.stdout) == (
        0,
        "report: already done with the same inputs; nothing to do\n",
    )
    for arguments, message in (
        (["klicks", "--ds", DS], "no pipeline 'klicks'"),
        (["clicks"], "needs a day"),
        (["clicks", "--ds", "today"], "not a date"),
        (["clicks", "--ds", DS, "--set", "train.epoch=1"], "unknown key 'train.epoch'"),
    ):
        ran = run_job("report", *arguments, "--home", str(ws.home))
        assert ran.returncode == 2
        assert ran.stderr.startswith("error: ")
        assert message in ran.stderr
        assert "Traceback" not in ran.stderr
    ran = run_job("report", "clicks", "--ds", DS, "--home", "s3a://bucket/home")
    assert (ran.returncode, "'s3a://bucket/home' is a URI, and this takes a path" in ran.stderr) == (2, True)
    with run_lock(ws, "clicks"):
        busy = run_job("report", "clicks", "--ds", DS, "--home", str(ws.home))
    assert busy.returncode == 69
    assert busy.stderr.startswith("error: another run of pipeline 'clicks' is at work")
    missing = run_job("baseline", "clicks", "--ds", DS, "--home", str(ws.home), "--set", "baseline=null")
    assert (missing.returncode, "has no 'baseline' section" in missing.stderr) == (2, True)
    ws.report("clicks", DS).local_path().unlink()
    ws.report("clicks", DS).local_path().mkdir()  # what no user can be told how to mend: a failure with its trace
    broken = run_job("report", "clicks", "--ds", DS, "--home", str(ws.home))
    assert broken.returncode == 1
    assert "Traceback" in broken.stderr


@pytest.mark.parametrize(("stage", "held_stage"), [("features", None), ("train", "train")])
def test_a_run_that_the_lease_refuses_starts_no_session(
    stage: str,
    held_stage: str | None,
    ws: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A session would begin beside the stage's imports, before the stage asks for its lease."""
    started = list[str]()

    def start(conf: Spark, ws: Workspace, name: str) -> None:
        started.append(name)
        raise UserError("not in this test")

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(run_stage, "when_parent_ends", lambda end: None)
    for holder in ("clicks", "other"):
        with run_lock(ws, holder, held_stage), pytest.raises(SystemExit) as exit_info:
            run_stage.main([stage, "clicks", "--ds", DS, "--home", str(ws.home), "--events"])
        stderr = capfd.readouterr().err
        if holder == "clicks":
            assert (exit_info.value.code, started) == (69, [])
            assert stderr.startswith(f"error: another run of pipeline 'clicks' is at work (process {os.getpid()} on ")
    # Another pipeline's is not in the way; nor is that of a stage that runs beside this one.
    assert len(started) == 1
    if held_stage is not None:
        with run_lock(ws, "clicks", "baseline"), pytest.raises(SystemExit):
            run_stage.main([stage, "clicks", "--ds", DS, "--home", str(ws.home), "--events"])
        assert len(started) == 2


def test_the_command_names_the_stages_and_the_environment_the_packages_own_spark(ws: Workspace) -> None:
    overrides = ["train.epochs=1", "spark.master=local[1]"]
    line = submit.command(["train", "baseline"], "clicks", DS, ws, overrides, events=True)
    assert line[:2] == [sys.executable, str(PROGRAM)]
    expected = ["train,baseline", "clicks", "--ds", DS, "--home", str(ws.home)]
    assert line[2:] == [*expected, "--set", "train.epochs=1", "--set", "spark.master=local[1]", "--events"]
    env = submit.environment(load_spec("clicks").spark, {"KEEP": "me"}, storage.local(Path("/a folder/p.properties")))
    assert env["KEEP"] == "me"
    assert (Path(env["SPARK_HOME"]) / "bin" / "spark-submit").is_file()
    assert Path(env["SPARK_HOME"]).name == "pyspark"
    assert env["PYSPARK_PYTHON"] == env["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert env["PYSPARK_SUBMIT_ARGS"] == "--properties-file '/a folder/p.properties' pyspark-shell"
    assert env["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert "PYSPARK_SUBMIT_ARGS" not in submit.environment(load_spec("clicks").spark, {})
    cluster = load_spec("clicks", ["spark.master=spark://head:7077"]).spark
    assert "SPARK_LOCAL_IP" not in submit.environment(cluster, {"KEEP": "me"})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [CLICKS_STAGES]),
        (["spark.master=local[8]"], [CLICKS_STAGES]),
        (["spark.master=yarn"], [CLICKS_STAGES]),
        (["spark.master=local[1]"], [CLICKS_STAGES[:3], ("train", "baseline", "promote"), CLICKS_STAGES[6:]]),
        (["spark.master=local[1]", "train.ranks=1"], [CLICKS_STAGES[:4], ("baseline", "promote"), CLICKS_STAGES[6:]]),
        (["spark.master=local[1]", "train.ranks=1", "baseline.workers=1"], [CLICKS_STAGES]),
        (
            ["spark.profile=gpu"],
            [
                ("ingest",),
                ("features", "drift"),
                ("train",),
                ("baseline", "promote"),
                ("score",),
                ("publish", "report"),
            ],
        ),
        (["spark.properties={spark.plugins: com.nvidia.spark.SQLPlugin}"], None),
        (["baseline=null", "drift=null"], [tuple(n for n in CLICKS_STAGES if n not in ("baseline", "drift"))]),
    ],
    ids=str,
)
def test_stages_share_an_application_where_their_settings_agree(
    overrides: list[str], expected: list[tuple[str, ...]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    spec = load_spec("clicks", overrides)
    stages = [name for name in ORDER if STAGES[name].applies(spec)]
    groups = applications(stages, spec)
    assert [name for group in groups for name in group] == stages
    if expected is None:
        assert all(sum(STAGES[name].spark for name in group) <= 1 for group in groups)
    else:
        assert groups == expected
    assert applications(stages, spec, isolated=True) == [(name,) for name in stages]


def test_settings_agree_where_all_that_an_application_is_started_with_is_the_same() -> None:
    base = Spark(master="local[4]")
    assert settings_agree(base, Spark(master="local[4]"))
    for changed in (
        Spark(master="local[2]"),
        Spark(master="local[4]", driver_memory="4g"),
        Spark(master="local[4]", properties={"spark.jars": "x.jar"}),
        Spark(master="spark://head:7077"),
    ):
        assert not settings_agree(base, changed)
    assert not settings_agree(Spark(profile="gpu"), Spark(profile="gpu"))


def test_what_belongs_to_one_machine_is_set_for_local_masters_alone(ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "x.properties"
    local_keys = ("spark.local.dir", "spark.driver.host", "spark.driver.bindAddress", "spark.sql.shuffle.partitions")
    for master, local in (("local[2]", True), ("local-cluster[2,1,1024]", True), ("yarn", False)):
        submit.write_properties(load_spec("clicks", [f"spark.master={master}"]), ws, storage.local(path))
        keys = [line.partition("=")[0] for line in path.read_text().splitlines()]
        assert [key in keys for key in local_keys] == [local] * len(local_keys)


def test_a_class_path_of_ones_own_goes_behind_the_one_that_delta_is_on(ws: Workspace, tmp_path: Path) -> None:
    class_paths = {f"spark.{process}.extraClassPath": f"/{process}.jar" for process in ("driver", "executor")}

    def written(properties: dict[str, str]) -> dict[str, str]:
        spec = load_spec("clicks", ["spark.master=yarn"])
        spec = spec.model_copy(update={"spark": spec.spark.model_copy(update={"properties": properties})})
        submit.write_properties(spec, ws, storage.local(tmp_path / "x.properties"))
        lines = (tmp_path / "x.properties").read_text().splitlines()
        return {key: value for key, _, value in (line.partition("=") for line in lines)}

    delta_path = written({})["spark.driver.extraClassPath"]
    assert "delta-spark" in delta_path
    assert written(class_paths)["spark.driver.extraClassPath"] == f"{delta_path}:/driver.jar"
    # Executors get what is ours by `spark.jars`.
    assert written(class_paths)["spark.executor.extraClassPath"] == "/executor.jar"


def test_the_log_holds_no_values_of_overrides(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "run_logged", lambda *_: 0)
    spec = load_spec("clicks")
    for stage in ("report", "score"):
        submit.submit([stage], "clicks", spec, ws, DS, ["spark.driver_memory=2g", "a={password: hunter2}"])
        text = ws.log("clicks", DS, stage).read_text()
        assert "--set spark.driver_memory=... --set a=... --events\n" in text
        assert "hunter2" not in text


def test_properties_are_written_whole_and_the_same_for_the_same_spec(ws: Workspace, tmp_path: Path) -> None:
    spec = load_spec("clicks", ["spark.driver_memory=2g", "spark.properties={spark.foo: 'a b'}"])
    path = tmp_path / "deep" / "x.properties"
    submit.write_properties(spec, ws, storage.local(path))
    lines = path.read_text().splitlines()
    assert "spark.driver.memory=2g" in lines
    assert "spark.foo=a b" in lines
    assert f"spark.local.dir={ws.spark_local / 'local'}" in lines
    assert [p.name for p in path.parent.iterdir()] == ["x.properties"]
    # A secret that nobody has known as one is not for others to read.
    assert path.stat().st_mode & 0o777 == 0o600
    first_bytes = path.read_bytes()
    submit.write_properties(spec, ws, storage.local(path))
    assert path.read_bytes() == first_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SAYS = r"""
import sys
out = sys.stdout.buffer
out.write("WARNING: Using incubator modules: jdk.incubator.vector\n".encode())
out.write("one\n\n".encode())
sys.stdout.flush()
sys.stderr.write("WARN NativeCodeLoader: Unable to load native-hadoop library for your platform\n"); sys.stderr.flush()
out.write(b"[17:44:01] Task 1 got rank 1[17:44:01] Task 0 got rank 0\n[17:44:01] Task 1 got rank 1\n")
out.write(b"/a/resource_tracker.py:254: UserWarning: resource_tracker: ")
out.write(b"There appear to be 5 leaked semaphore objects to clean up at shutdown\n")
out.write(b"  warnings.warn('resource_tracker: There appear to be %d '\n")
out.write("10 %\r20 %\r100 %\n".encode()); out.write(b"caf\xc3\xa9 \xff\n"); out.write(b"no newline")
out.flush()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1, 2])
def test_output_is_logged_whole_and_shown_without_noise(code: int) -> None:
    sink, echo, live = io.BytesIO(), io.StringIO(), Terminal()
    for screen in (echo, live):
        sink.seek(0)
        sink.truncate()
        assert run_logged([sys.executable, "-c", SAYS, str(code)], os.environ, sink, screen) == code
    logged = sink.getvalue()
    assert b"incubator" in logged
    assert b"native-hadoop" in logged
    assert logged.count(b"got rank") == 3
    assert b"5 leaked semaphore objects" in logged
    assert b"10 %\r20 %\r100 %\ncaf\xc3\xa9 \xff\nno newline" in logged
    assert echo.getvalue() == "one\n100 %\ncafé \N{REPLACEMENT CHARACTER}\nno newline\n"
    assert "\r\x1b[2K10 %\r\x1b[2K20 %\r\x1b[2K100 %\n" in live.getvalue()


EVENTS = """
import os, sys
from headrace.jobs.output import StageEvent
for stage in ("ingest", "features", "drift"):
    StageEvent(stage, "check").send()
    if stage == "features":
        StageEvent(stage, "skip").send()
        continue
    StageEvent(stage, "run", "not yet" * 1000).send()
    print(stage, "works")
    print("half a line", end="")
    StageEvent(stage, "done").send()
"""


def test_each_stage_has_a_log_of_its_own(ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(EVENTS)
    monkeypatch.setattr(submit, "command", lambda *_, **__: [sys.executable, str(program)])
    heard, echo = list[StageEvent](), io.StringIO()
    spec = load_spec("clicks")
    stages = ["ingest", "features", "drift"]
    assert submit.submit(stages, "clicks", spec, ws, DS, on_event=heard.append, echo=echo) == 0
    kinds = [(e.stage, e.kind) for e in heard]
    assert kinds == [
        *(("ingest", kind) for kind in ("check", "run", "done")),
        *(("features", kind) for kind in ("check", "skip")),
        *(("drift", kind) for kind in ("check", "run", "done")),
    ]
    assert heard[1].reason.startswith("not yetnot yet")
    assert echo.getvalue() == "ingest works\nhalf a line\ndrift works\nhalf a line\n"
    for stage in ("ingest", "drift"):
        first, *lines = ws.log("clicks", DS, stage).read_text().split("\n")
        assert first.startswith("# 20")
        assert lines == [f"{stage} works", "half a line"]
    assert not ws.log("clicks", DS, "features").exists()


@settings(max_examples=200)
@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=20).filter(lambda b: MARK not in b),
            st.sampled_from([b"\n", b"\r", b"\x1e not an event\n", b"\x1e"]),
            st.builds(
                StageEvent,
                st.sampled_from(ORDER),
                st.sampled_from(["check", "run", "skip", "done"]),
                st.text(max_size=9),
            ),
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_events_are_told_from_output_wherever_it_is_cut(parts: list[bytes | StageEvent], cuts: list[int]) -> None:
    """The reference is the list of parts: events in order, each with what came before it; all else byte for byte."""
    data, reasons = b"", list[StageEvent]()
    for part in parts:
        if isinstance(part, StageEvent):
            # A control character that nothing has ended takes the next line with it.
            data += b"\n" + MARK + json.dumps(asdict(part)).encode() + b"\n"
            reasons.append(part)
        else:
            data += part
    outer = b"".join(b"\n" if isinstance(p, StageEvent) else p for p in parts)
    chunks = []
    while data:
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(data[:size])
        data = data[size:]
    sink, heard = io.BytesIO(), list[StageEvent]()
    left = iter([*chunks, b""])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "read", lambda *_: next(left))
        copy_output(0, sink, io.StringIO(), heard.append)
    assert heard == reasons
    assert sink.getvalue() == outer


def test_a_killed_application_is_no_small_exit_code() -> None:
    line = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert run_logged(line, os.environ, io.BytesIO(), io.StringIO()) == 137


def test_a_line_is_shown_when_it_is_written(tmp_path: Path) -> None:
    """The child waits for a file that appears only once its first line has been shown."""

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text:
                (tmp_path / "seen").touch()
            return super().write(text)

    code = (
        "import sys, time, pathlib\n"
        "print('ready')\n"
        "for _ in range(1200):\n"
        f"    if pathlib.Path({str(tmp_path / 'seen')!r}).exists(): sys.exit(0)\n"
        "    time.sleep(0.05)\n"
        "sys.exit(9)\n"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    assert run_logged([sys.executable, "-c", code], env, io.BytesIO(), Screen()) == 0


# A family as Spark's: the application starts a helper in a group of its own that will not go when asked.
FAMILY = """
import signal, subprocess, sys, time
from pathlib import Path
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
helper = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
helper.stdout.readline()
Path(sys.argv[1]).write_text(f"{__import__('os').getpid()} {helper.pid}")
time.sleep(600)
"""
SUBMITTER = """
import io, os, signal, sys
from headrace.errors import UserError
from headrace.jobs import process
# Whoever runs the tests may ignore them: a shell's background job, nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
process._GRACE_SECONDS = process._PROGRAM_SECONDS = 0.5
try:
    process.run_logged([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, io.BytesIO(), io.StringIO())
except KeyboardInterrupt as e:
    sys.exit(128 + getattr(e, "signum", 2))
"""


def start_family(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    pids = tmp_path / "pids"
    submitter = subprocess.Popen([sys.executable, "-c", SUBMITTER, FAMILY, str(pids)], start_new_session=True)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the family starts")
    return submitter, [int(p) for p in pids.read_text().split()]


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda v: str(v)
)
def test_a_signal_stops_the_whole_family(tmp_path: Path, signum: int, code: int) -> None:
    submitter, family = start_family(tmp_path)
    submitter.send_signal(signum)
    assert submitter.wait() == code
    assert all(has_ended(p) for p in family)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_submitter_that_is_killed_takes_its_application_with_it(tmp_path: Path) -> None:
    submitter, (application, helper) = start_family(tmp_path)
    try:
        submitter.kill()
        submitter.wait()
        wait_for(lambda: has_ended(application), "the application stops")
    finally:
        os.kill(helper, signal.SIGKILL)  # beyond the kernel's reach: jobs watch their parents for that


def test_no_program_runs_python_between_fork_and_exec() -> None:
    """A function there may wait for ever for a lock of another thread. (Lint looks at `subprocess.Popen` alone.)"""
    modules = [file for folder in ("python", "bench", "plugins") for file in checkout().joinpath(folder).rglob("*.py")]
    texts = {file: file.read_text() for file in modules}
    assert any("start_new_session=" in text for text in texts.values())
    assert [file for file, text in texts.items() if re.search(r"\bpreexec_fn\s*=", text)] == []


WATCHED = """
import subprocess, sys
job = '''
import os, time
from headrace.jobs.process import when_parent_ends
when_parent_ends(lambda: os._exit(1))
print("up", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", job], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_job_leaves_when_its_parent_is_gone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    job = int(parent.stdout.readline())
    assert not has_ended(job)
    parent.kill()
    parent.communicate()
    wait_for(lambda: has_ended(job), "the job leaves")
