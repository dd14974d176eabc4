"""Ray's trainer for TensorFlow, for real: it sets `TF_CONFIG` in its workers, and they are the ranks."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import needs_ray
from starting import GOES_ON, REPOSITORY, check_fits, done, found_in

SCRIPTS = Path(__file__).with_name("scripts")

pytestmark = [pytest.mark.lane("engines"), needs_ray]


@pytest.fixture(autouse=True)
def _watchers_folders() -> Iterator[None]:
    """Removes what Ray leaves: it kills its workers together with their watchers, which would remove their folders."""
    yield
    for folder in Path(tempfile.gettempdir()).glob("tfrep-watcher-*"):
        shutil.rmtree(folder)


def check_learned(own: dict[str, Any], alone: dict[str, Any]) -> None:
    np.testing.assert_allclose(own["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    assert own["history"].keys() == alone["history"].keys() == {"loss", "mae"}
    for name, values in alone["history"].items():
        np.testing.assert_allclose(own["history"][name], values, rtol=1e-4)


def test_workers_of_ray_learn_what_one_device_learns(tmp_path: Path) -> None:
    output, _ = done([sys.executable, str(SCRIPTS / "in_ray.py")], tmp_path, RAY_USAGE_STATS_ENABLED="0")
    in_ray, alone = found_in(output)
    assert (in_ray["ranks"], in_ray["communicator"]) == ([0, 1], "shared_memory")
    assert alone["ranks"] == [0]
    check_learned(in_ray, alone)


def test_the_recipe_runs_a_script(one_device: list[Any], tmp_path: Path) -> None:
    """With two workers on CPUs. Ray is started before, in its own folder."""
    (recipe,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/recipes/clusters.md").read_text("utf-8"), re.DOTALL)
    for of_page, of_test in {"/shared/project/train.py": GOES_ON, "num_workers=8, use_gpu=True": "num_workers=2"}.items():
        assert of_page in recipe
        recipe = recipe.replace(of_page, of_test)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # Its sockets need a short name.
        init = f"ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, _temp_dir={folder!r})"
        (tmp_path / "ray_train.py").write_text(f"import ray\n{init}\n{recipe}ray.shutdown()\n", "utf-8")
        output, _ = done([sys.executable, "ray_train.py"], tmp_path, RAY_USAGE_STATS_ENABLED="0", HOME=folder)
    check_fits(output, one_device)


def test_shards_of_ray_data_are_the_parts_of_a_batch(tmp_path: Path) -> None:
    output, _ = done([sys.executable, str(SCRIPTS / "shards_in_ray.py")], tmp_path, RAY_USAGE_STATS_ENABLED="0")
    in_ray, alone = found_in(output)
    assert [len(each) for each in in_ray["rows"]] == [16, 16]
    assert sorted(sum(in_ray["rows"], [])) == alone["rows"]
    check_learned(in_ray, alone)
