"""What a rank holds at its fullest, worked out from shapes: the model stays on meta, nothing is allocated.

Its rule: it follows the backends, by their own functions where there are any. Tests hold weights, gradients and optimizer
against what both backends hold on a CPU, and FSDP's activations to a quarter; the rest, and all of a tower and of experts
on Megatron, is worked out alone. What it leaves out (the CUDA context, fragments, work space of kernels) is why only a part
of a device's memory is counted on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from burnish.assemble.model import lora_settings, megatron_sizes
from burnish.backends.fsdp import shard
from burnish.backends.fsdp.lora import Adapters
from burnish.backends.optimizer import Recipe, freeze
from burnish.backends.tensors import DTYPES
from burnish.config import SFTConfig
from burnish.models.load import ModelCard, blank_model
from burnish.models.loss import CHUNK_ELEMENTS
from burnish.models.vision import part_of

USABLE = 0.9
"""Share of a device's memory that a run is given."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Load:
    """The most that one rank is given at a time."""

    tokens: int
    """Of a micro-batch, padding included."""
    targets: int
    """Of a micro-batch."""
    patches: int = 0
    """Image patches of a micro-batch."""
    micro_batches: int = 1
    """Of a step."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the rank that holds most."""

    weights: int
    """Float32 masters and frozen weights on FSDP; on Megatron, in the dtype of the computation."""
    gradients: int
    optimizer: int
    """Moments in float32, and Megatron's float32 masters."""
    gathered: int
    """On FSDP: weights whole, in the dtype of the computation, and gradients on their way to the other ranks."""
    activations: int
    """Kept for the backward pass."""
    logits: int
    """One chunk of them, and what the loss keeps until the backward pass."""
    host: int = 0
    """In the memory of the machine, with ``fsdp_config.cpu_offload``; not in ``total``."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.logits


def estimate_memory(config: SFTConfig, card: ModelCard, *, world: int, load: Load, on_gpu: bool) -> MemoryEstimate:
    """The memory of a run of ``config`` on ``world`` ranks.

    Args:
        config: of the run, without problems.
        card: of its model.
        world: ranks.
        load: what the rank with most is given.
        on_gpu: whether ranks compute on GPUs, whose default is bfloat16.

    Raises:
        ConfigError: the model cannot be trained, or gets no such adapters.
    """
    held = DTYPES[config.model.dtype or ("bfloat16" if on_gpu else "float32")]
    fsdp, model = config.strategy == "fsdp", _model(config, card, held)
    precision = config.fsdp_config.mixed_precision
    size = (DTYPES[precision.param_dtype] if fsdp and precision.param_dtype else held).itemsize
    device = "cuda" if on_gpu else "cpu"
    state = _fsdp(model, config, shards=config.fsdp_config.fsdp_size or world, size=size, load=load)
    if not fsdp:
        state = _megatron(model, config, card, world=world, size=size)
    return MemoryEstimate(
        **state,
        activations=int(_activations(model, config, card, load=load, size=size)),
        logits=int(_logits(model, config, card, load=load, size=size, chunk=CHUNK_ELEMENTS[device])),
    )


def checkpoint_bytes(config: SFTConfig, card: ModelCard) -> int:
    """What a checkpoint takes on a disk: of each trained number a float32 weight and two moments."""
    model = _model(config, card, DTYPES["float32"])
    return 3 * _FLOAT32 * sum(int(p.numel()) for p in model.parameters() if p.requires_grad)


def readable_size(size: float) -> str:
    """``size`` bytes in GiB, or in MiB if that is less than a tenth of one."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


def _model(config: SFTConfig, card: ModelCard, held: torch.dtype) -> Any:
    """On meta, as the backend makes it, where the computation is in ``held``."""
    lora = lora_settings(config)
    kept = torch.float32 if config.strategy == "fsdp" and not lora else held
    blank = blank_model(card.path, dtype=kept, trust_remote_code=config.model.trust_remote_code)
    model = freeze(blank, Recipe(frozen=config.model.freeze))
    if lora:
        Adapters(model, lora, path=card.path)
    return model


