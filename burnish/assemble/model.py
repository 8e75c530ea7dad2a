"""The rules between a config, its model and this machine, and what tokenizes its rows."""

import os
from operator import attrgetter

from burnish.backends.comm import device_count, device_type
from burnish.config import Purpose, SFTConfig, find_problems
from burnish.config.rules_devices import environment_world, parallel_rules
from burnish.data.packing import Layout
from burnish.data.tokenize import TokenizerSettings
from burnish.errors import ConfigError, Problem
from burnish.models.load import ModelCard, bring_model, read_card
from burnish.storage.cache import Caching


def require_valid(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> ModelCard:
    """The model's card, once every rule that needs neither weights nor data holds.

    Raises:
        ConfigError: with all broken rules at once.
    """
    if problems := find_problems(config, purpose=purpose):
        raise ConfigError(problems)
    card = model_card(config)
    if problems := model_problems(config, card):
        raise ConfigError(problems)
    return card


def model_card(config: SFTConfig) -> ModelCard:
    """What is known of the model without its weights, which stay in their bucket if they are in one.

    Raises:
        ConfigError: there is no such model, or it cannot be trained.
    """
    folder = bring_model(config.model.path, weights=False, **cache_settings(config))
    return read_card(folder, trust_remote_code=config.model.trust_remote_code)


def model_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """Rules between the config, the model and this machine."""
    problems = _size_problems(config, card)
    attention, on_cpu = config.model.attention, device_type() == "cpu"
    if attention in ("flash", "flex") and on_cpu:
        problems.append(Problem("model.attention", attention, "needs a GPU, and there is none", "write auto"))
    if config.fsdp_config.compile and on_cpu:
        message = "gains next to nothing on a CPU, and there is no GPU"
        problems.append(Problem("fsdp_config.compile", True, message, "leave it out"))
    if config.max_length and card.max_position_embeddings and config.max_length > card.max_position_embeddings:
        fix = f"at most {card.max_position_embeddings}"
        problems.append(Problem("max_length", config.max_length, "is more positions than the model has", fix))
    return problems


def _size_problems(config: SFTConfig, card: ModelCard) -> list[Problem]:
    """Rules between parallel sizes, the heads of the model and the GPUs of this machine."""
    world, asked, share = planned_world(config), config.placement.num_gpus_per_node, config.sequence_parallel_size
    problems = [
        Problem(key, attrgetter(key)(config), message, fix) for key, message, fix in parallel_rules(config, world)
    ]
    explicit = "placement.num_gpus_per_node" in config.explicit_keys
    if explicit and config.launcher == "local" and not environment_world(os.environ) and 0 < device_count() < asked:
        fix = f"at most {device_count()}"
        problems.append(Problem("placement.num_gpus_per_node", asked, "is more GPUs than this machine has", fix))
    if card.num_heads % share:
        message, fix = f"does not divide the model's {card.num_heads} heads", "give a divisor of that"
        problems.append(Problem("sequence_parallel_size", share, message, fix))
    return problems


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
    )


def cache_settings(config: SFTConfig) -> Caching:
    """Where downloads and what is worked out are kept, and whether they are used."""
    return {
        "cache_dir": config.cache_dir,
        "force_recache": config.force_recache,
        "disable_cache": config.disable_cache,
    }


def planned_world(config: SFTConfig) -> int:
    """Processes of the run: those that the environment has started, else those of ``placement``."""
    return environment_world(os.environ) or config.placement.num_nodes * processes_per_node(config)


def processes_per_node(config: SFTConfig) -> int:
    """Those asked for; left unset, as many as there are GPUs, up to the default, and 1 on a machine without any."""
    asked = config.placement.num_gpus_per_node
    return asked if "placement.num_gpus_per_node" in config.explicit_keys else max(1, min(asked, device_count()))


def plan_layout(config: SFTConfig, *, rank: int, world_size: int) -> Layout:
    """What the plan of a batch has to know of the ranks."""
    share = config.sequence_parallel_size
    return Layout(data_rank=rank // share, data_size=world_size // share, row_multiple=share)
