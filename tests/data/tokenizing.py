"""Rows through the real reader and tokenizer, and what came out as text."""

from pathlib import Path

from burnish.config.choices import TrainOnWhat, Truncation
from burnish.data.chat import ChatReader, Dropped, Kind
from burnish.data.example import Example
from burnish.data.manifest import MANIFEST_NAME, read_manifest
from burnish.data.tokenize import ConversationTokenizer, TokenizerSettings
from burnish.data.write import tokenized_store
from burnish.storage.files import describe_file

LAST, ALL = TrainOnWhat.LAST_ASSISTANT_MESSAGE, TrainOnWhat.ALL_ASSISTANT_MESSAGES
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load(
    folder: Path, *, template: str | None = None, what=LAST, max_length=None, truncation=Truncation.RIGHT, **kwargs
):
    return TokenizerSettings(
        str(folder),
        chat_template=template,
        chat_template_kwargs=kwargs,
        train_on_what=what,
        max_length=max_length,
        truncation=truncation,
    ).load()


def read(row: dict, *, kind=Kind.CHAT, nulls_are_padding=False):
    return ChatReader(kind, "messages", "tools", "system", nulls_are_padding).read(row)


def encode(tokenizer: ConversationTokenizer, row: dict, *, kind=Kind.CHAT) -> Example | Dropped:
    found = read(row, kind=kind)
    return found if isinstance(found, Dropped) else tokenizer.encode([found])[0]


def text_of(tokenizer: ConversationTokenizer, example: Example) -> str:
    return tokenizer.decode(example.input_ids)


def targets_of(tokenizer: ConversationTokenizer, example: Example) -> str:
    return tokenizer.decode(example.input_ids[example.loss_mask == 1])


def manifest_of(folder: Path):
    return read_manifest(describe_file(folder / MANIFEST_NAME))


def store(
    path,
    *,
    model: Path,
    cache: Path,
    split=None,
    num_workers=0,
    force=False,
    disable_cache=False,
    messages_key=None,
    tools_key=None,
    system_key=None,
    **settings,
) -> Path:
    return tokenized_store(
        str(path),
        split=split,
        tokenizer_settings=TokenizerSettings(str(model), **settings),
        messages_key=messages_key,
        tools_key=tools_key,
        system_key=system_key,
        num_workers=num_workers,
        cache_dir=cache,
        force_recache=force,
        disable_cache=disable_cache,
    )


def rows_of(folder: Path) -> list[tuple[list[int], list[int]]]:
    import pyarrow as pa

    found = []
    for file in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_file(source).read_all()
        found += [(row["input_ids"], row["loss_mask"]) for row in table.to_pylist()]
    return found
