"""A folder or hub id becomes a model card, a model and a tokenizer; trained weights become such a folder again.

Its rule: what would fail in the export is found, or mended, when the model is read.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from burnish.errors import ConfigError, Problem
from burnish.log import get_logger
from burnish.models.attention import register
from burnish.models.balance import balancing_loss
from burnish.models.layers import linear_layers
from burnish.models.vision import FAMILIES, VisionCard, part_of
from burnish.storage.cache import Caching
from burnish.storage.files import is_remote, list_files
from burnish.storage.transfer import fetch

log = get_logger(__name__)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Generation settings that mean nothing unless ``do_sample`` is true."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
PICKLED = (".bin", ".pt", ".pth")
_NOWHERE = "no such folder and not a hub id that can be reached"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a run needs to know of a model before its weights are read."""

    path: str
    """Where it was read: a folder or a hub id."""
    model_type: str
    """As in its config, such as ``qwen3``."""
    num_embeddings: int
    """Rows of its embedding: every token id is below this."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    head_dim: int
    max_position_embeddings: int | None
    pad_id: int
    """Token written where no example is."""
    tied: bool
    """Whether the head is the embedding."""
    vision: VisionCard | None
    """Of the tower of a model that takes images."""
    num_parameters: int
    """All of them; a tied head counts once."""
    num_matmul_parameters: int
    """Those one token is multiplied with, embedding, head and tower not counted; of experts, the active share."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens one token sees; None is all before it."""
    linear_layers: tuple[str, ...]
    """Names of its linear layers but for the head and the tower."""
    has_balancing_loss: bool
    """Whether it is a mixture whose experts can be kept equally busy."""


def bring_model(path: str, *, weights: bool, **caching: Unpack[Caching]) -> str:
    """``path``, or the folder on this machine that holds what the bucket has there.

    Args:
        path: a folder, a hub id, or the s3:// or gs:// URI of a folder.
        weights: whether they are needed, and not only config and tokenizer.
        caching: where files of a bucket are kept.

    Raises:
        ConfigError: there is no such folder, or it has no config or only pickled weights.
        StorageError: the bucket cannot be read.
    """
    folder = path if is_remote(path) else str(Path(path).expanduser())
    files = list_files(folder)
    if not files:
        if is_remote(path) or path.startswith(("/", ".", "~")) or path.count("/") != 1:
            raise path_problem(path, _NOWHERE, fix="name a folder with a config.json, or an id such as Qwen/Qwen3-0.6B")
        return path
    names = [file.name for file in files]
    if "config.json" not in names:
        fix = "name the folder that holds config.json and *.safetensors"
        raise path_problem(path, "the folder has no config.json", fix=fix)
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in names if name.endswith(PICKLED)]
        found = f"only pickled weights ({', '.join(pickled[:3])})" if pickled else "no weights"
        fix = "save it again as safetensors (model.save_pretrained); of a checkpoint, burnish export makes a model"
        raise path_problem(path, f"the folder has {found}", fix=fix)
    unwanted = PICKLED if weights else (*PICKLED, ".safetensors")
    return str(fetch(folder, [file for file in files if not file.name.endswith(unwanted)], **caching))


def read_card(path: str, *, trust_remote_code: bool = False) -> ModelCard:
    """The card of ``path``, from its config and tokenizer alone.

    Raises:
        ConfigError: there is no such model, or it cannot be trained.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    facts = text.to_dict()
    is_vision = takes_images(config)
    if is_vision and config.model_type not in FAMILIES:
        message = f"{config.model_type} takes images, and of such models {', '.join(FAMILIES)} can be trained"
        raise path_problem(path, message, fix="name one of those, or a model of text only")
    tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        shell: Any = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    if "num_attention_heads" not in facts and "num_attention_heads" not in text.attribute_map:
        raise path_problem(path, f"{config.model_type} has no attention", fix="name a transformer model")
    heads = int(text.num_attention_heads)
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return ModelCard(
        path=path,
        model_type=str(config.model_type),
        num_embeddings=shell.get_input_embeddings().weight.shape[0],
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(facts.get("num_key_value_heads") or heads),
        hidden_size=int(text.hidden_size),
        head_dim=int(facts.get("head_dim") or text.hidden_size // heads),
        max_position_embeddings=facts.get("max_position_embeddings") or facts.get("n_positions"),
        pad_id=next(pad for pad in pads if pad is not None),
        tied=bool(facts.get("tie_word_embeddings")),
        vision=VisionCard.of(config, shell) if is_vision else None,
        num_parameters=sum(p.numel() for p in shell.parameters()),
        num_matmul_parameters=_matmul_parameters(shell, facts),
        windows=_windows(facts, num_layers=int(text.num_hidden_layers)),
        linear_layers=tuple(name for name in linear_layers(shell) if part_of(name) == "language"),
        has_balancing_loss=balancing_loss(shell) is not None,
    )


def read_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The ``transformers`` config of ``path``.

    Raises:
        ConfigError: there is none.
    """
    return _read("config", path, trust_remote_code=trust_remote_code)