def _fsdp(model: Any, config: SFTConfig, *, shards: int, size: int, load: Load) -> dict[str, int]:
    """Each rank holds ceil(rows / shards) of a parameter's rows, its gradient and two moments of the same size.

    Gradients are summed over several micro-batches before ranks exchange them, and until then they are whole, in
    ``reduce_dtype``. Embedding, head and small layers stay whole from forward to backward; of the other layers two, one
    in use and one ahead, or all without ``reshard_after_forward``; one of them has its gradient on the way.
    """
    keys = config.fsdp_config
    reduced = DTYPES[keys.mixed_precision.reduce_dtype].itemsize
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    weights = sum(_shard_bytes(p, shards) for p in parameters)
    gradients = sum(_shard_bytes(p, shards) for p in trained)
    optimizer = 2 * gradients + _FLOAT32 * len(trained)
    whole = reduced * sum(p.numel() for p in trained) if load.micro_batches > 1 else 0
    layers = [layer for layer in shard.decoder_layers(model) if _count(layer) >= shard.MIN_LAYER_PARAMETERS]
    rest = sum(p.numel() for p in parameters) - sum(map(_count, layers))
    at_once = sorted(map(_count, layers), reverse=True)[: 2 if keys.reshard_after_forward else None]
    sent = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    on_way = max(sum(p.numel() for p in trained) - sum(sent), *sent, 0)
    gathered = size * (rest + sum(at_once)) + (size + reduced) * on_way
    if keys.cpu_offload:
        host = weights + gradients + optimizer
        return {"weights": 0, "gradients": whole, "optimizer": 0, "gathered": gathered, "host": host}
    gradients = max(gradients, whole)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "gathered": gathered}


