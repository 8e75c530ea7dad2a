"""Rules between the keys that spread a run over devices, and what torchrun or SLURM say in the environment."""

from collections.abc import Iterator, Mapping

from burnish.config.choices import LauncherName, Strategy
from burnish.config.run import SFTConfig
from burnish.errors import Problem

_WORLDS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def device_rules(config: SFTConfig, variables: Mapping[str, str]) -> Iterator[Problem]:
    """The rules on placement and parallel sizes that ``config`` breaks under these environment ``variables``."""
    yield from _placement(config, variables)
    world = environment_world(variables) or config.placement.world_size
    if config.strategy is Strategy.MEGATRON:
        yield from _megatron(config, world)
    else:
        yield from _fsdp(config, world)


def environment_world(variables: Mapping[str, str]) -> int | None:
    """Processes of the run this process is a rank of already; none when it is to be launched."""
    for rank, size in _WORLDS:
        count = variables.get(size, "")
        if rank in variables and count.isdecimal() and int(count) > 1:
            return int(count)
    return None


def _placement(config: SFTConfig, variables: Mapping[str, str]) -> Iterator[Problem]:
    world = environment_world(variables)
    placement = config.placement
    given = sorted(key for key in config.explicit_keys if key.startswith("placement."))
    if world is not None and given and placement.world_size != world:
        nodes, gpus = placement.num_nodes, placement.num_gpus_per_node
        message = f"{nodes} nodes of {gpus} GPUs are not the {world} processes that the environment has started"
        yield Problem(given[0], nodes if given[0].endswith("nodes") else gpus, message, "leave out placement")
    if world is None and placement.num_nodes > 1 and config.launcher is LauncherName.LOCAL:
        message = "launcher=local starts processes on this machine only"
        fix = "start the command with torchrun on each machine, or write launcher=ray"
        yield Problem("placement.num_nodes", placement.num_nodes, message, fix)


def _fsdp(config: SFTConfig, world: int) -> Iterator[Problem]:
    for key, size in (
        ("sequence_parallel_size", config.sequence_parallel_size),
        ("fsdp_config.fsdp_size", config.fsdp_config.fsdp_size or 1),
    ):
        if world % size:
            yield Problem(key, size, f"does not divide the {world} processes of the run", "give a divisor of that")


def _megatron(config: SFTConfig, world: int) -> Iterator[Problem]:
    keys = config.megatron_config
    tensor, pipeline, context = (
        keys.tensor_model_parallel_size,
        keys.pipeline_model_parallel_size,
        keys.context_parallel_size,
    )
    if config.sequence_parallel_size != 1:
        message = "is for FSDP only"
        fix = "leave it out; Megatron's own are megatron_config.context_parallel_size and .sequence_parallel_size"
        yield Problem("sequence_parallel_size", config.sequence_parallel_size, message, fix)
    if world % (tensor * pipeline * context):
        message = f"tensor {tensor} * pipeline {pipeline} * context {context} does not divide {world} processes"
        fix = "change the sizes, or placement, so that it does"
        yield Problem("megatron_config.tensor_model_parallel_size", tensor, message, fix)
    elif world // pipeline % keys.expert_model_parallel_size:
        message = f"does not divide the {world // pipeline} processes of a pipeline stage"
        value = keys.expert_model_parallel_size
        yield Problem("megatron_config.expert_model_parallel_size", value, message, "give a divisor of that")
    if keys.sequence_parallel_size not in (1, tensor):
        message = f"is neither 1 nor tensor_model_parallel_size={tensor}"
        value = keys.sequence_parallel_size
        yield Problem("megatron_config.sequence_parallel_size", value, message, f"write 1 or {tensor}")
    if keys.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
        message = "needs pipeline_model_parallel_size above 1"
        value = keys.virtual_pipeline_model_parallel_size
        yield Problem("megatron_config.virtual_pipeline_model_parallel_size", value, message, "leave it out")