def read_tokenizer(path: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """The tokenizer of ``path``; the text ``chat_template`` replaces its template.

    Raises:
        ConfigError: there is none.
    """
    tokenizer = _read("tokenizer", path, trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up where there are no files
        raise path_problem(path, "has no tokenizer", fix="save the model's tokenizer into the folder")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def blank_model(path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """The model of ``path`` on meta, without weights, with attention inside segments, ready to be saved again.

    Raises:
        ConfigError: there is no such model, its weights are quantized, or it could not be exported after training.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    if "quantization_config" in config.to_dict():
        raise path_problem(path, "its weights are quantized", fix="name the model that it was made of")
    with torch.device("meta"):
        model: Any = _auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_of(config, register()),
            trust_remote_code=trust_remote_code,
        )
    if not type(model)._can_set_attn_implementation():
        raise path_problem(
            path,
            f"{type(model).__name__} does not use the attention interface of transformers",
            fix="name a model that does",
        )
    if model.can_generate():
        model.generation_config = _generation_config(path)
        _mend_generation(model.generation_config, path)
    return model


def takes_images(config: Any) -> bool:
    """Whether the model of ``config``, of ``transformers``, takes images."""
    return "vision_config" in config.to_dict()


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """What ``transformers`` is given for attention of ``name``: towers look at whole images, in a way of their own."""
    return {"text_config": name, "vision_config": "sdpa"} if takes_images(config) else name


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def export_folder(
    folder: Path, *, model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, tokenizer: Any
) -> None:
    """Write a Hugging Face folder that ``transformers`` loads.

    Args:
        folder: made if it is missing.
        model: gives the architecture and the generation config; its weights are not read.
        weights: by parameter name; one of two tied names is enough.
        dtype: what floating-point weights are written in.
        tokenizer: with the chat template it was trained with.
    """
    state = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in weights.items()}
    model.save_pretrained(folder, state_dict=state)
    _export_rest(folder, dtype=dtype, tokenizer=tokenizer)


def export_processor(folder: Path, *, path: str) -> None:
    """Copy into ``folder`` what the model of ``path`` reads images by; it is not trained."""
    from transformers.utils import hub

    quiet: Any = {"_raise_exceptions_for_missing_entries": False}
    for name in PROCESSOR_FILES:
        if file := hub.cached_file(path, name, **quiet):
            shutil.copyfile(file, folder / name)


def export_configs(folder: Path, *, model: Any, dtype: torch.dtype, tokenizer: Any) -> None:
    """Write what a Hugging Face folder holds beside its weights.

    Args:
        folder: made if it is missing.
        model: gives the architecture and the generation config.
        dtype: what floating-point weights will be written in.
        tokenizer: with the chat template it was trained with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _export_rest(folder, dtype=dtype, tokenizer=tokenizer)


def _export_rest(folder: Path, *, dtype: torch.dtype, tokenizer: Any) -> None:
    # save_pretrained notes the dtype of the model in memory, not that of the weights it wrote.
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


def _read(what: str, path: str, **settings: Any) -> Any:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    reader: Any = {"config": AutoConfig, "tokenizer": AutoTokenizer}[what]
    try:
        return reader.from_pretrained(path, **settings)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        if Path(path).is_dir():
            raise path_problem(
                path, f"its {what} cannot be read: {first}", fix="name a folder saved by transformers"
            ) from error
        raise path_problem(
            path,
            f"{_NOWHERE} ({first})",
            fix="name a folder, or an id such as Qwen/Qwen3-0.6B",
        ) from error


def path_problem(path: str, message: str, *, fix: str) -> ConfigError:
    """What is wrong with the model of ``path``."""
    return ConfigError([Problem("model.path", path, message, fix)])


def _matmul_parameters(shell: Any, facts: Mapping[str, Any]) -> int:
    outside = {id(shell.get_input_embeddings().weight), id(shell.get_output_embeddings().weight)}
    active = facts.get("num_experts_per_tok") or 1
    total = 0
    for name, parameter in shell.named_parameters():
        if id(parameter) not in outside and parameter.ndim >= 2 and part_of(name) == "language":
            # Experts are held as [experts, in, out]; a token passes through a few of them.
            total += parameter.numel() * active // parameter.shape[0] if parameter.ndim == 3 else parameter.numel()
    return total


def _windows(facts: Mapping[str, Any], *, num_layers: int) -> tuple[int | None, ...]:
    window = facts.get("sliding_window")
    kinds = facts.get("layer_types")
    if kinds is None:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # old folders hold its settings in the model's config
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)
    except ValueError as error:
        raise _not_valid(path, error) from error


def _mend_generation(generation: Any, path: str) -> None:
    """Unset what cannot be saved and has no effect; a run must not fail in its last call."""
    try:
        generation.validate(strict=True)
        return
    except ValueError:
        pass
    if generation.do_sample is not True:
        unset = [name for name in SAMPLING if generation.to_dict().get(name) is not None]
        log.warning(
            "%s: generation_config.json: %s without do_sample has no effect and is left out of exports",
            path,
            ", ".join(unset),
        )
        for name in unset:
            setattr(generation, name, None)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise _not_valid(path, error) from error


def _not_valid(path: str, error: ValueError) -> ConfigError:
    first = str(error).strip().splitlines()[0]
    fix = "mend or delete generation_config.json"
    return path_problem(path, f"its generation_config.json is not valid: {first}", fix=fix)