def _megatron(model: Any, config: SFTConfig, card: ModelCard, *, world: int, size: int) -> dict[str, int]:
    """Matrices and biases are cut by the tensor size, layers by the pipeline size, experts by the expert size too.

    A rank holds its part of the weights in the dtype of the computation, float32 gradients of all of it, and its share
    of float32 masters (where that dtype is another) and moments, which all copies of the part divide among them. The
    first stage has the embedding and the tower, the last one the head; with several, a tied one has its own copy.
    """
    sizes = megatron_sizes(config)
    copies, expert_copies = (world // (sizes.tensor * sizes.pipeline * part) for part in (1, sizes.expert))
    layers = {id(p) for layer in shard.decoder_layers(model) for p in layer.parameters()}
    stages = [[0.0, 0.0, 0.0] for _ in range(sizes.pipeline)]  # held, and trained of dense weights and of experts
    vocabulary = sizes.vocabulary(card.num_embeddings) / sizes.tensor
    for name, p in model.named_parameters():
        expert, tower = ".experts." in name, part_of(name) != "language"
        if p.shape[0] == card.num_embeddings:
            count = vocabulary * p.shape[1]
            homes = stages[-1:] if name.startswith("lm_head") else stages[:1]
            homes = [stages[0], stages[-1]] if card.tied and sizes.pipeline > 1 else homes
        else:
            cut = not tower and (p.ndim > 1 or name.endswith(".bias"))
            count = p.numel() / (sizes.tensor if cut else 1) / (sizes.expert if expert else 1)
            inside = id(p) in layers and not tower
            homes = stages if inside else stages[:1] if tower else stages[-1:]
            count = count / sizes.pipeline if inside else count
        for stage in homes:
            stage[0] += count
            stage[2 if expert else 1] += count if p.requires_grad else 0
    held, dense, experts = max(stages)
    state = 2 * _FLOAT32 + (_FLOAT32 if size != _FLOAT32 else 0)
    optimizer = state * (dense / copies + experts / expert_copies)
    gradients = _FLOAT32 * (dense + experts)
    return {"weights": int(size * held), "gradients": int(gradients), "optimizer": int(optimizer), "gathered": 0}


def _activations(model: Any, config: SFTConfig, card: ModelCard, *, load: Load, size: int) -> float:
    """Of a token and layer, with b bytes a number, as counted by Korthikanti et al. 2022, section 4.1, for today's layers:

        8 n + 2 b h + 2 b (q + k) + 4 heads + 4 b f (+ 2 b h a chosen expert)

    n is the width of its norms together, whose input and whose output without its weight are kept in float32 by most
    models; h that of the hidden state, the input of queries and of the gated matrices; q and k those of all queries and of
    all keys: the attention keeps queries, keys, values, its output and a sum a head, and no scores, as on a GPU; f that
    between the gated matrices: gate, its activation, the other half, and their product. Megatron's fused kernels keep b n
    and 3 b f.

    Checkpointed, a layer keeps b h, and one at a time all of it. Ranks that share rows have a part of the tokens each.
    Tensor parallelism cuts q, k, heads and f, and with Megatron's sequence parallelism all. A pipeline's first stage has
    as many micro-batches under way as there are stages.
    """
    megatron, sizes = config.strategy == "megatron", megatron_sizes(config)
    facts = model.config.get_text_config().to_dict()
    chosen = int(facts.get("num_experts_per_tok") or 0)
    width = facts.get("intermediate_size") or facts.get("n_inner") or 4 * card.hidden_size
    between = chosen * (facts.get("moe_intermediate_size") or width) if chosen else width
    between += facts.get("shared_expert_intermediate_size") or 0
    queries, keys = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
    norms = _norm_width(model, queries=queries, keys=keys, hidden=card.hidden_size)
    once = (size if megatron else 2 * _FLOAT32) * norms + 2 * size * card.hidden_size
    shared = 2 * size * (queries + keys) + 4 * card.num_heads + (3 if megatron else 4) * size * between
    layer = once / (sizes.tensor if sizes.sequence_parallel else 1) + shared / sizes.tensor
    layer += 2 * size * card.hidden_size * chosen
    under_way: float = min(sizes.pipeline, load.micro_batches)
    if sizes.virtual_pipeline:
        under_way *= 1 + (sizes.pipeline - 1) / (sizes.pipeline * sizes.virtual_pipeline)
    extra = config.megatron_config.transformer_config_kwargs.get("recompute_granularity")
    recomputed = config.fsdp_config.activation_checkpointing or extra == "full"
    tokens = load.tokens / (config.sequence_parallel_size * sizes.context)
    ends = 2 * _FLOAT32 * card.hidden_size + 2 * size * card.head_dim
    count = under_way * card.num_layers / sizes.pipeline
    of_text = tokens * (ends + (count * size * card.hidden_size + layer if recomputed else count * layer))
    return of_text + (_tower(model, card, size=size, recomputed=recomputed) * load.patches if card.vision else 0)


def _tower(model: Any, card: ModelCard, *, size: int, recomputed: bool) -> float:
    """The same of a patch, in a tower that is trained."""
    assert card.vision
    if not any(p.requires_grad for name, p in model.named_parameters() if part_of(name) == "vision"):
        return 0.0
    facts: Mapping[str, Any] = model.config.vision_config.to_dict()
    width = card.vision.num_heads * card.vision.head_dim
    between = facts.get("intermediate_size") or int(width * facts["mlp_ratio"])
    layer = 4 * _FLOAT32 * width + 6 * size * width + 4 * card.vision.num_heads + 4 * size * between
    return card.vision.num_layers * size * width + layer if recomputed else card.vision.num_layers * layer


def _logits(model: Any, config: SFTConfig, card: ModelCard, *, load: Load, size: int, chunk: int) -> float:
    """Of a chunk: logits and their probabilities in float32, and their gradient in the dtype of the computation.

    Beside it the loss makes the gradients at once: of the head in float32, if that is trained, and of the targets'
    hidden states.
    """
    parts = megatron_sizes(config).tensor
    of_head = card.num_embeddings / parts
    elements = min(max(1, chunk // of_head), load.targets) * of_head
    head = model.get_output_embeddings().weight.requires_grad
    in_head = (_FLOAT32 + (size if size != _FLOAT32 else 0)) * of_head * card.hidden_size if head else 0
    gradient = size if size != _FLOAT32 else 0
    return elements * (2 * _FLOAT32 + gradient) + in_head + 2 * size * load.targets * card.hidden_size


def _norm_width(model: Any, *, queries: int, keys: int, hidden: int) -> int:
    """Of all norms of one layer of the language model, those of single heads over all heads."""
    of_language = {id(m) for name, m in model.named_modules() if part_of(name) == "language"}
    layer = next(layer for layer in reversed(shard.decoder_layers(model)) if id(layer) in of_language)
    total = 0
    for name, module in layer.named_modules():
        if "Norm" in type(module).__name__ and not list(module.children()):
            in_heads = queries if name.rpartition(".")[2].startswith("q") else keys
            total += hidden if module.weight.numel() == hidden else in_heads
    return total


def _shard_bytes(parameter: nn.Parameter, shards: int) -> int:
    """What the first rank holds of it."""
    rows = -(-parameter.shape[0] // shards)
    return int(rows * parameter[0].nbytes)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
