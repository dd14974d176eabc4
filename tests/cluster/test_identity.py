"""What a launcher gives to its processes."""

from __future__ import annotations

import json
import socket
import urllib.request

import psutil
import pytest
from needs import needs_horovod

from tfrep_strategy.cluster.horovod.gloo import SECRET
from tfrep_strategy.cluster.identity import identities, inherited_environ

pytestmark = pytest.mark.lane("quick")


def test_tf_config():
    with identities("tf", 3) as variables:
        configs = [json.loads(each["TF_CONFIG"]) for each in variables]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1
    assert all(address.startswith("127.0.0.1:") for address in configs[0]["cluster"]["worker"])


@needs_horovod
def test_horovod_meets_on_loopback_only():
    with identities("horovod", 2) as variables:
        assert [each["HOROVOD_RANK"] for each in variables] == ["0", "1"]
        assert [each["HOROVOD_LOCAL_SIZE"] for each in variables] == ["2", "2"]
        port = int(variables[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        listening = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.laddr.port == port}
        assert listening == {"127.0.0.1"}
        shown = {"Authorization": f"Bearer {variables[0][SECRET]}"}
        put = urllib.request.Request(f"http://127.0.0.1:{port}/scope/key", data=b"value", headers=shown, method="PUT")
        urllib.request.urlopen(put, timeout=5).close()
    with socket.socket() as probe:
        probe.settimeout(2)
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_other_runs_do_not_speak_to_ours(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("TFREP_STRATEGY", "mirrored")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.1")
    environ = inherited_environ()
    assert not {"SLURM_PROCID", "TFREP_STRATEGY"} & set(environ)
    assert environ["HOROVOD_CYCLE_TIME"] == "0.1"
