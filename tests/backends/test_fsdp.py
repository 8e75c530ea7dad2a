import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from burnish.backends.fsdp import shard
from burnish.backends.fsdp.tensor_files import TensorReader
from burnish.config.choices import Schedule
from burnish.errors import BurnishError, CheckpointError, ConfigError
from tests.backends.steps import batch_of, draw, opened, reference_run, summed_loss
from tests.models.families import tiny
from tests.toys import save_model, save_tokenizer

STEPS = [draw(seed) for seed in range(4)]


@contextmanager
def open_backend(model_dir, **settings):
    defaults = {"num_steps": 10, "num_sources": 2, "learning_rate": 1e-2, "eps": 1e-6}
    with opened(model_dir, **{**defaults, **settings}) as backend:
        yield backend


def exported(backend, folder):
    backend.export(folder)
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def run(backend, *, first=1, **layout):
    return [backend.train_step(batch_of(rows, step=first + i, **layout)) for i, rows in enumerate(STEPS)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=96)


@pytest.fixture(scope="module")
def reference(model_dir):
    return reference_run(model_dir, STEPS, lr=1e-2)


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "shared", "micro_batch_size": 1},
        {"layout": "shared", "micro_batch_size": 2},
        {"layout": "shared", "micro_batch_size": 5},
        {"layout": "padded", "micro_batch_size": 2},
        {"layout": "padded", "micro_batch_size": 5},
        {"layout": "packed"},
    ],
    ids=str,
)
def test_steps_equal_the_hand_written_loop(model_dir, reference, layout, tmp_path):
    losses, norms, trained = reference
    with open_backend(model_dir) as backend:
        results = run(backend, **layout)
        weights = exported(backend, tmp_path)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-5)
    for name, weight in trained.named_parameters():
        assert (weights[name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.parametrize(
    "settings", [{"activation_checkpointing": True}, {"reshard_after_forward": False}, {"share_rows": False}], ids=str
)
def test_settings_that_must_not_change_the_numbers(model_dir, reference, settings):
    with open_backend(model_dir, **settings) as backend:
        assert [r.loss for r in run(backend)] == pytest.approx(reference[0], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_gathered_by_themselves_change_no_number(model_dir, reference, dtype, monkeypatch, tmp_path):
    with open_backend(model_dir, dtype=dtype) as backend:
        together = [r.loss for r in run(backend)]
    monkeypatch.setattr(shard, "MIN_LAYER_PARAMETERS", 0)
    for number, settings in enumerate(({}, {"reshard_after_forward": False}, {"activation_checkpointing": True})):
        folder = tmp_path / str(number)
        with open_backend(model_dir, dtype=dtype, **settings) as backend:
            assert [r.loss for r in run(backend)] == pytest.approx(together, rel=1e-6)
            backend.save(folder).wait()
            ahead = run(backend, first=5)[3].loss
            backend.eval_loss(batch_of(STEPS[0]))
            backend.load(folder)
            assert run(backend, first=5)[3].loss == ahead


def test_every_layer_is_compiled_where_that_is_asked_for(model_dir, monkeypatch):
    """With what stands in for a compiler; tests/gpu has the real one."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **settings: compiled.append((layer, settings)))
    with open_backend(model_dir) as backend:
        assert compiled == []
    with open_backend(model_dir, compile_layers=True) as backend:
        assert compiled == [(layer, {"dynamic": True}) for layer in backend._model.model.model.layers]


@pytest.mark.parametrize("family", ["gemma2", "phi", "qwen3-moe"])
def test_families_equal_the_hand_written_loop(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    losses, norms, _ = reference_run(tmp_path, STEPS, lr=1e-3)
    with open_backend(tmp_path, learning_rate=1e-3) as backend:
        results = run(backend)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-5)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-4)


def test_losses_are_told_apart_by_source(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with open_backend(model_dir) as backend:
        result = backend.train_step(batch_of(STEPS[0]))
    for source in range(2):
        own = STEPS[0][source::2]
        assert result.loss_sums[source] == pytest.approx(summed_loss(model, own).item(), rel=1e-5)
        assert result.num_targets[source] == sum(int(e.loss_mask[1:].sum()) for e in own)


def test_evaluation_sums_and_changes_nothing(model_dir, reference):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = summed_loss(model, STEPS[3]).item()
    with open_backend(model_dir) as backend:
        for layout in ("shared", "padded", "packed"):
            loss, targets = backend.eval_loss(batch_of(STEPS[3], layout=layout))
            assert loss == pytest.approx(expected, rel=1e-6)
            assert targets == sum(int(e.loss_mask[1:].sum()) for e in STEPS[3])
        assert [r.loss for r in run(backend)] == pytest.approx(reference[0], rel=1e-6)


def test_a_rank_without_examples_takes_part(model_dir):
    with open_backend(model_dir) as backend:
        full, filler = batch_of(STEPS[0]), batch_of(STEPS[0][:1], ranks=2, rank=1)
        both = backend.train_step(full)
        empty = backend.train_step(filler)
    assert both.loss > 0
    assert (empty.loss_sums, empty.num_targets, empty.grad_norm) == ((0.0, 0.0), (0, 0), 0.0)


@pytest.mark.parametrize("settings", [{}, {"weights_only": True}], ids=str)
def test_resume_is_bit_equal(model_dir, tmp_path, settings):
    with open_backend(model_dir, schedule=Schedule.LINEAR) as backend:
        run(backend)
        pending = backend.save(tmp_path / "a")
        ahead = run(backend, first=5)
        pending.wait()
        assert pending.done
    with open_backend(model_dir, schedule=Schedule.LINEAR) as backend:
        backend.eval_loss(batch_of(STEPS[0]))
        backend.load(tmp_path / "a", **settings)
        again = run(backend, first=5)
        assert ahead[0].loss == again[0].loss
        assert ([r.loss for r in ahead] == [r.loss for r in again]) is (not settings)
        assert [r.learning_rate for r in ahead] == [r.learning_rate for r in again]


def test_a_save_before_the_first_step_resumes_as_a_fresh_start(model_dir, tmp_path):
    with open_backend(model_dir) as backend:
        backend.save(tmp_path).wait()
        fresh = [r.loss for r in run(backend)]
        backend.load(tmp_path)
        assert [r.loss for r in run(backend)] == fresh


def test_a_save_holds_only_tensors_by_parameter_name(model_dir, tmp_path):
    with open_backend(model_dir) as backend:
        run(backend)
        backend.save(tmp_path).wait()
    names = set(TensorReader(tmp_path).read_metadata().state_dict_metadata)
    assert {n.split(".", 1)[0] for n in names} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    assert "exp_avg.model.layers.0.self_attn.q_proj.weight" in names
    assert sorted(f.name for f in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]


class Evil:
    def __reduce__(self):
        return print, ("this must never run",)


def test_a_planted_pickle_is_refused(model_dir, tmp_path, capsys):
    with open_backend(model_dir) as backend:
        backend.save(tmp_path).wait()
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError, match=r"names builtins.print"):
            backend.load(tmp_path)
    assert "must never run" not in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    save_model(tmp_path / "other", vocabulary=128)
    with open_backend(tmp_path / "other") as backend:
        backend.save(tmp_path / "saved").wait()
    with open_backend(model_dir) as backend:
        with pytest.raises(CheckpointError, match="does not fit this model"):
            backend.load(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=r"no \.metadata"):
            backend.load(tmp_path / "nothing")


def test_a_checkpoint_that_holds_more_than_the_model_is_refused(model_dir, tmp_path):
    """Untied weights in a tied model: the head would be lost, and nothing would say so."""
    with open_backend(save_model(tmp_path / "untied", vocabulary=96, tied=False)) as backend:
        backend.save(tmp_path / "saved").wait()
    with open_backend(model_dir) as backend:
        with pytest.raises(CheckpointError, match=r"holds exp_avg\.lm_head\.weight and 3 more"):
            backend.load(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=r"holds weights\.lm_head\.weight and 0 more"):
            backend.load(tmp_path / "saved", weights_only=True)


def test_a_save_that_fails_says_so_when_waited_for(model_dir, tmp_path):
    with open_backend(model_dir) as backend:
        (tmp_path / "__0_0.distcp").mkdir()
        pending = backend.save(tmp_path)
        with pytest.raises(CheckpointError, match="could not be written"):
            pending.wait()


def test_a_step_that_is_not_finite_changes_nothing(model_dir):
    with open_backend(model_dir) as backend:
        run(backend)
        state = {
            kind: {n: t.clone() for n, t in named.items()}
            for kind, named in backend._tensors(with_moments=True).items()
        }
        weight = backend._parameters["model.norm.weight"]
        with torch.no_grad():
            good = weight.detach().clone()
            weight.mul_(float("nan"))
        result = backend.train_step(batch_of(STEPS[0], step=5))
        with torch.no_grad():
            weight.copy_(good)
        assert result.skipped
        assert not np.isfinite(result.loss)
        for kind, named in backend._tensors(with_moments=True).items():
            for name, tensor in named.items():
                assert torch.equal(_plain(tensor), _plain(state[kind][name])), (kind, name)
        assert not backend.train_step(batch_of(STEPS[0], step=6)).skipped


def _plain(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_the_rate_is_that_of_the_batch(model_dir):
    with open_backend(
        model_dir, schedule=Schedule.LINEAR, num_warmup_steps=4, num_steps=12, learning_rate=1.0
    ) as backend:
        found = [backend.train_step(batch_of(STEPS[0], step=step)).learning_rate for step in (1, 4, 12)]
    assert found == [0.25, 1.0, 0.125]


def test_dropout_depends_on_seed_and_step_alone(tmp_path):
    tiny("qwen3", attention_dropout=0.5).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    def losses(seed):
        with open_backend(tmp_path, learning_rate=0.0, seed=seed) as backend:
            return [backend.train_step(batch_of(STEPS[0], step=step)).loss for step in (1, 2, 1)]

    first, second, again = losses(7)
    assert first == again
    assert first != second
    assert losses(7)[0] == first
    assert losses(8)[0] != first


def test_generation_is_the_greedy_continuation(tmp_path):
    model = tiny("qwen3")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model.set_attn_implementation("eager")
    prompts = [[5, 6, 7], [40, 41]]
    wholes = [
        model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
        )[0].tolist()
        for p in prompts
    ]
    with open_backend(tmp_path) as backend:
        answers = backend.generate(prompts, max_new_tokens=8)
    for prompt, whole, answer in zip(prompts, wholes, answers, strict=True):
        expected = whole[len(prompt) :]
        assert answer == (expected[:-1] if expected[-1] == 2 else expected)


def test_bfloat16_computes_low_and_keeps_float32_masters(model_dir, reference, tmp_path):
    with open_backend(model_dir, dtype="bfloat16") as backend:
        results = run(backend)
        assert {p.dtype for p in backend._parameters.values()} == {torch.float32}
        backend.export(tmp_path)
    assert [r.loss for r in results] == pytest.approx(reference[0], rel=2e-2)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_model_that_cannot_share_rows_trains_alone(tmp_path):
    from transformers import Qwen3NextConfig

    from tests.models.families import SHAPE, build

    config = Qwen3NextConfig(
        **SHAPE,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    build(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(BurnishError, match="cannot share a row: its linear_attention layers"), open_backend(tmp_path):
        pass
    losses, _, _ = reference_run(tmp_path, STEPS[:1], lr=1e-3)
    with open_backend(tmp_path, share_rows=False) as backend:
        assert backend.train_step(batch_of(STEPS[0], layout="padded")).loss == pytest.approx(losses[0], rel=1e-5)


def test_a_failed_start_leaves_no_group_behind(tmp_path):
    save_model(tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer_config\.name"), open_backend(tmp_path, optimizer="sgd"):
        pass
    assert not dist.is_initialized()
