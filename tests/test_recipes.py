"""The recipes of the site are true: their commands parse, their scripts run, and the image's files are enough."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import tfrep_strategy
from tfrep_strategy.cli import app

_REPOSITORY = Path(__file__).resolve().parent.parent
_RECIPES = _REPOSITORY / "docs" / "recipes"
_DOCKERFILE = _REPOSITORY / "deploy" / "Dockerfile"
_ROOT = str(Path(tfrep_strategy.__file__).parents[1])


def _text(page: str) -> str:
    return (_RECIPES / f"{page}.md").read_text("utf-8")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _commands() -> list[str]:
    """Returns all commands of recipes and examples that start with `tfrep`."""
    code = [block for page in _RECIPES.glob("*.md") for block in _blocks(page.read_text("utf-8"), r"(?:bash|console)")]
    docstrings = [path.read_text("utf-8").split('"""')[1] for path in (_REPOSITORY / "examples").glob("*.py")]
    return re.findall(
        r"\btfrep (?:run|verify) .*?(?=\s*(?:#|`|$))", re.sub(r" *\\\n *", " ", "\n".join([*code, *docstrings])), re.MULTILINE
    )


@pytest.mark.lane("quick")
@pytest.mark.parametrize("command", sorted(set(_commands())))
def test_commands_parse(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    chosen = get_command(app).commands[name]  # type: ignore[attr-defined]
    script = Path(chosen.make_context(name, arguments).params["script"])
    assert script.name == "train.py" or (_REPOSITORY / script).exists()


@pytest.mark.lane("quick")
def test_the_page_shows_the_manifest() -> None:
    (shown,) = yaml.safe_load(_blocks(_text("clusters"), "yaml")[0])["containers"]
    *_, job = yaml.safe_load_all((_REPOSITORY / "deploy" / "gpu_job.yaml").read_text("utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert shown == {name: container[name] for name in shown}


def _run(folder: Path, *command: str) -> str:
    paths = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    kept = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=kept | own, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_PACKAGES = {
    "KerasHub": "keras_hub",
    "KerasTuner": "keras_tuner",
    "KerasRS": "keras_rs",
    "BayesFlow": "bayesflow",
    "MLflow": "mlflow",
    "Weights and Biases": "wandb",
}


def _script_of(heading: str) -> str:
    (script,) = _blocks(_text("packages").split(f"\n## {heading}\n")[1].split("\n## ")[0], "python")
    return script


@pytest.mark.lane("packages")
@pytest.mark.parametrize("heading", _PACKAGES)
def test_recipes_of_packages_run(heading: str, tmp_path: Path) -> None:
    pytest.importorskip(_PACKAGES[heading])
    (tmp_path / "script.py").write_text(_script_of(heading), "utf-8")
    output = _run(tmp_path, "-m", "tfrep_strategy.cli", "run", "-n", "2", "script.py")
    if "print(" in _script_of(heading):
        assert re.search(r"^(losses|best) ", output, re.MULTILINE)


@pytest.mark.lane("quick")
def test_each_recipe_of_a_package_is_run() -> None:
    assert re.findall(r"^## (.*)$", _text("packages"), re.MULTILINE) == [*_PACKAGES]


@pytest.mark.lane("package")
def test_cells_of_hosted_notebooks_run(tmp_path: Path) -> None:
    """On CPUs, with two logical devices for the two GPUs of Kaggle."""
    colab, kaggle = (
        [block for block in _blocks(part, "python") if "%pip" not in block] for part in _text("hosted").split("\n## ")[1:]
    )
    strategy = "tfrep.MirroredStrategy()"
    assert strategy in kaggle[0]
    kaggle[0] = kaggle[0].replace(strategy, "tfrep.MirroredStrategy(tfrep.use_logical_cpus(2))")
    (tmp_path / "kaggle.py").write_text("\n".join(kaggle), "utf-8")
    assert "2 replicas" in _run(tmp_path, "kaggle.py")
    (tmp_path / "colab.py").write_text("\n".join(colab), "utf-8")
    one_device, two = (yaml.safe_load(line) for line in _run(tmp_path, "colab.py").splitlines()[-2:])
    assert two == pytest.approx(one_device, rel=1e-5)


@pytest.mark.lane("package")
def test_the_image_gets_the_files_of_the_wheel(tmp_path: Path) -> None:
    text = _DOCKERFILE.read_text("utf-8")
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            there = tmp_path / "source" / target / ("" if target != "./" else source)
            if (_REPOSITORY / source).is_dir():
                shutil.copytree(_REPOSITORY / source, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(_REPOSITORY / source, there)
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tmp_path / "source")]
    _run(tmp_path, *command)
    assert len([*tmp_path.glob("tfrep_strategy-*.whl")]) == 1
    extras: Any = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"EXTRAS=(\w+)", text)) <= set(extras)


@pytest.mark.lane("package")
def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if hadolint is None:
        pytest.skip("hadolint is not installed: the extra dev")
    done = subprocess.run([hadolint, _DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
