"""Keys whose feature is not built yet: refused by name when they ask for it, never ignored."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from burnish.config.choices import Attention, Dtype, ImageReading, LauncherName, Strategy, TrackerName
from burnish.config.rules_data import is_bucket, paths_in
from burnish.config.rules_devices import environment_world
from burnish.config.run import SFTConfig
from burnish.errors import Problem


@dataclass(frozen=True, slots=True)
class _Missing:
    """A feature to come."""

    key: str
    feature: str
    asks: Callable[[Any], bool]
    """Whether a value of the key asks for it."""


def _above(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > neutral


_MISSING = (
    _Missing("strategy", "the Megatron backend", lambda value: value is Strategy.MEGATRON),
    _Missing("launcher", "launching on Ray", lambda value: value is LauncherName.RAY),
    _Missing("placement.num_nodes", "running on several nodes", _above(1)),
    _Missing("sequence_parallel_size", "sequence parallelism", _above(1)),
    _Missing("model.lora.rank", "LoRA", _above(0)),
    _Missing("model.attention", "this attention", lambda value: value in (Attention.FLASH, Attention.FLEX)),
    _Missing("model.freeze", "freezing parts", bool),
    _Missing("model.router_aux_loss_coef", "the balancing loss", _above(0)),
    _Missing("optimizer_config.lr_by_part", "a learning rate for parts", bool),
    _Missing("fsdp_config.cpu_offload", "CPU offload", bool),
    _Missing("fsdp_config.compile", "compiling the layers", bool),
    _Missing("fsdp_config.fsdp_size", "sharding over ranks", _above(1)),
    _Missing("fsdp_config.mixed_precision.param_dtype", "this format", lambda value: value is not None),
    _Missing("fsdp_config.mixed_precision.reduce_dtype", "this format", lambda value: value is not Dtype.FLOAT32),
    _Missing("megatron_config.virtual_pipeline_model_parallel_size", "interleaving", lambda value: value is not None),
    _Missing("megatron_config.cpu", "Megatron on a CPU", bool),
    _Missing("batch_tokens", "a batch of tokens", lambda value: value is not None),
    _Missing("label_smoothing", "label smoothing", _above(0)),
    _Missing("z_loss", "the z-loss", _above(0)),
    _Missing("images", "reading images late", lambda value: value is ImageReading.LAZY),
    _Missing("eval_generate.prompts", "answering prompts in an evaluation", bool),
    _Missing("torch_profiler_config", "profiling", lambda value: value is not None),
    _Missing("record_memory", "recording memory", bool),
    _Missing("logger", "this tracker", lambda value: any(name is not TrackerName.CONSOLE for name in value)),
    _Missing("tags", "a tracker that keeps tags", bool),
    _Missing("project_name", "a tracker that knows projects", lambda value: value != "burnish"),
    _Missing("shutdown_grace_seconds", "a launcher that waits for its ranks", lambda value: value != 600),
    _Missing("dummy_run_full_ctx", "the dummy run", bool),
)


def refusals(config: SFTConfig, variables: Mapping[str, str]) -> Iterator[Problem]:
    """What ``config``, or the environment, asks for and is not there yet."""
    for missing in _MISSING:
        value = attrgetter(missing.key)(config)
        if missing.asks(value):
            yield _refusal(missing.key, value, missing.feature)
    gpus = config.placement.num_gpus_per_node
    if "placement.num_gpus_per_node" in config.explicit_keys and gpus > 1:
        yield _refusal("placement.num_gpus_per_node", gpus, "running on several GPUs")
    for key, path in paths_in(config):
        if is_bucket(path):
            yield _refusal(key, path, "object storage")
    world = environment_world(variables)
    if world is not None:
        message = f"the environment makes this one of {world} processes; running as several is not built yet"
        yield Problem("placement", world, message, "start one process, without torchrun or srun")


def _refusal(key: str, value: Any, feature: str) -> Problem:
    plain = list(value) if isinstance(value, tuple) else value
    return Problem(key, plain, f"{feature} is not built yet", "leave the key out")
