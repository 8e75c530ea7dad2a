"""FsdpBackend: training with PyTorch FSDP2, from one CPU process on. One path for any number of ranks.

Its rule: everything a step depends on comes with the batch (rows, step number); the rest is weights and moments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from burnish.backends.base import StepResult
from burnish.backends.comm import Ranks, claim
from burnish.backends.fsdp.generate import next_tokens
from burnish.backends.fsdp.gradients import clip, held_gradients, sum_of_squares
from burnish.backends.fsdp.lora import Adapters, LoraSettings
from burnish.backends.fsdp.shard import Sharding, build_mesh, move_to_host, shard
from burnish.backends.fsdp.tensor_files import DcpSave, begin_save, build_stager, load_in_place
from burnish.backends.fsdp.ulysses import SequenceExchange
from burnish.backends.greedy import continuations, stop_ids
from burnish.backends.optimizer import Recipe, build_optimizer, freeze, optimizer_tensors
from burnish.backends.tensors import DTYPES, device_peak_flops, inputs_ahead, memory_peak_gib, target_counts
from burnish.data.batch import Batch
from burnish.data.packing import Layout
from burnish.errors import BurnishError, StorageError
from burnish.log import get_logger
from burnish.models.attention import register
from burnish.models.kernels import Demand, choose_kernel
from burnish.models.load import attention_of, blank_model, export_folder, export_processor, read_tokenizer
from burnish.models.loss import CROSS_ENTROPY, LossModel, Objective
from burnish.models.probe import head_problem, isolation_problem, parts_problem
from burnish.models.weights import read_weights

log = get_logger(__name__)


_RECIPE, _SHARDING = Recipe(), Sharding()


class FsdpBackend:
    """Implements :class:`burnish.backends.base.Backend`.

    Making one loads the model, spreads it and tries it out.

    Args:
        ranks: the group; left by whoever joined it, after ``close``.
        layout: of the plans it will be given; ranks of one ``data_rank`` share its rows.
        model_path: folder or hub id.
        num_steps: horizon of the schedule.
        num_sources: sources the loss is told apart by.
        seed: of dropout, and of the first values of adapters.
        dtype: ``bfloat16`` or ``float32`` compute; by default the first on a GPU, the second on a CPU.
        trust_remote_code: run code that comes with the model.
        chat_template: text that replaces the tokenizer's in exports.
        share_rows: whether rows may hold several segments.
        attention: ``flash``, ``flex``, ``sdpa``, or ``auto`` for the fastest that can.
        objective: what a target costs in training.
        lora: trains adapters alone, beside a model that is held in ``dtype``; None trains all weights.
        recipe: how a step changes the weights.
        sharding: how they are spread over the ranks.
        param_dtype: as ``dtype``, in whose place it comes for the computation, not for exports.

    Raises:
        BurnishError: the model is missing, cannot be trained faithfully, or cannot share rows.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        layout: Layout,
        model_path: str,
        num_steps: int,
        num_sources: int = 1,
        seed: int = 42,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        share_rows: bool = True,
        attention: str = "auto",
        objective: Objective = CROSS_ENTROPY,
        lora: LoraSettings | None = None,
        recipe: Recipe = _RECIPE,
        sharding: Sharding = _SHARDING,
        param_dtype: str | None = None,
    ) -> None:
        self._tokenizer = read_tokenizer(model_path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        self._rate: Callable[..., float] = partial(recipe.rate, num_steps=num_steps)
        self._model_path, self._num_sources, self._seed = model_path, num_sources, seed
        self._ranks, self.layout, self._max_grad_norm = ranks, layout, recipe.max_grad_norm
        claim(ranks.device)
        # A group of its own: the saving thread's messages must not mix with training's.
        self._save_group = dist.new_group(backend="gloo")
        self._stager = build_stager(ranks.device)
        self._exchange = SequenceExchange.between(ranks, layout=layout)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._export_dtype = DTYPES[dtype or ("bfloat16" if ranks.device.type == "cuda" else "float32")]
            self._dtype = DTYPES[param_dtype] if param_dtype else self._export_dtype
            held_dtype = self._export_dtype if lora else torch.float32
            blank = partial(blank_model, model_path, dtype=held_dtype, trust_remote_code=trust_remote_code)
            model = freeze(blank(), recipe)
            self._adapters = Adapters(model, lora, path=model_path) if lora else None
            self._attend(model, attention, compiled=sharding.compile_layers)
            self._model = LossModel(model, num_sources=num_sources, objective=objective)
            mesh = build_mesh(ranks, fsdp_size=sharding.fsdp_size)
            self._num_copies = ranks.world_size // mesh.size(-1)
            self._sharded = shard(self._model, mesh=mesh, dtype=self._dtype, sharding=sharding)
            with self._adapters.aside(model, seed=seed, device=ranks.device) if self._adapters else nullcontext():
                read_weights(model, model_path, device=ranks.device, blank=blank)
            if sharding.cpu_offload:
                move_to_host(model)
            self._parameters = dict(model.named_parameters())
            self._optimizer = build_optimizer(self._parameters, recipe)
            self._try_out(model_path, share_rows=share_rows)
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
        """What this rank's part of a save takes on a disk; ranks write equal parts."""
        tensors = [tensor for kind in self._tensors(with_moments=True).values() for tensor in kind.values()]
        return int(sum(tensor.numel() * tensor.element_size() for tensor in tensors)) // self._ranks.world_size

    def train_step(self, batch: Batch) -> StepResult:
        """Forward, backward and one update of the weights, at the learning rate of ``batch.step``."""
        began = perf_counter()
        self._model.train()
        sums = torch.zeros(self._num_sources, dtype=torch.float64, device=self._ranks.device)
        last = len(batch.micro_batches) - 1
        # Nothing in this loop waits for the device.
        for index, inputs in enumerate(self._inputs(batch)):
            if index in (0, last):  # it asks every module
                self._sharded.set_requires_gradient_sync(index == last)
            self._seed_dropout(batch.step, index)
            loss, by_source = self._model(**inputs, targets_per_token=max(1, batch.num_targets) / batch.num_tokens)
            (loss / max(1, batch.num_targets)).backward()
            sums += by_source
        counts = target_counts(batch, num_sources=self._num_sources, exchange=self._exchange)
        gradients = held_gradients(self._parameters.values())
        *totals, squares = self._ranks.sum([*sums.tolist(), *counts.tolist(), sum_of_squares(gradients)])
        loss_sums, grad_norm = totals[: self._num_sources], sqrt(squares / self._num_copies)
        forward_backward = perf_counter() - began
        lr = self._rate(batch.step)
        skipped = not all(map(isfinite, [*loss_sums, grad_norm]))
        if not skipped:
            clip(gradients, norm=grad_norm, max_norm=self._max_grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate(batch.step, part=group["part"])
            self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(
            loss_sums=tuple(loss_sums),
            num_targets=tuple(int(count) for count in totals[self._num_sources :]),
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
        self._model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for inputs in self._inputs(batch):
            total += self._model(**inputs)[0]
        return self._ranks.sum([total.item()])[0], batch.num_targets

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt, without the prompt and without the token that ended it."""
        self._model.eval()
        return continuations(
            prompts,
            next_tokens=partial(next_tokens, self._model, ranks=self._ranks),
            stops=stop_ids(self._model.model, self._tokenizer),
            max_new_tokens=max_new_tokens,
        )

    def save(self, folder: Path) -> DcpSave:
        """Begin to write weights and optimizer state into ``folder``; returns once they are off the device."""
        return begin_save(self._tensors(with_moments=True), folder, stager=self._stager, group=self._save_group)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read what ``save`` wrote, also when the number of ranks has changed.

        Raises:
            CheckpointError: the folder is not a checkpoint of this model.
        """
        # An evaluation leaves gathered copies of the weights behind; they would outlive what is loaded here.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        load_in_place(self._tensors(with_moments=not weights_only), folder, group=self._save_group)

    def export(self, folder: Path) -> None:
        """Write the weights, the tokenizer and the model's configs as a Hugging Face folder; rank 0 writes.

        Raises:
            StorageError: rank 0 could not; on every rank.
        """
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in [*self._parameters.items(), *self._buffers().items()]:
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self._ranks.rank == 0:
                # Adapters are merged before anything is rounded.
                dtype = whole.dtype if self._adapters or not whole.is_floating_point() else self._export_dtype
                weights[name] = whole.to("cpu", dtype)
        self._ranks.of_first(lambda: self._write(folder, weights))

    def close(self) -> None:
        """End what only the backend used."""
        self._stager.close()
        dist.destroy_process_group(self._save_group)
        if self._exchange:
            self._exchange.close()

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        settings: dict[str, Any] = {"dtype": self._export_dtype, "tokenizer": self._tokenizer}
        try:
            if self._adapters:
                self._adapters.save(folder / "adapter", weights)
                weights = dict(self._adapters.merged(weights))
            export_folder(folder, model=self._model.model, weights=weights, **settings)
            if self._model.vision:
                export_processor(folder, path=self._model_path)
        except (OSError, SafetensorError) as error:
            fix = "see that the disk has room and can be written"
            raise StorageError(str(folder), f"could not be written: {error}", fix=fix) from error

    def _inputs(self, batch: Batch) -> Iterator[dict[str, Any]]:
        settings: dict[str, Any] = {"exchange": self._exchange, "vision": self._model.vision}
        return inputs_ahead(batch.micro_batches, device=self._ranks.device, **settings)

    def _attend(self, model: Any, attention: str, *, compiled: bool) -> None:
        demand = Demand.of(model.config.get_text_config(), device_type=self._ranks.device.type, dtype=self._dtype)
        kernel = choose_kernel(attention, demand)
        log.info("attention: %s", kernel)
        model.set_attn_implementation(attention_of(model.config, register(kernel, compiled=compiled)))

    def _try_out(self, model_path: str, *, share_rows: bool) -> None:
        self._model.eval()
        settings: dict[str, Any] = {"device": self._ranks.device, "dtype": self._dtype}
        checks: list[tuple[str, Callable[[], str], str]] = [
            ("cannot be trained faithfully", lambda: head_problem(self._model, **settings), "name another model")
        ]
        if share_rows:
            fix = "write remove_microbatch_padding=false (and use_sequence_packing=false)"
            checks.append(("examples cannot share a row", lambda: isolation_problem(self._model, **settings), fix))
        if exchange := self._exchange:
            fix = "leave out sequence_parallel_size"
            checks.append(
                ("ranks cannot share its rows", lambda: parts_problem(self._model, exchange, **settings), fix)
            )
        for what, find, fix in checks:
            # One rank may find it alone, and no other may wait for that one.
            if problem := max(self._ranks.gather(find())):
                raise BurnishError(f"model.path={model_path}", f"{what}: {problem}", fix=fix)

    def _seed_dropout(self, step: int, micro_batch: int) -> None:
        entropy = np.random.SeedSequence([self._seed, step, self._ranks.rank, micro_batch])
        seed = int(entropy.generate_state(1, np.uint64)[0])
        # torch.manual_seed would note a stack trace for every kind of device that is not there, 0.2 ms and more.
        torch.default_generator.manual_seed(seed)
        if self._ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _tensors(self, *, with_moments: bool) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "weights": {name: p.detach() for name, p in self._parameters.items() if p.requires_grad}
        }
        return tensors | optimizer_tensors(self._optimizer, self._parameters) if with_moments else tensors

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong to a saved model."""
        model = self._model.model
        saved = model.state_dict().keys()
        return {name: buffer for name, buffer in model.named_buffers() if name in saved}
