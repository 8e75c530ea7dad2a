"""The rules between a config, its model and this machine, and what tokenizes its rows."""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from burnish.backends.comm import device_count, device_type
from burnish.backends.fsdp.lora import LoraSettings, lora_problems
from burnish.backends.megatron.layout import FP8_TOKENS, layout_of
from burnish.backends.megatron.sizes import Sizes, size_problems
from burnish.config import Purpose, SFTConfig, find_problems
from burnish.config.choices import TrackerName
from burnish.config.parallel import MegatronConfig
from burnish.config.rules_devices import planned_world
from burnish.data.packing import Layout
from burnish.data.tokenize import TokenizerSettings
from burnish.errors import ConfigError, Problem
from burnish.models.flops import step_flops
from burnish.models.load import ModelCard, bring_model, read_card, read_config
from burnish.storage.cache import Caching


def require_valid(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> ModelCard:
    """The model's card, once every rule that needs neither weights nor data holds.

    Raises:
        ConfigError: with all broken rules at once.
    """
    if problems := find_problems(config, purpose=purpose, num_devices=device_count()):
        raise ConfigError(problems)
    card = model_card(config)
    if problems := model_problems(config, card, on_cpu=device_type() == "cpu"):
        raise ConfigError(problems)
    return card


def model_card(config: SFTConfig) -> ModelCard:
    """What is known of the model without its weights, which stay in their bucket if they are in one.

    Raises:
        ConfigError: there is no such model, or it cannot be trained.
    """
    folder = bring_model(config.model.path, weights=False, **cache_settings(config))
    return read_card(folder, trust_remote_code=config.model.trust_remote_code)


def _is_installed(package: str) -> bool:
    """A mere folder of that name, such as the one that W&B writes to, is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def model_problems(config: SFTConfig, card: ModelCard, *, on_cpu: bool) -> list[Problem]:
    """Rules between the config, the model and the machine it is to run on, one without a GPU if ``on_cpu``."""
    problems = []
    share = config.sequence_parallel_size
    if card.num_heads % share:
        message, fix = f"does not divide the model's {card.num_heads} heads", "give a divisor of that"
        problems.append(Problem("sequence_parallel_size", share, message, fix))
    attention = config.model.attention
    if attention in ("flash", "flex") and on_cpu:
        problems.append(Problem("model.attention", attention, "needs a GPU, and there is none", "write auto"))
    if config.fsdp_config.compile and on_cpu:
        message = "gains next to nothing on a CPU, and there is no GPU"
        problems.append(Problem("fsdp_config.compile", True, message, "leave it out"))
    if config.record_memory and on_cpu:
        message, fix = "records the memory of a GPU, and there is none", "leave it out; train/memory_peak_gib is logged"
        problems.append(Problem("record_memory", True, message, fix))
    if config.max_length and card.max_position_embeddings and config.max_length > card.max_position_embeddings:
        fix = f"at most {card.max_position_embeddings}"
        problems.append(Problem("max_length", config.max_length, "is more positions than the model has", fix))
    for name in config.logger:
        if name is not TrackerName.CONSOLE and not _is_installed(name):
            message, fix = f"{name} is not installed", f"pip install 'burnish[{name}]'"
            problems.append(Problem("logger", list(config.logger), message, fix))
    problems += _trained_problems(config, card)
    return [*problems, *(_megatron_problems(config, card, on_cpu=on_cpu) if config.strategy == "megatron" else ())]


def _trained_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """Rules on what of the model is trained, and to what end."""
    lora, balance = lora_settings(config), config.model.router_aux_loss_coef
    by_part = {
        "model.freeze": config.model.freeze,
        "optimizer_config.lr_by_part": dict(config.optimizer_config.lr_by_part),
    }
    if card.vision is None:
        message, fix = f"{card.model_type} has no such parts", "leave it out, or name a vision-language model"
        strange = [Problem(key, value, message, fix) for key, value in by_part.items() if value]
    else:
        strange = _vision_problems(config, card)
    problems = [*strange, *(lora_problems(lora, card.linear_layers) if lora else ())]
    if balance and not card.has_balancing_loss:
        message = f"{card.model_type} has no experts, or transformers has no loss that balances them"
        problems.append(Problem("model.router_aux_loss_coef", balance, message, "leave it out"))
    return problems


def _megatron_problems(config: SFTConfig, card: ModelCard, *, on_cpu: bool) -> list[Problem]:
    """Rules between the model, the sizes it is cut to and the machine."""
    problems = []
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        message = "needs Megatron Core, which is not installed"
        problems.append(Problem("strategy", "megatron", message, "pip install 'burnish[megatron]'"))
    if on_cpu and not config.megatron_config.cpu:
        fix = "write strategy=fsdp; to test with, megatron_config.cpu=true"
        problems.append(Problem("strategy", "megatron", "needs a GPU, and there is none", fix))
    if config.megatron_config.cpu and not on_cpu:
        problems.append(Problem("megatron_config.cpu", True, "there is a GPU on this machine", "leave it out"))
    hf_config = read_config(card.path, trust_remote_code=config.model.trust_remote_code)
    return [*problems, *size_problems(hf_config, megatron_sizes(config), on_cpu=on_cpu)]


def megatron_sizes(config: SFTConfig) -> Sizes:
    """How Megatron cuts the model."""
    keys = config.megatron_config
    parts = keys.virtual_pipeline_model_parallel_size
    return Sizes(
        tensor=keys.tensor_model_parallel_size,
        pipeline=keys.pipeline_model_parallel_size,
        context=keys.context_parallel_size,
        expert=keys.expert_model_parallel_size,
        sequence_parallel=keys.sequence_parallel_size > 1,
        virtual_pipeline=None if parts == 1 else parts,
    )


def on_one_rank(config: SFTConfig) -> SFTConfig:
    """``config`` with a model that is not cut, to read here what any number of ranks has saved anywhere."""
    return config.model_copy(update={"megatron_config": MegatronConfig(cpu=device_type() == "cpu")})


def _vision_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """What a model that takes images does not go with."""
    fix, lora = "leave it out", config.model.lora.rank
    freeze, rates = config.model.freeze, config.optimizer_config.lr_by_part
    share = config.sequence_parallel_size
    found = {
        "sequence_parallel_size": (share, share > 1, "does not go with a model that takes images"),
        "model.freeze": (
            freeze,
            bool(lora and freeze),
            "goes without saying beside model.lora, which trains adapters alone",
        ),
        "optimizer_config.lr_by_part": (
            dict(rates),
            bool(rates and set(rates) & set(freeze)),
            "has a part that model.freeze names",
        ),
    }
    problems = [Problem(key, value, message, fix) for key, (value, wrong, message) in found.items() if wrong]
    if len(set(freeze)) == 3:
        problems.append(Problem("model.freeze", freeze, "leaves nothing to train", "leave a part out"))
    if config.strategy == "megatron":
        problems += _vision_kwargs_problems(config, card)
    return problems


def _vision_kwargs_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """Fields of Megatron's config that a model that takes images does not go with."""
    given = config.megatron_config.transformer_config_kwargs
    wrong = {
        "fp8": bool(given.get("fp8")),
        "fp4": bool(given.get("fp4")),
        # Its kernel for packed rows lets positions begin anew in each, in one dimension.
        "apply_rope_fusion": bool(given.get("apply_rope_fusion")),
        # A layer that is computed again would be given the features of another micro-batch.
        "recompute_granularity": given.get("recompute_granularity") == "full" and card.model_type == "qwen3_vl",
    }
    key, message = (
        "megatron_config.transformer_config_kwargs",
        f"does not go with {card.model_type}, which takes images",
    )
    return [Problem(f"{key}.{name}", given[name], message, "leave it out") for name, found in wrong.items() if found]


def tokenizer_settings(config: SFTConfig, card: ModelCard) -> TokenizerSettings:
    """What decides the tokens of a raw row."""
    return TokenizerSettings(
        model_path=card.path,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
        train_on_what=config.train_on_what,
        max_length=config.max_length,
        truncation=config.truncation,
        image_token_id=card.vision.image_token_id if card.vision else None,
        image_merge_size=card.vision.merge_size if card.vision else 1,
        compressed_images=config.images == "lazy" and card.vision is not None,
    )


def lora_settings(config: SFTConfig) -> LoraSettings | None:
    """What adapters the model gets; None where all weights are trained."""
    lora = config.model.lora
    return LoraSettings(**lora.model_dump()) if lora.rank else None


def flops_counter(config: SFTConfig, card: ModelCard) -> Callable[..., float]:
    """``step_flops`` of this run; it takes ``lengths``, ``patches`` and ``num_targets``."""
    adapted = config.model.lora.rank > 0
    return partial(step_flops, card, frozen=adapted, tower_frozen=adapted or "vision" in config.model.freeze)


def cache_settings(config: SFTConfig) -> Caching:
    """Where downloads and what is worked out are kept, and whether they are used."""
    return {
        "cache_dir": config.cache_dir,
        "force_recache": config.force_recache,
        "disable_cache": config.disable_cache,
    }


def world_size(config: SFTConfig) -> int:
    """Processes of the run: those that the environment has started, else those of ``placement``."""
    return planned_world(config, os.environ, num_devices=device_count())


def plan_layout(config: SFTConfig, *, rank: int, world_size: int) -> Layout:
    """What the plan of a batch has to know of the ranks."""
    if config.strategy == "megatron":
        fp8 = config.megatron_config.transformer_config_kwargs.get("fp8")
        multiple = FP8_TOKENS if fp8 else 1
        return layout_of(megatron_sizes(config), rank=rank, world_size=world_size, token_multiple=multiple)
    share = config.sequence_parallel_size
    return Layout(data_rank=rank // share, data_size=world_size // share, row_multiple=share)
