"""Rules between the keys that spread a run over devices, and what torchrun or SLURM say in the environment."""

from collections.abc import Iterator, Mapping

from burnish.config.run import Broken, SFTConfig

_WORLDS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def device_rules(config: SFTConfig, variables: Mapping[str, str], *, num_devices: int) -> Iterator[Broken]:
    """The rules on placement and parallel sizes that ``config`` breaks.

    Args:
        config: what was read.
        variables: of the environment.
        num_devices: GPUs of this machine.
    """
    yield from _placement(config, variables, num_devices)
    world = planned_world(config, variables, num_devices=num_devices)
    yield from _megatron(config, world) if config.strategy == "megatron" else _fsdp(config, world)


def planned_world(config: SFTConfig, variables: Mapping[str, str], *, num_devices: int) -> int:
    """Processes of the run: those that the environment has started, else those of ``placement``."""
    return environment_world(variables) or config.placement.num_nodes * processes_per_node(config, num_devices)


def processes_per_node(config: SFTConfig, num_devices: int) -> int:
    """Those asked for; left unset, one a GPU, up to the default, and 1 on a machine without any."""
    asked = config.placement.num_gpus_per_node
    return asked if "placement.num_gpus_per_node" in config.explicit_keys else max(1, min(asked, num_devices))


def environment_world(variables: Mapping[str, str]) -> int | None:
    """Processes of the run this process is a rank of already; none when it is to be launched."""
    place = _environment_place(variables)
    return place[1] if place else None


def environment_rank(variables: Mapping[str, str]) -> int:
    """Which of these processes this one is; 0 when it is to be launched."""
    place = _environment_place(variables)
    return place[0] if place else 0


def _environment_place(variables: Mapping[str, str]) -> tuple[int, int] | None:
    for rank, size in _WORLDS:
        number, count = variables.get(rank, ""), variables.get(size, "")
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            return int(number), int(count)
    return None


def _placement(config: SFTConfig, variables: Mapping[str, str], num_devices: int) -> Iterator[Broken]:
    started = environment_world(variables)
    nodes, gpus = config.placement.num_nodes, config.placement.num_gpus_per_node
    given = sorted(key for key in config.explicit_keys if key.startswith("placement."))
    if started is not None and given and nodes * gpus != started:
        message = f"{nodes} nodes of {gpus} GPUs are not the {started} processes that the environment has started"
        yield given[0], message, "leave out placement"
    if started is not None or config.launcher == "ray":
        return
    if nodes > 1:
        fix = "start the command with torchrun on each machine, or write launcher=ray"
        yield "placement.num_nodes", "launcher=local starts processes on this machine only", fix
    if 0 < num_devices < processes_per_node(config, num_devices):
        yield "placement.num_gpus_per_node", f"this machine has {num_devices}", f"give at most {num_devices}"


def _fsdp(config: SFTConfig, world: int) -> Iterator[Broken]:
    sizes = {
        "sequence_parallel_size": config.sequence_parallel_size,
        "fsdp_config.fsdp_size": config.fsdp_config.fsdp_size or 1,
    }
    for key, size in sizes.items():
        if world % size:
            yield key, f"does not divide the {world} processes of the run", "give a divisor of that"


def _megatron(config: SFTConfig, world: int) -> Iterator[Broken]:
    keys = config.megatron_config
    tensor, pipeline = keys.tensor_model_parallel_size, keys.pipeline_model_parallel_size
    context = keys.context_parallel_size
    if config.sequence_parallel_size != 1:
        fix = "leave it out; Megatron's own are megatron_config.context_parallel_size and .sequence_parallel_size"
        yield "sequence_parallel_size", "is for FSDP only", fix
    if world % (tensor * pipeline * context):
        message = f"tensor {tensor} * pipeline {pipeline} * context {context} does not divide {world} processes"
        fix = "change the sizes, or placement, so that it does"
        yield "megatron_config.tensor_model_parallel_size", message, fix
    elif world // pipeline % keys.expert_model_parallel_size:
        message = f"does not divide the {world // pipeline} processes of a pipeline stage"
        yield "megatron_config.expert_model_parallel_size", message, "give a divisor of that"
    if keys.sequence_parallel_size not in (1, tensor):
        message = f"is neither 1 nor tensor_model_parallel_size={tensor}"
        yield "megatron_config.sequence_parallel_size", message, f"write 1 or {tensor}"
    yield from _not_on_megatron(config)
    if keys.virtual_pipeline_model_parallel_size is not None and pipeline == 1:
        message = "needs pipeline_model_parallel_size above 1"
        yield "megatron_config.virtual_pipeline_model_parallel_size", message, "leave it out"


def _not_on_megatron(config: SFTConfig) -> Iterator[Broken]:
    """What only the other backend has."""
    asked = {
        "model.lora.rank": (config.model.lora.rank, "LoRA"),
        "model.router_aux_loss_coef": (config.model.router_aux_loss_coef, "the balancing loss of experts"),
        "eval_generate.prompts": (config.eval_generate.prompts, "answering prompts"),
    }
    for key, (value, feature) in asked.items():
        if value:
            yield key, f"{feature} is not built for strategy=megatron", "leave it out, or write strategy=fsdp"
