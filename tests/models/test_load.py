import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, MambaConfig

from burnish.errors import ConfigError
from burnish.models.load import bring_model, export_folder, read_card, read_tokenizer
from tests.models.families import FAMILIES, load_model
from tests.toys import T3, save_model, save_tokenizer


def bring(folder):
    return bring_model(str(folder), weights=True, cache_dir=None, force_recache=False, disable_cache=False)


def test_card_of_a_folder(model_dir):
    card = read_card(str(model_dir))
    assert (card.model_type, card.num_embeddings, card.num_layers, card.pad_id) == ("qwen3", 128, 2, 2)
    assert (card.num_heads, card.num_kv_heads, card.hidden_size, card.head_dim) == (4, 2, 32, 8)
    assert (card.max_position_embeddings, card.tied, card.windows) == (512, True, (None, None))
    # Two layers of q, k, v, o (32 x (32 + 16 + 16 + 32)) and gate, up, down (3 x 32 x 64).
    assert card.num_matmul_parameters == 2 * (32 * 96 + 3 * 32 * 64)
    assert card.num_parameters == sum(p.numel() for p in load_model(model_dir).parameters())


def test_card_of_experts_and_windows(tmp_path):
    from burnish.models.load import _matmul_parameters, _windows

    config = FAMILIES["qwen3-moe"]()
    shell = AutoModelForCausalLM.from_config(config)
    # q, o 32 x 32; k, v 32 x 16; router 32 x 4; two of four experts with gate, up, down 32 x 16.
    assert _matmul_parameters(shell, config.to_dict()) == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 16)
    assert _windows(FAMILIES["gemma2"]().to_dict(), num_layers=2) == (4, None)
    assert _windows(FAMILIES["mistral"]().to_dict(), num_layers=2) == (4, 4)
    assert _windows(FAMILIES["qwen3"]().to_dict(), num_layers=2) == (None, None)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "nothing", "nobody/no-such-model"])
@pytest.mark.parametrize("read", [read_card, load_model])
def test_a_missing_model_is_named(path, read):
    with pytest.raises(ConfigError, match=r"no such folder and not a hub id that can be reached") as error:
        read(path)
    assert error.value.problems[0].key == "model.path"
    assert error.value.problems[0].value == path


def test_pickled_weights_are_refused(model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match="no weights"):
        bring(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model.bin\)"):
        bring(tmp_path)
    with pytest.raises(ConfigError, match="its weights cannot be read"):
        load_model(tmp_path)


def test_a_model_without_tokenizer_gets_no_made_up_one(model_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_card(str(tmp_path))


def test_a_folder_without_config_is_named(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        bring(tmp_path)


def test_sampling_settings_without_sampling_are_mended_at_the_start(tmp_path, caplog):
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9, "eos_token_id": 2}')
    with caplog.at_level(logging.WARNING):
        generation = load_model(tmp_path).generation_config
    assert "temperature" in caplog.text
    assert (generation.temperature, generation.do_sample, generation.eos_token_id) == (None, False, 2)


def test_a_generation_config_that_cannot_be_mended_is_refused_at_the_start(tmp_path):
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"num_return_sequences": 3}')
    with pytest.raises(ConfigError, match=r"num_return_sequences"):
        load_model(tmp_path)


def test_export_writes_dtype_and_template(model_dir, tmp_path):
    model = load_model(model_dir)
    tokenizer = read_tokenizer(str(model_dir), chat_template=T3)
    weights = dict(model.named_parameters())
    export_folder(tmp_path, model=model, weights=weights, dtype=torch.bfloat16, tokenizer=tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == T3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "burnish" not in json.dumps(config)


def test_a_model_without_attention_is_refused(tmp_path):
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(save_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match="mamba has no attention"):
        read_card(str(tmp_path))


def test_a_card_of_other_names_for_the_same_things(tmp_path):
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(save_tokenizer(tmp_path))
    card = read_card(str(tmp_path))
    assert (card.num_layers, card.num_heads, card.hidden_size, card.head_dim) == (2, 4, 32, 8)
    assert card.max_position_embeddings == 64
