"""The archives that are published; the wheel, installed into a fresh environment and used from outside the checkout."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import tfrep_strategy as tfrep
from tfrep_strategy.core.replacements import KERAS, TENSORFLOW

pytestmark = pytest.mark.lane("package")

_REPOSITORY = Path(__file__).resolve().parent.parent
_PROJECT = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
_SCRIPTS = _REPOSITORY / "tests" / "scripts"
_LIMIT = 240.0


def _run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(folder: Path, **environ: str) -> dict[str, Path]:
    """Builds from a copy, so that nothing is left in the checkout. Returns the wheel and the source archive."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".*_cache", "__pycache__")
    # Every file gets the time of the copy.
    shutil.copytree(_REPOSITORY, source, symlinks=True, ignore=ignored, copy_function=shutil.copyfile)
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], env=os.environ | environ)
    return {"wheel": next(folder.glob("*.whl")), "source": next(folder.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return _build(tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def wheel(archives):
    return archives["wheel"]


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """A fresh environment with the wheel, which borrows what the wheel depends on from the environment of the tests."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    _run([sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    site = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # Searched after the environment's own packages, so that the wheel goes first.
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    _run([python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)])
    return python


def _outside(python, script, tmp_path, *arguments):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return _run([python, _SCRIPTS / script, *arguments], cwd=tmp_path, env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})


def test_wheel_holds_what_it_should(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        scripts = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    expected = {
        path.relative_to(_REPOSITORY).as_posix()
        for path in (_REPOSITORY / "tfrep_strategy").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == expected
    for name in ("py.typed", "contrib/digits.npz", "contrib/digits.txt"):
        assert f"tfrep_strategy/{name}" in packaged
    assert f"Version: {tfrep.__version__}" in metadata
    assert set(re.findall(r"Provides-Extra: (\S+)", metadata)) >= {"horovod", "test", "notebooks", "gpu"}
    assert "tfrep = tfrep_strategy.cli:main" in scripts


def test_wheel_says_where_it_runs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))))
    classifiers = metadata.get_all("Classifier")
    assert [each for each in classifiers if each.startswith("Operating System")] == ["Operating System :: POSIX :: Linux"]
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert versions == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]
    assert metadata.get_all("Project-URL") == [f"Repository, {_PROJECT['urls']['Repository']}"]


def test_a_release_waits_for_the_address_of_the_repository(tmp_path):
    pytest.importorskip("nox")
    for name in ("noxfile.py", "pyproject.toml", "notebooks/gan.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(_REPOSITORY / name, tmp_path / name)
    placeholder = "https://github.com/OWNER/tfrep_strategy"
    nox = [sys.executable, "-m", "nox", "--sessions"]
    _run(["git", "init", "--quiet"], cwd=tmp_path)
    _run(["git", "add", "."], cwd=tmp_path)
    _run([*nox, "address", "--", placeholder], cwd=tmp_path)
    refused = subprocess.run([*nox, "release"], cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT, check=False)
    assert refused.returncode == 1
    assert f"The address of the repository is a placeholder, {placeholder}" in refused.stderr
    _run([*nox, "address", "--", "https://example.org/tfrep"], cwd=tmp_path)
    for name in ("pyproject.toml", "notebooks/gan.ipynb"):
        text = (tmp_path / name).read_text("utf-8")
        assert 'https://example.org/tfrep"' in text.replace("\\", "")
        assert placeholder not in text


def test_wheel_says_under_which_licences_its_parts_are(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name) for name in archive.namelist()}
    info = next(name for name in texts if name.endswith("/METADATA")).removesuffix("METADATA")
    metadata = email.message_from_bytes(texts[f"{info}METADATA"])
    licences = {name: texts[f"{info}licenses/{name}"].decode() for name in metadata.get_all("License-File")}
    notice = licences["NOTICE"]
    expression = metadata["License-Expression"].split(" AND ")
    assert sorted(set(re.findall(r"^Licence: ([\w.-]+)", notice, re.MULTILINE))) == expression
    assert "Apache License" in licences["LICENSE"]
    copyright_of_gloo = "Copyright (c) 2017-present, Facebook, Inc. All rights reserved."
    assert licences["LICENSES/BSD-3-Clause.txt"].startswith(copyright_of_gloo)
    assert copyright_of_gloo in notice
    named = set(re.findall(r"tfrep_strategy/[\w./]+\w", notice))
    assert named >= {f"tfrep_strategy/{name}" for name in ("cluster/horovod/source.py", "contrib/digits.npz")}
    assert named <= set(texts)
    assert set(re.findall(r"\((LICENSE[\w./-]*)\)", notice)) == set(licences) - {"NOTICE"}


def test_a_second_build_gives_the_same_bytes(archives, tmp_path):
    assert {kind: path.read_bytes() for kind, path in _build(tmp_path).items()} == {
        kind: path.read_bytes() for kind, path in archives.items()
    }


def test_a_build_has_the_time_that_it_is_given(tmp_path):
    time = 1_796_000_000  # In November 2026.
    built = _build(tmp_path, SOURCE_DATE_EPOCH=str(time))
    with zipfile.ZipFile(built["wheel"]) as wheel, tarfile.open(built["source"]) as source:
        assert {each.date_time for each in wheel.infolist()} == {datetime.fromtimestamp(time, UTC).timetuple()[:6]}
        assert {each.mtime for each in source.getmembers()} == {time}


def test_archives_can_be_published(archives):
    _run([sys.executable, "-m", "twine", "check", "--strict", *archives.values()])


def test_source_archive_has_what_tests_and_docs_need(archives):
    with tarfile.open(archives["source"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder, suffix in {"tests": "py", "docs": "md", "notebooks": "ipynb", "benchmarks": "py", "examples": "py"}.items():
        files = {path.relative_to(_REPOSITORY).as_posix() for path in (_REPOSITORY / folder).rglob(f"*.{suffix}")}
        assert files
        assert files <= held


def test_installed_package_is_complete(fresh, tmp_path):
    found = json.loads(_outside(fresh, "installed.py", tmp_path).splitlines()[-1])
    assert Path(found["file"]).is_relative_to(fresh.parent.parent)
    assert found["version"] == tfrep.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\S+)?", found["version"])
    assert not found["missing"]
    assert not found["early"]
    assert found["same"]
    assert found["all"] == sorted(tfrep.__all__)
    assert found["digits"] == 1437
    assert found["typed"]


def test_installed_command_runs(fresh, tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = fresh.parent / "tfrep"
    assert _run([command, "--version"], cwd=tmp_path, env=environ).strip() == f"tfrep_strategy {tfrep.__version__}"
    listed = _run([command, "--help"], cwd=tmp_path, env=environ)
    for name in ("run", "doctor", "demo", "horovod"):
        assert re.search(rf"\b{name}\b", listed)


def test_installed_package_trains(fresh, tmp_path):
    assert _outside(fresh, "trains.py", tmp_path).splitlines()[-1] == "2 True"


@pytest.mark.parametrize(
    ("module", "version", "tested"),
    [("tensorflow", "2.18.1", "tensorflow>=2.19,<2.22"), ("keras", "3.11.0", "keras>=3.12,<3.16")],
)
def test_too_old_a_version_is_refused_at_first_use(fresh, tmp_path, module, version, tested):
    said = _outside(fresh, "another_version.py", tmp_path, module, version).splitlines()[-1]
    assert said.startswith("UnsupportedVersionError")
    assert version in said
    assert f"pip install '{tested}'" in said


@pytest.mark.parametrize(("module", "version"), [("tensorflow", "2.22.0.dev1"), ("keras", "3.16.0.dev1")])
def test_a_newer_version_in_which_all_fits_is_one_warning(fresh, tmp_path, module, version):
    used, *said = _outside(fresh, "another_version.py", tmp_path, module, version).splitlines()
    assert used.endswith("MirroredStrategy'>")
    (warning,) = said
    assert warning.startswith(f"warned | {_SCRIPTS / 'another_version.py'} ")
    assert version in warning
    assert "pip install" in warning


def test_all_that_a_newer_keras_has_changed_is_one_error(fresh, tmp_path):
    changed = ["trainers.trainer:Trainer.compile", "optimizers.base_optimizer:BaseOptimizer.apply"]
    changes = ["-keras.src.utils.python_utils:is_default", *(f"+keras.src.{name}" for name in changed)]
    (said,) = _outside(fresh, "another_version.py", tmp_path, "keras", "3.16.0.dev1", *changes).splitlines()
    assert said.startswith("UnsupportedVersionError | tfrep_strategy does not fit Keras 3.16.0.dev1 (3 misfits): ")
    assert "`keras.src.utils.python_utils.is_default` is gone." in said
    for name in changed:
        assert f"`{name}` is (self, made_up), not (self, " in said
    assert said.endswith(f" Hint: pip install '{KERAS.requirement}' [TFREP-E003]")


def test_all_that_a_newer_tensorflow_has_moved_is_one_error(fresh, tmp_path):
    gone = ["framework.op_def_registry:get", "eager.record:record_operation", "autograph.core.config:CONVERSION_RULES"]
    changes = [f"-tensorflow.python.{name}" for name in gone]
    (said,) = _outside(fresh, "another_version.py", tmp_path, "tensorflow", "2.22.0", *changes).splitlines()
    assert said.startswith("UnsupportedVersionError | tfrep_strategy does not fit TensorFlow 2.22.0 (3 misfits): ")
    for name in gone:
        assert f"`tensorflow.python.{name.replace(':', '.')}` is gone." in said
    assert said.endswith(f" Hint: pip install '{TENSORFLOW.requirement}' [TFREP-E003]")


def test_the_bounds_are_those_of_pip():
    assert {TENSORFLOW.requirement, KERAS.requirement} <= set(_PROJECT["dependencies"])


def test_another_keras_backend_is_refused_at_first_use(fresh, tmp_path):
    said = _outside(fresh, "other_backend.py", tmp_path).splitlines()[-1]
    assert "TensorFlow backend" in said
    assert "[TFREP-E001]" in said
    assert "KERAS_BACKEND=tensorflow" in said


def test_every_public_name_is_documented():
    for name in tfrep.__all__:
        if name != "__version__":
            assert (getattr(tfrep, name).__doc__ or "").strip(), name


def test_facade_is_names_only():
    text = (Path(tfrep.__file__)).read_text("utf-8")
    assert len(text.splitlines()) < 90
    assert not re.search(r"^(def|class) ", text, re.MULTILINE)
