"""Jobs: Spark properties as Java reads them, secrets on clusters, and imports of later stages."""

from __future__ import annotations

import configparser
import re
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import logs
from headrace.config import load_spec
from headrace.config.stages import STAGES
from headrace.jobs import run_stage as module
from headrace.jobs.process import property_line, take_secrets, with_secrets
from headrace.jobs.run_stage import import_ahead
from headrace.logs import redact
from headrace.publish.opening import password_of

SECRET, KEY = "\t pass\rwort\\n=ä", "wJalrXUtnFEMI/K7MDENG"


def as_java_reads(text: str) -> dict[str, str]:
    """The logical lines of a file, by the documentation of java.util.Properties.load: a reader of the tests' own."""
    entries = {}
    for line in re.split(r"\r\n|\r|\n", text):
        line = re.sub(r"^[ \t\f]+", "", line)
        if not line or line[0] in "#!":
            continue
        position, is_key_complete, key = 0, False, ""
        while position < len(line) and not is_key_complete:
            if line[position] == "\\":
                key, position = key + unescaped(line[position + 1]), position + 2
            elif line[position] in " \t\f=:":
                is_key_complete = True
            else:
                key, position = key + line[position], position + 1
        rest = re.sub(r"^[ \t\f]*[=:]?[ \t\f]*", "", line[position:])
        value = re.sub(r"\\(.)", lambda m: unescaped(m[1]), rest)
        entries[key] = value
    return entries


def unescaped(letter: str) -> str:
    return {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}.get(letter, letter)


TEXTS = st.text(st.sampled_from(list(" \t\r\n\f\\=:#!aä€\"'u{}")), max_size=8)


@given(st.dictionaries(TEXTS.filter(bool), TEXTS, max_size=4))
def test_any_key_and_value_are_read_back(properties: dict[str, str]) -> None:
    text = "\n".join(property_line(key, value) for key, value in properties.items())
    assert as_java_reads(text) == properties


def test_secrets_are_in_files_of_their_owner_and_in_no_property(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "# Spark properties\nspark.foo=bar\nspark.yarn.dist.files=hdfs://n/x.txt\n"
    secrets = {"DB_PASS": SECRET, "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": KEY}
    folder = tmp_path / "a folder"
    folder.mkdir()
    text = with_secrets(template, folder, secrets, {"AWS_DEFAULT_REGION": "eu", "OPENLINEAGE_PARENT_ID": "a\tb"})
    entries = as_java_reads(text)
    assert not [key for key, value in entries.items() if SECRET in value or KEY in value or "AKIAEXAMPLE" in value]
    assert entries["spark.foo"] == "bar"
    assert entries["spark.yarn.appMasterEnv.AWS_DEFAULT_REGION"] == "eu"
    assert entries["spark.yarn.appMasterEnv.OPENLINEAGE_PARENT_ID"] == "a\tb"
    user_file, *added_files = entries["spark.yarn.dist.files"].split(",")
    assert user_file == "hdfs://n/x.txt"
    files = {Path(unquote(urlparse(uri).path)) for uri in added_files}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    # In a container the files lie in the working folder, by their names.
    monkeypatch.chdir(folder)
    assert {file.name for file in files} == {p.name for p in folder.iterdir()}
    environ = {
        name.removeprefix("spark.yarn.appMasterEnv."): value for name, value in entries.items() if "Env." in name
    }
    assert take_secrets(environ) == {"DB_PASS": SECRET}
    assert environ["DB_PASS"] == SECRET
    assert not [name for name in environ if name == "HEADRACE_SECRETS"]
    assert take_secrets(environ) == {}
    for place in ("spark.yarn.appMasterEnv", "spark.executorEnv"):
        profiles = configparser.ConfigParser(interpolation=None)
        assert profiles.read(entries[f"{place}.AWS_SHARED_CREDENTIALS_FILE"])
        assert dict(profiles["default"]) == {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": KEY}


def test_without_secrets_there_are_no_files(tmp_path: Path) -> None:
    assert with_secrets("spark.foo=bar\n", tmp_path, {}, {}) == "spark.foo=bar\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_values", set())
    monkeypatch.setattr(logs, "_variables", set())


WAREHOUSE = '{"kind": "postgres", "host": "db", "database": "d", "user": "u", "password_env": "THE_KEYWORD"}'


@pytest.mark.usefixtures("nothing_known")
def test_values_are_hidden_whatever_their_variables_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEYWORD", 'hunt"er 2')
    message = 'could not connect: "hunt\\"er 2", postgresql://u@db?x=hunt%22er%202, hunt"er 2'
    assert "hunt" in redact(message)
    spec = load_spec("clicks", [f"publish.warehouse={WAREHOUSE}"])
    assert "hunt" not in redact(message)
    assert spec.publish is not None
    monkeypatch.setenv("THE_KEYWORD", "another one")
    assert password_of(spec.publish.warehouse) == "another one"
    monkeypatch.delenv("THE_KEYWORD")
    assert redact("login: another one") == "login: ***"


@pytest.mark.usefixtures("nothing_known")
def test_the_password_of_a_file_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("four\n")
    text = WAREHOUSE.replace('"password_env": "THE_KEYWORD"', f'"password_file": "{tmp_path}/secret"')
    spec = load_spec("clicks", [f"publish.warehouse={text}"])
    assert spec.publish is not None
    assert password_of(spec.publish.warehouse) == "four"
    assert redact("with four and more") == "with *** and more"


def test_names_that_end_in_pass() -> None:
    assert redact("DB_PASS=abc compass=abc first-pass=abc") == "DB_PASS=*** compass=abc first-pass=abc"


@pytest.mark.parametrize("name", STAGES)
def test_what_stages_name_can_be_imported(name: str) -> None:
    for imported in STAGES[name].imports:
        module_name, _, function = imported.partition(":")
        assert not function or callable(getattr(import_module(module_name), function))


def test_stages_are_imported_in_order_once_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    all_seen = threading.Event()

    def load(name: str) -> None:
        seen.append(name)
        if name == "four":
            all_seen.set()
        if name == "two":
            raise ImportError("not for long")

    stages = {
        n: replace(STAGES[n], imports=i) for n, i in {"train": ("one", "two", "three"), "score": ("four",)}.items()
    }
    monkeypatch.setattr(module, "STAGES", stages)
    monkeypatch.setattr(module, "_load", load)
    with import_ahead(["train", "score"]):
        pass
    assert seen == []
    with import_ahead(["train", "score"]) as begin:
        begin()
        begin()
        assert all_seen.wait(60)
    assert seen == ["one", "two", "three", "four"]


def test_it_ends_behind_the_module_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def load(name: str) -> None:
        entered.set()
        assert leave.wait(60)
        seen.append(name)

    monkeypatch.setattr(module, "STAGES", {"train": replace(STAGES["train"], imports=("one", "two"))})
    monkeypatch.setattr(module, "_load", load)
    with import_ahead(["train"]) as begin:
        begin()
        assert entered.wait(60)
        threading.Timer(0.05, leave.set).start()
    assert seen == ["one"]


def test_an_application_that_ends_meanwhile_ends_in_order() -> None:
    program = (
        "import sys\n"
        "from headrace.jobs.run_stage import import_ahead\n"
        "with import_ahead(['train', 'baseline']) as begin:\n"
        "    begin()\n"
        "    sys.exit(75)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (75, "")
