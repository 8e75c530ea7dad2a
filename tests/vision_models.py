"""Small vision-language models with random weights, rows with images for them, and the loop they are compared with."""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from burnish.data.example import Example, Images
from tests.toys import save_tokenizer

BEGIN, END, IMAGE, VIDEO = 103, 104, 105, 106
"""What stands before and after the placeholders of an image, these, and those of videos."""
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE = 4, 2
WIDE = 0.2
"""Range of the random weights: ten times the usual one, so that attention is uneven and positions matter."""
FEATURES = 3 * 2 * PATCH**2
TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": WIDE,
}
TOWER = {
    "initializer_range": WIDE,
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
GRIDS = {"one": [(1, 4, 6)], "text": [], "two": [(1, 2, 2), (1, 4, 4)], "wide": [(1, 2, 10)]}
"""Images of the rows of :func:`vision_rows`, in patches along time, height and width."""


def config_of(family, *, tied=False, layers=3):
    from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig

    text = TEXT | {"rope_parameters": ROPE, "tie_word_embeddings": tied, "num_hidden_layers": layers}
    if family == "qwen2_vl":
        tower = TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **TOKENS)
    tower = TOWER | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
    if family == "qwen2_5_vl":
        tower |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **TOKENS)
    text |= {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}}
    tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **TOKENS)


def save_vision_model(folder: Path, family: str, *, tied: bool = False, layers: int = 3, seed: int = 0) -> Path:
    """A model of ``family`` and a tokenizer in ``folder``."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config_of(family, tied=tied, layers=layers), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # as of a trained model: not 0, nor 1
                parameter.add_(torch.randn_like(parameter), alpha=WIDE)
    model.save_pretrained(folder)
    save_tokenizer(folder, template=TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [BEGIN, END, IMAGE, VIDEO]
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=1024).save_pretrained(folder)
    return folder


def vision_example(grids, *, num_text, seed):
    """Text, and between it images of these grids; a third of the text tokens are targets, and the last."""
    random = np.random.default_rng(seed)
    ids, mask = [], []
    for grid in [*grids, None]:
        words = random.integers(3, 103, num_text).tolist()
        ids += words
        mask += (random.integers(0, 3, num_text) == 0).tolist()
        if grid:
            placeholders = int(np.prod(grid)) // MERGE**2
            ids += [BEGIN, *[IMAGE] * placeholders, END]
            mask += [False] * (placeholders + 2)
    mask[-1] = True
    pixels = [random.normal(size=(int(np.prod(grid)), FEATURES)).astype(np.float32) for grid in grids]
    images = Images(np.concatenate(pixels), np.array(grids)) if grids else None
    return Example(np.array(ids, np.int32), np.array(mask, np.uint8), images)


def vision_rows(seed, kinds=("one", "text", "two", "text", "wide", "one")):
    """Examples of one step."""
    return [vision_example(GRIDS[kind], num_text=4 + n, seed=100 * seed + n) for n, kind in enumerate(kinds)]


def logits_alone(model, one):
    """[length, vocabulary] of an example by itself, as ``transformers`` computes it."""
    ids = torch.tensor(one.input_ids.astype(np.int64))[None]
    images = {}
    if one.images:
        images = {
            "pixel_values": torch.tensor(one.images.pixel_values),
            "image_grid_thw": torch.tensor(one.images.grid_thw),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    return model(input_ids=ids, use_cache=False, **images).logits[0].float()


def summed_loss(model, examples):
    """Cross-entropy of the targets, summed, one example at a time."""
    total = torch.zeros(())
    for one in examples:
        ids = torch.tensor(one.input_ids.astype(np.int64))
        labels = torch.where(torch.tensor(one.loss_mask[1:].astype(bool)), ids[1:], -100)
        logits = logits_alone(model, one)[:-1]
        total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total


def reference_run(folder, steps, *, lr, frozen=(), rates=None, max_grad_norm=1.0):
    """(losses, gradient norms, the trained model) of a hand-written loop over lists of examples."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    groups = []
    for name, parameter in model.named_parameters():
        part = "language"
        if name.startswith("model.visual."):
            part = "projector" if "merger" in name else "vision"
        parameter.requires_grad_(part not in frozen)
        rate = (rates or {}).get(part, lr)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": 0.01 if parameter.ndim > 1 else 0.0})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-6)
    losses, norms = [], []
    for examples in steps:
        loss = summed_loss(model, examples) / sum(int(e.loss_mask[1:].sum()) for e in examples)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model
