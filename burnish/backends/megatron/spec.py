"""The parts a layer is made of: those of Transformer Engine where there is one, else those of torch below.

Megatron's own parts for the latter refuse to share rows between ranks and to pack them; these do both, on any device.
Their rule: no token ever sees a token of another segment.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from burnish.backends.megatron.sizes import Sizes


def has_transformer_engine() -> bool:
    """Whether layers are made of Transformer Engine's parts."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def cost_without_engine(sizes: Sizes) -> str:
    """What rows cost on a GPU without Transformer Engine, to be said in the log; empty with it, and without a GPU."""
    if not torch.cuda.is_available() or has_transformer_engine():
        return ""
    shared = ", and ranks that share rows hold the keys and values of whole rows" if sizes.context > 1 else ""
    return f"without Transformer Engine attention is one call a segment{shared}: long rows and many segments cost time"


def block_spec(config: Any, *, part: int | None) -> Any:
    """The layers that this rank holds, in Megatron's terms.

    Args:
        config: Megatron's ``TransformerConfig``.
        part: of an interleaved stage; else None.
    """
    fused = has_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization="RMSNorm", qk_l2_norm=False, vp_stage=part
    )
    if fused:
        return block
    # Megatron Core 0.16 looks for it also where there is none.
    vars(moe_utils).setdefault("te_general_gemm", None)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SegmentAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    block.layer_norm = Norm
    return block


class Norm(nn.RMSNorm):
    """Root mean square norm of rows that the ranks of a tensor parallel group may share."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # By this mark Megatron sums its gradients over the ranks, which have some of the tokens each.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SegmentAttention(nn.Module):
    """Causal attention within each segment, by a call a segment. It has no weights.

    Of a segment each rank of the context parallel group holds two of as many equal parts as twice the ranks, the n-th
    and the n-th from the end, so that all have as much to do; keys and values of the others are gathered.
    """

    def __init__(
        self, config: Any, layer_number: int, *, pg_collection: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed else None
        """Tokens that one token sees, itself included."""
        self.scale = softmax_scale
        self.group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """[length, rows, heads x width]; packed rows are one, without their dimension in the arguments.

        Args:
            query: [length, rows, heads, width], of ``length`` what this rank holds.
            key: [length, rows, key heads, width]
            value: as ``key``.
            packed_seq_params: Megatron's bounds of the segments in whole rows; None is one a row.
        """
        ranks = self.group.size()
        bounds = [0, query.shape[0] * ranks]
        if packed_seq_params is not None:
            padded, exact = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_q
            bounds = (exact if padded is None else padded).tolist()
        query, key, value = (x.unsqueeze(1) if x.ndim == 3 else x for x in (query, key, value))
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self.group) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        outputs = []
        for start, stop in pairwise(bounds):
            keys, values = (_in_order(x, start, stop, ranks=ranks) for x in (key, value))
            for begin, end, position in _parts(start, stop, ranks=ranks, rank=self.group.rank()):
                seen = position + end - begin
                outputs.append(self._attend(query[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen]))
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(2).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last tokens of ``key`` to all of it."""
        if self.window is not None:
            seen = query.shape[2] + self.window - 1
            key, value = key[:, :, -seen:], value[:, :, -seen:]
        before = key.shape[2] - query.shape[2]
        mask = None
        if before or (self.window is not None and self.window < key.shape[2]):
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
            mask = mask if self.window is None else mask.triu(before + 1 - self.window)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _parts(start: int, stop: int, *, ranks: int, rank: int) -> Sequence[tuple[int, int, int]]:
    """Of the segment between ``start`` and ``stop``, what ``rank`` holds.

    Returns:
        For each part where in the rank's own tokens it begins and ends, and the position of its first in the segment.
    """
    if ranks == 1:
        return ((start, stop, 0),)
    size, begin = (stop - start) // (2 * ranks), start // ranks
    return (
        (begin, begin + size, rank * size),
        (begin + size, begin + 2 * size, (2 * ranks - 1 - rank) * size),
    )


def _in_order(gathered: Tensor, start: int, stop: int, *, ranks: int) -> Tensor:
    """The tokens of a segment, out of those of one rank after another ([rows, heads, tokens of all ranks, width])."""
    if ranks == 1:
        return gathered[:, :, start:stop]
    own = gathered.shape[2] // ranks
    places: list[tuple[int, int, int]] = []
    for rank in range(ranks):
        parts = _parts(start, stop, ranks=ranks, rank=rank)
        places += [(position, rank * own + begin, rank * own + end) for begin, end, position in parts]
    return torch.cat([gathered[:, :, begin:end] for _, begin, end in sorted(places)], dim=2)
