"""Rules between the keys that spread a run over devices, and what torchrun or SLURM say in the environment."""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from burnish.config.run import Broken, SFTConfig
from burnish.config.section import keys_of

_WORLDS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_OWN_SECTIONS = {"fsdp": "fsdp_config", "megatron": "megatron_config"}
_DECIDED = {
    "tensor_model_parallel_size": "megatron_config.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "megatron_config.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron_config.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "megatron_config.context_parallel_size",
    "expert_model_parallel_size": "megatron_config.expert_model_parallel_size",
    "sequence_parallel": "megatron_config.sequence_parallel_size",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "moe_aux_loss_coeff": "model.router_aux_loss_coef",
}
"""Fields of Megatron's ``TransformerConfig``, and the keys that say what they are."""


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
    yield from _of_other_strategy(config)
    if absent := [rank for rank in config.torch_profiler_config.ranks if rank >= world]:
        message = f"there is no rank {absent[0]}: {_processes(world)}"
        yield "torch_profiler_config.ranks", message, f"give ranks from 0 to {world - 1}"


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
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    if world % (tensor * pipeline * context):
        message = f"tensor {tensor} * pipeline {pipeline} * context {context} does not divide {_processes(world)}"
        fix = "give sizes whose product divides that, or another placement.num_gpus_per_node"
        yield f"megatron_config.{max(sizes, key=lambda name: sizes[name])}", message, fix
    elif world % (keys.expert_model_parallel_size * tensor * pipeline):
        message = f"times tensor {tensor} * pipeline {pipeline} does not divide {_processes(world)}"
        yield "megatron_config.expert_model_parallel_size", message, "give a smaller size, or another placement"
    if keys.sequence_parallel_size not in (1, tensor):
        message = f"is neither 1 nor tensor_model_parallel_size={tensor}"
        yield "megatron_config.sequence_parallel_size", message, f"write 1 or {tensor}"
    yield from _not_on_megatron(config)
    if (keys.virtual_pipeline_model_parallel_size or 1) > 1 and pipeline == 1:
        message = "needs pipeline_model_parallel_size above 1"
        yield "megatron_config.virtual_pipeline_model_parallel_size", message, "leave it out"


def _not_on_megatron(config: SFTConfig) -> Iterator[Broken]:
    """What only the other backend has."""
    asked = {
        "model.lora.rank": (config.model.lora.rank, "LoRA"),
        "model.router_aux_loss_coef": (config.model.router_aux_loss_coef, "the balancing loss of experts"),
        "model.attention": (config.model.attention != "auto", "a choice of attention"),
    }
    for key, (value, feature) in asked.items():
        if value:
            yield key, f"{feature} is not built for strategy=megatron", "leave it out, or write strategy=fsdp"
    for name in sorted(config.megatron_config.transformer_config_kwargs):
        key = f"megatron_config.transformer_config_kwargs.{name}"
        if name in _DECIDED:
            yield key, f"is decided by {_DECIDED[name]}", "use that"
        if name == "calculate_per_token_loss":
            yield key, "is always true, as the loss is a mean over all targets", "leave it out"


def _of_other_strategy(config: SFTConfig) -> Iterator[Broken]:
    """What is set in the section of the backend that is not used."""
    for strategy, name in _OWN_SECTIONS.items():
        section = dict(config)[name]
        for key in keys_of(type(section)) if strategy != config.strategy else ():
            if attrgetter(key)(section) != attrgetter(key)(type(section)()):
                fix = f"leave it out, or write strategy={strategy}"
                yield f"{name}.{key}", f"has no effect on strategy={config.strategy}", fix


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
