"""``images=lazy``: the losses of a run are those of one that stores pixels."""

import base64
import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tests.runs.commands import burnish, metrics
from tests.toys import write_jsonl
from tests.vision_models import save_vision_model

STEPS = ["num_steps=3", "batch_size=4", "micro_train_batch_size_per_gpu=2", "num_workers=0"]


def picture(seed):
    stream = io.BytesIO()
    size = (8 + 4 * (seed % 5), 16, 3)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, np.uint8)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def rows():
    for seed in range(12):
        images = [{"type": "image", "image": picture(seed + n)} for n in range(seed % 3)]
        yield {
            "messages": [
                {"role": "user", "content": [*images, {"type": "text", "text": f"what is {seed}"}]},
                {"role": "assistant", "content": f"number {seed}"},
            ]
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def losses(folder, *words):
    result = burnish("train", *STEPS, *words, folder=folder)
    assert result.returncode == 0, result.stderr
    return [line["train/loss"] for _, line in sorted(metrics(folder).items())]


def test_losses_are_those_of_pixels(tmp_path, model):
    data = write_jsonl(tmp_path / "rows.jsonl", list(rows()))
    source, found = [f"model.path={model}", f"train_datasets=[{data}]"], {}
    for images in ("pixels", "lazy"):
        (tmp_path / images).mkdir()
        found[images] = losses(tmp_path / images, *source, f"images={images}", "dataloader_num_workers=2")
    assert len(found["lazy"]) == 3
    assert found["lazy"] == found["pixels"]
    store = tmp_path / "store"
    result = burnish("tokenize", *source, "images=lazy", "num_workers=0", f"out={store}", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    columns = pa.ipc.open_file(str(next(store.glob("*.arrow")))).schema.names
    assert columns == ["input_ids", "loss_mask", "raw_row", "images", "image_grid_thw"]
    assert losses(tmp_path, source[0], f"pretokenized_dataset_paths=[{store}]") == found["pixels"]
