"""`headrace new`: a folder for a pipeline of your own, with its DAG, its image and a check of each change."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.root import Panel, app, examples
from headrace.cli.screen import out, plain, table
from headrace.config.installation import pipeline_file
from headrace.errors import UserError

_TEMPLATES = Path(__file__).with_name("templates")
#: The pipeline whose file is the new one's beginning: it generates its own data.
_MODEL = "clicks"
#: Files of the folder: their template (the pipeline's is a shipped pipeline) and what they are for.
_FILES = {
    "pipelines/{name}.yaml": ("", "the pipeline; it reads generated clicks"),
    "README.md": ("README.md", "the commands of a first day"),
    ".gitignore": ("gitignore", "without the workspace and secrets"),
    "dags/{name}.py": ("dags.py", "its days in Airflow"),
    "Dockerfile": ("Dockerfile", "headrace with this pipeline"),
    ".github/workflows/check.yaml": ("check.yaml", "a day of few rows after each change"),
}


@app.command(rich_help_panel=Panel.SET_UP, epilog=examples("headrace new shop", "headrace new shop -o /srv/shop"))
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name: small letters, digits and _.")],
    target: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder; default: NAME here.", metavar="FOLDER")
    ] = None,
) -> None:
    """Write a folder with a pipeline, a README, a DAG, a Dockerfile and a check for GitHub.

    The pipeline runs as it is, on generated clicks. `headrace init` then writes it anew for data of your own.
    """
    write_project(name, target or Path(name))


def write_project(name: str, folder: Path) -> None:
    """Write the folder of a new pipeline, and print what is in it and how to go on.

    Args:
        name: of the pipeline.
        folder: must not exist, or be empty.

    Raises:
        UserError: the name is none that a pipeline can have, or the folder has files.
    """
    from headrace.cli.json_schema import editor_line
    from headrace.config.section import NAME
    from headrace.storage import local

    if not NAME.fullmatch(name):
        raise UserError(f"{name}: a pipeline's name must match {NAME.pattern}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name another folder (-o FOLDER)")
    model = pipeline_file(_MODEL).read_text(encoding="utf-8")
    words = {"@PIPELINE@": name, "@DS@": _first_day(), "@VERSION@": __version__}
    with local(folder).new_folder() as project:
        for path, (template, _) in _FILES.items():
            path = path.format(name=name)
            if template:
                text = (_TEMPLATES / f"{template}.template").read_text("utf-8")
            else:
                text = f"{editor_line(folder / path)}\n{_pipeline(name, model)}"
            for word, value in words.items():
                text = text.replace(word, value)
            (project / path).put_text(text)
    files = table("file", "what it is")
    for path, (_, description) in _FILES.items():
        files.add_row(plain(path.format(name=name)), description)
    out.print(f"wrote {folder}:\n", markup=False, soft_wrap=True)
    out.print(files)
    out.print("\nThen:\n")
    run = f"headrace run pipelines/{name}.yaml --ds {words['@DS@']}"
    for line in (f"cd {folder}", f"headrace generate pipelines/{name}.yaml --until {words['@DS@']}", run):
        out.print(f"  {line}", markup=False, soft_wrap=True)


def _pipeline(name: str, model: str) -> str:
    """Return the text of the pipeline: the shipped one under another name."""
    _, _, text = model.partition(f"pipeline: {_MODEL}\n")
    return (
        f"# Generated click logs, retrained every day. For data of your own: headrace init, or change `source` and\n"
        f"# `table` here and leave out `generate`.\npipeline: {name}\n{text}"
    ).replace(f"landing/{_MODEL}/", f"landing/{name}/")


def _first_day() -> str:
    """Return the first day that has a week of generated clicks before it."""
    from headrace.config import load_spec

    generate = load_spec(_MODEL).generate
    assert generate is not None, "the shipped pipeline generates its data"
    return (date.fromisoformat(generate.start) + timedelta(days=7)).isoformat()
