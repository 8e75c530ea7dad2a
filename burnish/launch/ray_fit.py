"""Ray Train at work, in a process beside the command: a worker on each node of the run.

The rule: this file and what it imports is light, and a node that cannot import Burnish still says so.
"""

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any


def fit(order: dict[str, Any], *, bundle: Mapping[str, int], limit: int) -> tuple[str, str]:
    """Have Ray Train put a worker on each node, which starts the ranks there; returns when the run is over.

    Args:
        order: what the workers are told.
        bundle: what each node holds for the run.
        limit: times that the run is started again.

    Returns:
        The name of the error that ended it, and its last line; empty without one.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    with TemporaryDirectory(prefix="burnish-ray-") as folder:
        trainer = DataParallelTrainer(
            _on_node(),
            train_loop_config=order,
            scaling_config=ScalingConfig(
                num_workers=order["num_nodes"],
                use_gpu="GPU" in bundle,
                resources_per_worker=dict(bundle),
                placement_strategy="STRICT_SPREAD" if order["num_nodes"] > 1 else "PACK",
            ),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=limit)),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            return type(error).__name__, str(error).strip().splitlines()[-1]
    return "", ""


def _on_node() -> Any:
    """What a worker does. It travels as it stands, so that a node without Burnish can say that it has none."""

    def work(order: dict[str, Any]) -> None:
        import platform

        import ray

        try:
            from burnish.launch.ray_node import run_node
        except ImportError as error:
            told = {
                "kind": "LaunchError",
                "where": f"node {platform.node()}",
                "problem": f"Burnish cannot be imported there, or is another version ({error})",
                "fix": "install the same version on all nodes",
            }
            ray.get(order["actor"].put.remote("error", told))
            return
        run_node(ray, **order)

    return work
