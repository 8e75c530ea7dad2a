"""B63: an export loads in stock transformers with the logits of the trained model, tied or not."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from burnish.models.attention import Segments
from tests.backends.steps import batch_of, draw, opened
from tests.toys import save_model

IDS = torch.arange(3, 23)[None]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_after_reload_equal_the_trained_model(tied, tmp_path):
    base = save_model(tmp_path / "base", tied=tied)
    with opened(base, num_steps=2, num_sources=2, learning_rate=1e-2) as backend:
        for step in (1, 2):
            backend.train_step(batch_of(draw(step), step=step))
        with torch.no_grad():
            segments = Segments.whole(1, length=IDS.shape[1])
            backend._model.eval()
            trained = backend._model.native_logits(
                IDS, position_ids=torch.from_numpy(segments.positions()), segments=segments
            )
        backend.export(tmp_path / "export")

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(model(input_ids=IDS).logits, trained, rtol=1e-5, atol=1e-5)
    original = AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits
    assert (trained - original).abs().max() > 1e-3

    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "model.embed_tokens.weight" in names
        assert ("lm_head.weight" in names) is not tied
        if not tied:
            embedding, head = (file.get_tensor(n) for n in ("model.embed_tokens.weight", "lm_head.weight"))
            assert not torch.equal(embedding, head)
