"""What the environment says of this process: a rank already, under torchrun, Kubernetes or SLURM, or still to launch.

The rule: what is set by hand wins; the names of SLURM become those that ``torch.distributed`` reads.
"""

import os
import re
from collections.abc import Iterator, Mapping

from burnish.backends.comm import device_count
from burnish.config.rules_devices import environment_world
from burnish.errors import LaunchError

_FIRST_PORT, _NUM_PORTS = 10_240, 20_000
"""Below the ports that Linux gives to outgoing connections (32768 and up)."""
_NODES = re.compile(r"([^,\[]*)(?:\[([^]]*)\])?((?:[^,\[]|\[[^]]*\])*)(?:,|$)")


def adopt_rank() -> None:
    """Set ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` if SLURM started this process.

    Raises:
        LaunchError: a process of several lacks the address to meet the others at.
    """
    if environment_world(os.environ) is None:
        return
    os.environ.update(slurm_variables(os.environ, num_devices=device_count()))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        fix = "set both, the same on every process: a host of rank 0 that all reach, and a port free there"
        raise LaunchError(f"rank {os.environ['RANK']}", f"{' and '.join(missing)} not set", fix=fix)


def slurm_variables(variables: Mapping[str, str], *, num_devices: int) -> dict[str, str]:
    """What to set beside ``variables`` so that a task of srun is a rank; nothing where ``RANK`` says so already.

    Args:
        variables: the environment.
        num_devices: GPUs that this process sees; with one each, every task computes on its device 0.
    """
    own = {name: variables[name] for name in ("RANK", "WORLD_SIZE") if name in variables}
    if environment_world(own) is not None or "SLURM_PROCID" not in variables:
        return {}
    local = int(variables.get("SLURM_LOCALID", "0"))
    found = {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_NTASKS"],
        "LOCAL_RANK": str(local % num_devices if num_devices else local),
    }
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if nodes and "MASTER_ADDR" not in variables:
        found["MASTER_ADDR"] = next(expand_nodes(nodes))
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
    if job.isdecimal() and "MASTER_PORT" not in variables:
        shift = int(step) if step.isdecimal() else 0
        found["MASTER_PORT"] = str(_FIRST_PORT + (int(job) + shift) % _NUM_PORTS)
    return found


def expand_nodes(names: str) -> Iterator[str]:
    """The hosts of a SLURM node list, ``gpu[01-03,7],login`` for instance, in its order."""
    for prefix, ranges, rest in _NODES.findall(names):
        if not ranges:
            if prefix:
                yield prefix
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                for end in expand_nodes(rest) if "[" in rest else (rest,):
                    yield f"{prefix}{number:0{len(first)}d}{end}"
