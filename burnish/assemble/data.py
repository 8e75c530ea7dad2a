"""The data keys become stores, their order, and batches."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from burnish.assemble.model import cache_settings, tokenizer_settings
from burnish.config import EvalSource, SFTConfig, TrainSource
from burnish.data.example import ExampleStore, IntArray
from burnish.data.manifest import Manifest, require_same
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, RankPlan, plan_bins, plan_micro_batches
from burnish.data.pictures import ImageReader
from burnish.data.samplers import DataMixingSampler, RandomSampler, Sampler, SequentialSampler, load_custom_sampler
from burnish.data.store import Store, open_store
from burnish.data.stream import BatchBuilder, BatchStream, EvalBatches
from burnish.data.write import tokenized_store
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.models.flops import segment_flops
from burnish.models.load import ModelCard
from burnish.models.vision import image_flops

log = get_logger(__name__)


def open_train(config: SFTConfig, card: ModelCard) -> list[Store]:
    """The training stores in the order given; their rows are checked. Needs no device."""
    return [open_source(config, card, source) for source in config.train_sources]


def open_evals(config: SFTConfig, card: ModelCard) -> dict[str, Store]:
    """The evaluation stores by name."""
    return {source.name: open_source(config, card, source) for source in config.eval_sources}


def open_source(config: SFTConfig, card: ModelCard, source: TrainSource | EvalSource) -> Store:
    """Tokenize ``source`` if it is raw, open the store and check its rows.

    Raises:
        DataError: it is missing, a row is wrong or longer than the model's positions, or no row is left.
    """
    caching = cache_settings(config)
    place = source.path
    if not source.pretokenized:
        place = str(
            tokenized_store(
                source.path,
                split=source.split,
                tokenizer_settings=tokenizer_settings(config, card),
                num_workers=config.num_workers,
                **caching,
                **raw_columns(config),
            )
        )
        caching["force_recache"] = False
    store = open_store(
        place,
        name=source.name if isinstance(source, EvalSource) else source.path,
        max_length=config.max_length,
        truncation=config.truncation,
        num_embeddings=card.num_embeddings,
        image_token_id=card.vision.image_token_id if card.vision else None,
        image_merge_size=card.vision.merge_size if card.vision else None,
        image_reader=partial(image_reader, card.path, trust_remote_code=config.model.trust_remote_code),
        admit=None if config.allow_store_mismatch else partial(_require_same_tokens, config, card),
        **caching,
    )
    if store.num_patches.any() and not card.vision:
        where = store.locate(int(store.num_patches.argmax()))
        raise DataError(where, f"has images, and {config.model.path} takes none", fix="name a vision-language model")
    longest, positions = int(store.lengths.max()), card.max_position_embeddings
    if positions and longest > positions:
        where = store.locate(int(store.lengths.argmax()))
        problem = f"has {longest} tokens, and the model {positions} positions"
        raise DataError(where, problem, fix=f"give max_length, at most {positions}")
    return store


@cache
def image_reader(model_path: str, *, trust_remote_code: bool) -> ImageReader:
    """One a process, for all stores."""
    return ImageReader(model_path, trust_remote_code=trust_remote_code)


def _require_same_tokens(config: SFTConfig, card: ModelCard, place: str, manifest: Manifest) -> None:
    """Compare the ``manifest`` of the store at ``place`` with the model."""
    tokenizer = tokenizer_settings(config, card).load()
    require_same(
        place,
        manifest,
        tokenizer_hash=tokenizer.tokenizer_hash,
        template_hash=tokenizer.template_hash,
        vocabulary_size=tokenizer.vocabulary_size,
    )


def raw_columns(config: SFTConfig) -> dict[str, str | None]:
    """The columns of raw rows that were named; a default one may be absent and is ``None``."""
    explicit = config.model_fields_set
    return {
        "messages_key": config.messages_key if "messages_key" in explicit else None,
        "tools_key": config.tools_key if "tools_key" in explicit else None,
        "system_key": config.system_key if "system_key" in explicit else None,
    }


def build_sampler(config: SFTConfig, mixture: Mixture) -> Sampler:
    """The order in which rows are drawn."""
    lengths = [len(store) for store in mixture.stores]
    if config.sampler == "sequential":
        return SequentialSampler(len(mixture))
    if config.sampler == "custom":
        assert config.sampler_class_path is not None
        return load_custom_sampler(
            config.sampler_class_path, dataset=mixture, kwargs=config.sampler_kwargs, source_lengths=lengths
        )
    if config.train_dataset_weights:
        return DataMixingSampler(mixture, lengths=lengths, weights=config.train_dataset_weights, seed=config.seed)
    if len(lengths) > 1:
        log.info("no weights: an epoch is one pass over all %d rows of %d sources", len(mixture), len(lengths))
    return RandomSampler(len(mixture), seed=config.seed)


def build_builder(
    config: SFTConfig, card: ModelCard, stores: Sequence[ExampleStore], *, layout: Layout
) -> BatchBuilder:
    """How drawn rows of ``stores`` are dealt to ranks and micro-batches, and laid out."""
    deal: Callable[..., Any] = partial(
        plan_micro_batches,
        micro_batch_size=config.micro_train_batch_size_per_gpu,
        share_row=config.remove_microbatch_padding,
    )
    if config.use_sequence_packing:
        capacity = config.max_tokens_per_microbatch or config.max_length
        assert capacity is not None
        deal = partial(plan_bins, capacity=capacity)

    def plan(lengths: IntArray, patches: IntArray) -> tuple[RankPlan, ...]:
        extra = image_flops(patches, card=card.vision) if card.vision else 0.0
        plans: tuple[RankPlan, ...] = deal(lengths, layout=layout, cost=partial(segment_flops, card=card), extra=extra)
        return plans

    return BatchBuilder(Mixture(stores), planner=plan, layout=layout, pad_id=card.pad_id)


def build_stream(config: SFTConfig, card: ModelCard, stores: Sequence[ExampleStore], *, layout: Layout) -> BatchStream:
    """Training batches, endless."""
    builder = build_builder(config, card, stores, layout=layout)
    return BatchStream(
        builder,
        sampler=build_sampler(config, builder.store),
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        num_readers=config.dataloader_num_workers,
    )


def build_eval_sets(
    config: SFTConfig, card: ModelCard, evals: Mapping[str, Store], *, layout: Layout
) -> dict[str, EvalBatches]:
    """The evaluation sets by name; their batches are as large as those of the training."""
    of = partial(EvalBatches, batch_size=config.batch_size, batch_tokens=config.batch_tokens)
    return {name: of(build_builder(config, card, [store], layout=layout)) for name, store in evals.items()}


def count_steps(config: SFTConfig, *, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the run: ``num_steps``, or those of ``num_epochs``, or one epoch."""
    if config.num_steps:
        return config.num_steps
    assert steps_per_epoch is not None, "batch_tokens needs num_steps"
    return steps_per_epoch * (config.num_epochs or 1)
