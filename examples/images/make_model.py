"""Nothing -> model/: a Qwen2.5-VL of about half a million random weights, with a tokenizer of letters and an image processor.

The same bytes at every call; nothing is downloaded.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH = {"patch_size": 4, "temporal_patch_size": 2}
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(folder: Path) -> None:
    """One letter is one token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {text: number for number, text in enumerate([*SPECIALS, *VISION, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*SPECIALS, *VISION])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Write ``folder`` so that transformers loads it like any model, and return it."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_tokenizer(folder)
    Qwen2VLImageProcessorPil(**PATCH, merge_size=2, min_pixels=32 * 32, max_pixels=64 * 64).save_pretrained(folder)
    text = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 96,
        "spatial_merge_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.12,
        **PATCH,
    }
    begin, end, image, video = range(len(SPECIALS), len(SPECIALS) + len(VISION))
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_model(FOLDER / "model"))
