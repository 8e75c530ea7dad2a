"""The environment of a task of srun becomes that of a rank."""

import pytest

from burnish.config.rules_devices import environment_rank, environment_world
from burnish.launch.environment import expand_nodes, slurm_variables

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03,07]",
    "SLURM_JOB_NODELIST": "login1,gpu[03,07]",
}


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("a[1-2],login,b[3]-ib0.site.org", ["a1", "a2", "login", "b3-ib0.site.org"]),
        ("rack[0-1]node[1,3]", ["rack0node1", "rack0node3", "rack1node1", "rack1node3"]),
        ("ip-10-0-0-1,ip-10-0-0-2", ["ip-10-0-0-1", "ip-10-0-0-2"]),
    ],
)
def test_node_lists(names, hosts):
    assert list(expand_nodes(names)) == hosts


def test_a_task_is_a_rank():
    assert (environment_rank(TASK), environment_world(TASK)) == (5, 8)
    assert slurm_variables(TASK, num_devices=8) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(10_240 + 4713),
    }


def test_a_task_that_sees_one_gpu_takes_that():
    assert slurm_variables(TASK, num_devices=1)["LOCAL_RANK"] == "0"


def test_what_is_set_by_hand_wins():
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert set(slurm_variables(TASK | own, num_devices=0)) == {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


def test_torchrun_inside_a_job_wins():
    assert slurm_variables(TASK | {"RANK": "1", "WORLD_SIZE": "2"}, num_devices=0) == {}
    assert environment_rank(TASK | {"RANK": "1", "WORLD_SIZE": "2"}) == 1


@pytest.mark.parametrize("job", [1, 19_999, 20_000, 87_654_321])
def test_ports_are_below_those_of_outgoing_connections(job):
    port = int(slurm_variables(TASK | {"SLURM_JOB_ID": str(job)}, num_devices=0)["MASTER_PORT"])
    assert 10_240 <= port < 30_240


def test_jobs_that_follow_each_other_have_their_own_ports():
    ports = {slurm_variables(TASK | {"SLURM_JOB_ID": str(n)}, num_devices=0)["MASTER_PORT"] for n in range(900, 1000)}
    assert len(ports) == 100
