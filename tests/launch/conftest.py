"""Two Ray nodes on this machine, with a CPU each."""

import os
import subprocess
import sys
import uuid

import pytest

from tests.runs.commands import ROOT

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="session")
def two_nodes():
    """The environment in which a command finds them."""
    variables = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        yield variables | {"RAY_ADDRESS": cluster.stdout.readline().strip()}
        cluster.stdin.close()
