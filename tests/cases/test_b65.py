"""B65: an export tokenizes a chat as training did, and a base that could not be saved is found before the run."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from burnish.errors import ConfigError
from tests.backends.steps import opened
from tests.toys import T3, save_model

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<new>yo"}]


@pytest.fixture
def base(tmp_path):
    """A folder with greedy decoding and a temperature, an added token and its template in a file of its own."""
    folder = save_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.9, "eos_token_id": 2})
    )
    return folder


@pytest.mark.parametrize("template", [None, T3])
def test_an_export_tokenizes_as_training_did(base, template, tmp_path):
    trained_with = AutoTokenizer.from_pretrained(base)
    trained_with.chat_template = template or trained_with.chat_template
    expected = trained_with.apply_chat_template(CHAT, return_dict=False)
    with opened(base, num_steps=1, chat_template=template) as backend:
        backend.export(tmp_path / "export")

    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported.apply_chat_template(CHAT, return_dict=False) == expected
    assert exported.convert_tokens_to_ids("<new>") == trained_with.convert_tokens_to_ids("<new>")
    generation = GenerationConfig.from_pretrained(tmp_path / "export")
    assert generation.eos_token_id == 2
    generation.validate(strict=True)


def test_a_base_that_cannot_be_saved_is_found_at_the_start(base):
    (base / "generation_config.json").write_text(json.dumps({"num_return_sequences": 3}))
    with pytest.raises(ConfigError, match="num_return_sequences"), opened(base, num_steps=1):
        pass
