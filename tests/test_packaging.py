"""What is built, and whether it is all that a stranger needs."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import beaconscope

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif("hatchling" not in packages_distributions(), reason="needs hatchling, which builds")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, by their endings."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def unpacked(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as an installer puts it down."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(built[".whl"]).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def described(unpacked: Path) -> Message:
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    return email.message_from_string(metadata.read_text(encoding="utf-8"))


def outside(unpacked: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the unpacked wheel, far from the repository."""
    command = [sys.executable, *arguments]
    settings = {**os.environ, "PYTHONPATH": str(unpacked), **environment}
    return subprocess.run(command, cwd=unpacked.parent, env=settings, capture_output=True, text=True, check=False)


def test_the_wheel_has_everything_and_nothing_else(unpacked: Path) -> None:
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    tracked = subprocess.run(["git", "ls-files", "beaconscope"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode == 0:
        assert set(tracked.stdout.split()) - files == set()
    assert "beaconscope/py.typed" in files
    assert "beaconscope/report/assets/page.html.j2" in files
    assert "beaconscope/reasoner/model/model.safetensors" in files
    assert {name.split("/")[0].split("-")[0] for name in files} == {"beaconscope"}


def test_the_licence_goes_along(unpacked: Path, described: Message) -> None:
    (licence,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()
    assert described["License-Expression"] == "Apache-2.0"
    # Of the weights too, which have a page of their own.
    assert "apache-2.0" in (unpacked / "beaconscope/reasoner/model/README.md").read_text().lower()


def test_plotly_brings_its_licence_into_a_report() -> None:
    from plotly.offline import get_plotlyjs

    assert "Licensed under the MIT license" in get_plotlyjs()[:400]


def test_there_is_one_version(described: Message) -> None:
    assert described["Version"] == beaconscope.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(beaconscope.__version__)}$", citation, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project


def test_a_plain_install_pulls_neither_tests_nor_gguf(described: Message) -> None:
    plain = {
        re.split(r"[<>=!~ ;\[]", wanted)[0]
        for wanted in described.get_all("Requires-Dist", [])
        if "extra ==" not in wanted
    }
    assert {"torch", "transformers", "pyarrow", "typer"} <= plain
    unwanted = {"pytest", "hypothesis", "gguf", "accelerate", "duckdb", "polars", "dask", "ray", "playwright", "ruff"}
    assert not plain & unwanted


def test_everything_that_is_imported_is_asked_for(described: Message) -> None:
    """Packages that the code imports and that come only because another package happens to want them."""
    import ast

    asked = {re.split(r"[<>=!~ ;\[]", wanted)[0].lower() for wanted in described.get_all("Requires-Dist", [])}
    homes = packages_distributions()
    own = {"beaconscope"} | set(sys.stdlib_module_names)
    missing = set()
    for path in (ROOT / "beaconscope").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in {name.split(".")[0] for name in names} - own:
                if not {home.lower() for home in homes.get(name, [name])} & asked:
                    missing.add(name)
    # What transformers' tokenizers and weights are, what it fetches models with, and what dask[distributed] brings.
    assert missing <= {"tokenizers", "safetensors", "huggingface_hub", "distributed"}


def test_it_runs_outside_the_tree(unpacked: Path) -> None:
    ran = outside(unpacked, "-m", "beaconscope", "--version")
    assert ran.stdout == f"beaconscope {beaconscope.__version__}\n"
    where = outside(
        unpacked,
        "-c",
        "import beaconscope, beaconscope.models.load as m; from beaconscope.report.page import bundle; bundle();"
        "assert (m.BUNDLED_FOLDER / 'model.safetensors').is_file(); print(beaconscope.__file__)",
    )
    assert where.stdout.startswith(str(unpacked)), where.stderr


def test_the_command_and_its_completion(unpacked: Path) -> None:
    (entry,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "beaconscope = beaconscope.cli:main" in entry.read_text()
    script = "import sys; sys.argv = ['beaconscope']; from beaconscope.cli import main; main()"
    words = {"_BEACONSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "beaconscope rec", "COMP_CWORD": "1"}
    assert outside(unpacked, "-c", script, **words).stdout.split() == ["record", "recover"]
    words |= {"COMP_WORDS": "beaconscope record --max", "COMP_CWORD": "2"}
    assert "--max-new-tokens" in outside(unpacked, "-c", script, **words).stdout
    shown = outside(unpacked, "-c", script, _BEACONSCOPE_COMPLETE="source_zsh")
    assert "#compdef beaconscope" in shown.stdout


def test_the_sdist_can_be_tested_and_built_again(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "PKG-INFO"} <= names
    assert {"tests/conftest.py", "benchmarks/smollm2.py", "traces/smollm2-balcony.parquet"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/", "node_modules"))]
