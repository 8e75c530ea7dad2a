"""Weights that are read are those of ``from_pretrained``, by however many ranks each holds its rows."""

from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, HrmTextConfig

from burnish.backends.comm import joined
from burnish.backends.fsdp.shard import build_mesh
from burnish.errors import ConfigError
from burnish.models import weights
from burnish.models.attention import register
from burnish.models.load import blank_model
from burnish.models.weights import read_weights
from tests.models.families import FAMILIES, SHAPE, build, load_model, tiny
from tests.ranks import on_ranks

CPU = torch.device("cpu")
MODELS = {
    **{family: (lambda family=family: tiny(family)) for family in FAMILIES},
    "experts for two of three ranks": lambda: tiny("qwen3-moe", num_experts=2, num_local_experts=2),
    "tied": lambda: tiny("qwen3", tie_word_embeddings=True),
    # One stored matrix holds the rows of several parameters.
    "rows of several": lambda: build(HrmTextConfig(**SHAPE, head_dim=8)),
}


def same_as_transformers(model, folder):
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=register())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for kind in ("named_parameters", "named_buffers"):
        read = dict(getattr(model, kind)())
        for name, tensor in getattr(expected, kind)():
            own = read[name].full_tensor() if isinstance(read[name], DTensor) else read[name]
            assert torch.equal(own, tensor), name
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    return True


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_spread(name, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    assert same_as_transformers(load_model(tmp_path), tmp_path)


def spread(folders, fsdp_size):
    """Reads each on these ranks, and says how many bytes of each parameter a rank holds beyond its rows."""
    surplus = []
    with joined() as ranks:
        for folder in folders:
            model = blank_model(str(folder))
            trained = [parameter.requires_grad for parameter in model.parameters()]
            fully_shard(model, mesh=build_mesh(ranks, fsdp_size=fsdp_size))
            read_weights(model, str(folder), device=CPU, blank=lambda: blank_model(str(folder)))  # noqa: B023
            assert same_as_transformers(model, folder)
            assert [parameter.requires_grad for parameter in model.parameters()] == trained
            for parameter in model.parameters():
                own = parameter.to_local()
                surplus.append(own.untyped_storage().nbytes() - own.numel() * own.element_size())
    return surplus


@pytest.mark.parametrize(("ranks", "fsdp_size"), [(2, None), (3, None), (4, 2), (2, 1)])
def test_a_model_that_is_spread(ranks, fsdp_size, tmp_path):
    folders = [tmp_path / name for name in MODELS]
    for folder, make in zip(folders, MODELS.values(), strict=True):
        make().save_pretrained(folder)
    for surplus in on_ranks(ranks, spread, folders, fsdp_size):
        assert not any(surplus)


def taken_by_rows(folder):
    with patch.object(weights, "_rows_come_from_rows", lambda *_: True):
        return spread([folder], None)


def test_rows_of_several_are_not_taken_for_rows_of_one(tmp_path):
    """What is spared is needed: read as other models are, this one would be another, and no shape would say so."""
    MODELS["rows of several"]().save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match=r"proj\.weight"):
        on_ranks(2, taken_by_rows, tmp_path)


def test_files_may_change_once_they_are_read(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_several_files_in_the_dtype_they_are_stored_in(tmp_path):
    tiny("qwen3-moe").bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same_as_transformers(load_model(tmp_path), tmp_path)


def change(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"its weights lack model\.norm\.weight"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), r"its weights lack model\.embed_tokens\.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            r"its weights model\.norm\.weight are not those of its config\.json",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 32)}),
            r"ties .*lm_head\.weight.*, but both are stored and differ",
        ),
    ],
    ids=["absent", "tied and absent", "of another shape", "tied and different"],
)
def test_weights_of_another_model_are_refused(edit, message, tmp_path):
    tiny("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_head_that_is_stored_beside_the_embedding_it_equals_is_tied(tmp_path):
    tiny("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same_as_transformers(model, tmp_path)


def test_a_head_may_stand_for_the_embedding(tmp_path):
    tiny("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert same_as_transformers(load_model(tmp_path), tmp_path)


def test_damaged_files_are_named(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"its weights cannot be read: .*header"):
        load_model(tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    model = tiny("qwen3")
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its weights are quantized"):
        load_model(tmp_path)
