import json
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config

from burnish.backends.fsdp import shard
from burnish.backends.fsdp.lora import LoraSettings
from burnish.backends.fsdp.tensor_files import TensorReader
from burnish.errors import CheckpointError, ConfigError
from tests.backends.steps import batch_of, draw, opened, reference_run, summed_loss
from tests.models.families import build, tiny
from tests.ranks import on_ranks
from tests.toys import save_model, save_tokenizer

STEPS = [draw(seed) for seed in range(3)]
LORA = LoraSettings(rank=4, alpha=8)
SETTINGS = {"num_steps": 10, "num_sources": 2, "learning_rate": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "lora": LORA}


def run(backend, *, first=1, ranks=1, rank=0, **layout):
    steps = [batch_of(rows, step=first + i, ranks=ranks, rank=rank, **layout) for i, rows in enumerate(STEPS)]
    return [backend.train_step(step) for step in steps]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def with_adapter(model_dir, folder, **settings):
    """The base in ``model_dir`` with the adapter in ``folder``, by peft itself."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in an older way
        return PeftModel.from_pretrained(base, folder, **settings)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 45)[None]).logits


def distance(a, b):
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=96)


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """(results, the folder of an export before the first step, that of one after the last)."""
    folder = tmp_path_factory.mktemp("exports")
    with opened(model_dir, **SETTINGS) as backend:
        backend.export(folder / "before")
        results = run(backend)
        backend.export(folder / "after")
    return results, folder / "before", folder / "after"


def test_steps_equal_those_of_peft_in_a_hand_written_loop(model_dir, trained):
    results, before, after = trained
    model = with_adapter(model_dir, before / "adapter", is_trainable=True)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for rows, result in zip(STEPS, results, strict=True):
        loss = summed_loss(model, rows) / sum(int(e.loss_mask[1:].sum()) for e in rows)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(torch.nn.utils.clip_grad_norm_(own, 1.0).item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    found = load_file(after / "adapter" / "adapter_model.safetensors")
    expected = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert distance(found[name], tensor) <= 1e-4, name


def test_the_adapter_and_what_is_merged_give_equal_logits(model_dir, trained):
    _, before, after = trained
    base = logits_of(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    for folder, least in ((before, 0.0), (after, 1e-2)):
        adapted = logits_of(with_adapter(model_dir, folder / "adapter"))
        assert distance(adapted, base) >= least
        assert distance(logits_of(AutoModelForCausalLM.from_pretrained(folder)), adapted) < 1e-6
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(before)), base), "B begins at zero"


def test_the_export_is_that_of_the_plain_model(model_dir, trained):
    _, before, after = trained
    assert load_file(after / "model.safetensors").keys() == load_file(model_dir / "model.safetensors").keys()
    config = json.loads((after / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_dir)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, kinds)
    assert json.loads((after / "config.json").read_text()) == json.loads((before / "config.json").read_text())


@pytest.mark.parametrize("layout", [{"layout": "padded", "micro_batch_size": 5}, {"layout": "packed"}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["together", "layers alone"])
def test_no_layout_changes_the_numbers(model_dir, trained, layout, settings, alone, monkeypatch):
    if alone:
        monkeypatch.setattr(shard, "MIN_LAYER_PARAMETERS", 0)
    with opened(model_dir, **SETTINGS, **settings) as backend:
        found = run(backend, **layout)
    assert [r.loss for r in found] == pytest.approx([r.loss for r in trained[0]], rel=1e-6)
    assert [r.grad_norm for r in found] == pytest.approx([r.grad_norm for r in trained[0]], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_is_frozen_to_the_bit_in_the_dtype_of_the_computation(model_dir, dtype, tmp_path):
    with opened(model_dir, **SETTINGS, dtype=dtype) as backend:
        frozen = {name: whole(p) for name, p in backend._parameters.items() if not p.requires_grad}
        run(backend)
        assert {str(tensor.dtype) for tensor in frozen.values()} == {f"torch.{dtype}"}
        for name, parameter in backend._parameters.items():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32, name
                assert whole(parameter).abs().sum() > 0, name
            else:
                assert torch.equal(whole(parameter), frozen[name]), name
        backend.export(tmp_path)
    merged, adapter = AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "adapter"
    assert {str(p.dtype) for p in merged.parameters()} == {f"torch.{dtype}"}
    assert {t.dtype for t in load_file(adapter / "adapter_model.safetensors").values()} == {torch.float32}
    layer = "model.layers.1.mlp.up_proj"
    a, b = (load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{layer}.lora_{p}.weight"] for p in "AB")
    exact = (frozen[f"{layer}.base_layer.weight"].float() + 2 * (b @ a)).to(getattr(torch, dtype))
    assert torch.equal(merged.get_parameter(f"{layer}.weight"), exact)


def test_bfloat16_is_near_float32(model_dir, trained):
    with opened(model_dir, **SETTINGS, dtype="bfloat16") as backend:
        assert [r.loss for r in run(backend)] == pytest.approx([r.loss for r in trained[0]], rel=2e-2)


def test_a_checkpoint_holds_adapters_alone_and_resumes_to_the_bit(model_dir, tmp_path):
    with opened(model_dir, **SETTINGS) as backend:
        run(backend)
        backend.save(tmp_path / "saved").wait()
        own = sum(p.numel() for p in backend._parameters.values() if p.requires_grad)
        expected = [r.loss for r in run(backend, first=4)]
    names = set(TensorReader(tmp_path / "saved").read_metadata().state_dict_metadata)
    assert all(".lora_" in name for name in names)
    assert {name.split(".", 1)[0] for name in names} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    # Three tensors of four bytes an element; what surrounds each of them takes a kilobyte or two.
    size = (tmp_path / "saved" / "__0_0.distcp").stat().st_size
    assert 12 * own <= size <= 12 * own + 3000 * len(names)
    with opened(model_dir, **SETTINGS, seed=7) as backend:
        backend.load(tmp_path / "saved")
        assert [r.loss for r in run(backend, first=4)] == expected


def test_a_checkpoint_of_other_adapters_is_refused(model_dir, tmp_path):
    with opened(model_dir, **SETTINGS) as backend:
        backend.save(tmp_path / "lora").wait()
    with opened(model_dir, **{**SETTINGS, "lora": None}) as backend:
        backend.save(tmp_path / "full").wait()
        with pytest.raises(CheckpointError, match=r"lora_A.*that this model has not\n.*the same model.lora"):
            backend.load(tmp_path / "lora")
    with opened(model_dir, **SETTINGS) as backend, pytest.raises(CheckpointError, match="that this model has not"):
        backend.load(tmp_path / "full", weights_only=True)
    others = {
        "does not fit this model": LoraSettings(rank=2, alpha=8),
        "that this model has not": LoraSettings(rank=4, alpha=8, target_modules=("q_proj",)),
    }
    for message, lora in others.items():
        with (
            opened(model_dir, **{**SETTINGS, "lora": lora}) as backend,
            pytest.raises(CheckpointError, match=message),
        ):
            backend.load(tmp_path / "lora")


def _on_a_rank(model_dir, folder, dtype):
    """Three steps, a save, an export; then what follows after a load of what one rank has saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "MIN_LAYER_PARAMETERS", 0)
        with opened(model_dir, **SETTINGS, dtype=dtype) as backend:
            place = {"ranks": backend.layout.data_size, "rank": backend.layout.data_rank}
            first = run(backend, **place)
            backend.save(folder / "of two").wait()
            backend.export(folder / "export of two")
            backend.load(folder / "of one")
            later = run(backend, first=4, **place)
    return [[(r.loss, r.grad_norm) for r in results] for results in (first, later)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_one(model_dir, tmp_path, dtype):
    exact = dtype == "float32"
    with opened(model_dir, **SETTINGS, dtype=dtype) as backend:
        first = run(backend)
        backend.save(tmp_path / "of one").wait()
        backend.export(tmp_path / "export of one")
        later = run(backend, first=4)
        found = on_ranks(2, _on_a_rank, model_dir, tmp_path, dtype)
        assert found[0] == found[1]
        for got, expected in zip(found[0], (first, later), strict=True):
            losses, norms = zip(*got, strict=True)
            assert losses == pytest.approx([r.loss for r in expected], rel=1e-6 if exact else 1e-2)
            assert norms == pytest.approx([r.grad_norm for r in expected], rel=1e-5 if exact else 2e-2)
        backend.load(tmp_path / "of two")
        again = run(backend, first=4)
    assert [r.loss for r in again] == pytest.approx([r.loss for r in later], rel=1e-6 if exact else 1e-2)
    one, two = (load_file(tmp_path / f"export of {n}" / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(distance(two[name].float(), tensor.float()) < (1e-5 if exact else 1e-2) for name, tensor in one.items())


def test_adapters_begin_with_the_seed_alone(model_dir, tmp_path):
    def begun(folder, **settings):
        with opened(model_dir, **{**SETTINGS, **settings}) as backend:
            backend.export(folder)
        return load_file(folder / "adapter" / "adapter_model.safetensors")

    first, again, other = begun(tmp_path / "a"), begun(tmp_path / "b"), begun(tmp_path / "c", seed=43)
    inward = [name for name in first if "lora_A" in name]
    for name in inward:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        bound = first[name].shape[1] ** -0.5  # uniform, as nn.Linear
        assert 0.8 * bound < first[name].abs().max() <= bound
    assert len({float(first[name][0, 0]) for name in inward}) == len(inward)
    assert all(bool((first[name] == 0).all()) for name in first.keys() - set(inward))


def test_dropout_is_of_the_seed_and_the_step_and_of_training_alone(model_dir):
    lora = LoraSettings(rank=4, dropout=0.5)

    def losses(**settings):
        with opened(model_dir, **{**SETTINGS, "lora": lora, **settings}) as backend:
            run(backend)
            assert backend.eval_loss(batch_of(STEPS[0])) == backend.eval_loss(batch_of(STEPS[0]))
            return [backend.train_step(batch_of(STEPS[0], step=step)).loss for step in (1, 1, 2)]

    frozen = {"learning_rate": 0.0}
    first, second, third = losses()
    assert losses() == [first, second, third]
    assert first != pytest.approx(third, rel=1e-6)
    # Without an update nothing but the mask could differ, and with B = 0 the mask does not matter.
    assert len(set(losses(**frozen))) == 1


@pytest.mark.parametrize("family", ["gemma2", "phi", "qwen3-moe"])
def test_families_equal_a_full_run_of_what_they_adapt(family, tmp_path):
    """Trained, merged and read by transformers they have the loss that the backend says."""
    tiny(family).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    first, _, _ = reference_run(tmp_path / "base", STEPS[:1], lr=0.0)
    with opened(tmp_path / "base", **SETTINGS) as backend:
        assert run(backend)[0].loss == pytest.approx(first[0], rel=1e-5)
        said, _ = backend.eval_loss(batch_of(STEPS[0]))
        backend.export(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    assert said == pytest.approx(summed_loss(model, STEPS[0]).item(), rel=1e-5)
    adapted = with_adapter(tmp_path / "base", tmp_path / "export" / "adapter")
    assert distance(logits_of(adapted), logits_of(model)) < 1e-5


def test_layers_that_hold_their_weights_the_other_way_round(tmp_path):
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    build(config).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    with opened(tmp_path / "base", **SETTINGS) as backend:
        run(backend)
        backend.export(tmp_path / "export")
    adapted = with_adapter(tmp_path / "base", tmp_path / "export" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    assert distance(logits_of(adapted), logits_of(merged)) < 1e-5


def test_some_layers_alone(model_dir, tmp_path):
    lora = LoraSettings(rank=2, target_modules=("layers.1.self_attn.q_proj", "mlp.up_proj"))
    with opened(model_dir, **{**SETTINGS, "lora": lora}) as backend:
        run(backend)
        backend.export(tmp_path)
    layers = {
        name.partition(".lora_")[0].removeprefix("base_model.model.model.layers.")
        for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    }
    assert layers == {"1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj"}
    adapted = logits_of(with_adapter(model_dir, tmp_path / "adapter"))
    assert distance(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), adapted) < 1e-6


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"target_modules": ("query",)},
            r"target_modules='query': fits no linear layer but the head\n.*q_proj, up_proj",
        ),
        ({"target_modules": ("lm_head",)}, "target_modules='lm_head': fits no linear layer but the head"),
        ({"target_modules": ("embed_tokens",)}, "target_modules='embed_tokens': fits no linear layer"),
        ({"exclude_modules": ("lm_head",)}, "exclude_modules='lm_head': fits no linear layer"),
        ({"target_modules": ("q_proj",), "exclude_modules": ("q_proj",)}, "leaves no layer"),
    ],
)
def test_names_that_fit_nothing_are_said_with_what_there_is(model_dir, names, message):
    with (
        pytest.raises(ConfigError, match=message),
        opened(model_dir, **{**SETTINGS, "lora": LoraSettings(rank=4, **names)}),
    ):
        pass


def test_without_peft_the_extra_is_named(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with (
        pytest.raises(ConfigError, match=r"lora.rank=4: needs peft.*\n.*burnish\[lora\]"),
        opened(model_dir, **SETTINGS),
    ):
        pass


def test_layers_that_peft_takes_for_experts_are_refused(tmp_path):
    """A dense layer among those of experts: peft reads its names as those that experts once had."""
    tiny("qwen3-moe", mlp_only_layers=[0]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    message = r"adapts something else for model.layers.0.mlp.down_proj and \d+ more"
    with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match=message), opened(tmp_path, **SETTINGS):
        pass
    attention = LoraSettings(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    with opened(tmp_path, **{**SETTINGS, "lora": attention}) as backend:
        assert all(result.loss > 0 for result in run(backend))
