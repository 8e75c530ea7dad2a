"""MegatronBackend: training with Megatron Core's model, schedules and optimizer.

Its rule: every rank of a replica is given the same micro-batches; Megatron knows which part of them it computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from burnish.backends.base import StepResult
from burnish.backends.comm import Ranks
from burnish.backends.fsdp.tensor_files import DcpSave
from burnish.backends.greedy import continuations, stop_ids
from burnish.backends.megatron.generate import asked, likeliest
from burnish.backends.megatron.loss import VocabularyPart, target_loss
from burnish.backends.megatron.model import build_model, start, stop
from burnish.backends.megatron.optimizer import AdamOptimizer, wrap
from burnish.backends.megatron.sizes import Sizes
from burnish.backends.megatron.spec import cost_without_engine
from burnish.backends.megatron.tensor_files import begin_save, load_in_place
from burnish.backends.megatron.thd import StageInputs, stage_inputs
from burnish.backends.megatron.vision import add_tower, embedded, freeze, language_config, with_images
from burnish.backends.megatron.weights import export_weights, load_weights
from burnish.backends.optimizer import Recipe
from burnish.backends.tensors import DTYPES, device_peak_flops, memory_peak_gib
from burnish.data.batch import Batch, MicroBatch
from burnish.data.packing import Layout
from burnish.log import get_logger
from burnish.models.load import (
    blank_model,
    export_configs,
    export_processor,
    read_config,
    read_tokenizer,
    takes_images,
)
from burnish.models.loss import CROSS_ENTROPY, Objective

log = get_logger(__name__)

_RECIPE, _WHOLE = Recipe(), Sizes()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class MegatronBackend:
    """Implements :class:`burnish.backends.base.Backend`.

    Making one loads the model and cuts it. On a machine without a GPU, ``burnish.backends.megatron.cpu`` comes first.

    Args:
        ranks: the group; left by whoever joined it, after ``close``.
        layout: of the plans it will be given: :func:`burnish.backends.megatron.layout.layout_of`.
        model_path: folder or hub id.
        num_steps: horizon of the schedule.
        num_sources: sources the loss is told apart by.
        sizes: how the model is cut.
        seed: of dropout.
        dtype: ``bfloat16`` or ``float32``; by default the first on a GPU, the second on a CPU. Masters are float32.
        trust_remote_code: run code that comes with the tokenizer.
        chat_template: text that replaces the tokenizer's in exports.
        objective: what a target costs in training.
        recipe: how a step changes the weights.
        transformer_config_kwargs: more keys of Megatron's ``TransformerConfig``.
        optimizer_config_kwargs: more keys of Megatron's ``OptimizerConfig``.

    Raises:
        BurnishError: the model is missing, or Megatron cannot train it so.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        layout: Layout,
        model_path: str,
        num_steps: int,
        num_sources: int = 1,
        sizes: Sizes = _WHOLE,
        seed: int = 42,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        objective: Objective = CROSS_ENTROPY,
        recipe: Recipe = _RECIPE,
        transformer_config_kwargs: Mapping[str, Any] = _NOTHING,
        optimizer_config_kwargs: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self._rate: Callable[..., float] = partial(recipe.rate, num_steps=num_steps)
        self._ranks, self.layout, self._sizes = ranks, layout, sizes
        self._num_sources, self._objective, self._seed = num_sources, objective, seed
        self._dtype = DTYPES[dtype or ("bfloat16" if ranks.device.type == "cuda" else "float32")]
        self._tokenizer = read_tokenizer(model_path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        hf_config = read_config(model_path, trust_remote_code=trust_remote_code)
        self._hf_config, self._model_path = language_config(hf_config), model_path
        self._blank = partial(blank_model, model_path, trust_remote_code=trust_remote_code)
        with ExitStack() as undo:
            # A group of its own: the saving thread's messages must not mix with training's.
            self._save_group = dist.new_group(backend="gloo")
            start(ranks, sizes, seed=seed)
            undo.callback(self.close)
            if warning := cost_without_engine(sizes) if ranks.rank == 0 else "":
                log.warning("%s", warning)
            self._models = build_model(self._hf_config, sizes=sizes, dtype=self._dtype, extra=transformer_config_kwargs)
            shell = self._blank() if takes_images(hf_config) else None
            self._vision = add_tower(self._models, shell, dtype=self._dtype) if shell else None
            freeze(self._models, recipe)
            load_weights(self._models, Path(model_path), hf_config=self._hf_config, sizes=sizes)
            for model in self._models:
                model._postprocess = _hidden_states
                model.config.finalize_model_grads_func = finalize_model_grads
            self._wrapped = wrap(self._models)
            self._optimizer = AdamOptimizer(
                self._wrapped,
                recipe=recipe,
                dtype=self._dtype,
                extra=optimizer_config_kwargs,
            )
            undo.pop_all()

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self._ranks.device

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations a second of the device; None when that is not known."""
        return device_peak_flops(self._ranks.device)

    @property
    def save_bytes(self) -> int:
        """What this rank's part of a save takes on a disk; ranks that hold the same write equal parts."""
        elements = sum(parameter.numel() for model in self._models for parameter in model.parameters())
        copies = self._ranks.world_size // (self._sizes.tensor * self._sizes.pipeline)
        return int(elements * (self._dtype.itemsize + 3 * torch.float32.itemsize) // copies)

    def train_step(self, batch: Batch) -> StepResult:
        """Forward, backward and one update of the weights, at the learning rate of ``batch.step``."""
        began = perf_counter()
        for model in self._wrapped:
            model.train()
            model.zero_grad_buffer()
        totals = self._run(batch, objective=self._objective)
        grad_norm = self._optimizer.measure()
        forward_backward = perf_counter() - began
        loss_sums, counts = totals[: self._num_sources], totals[self._num_sources :]
        lr = self._rate(batch.step)
        skipped = not all(map(isfinite, [*loss_sums, grad_norm]))
        if not skipped:
            self._optimizer.apply(grad_norm=grad_norm, rate=lambda part: self._rate(batch.step, part=part))
        self._optimizer.zero_grad()
        return StepResult(
            loss_sums=tuple(loss_sums),
            num_targets=tuple(int(count) for count in counts),
            grad_norm=grad_norm,
            learning_rate=lr,
            skipped=skipped,
            timings={
                "forward_backward": forward_backward,
                "optimizer": perf_counter() - began - forward_backward,
            },
            memory_peak_gib=memory_peak_gib(self._ranks.device),
        )

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> tuple[float, int]:
        """(summed loss, targets) of the whole batch, equal on all ranks. Changes nothing."""
        for model in self._wrapped:
            model.eval()
        totals = self._run(batch, objective=CROSS_ENTROPY, forward_only=True)
        return sum(totals[: self._num_sources]), batch.num_targets

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt, without the prompt and without the token that ended it."""
        for model in self._wrapped:
            model.eval()
        stops = stop_ids(self._blank(), self._tokenizer)
        return continuations(prompts, next_tokens=self._next_tokens, stops=stops, max_new_tokens=max_new_tokens)

    def save(self, folder: Path) -> DcpSave:
        """Begin to write weights and optimizer state into ``folder``; returns once they are off the device."""
        settings: dict[str, Any] = {"vocabulary": self._hf_config.vocab_size, "group": self._save_group}
        return begin_save(self._models, self._optimizer, folder, **settings)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read what ``save`` wrote, also when the number of ranks or the sizes have changed.

        Raises:
            CheckpointError: the folder is not a checkpoint of this backend and this model.
        """
        load_in_place(
            self._models,
            self._optimizer,
            folder,
            weights_only=weights_only,
            vocabulary=self._hf_config.vocab_size,
            ranks=self._ranks,
            group=self._save_group,
        )

    def export(self, folder: Path) -> None:
        """Write the weights, the tokenizer and the model's configs as a Hugging Face folder; rank 0 writes."""
        if self._ranks.rank == 0:
            export_configs(folder, model=self._blank(), dtype=self._dtype, tokenizer=self._tokenizer)
            if self._vision:
                export_processor(folder, path=self._model_path)
        settings: dict[str, Any] = {"ranks": self._ranks, "hf_config": self._hf_config, "sizes": self._sizes}
        export_weights(self._models, folder, dtype=self._dtype, **settings)
        self._ranks.gather(None)

    def close(self) -> None:
        """End what only the backend used."""
        dist.destroy_process_group(self._save_group)
        stop()

    def _run(self, batch: Batch, *, objective: Objective, forward_only: bool = False) -> list[float]:
        """Losses summed by source, then targets by source, of the whole batch; equal on all ranks.

        Gradients, if any, are divided by the number of targets when they have been summed over all micro-batches.
        """
        loss = partial(self._loss, objective=objective)
        outcomes = self._pass(batch.micro_batches, step=batch.step, outcome=loss, forward_only=forward_only)
        totals = torch.zeros(2, self._num_sources, dtype=torch.float64, device=self._ranks.device)
        # The last stage knows the loss, and all of its ranks that share matrices know the same.
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for outcome in outcomes:
                totals += outcome
        return self._ranks.sum(totals.flatten().tolist())

    def _pass(
        self, micro_batches: Sequence[MicroBatch], *, step: int, outcome: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        """What ``outcome`` made, third, of each micro-batch's last hidden states; nothing but on a last stage."""
        longest = max(micro_batch.input_ids.size for micro_batch in micro_batches)
        inputs = [self._inputs(micro_batch, longest=longest) for micro_batch in micro_batches]
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, outcome=outcome, step=step),
            data_iterator=[enumerate(inputs) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(inputs),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return found

    def _next_tokens(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The likeliest token after each of ``rows``, equal on all ranks."""
        # Interleaved stages pass on as many at a time.
        micro_batches = [asked(rows, layout=self.layout)] * self.layout.micro_batch_multiple
        outcomes = self._pass(micro_batches, step=0, outcome=self._likeliest, forward_only=True)
        known = [dict(zip(*outcome, strict=True)) for outcome in outcomes]
        # Of ranks that share rows each knows some of them; copies know the same, or two that are equally likely.
        answers = {int(n): token for one in self._ranks.gather(known) for held in one for n, token in held.items()}
        return [answers[number] for number in range(len(rows))]

    def _inputs(self, micro_batch: MicroBatch, *, longest: int) -> StageInputs:
        # Interleaved stages do not tell each other how long a micro-batch is.
        num_tokens = 0 if self._sizes.virtual_pipeline is None else longest
        inputs = stage_inputs(
            micro_batch,
            segment_multiple=self.layout.segment_multiple,
            parts=self._sizes.context,
            part=parallel_state.get_context_parallel_rank(),
            device=self._ranks.device,
            num_tokens=num_tokens,
        )
        if not self._vision:
            return inputs
        is_first = any(model.pre_process for model in self._models)
        return with_images(inputs, micro_batch, card=self._vision, is_first=is_first, device=self._ranks.device)

    def _forward(
        self, data: Iterator[tuple[int, StageInputs]], model: Any, *, outcome: Callable[..., Any], step: int
    ) -> tuple[Tensor, Any]:
        """What Megatron's schedules call for each micro-batch: the output of ``model`` and what is made of it."""
        number, inputs = next(data)
        if model.training and (model.config.hidden_dropout or model.config.attention_dropout):
            self._seed_dropout(step, number, part=model.module.vp_stage or 0)
        images = embedded(model.module, inputs, card=self._vision) if self._vision else {}
        return model(**inputs.call, **images), partial(outcome, model=model.module, inputs=inputs)

    def _seed_dropout(self, step: int, micro_batch: int, *, part: int) -> None:
        """Ranks that share matrices drop the same of what they all hold; others, other parts of the model's."""
        pipeline, context = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        entropy = [self._seed, step, self.layout.data_rank, micro_batch, pipeline, part, context]
        model_parallel_cuda_manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def _loss(
        self, hidden: Tensor, *, model: Any, inputs: StageInputs, objective: Objective
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last stage's output [tokens, 1, width]: the summed loss, its targets, and both by source [2, sources]."""
        of_targets, weight, part = self._at_targets(hidden, model=model, inputs=inputs)
        losses = target_loss(
            of_targets, weight, target_ids=inputs.target_ids, vocabulary=part, objective=objective
        ).double()
        # A product, not a scatter: its order of summation is fixed on every device.
        of_source = (torch.arange(self._num_sources, device=hidden.device)[:, None] == inputs.target_sources).double()
        by_source = torch.stack([of_source @ losses.detach(), of_source.sum(1)])
        return losses.sum().float(), torch.tensor(len(losses), dtype=torch.int32, device=hidden.device), by_source

    def _likeliest(self, hidden: Tensor, *, model: Any, inputs: StageInputs) -> tuple[Tensor, Tensor, Any]:
        """As :meth:`_loss`, with no loss; third the sources of the targets that are here, and the likeliest tokens."""
        of_targets, weight, part = self._at_targets(hidden, model=model, inputs=inputs)
        tokens = likeliest(of_targets, weight, vocabulary=part)
        nothing = torch.zeros((), device=hidden.device)
        return nothing, nothing.int(), (inputs.target_sources.tolist(), tokens.tolist())

    def _at_targets(self, hidden: Tensor, *, model: Any, inputs: StageInputs) -> tuple[Tensor, Tensor, VocabularyPart]:
        """[targets, width] of the last stage's output, and this rank's part of the head."""
        of_targets = self._whole_rows(hidden)[:, 0].index_select(0, inputs.target_positions)
        # Its method of that name gives the embedding also where nothing is shared.
        is_tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        group = parallel_state.get_tensor_model_parallel_group()
        return of_targets, weight, VocabularyPart(group.rank() * len(weight), self._hf_config.vocab_size, group)

    def _whole_rows(self, hidden: Tensor) -> Tensor:
        """``hidden`` on every rank that shares matrices, with its gradient summed over them on the way back."""
        if self._sizes.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(hidden)  # type: ignore[no-any-return]


def _hidden_states(hidden_states: Tensor, **_: Any) -> Tensor:
    """In the place of Megatron's own last step, which would make the logits of all tokens."""
    return hidden_states
