"""Horovod with NCCL, really built: `TFREP_HOROVOD_TESTS=nccl pytest tests/cluster/horovod/test_horovod_nccl.py`, about 10 minutes.

It needs NVIDIA's CUDA toolkit and the wheel nvidia-nccl-cu12, and no GPU: what is shown is that the library loads, has
NCCL, and serves CPUs as before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tfrep_strategy.cluster.hardware import find_nccl
from tfrep_strategy.cluster.horovod.build import build_wheel

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("TFREP_HOROVOD_TESTS") != "nccl", reason="TFREP_HOROVOD_TESTS=nccl builds Horovod with NCCL"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built Horovod; HOROVOD_BUILD_CUDA_CC_LIST=90 saves nvcc's time for other GPUs."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build_wheel(["nccl"])) as wheel:
        wheel.extractall(folder)
    return folder


def run(site: Path, script: str) -> str:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scripts" / script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_loads_without_a_gpu_and_has_nccl(site):
    assert run(site, "horovod_built.py").split() == [str(site / "horovod/tensorflow/__init__.py"), "True", "True", "gloo/nccl"]


def test_it_calls_no_cuda_runtime_but_its_own_and_the_nccl_that_was_found(site):
    library = next((site / "horovod" / "tensorflow").glob("mpi_lib*"))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1].partition("@")[0] for line in symbols.splitlines()}
    assert not {name for name in undefined if "cuda" in name.lower() or "AsGpuStreamValue" in name}
    assert "ncclAllReduce" in undefined
    loaded = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    nccl = find_nccl()
    assert nccl is not None
    assert str(nccl.library) in loaded
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "$ORIGIN/../../nvidia/nccl/lib" in dynamic


def test_it_trains_on_cpus_over_gloo(site):
    expected = [str(site / "horovod/tensorflow/__init__.py"), "True", "3.0", "3.0"]
    assert [line.split() for line in run(site, "horovod_sums.py").splitlines()] == [expected] * 2
