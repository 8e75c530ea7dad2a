"""The keys of the model, its spreading and its optimizer become a backend."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from burnish.assemble.model import (
    cache_settings,
    lora_settings,
    megatron_sizes,
    plan_layout,
)
from burnish.backends.comm import Ranks
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.backends.fsdp.shard import Sharding
from burnish.backends.megatron.quiet import keep_quiet
from burnish.backends.optimizer import Recipe
from burnish.backends.tensors import DTYPES
from burnish.config import SFTConfig
from burnish.data.tokenize import template_text
from burnish.models.load import bring_model
from burnish.models.loss import Objective

if TYPE_CHECKING:
    from burnish.backends.megatron.backend import MegatronBackend


def build_backend(
    config: SFTConfig, *, ranks: Ranks, num_steps: int, num_sources: int
) -> "FsdpBackend | MegatronBackend":
    """The model on its device, with its optimizer."""
    optimizer = config.optimizer_config
    first_beta, second_beta = optimizer.adam_betas
    recipe = Recipe(
        optimizer=optimizer.name,
        learning_rate=optimizer.lr,
        adam_betas=(first_beta, second_beta),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        schedule=optimizer.scheduler,
        num_warmup_steps=optimizer.num_warmup_steps,
        min_lr_ratio=optimizer.min_lr_ratio,
        lr_by_part=optimizer.lr_by_part,
        frozen=config.model.freeze,
    )
    settings: dict[str, Any] = {
        "ranks": ranks,
        "layout": plan_layout(config, rank=ranks.rank, world_size=ranks.world_size),
        "model_path": bring_model(config.model.path, weights=True, **cache_settings(config)),
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template": template_text(config.chat_template) if config.chat_template else None,
        "objective": Objective(config.label_smoothing, config.z_loss, config.model.router_aux_loss_coef),
        "recipe": recipe,
        "num_steps": num_steps,
        "num_sources": num_sources,
        "seed": config.seed,
    }
    return _megatron(config, settings) if config.strategy == "megatron" else _fsdp(config, settings)


def _fsdp(config: SFTConfig, settings: Mapping[str, Any]) -> FsdpBackend:
    keys = config.fsdp_config
    sharding = Sharding(
        fsdp_size=keys.fsdp_size,
        cpu_offload=keys.cpu_offload,
        reduce_dtype=DTYPES[keys.mixed_precision.reduce_dtype],
        reshard_after_forward=keys.reshard_after_forward,
        activation_checkpointing=keys.activation_checkpointing,
        compile_layers=keys.compile,
    )
    return FsdpBackend(
        **settings,
        share_rows=config.remove_microbatch_padding,
        attention=config.model.attention,
        lora=lora_settings(config),
        sharding=sharding,
        param_dtype=keys.mixed_precision.param_dtype,
    )


def _megatron(config: SFTConfig, settings: Mapping[str, Any]) -> "MegatronBackend":
    keep_quiet()
    if config.megatron_config.cpu:
        from burnish.backends.megatron.cpu import install

        install()
    from burnish.backends.megatron.backend import MegatronBackend

    return MegatronBackend(
        **settings,
        sizes=megatron_sizes(config),
        transformer_config_kwargs=config.megatron_config.transformer_config_kwargs,
        optimizer_config_kwargs=config.megatron_config.optimizer_config_kwargs,
    )
