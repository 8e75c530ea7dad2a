"""Keys of other trainers are answered by ours, as docs/moving.md has them."""

import re
from pathlib import Path

import pytest
import yaml

from burnish.config import read
from burnish.config.run import SFTConfig, key_names
from burnish.config.section import sections_of
from tests.config.configs import refused
from tests.house.source import ROOT

PAGE = (ROOT / "docs/moving.md").read_text(encoding="utf-8")
TABLE = yaml.safe_load((Path(read.__file__).with_name("elsewhere.yaml")).read_text(encoding="utf-8"))
KNOWN = {*key_names(), *sections_of(SFTConfig)}


def answer(name):
    """What is said of ``name``, without what is always said."""
    problem = refused(f"{name}=5")[name]
    assert problem.message == "there is no such key"
    return re.sub("^write ([^ ]+), the nearest key there is$", r"\1", problem.fix).removesuffix("; see docs/moving.md")


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        ("fp16 torch_dtype", "model.dtype"),
        ("bf16", "write model.dtype=bfloat16, which a GPU takes by itself"),
        ("base_model model_name_or_path", "model.path"),
        ("max_steps", "num_steps"),
        ("num_train_epochs", "num_epochs"),
        ("save_total_limit", "max_ckpts_to_keep"),
        ("save_steps", "ckpt_interval"),
        ("save_strategy saves_per_epoch", "write ckpt_interval, in steps"),
        ("eval_steps", "eval_interval"),
        ("eval_strategy evals_per_epoch", "write eval_interval, in steps"),
        ("val_set_size", "write eval_datasets and eval_dataset_splits, a slice such as train[95%:]"),
        (
            "per_device_train_batch_size micro_batch_size",
            "write micro_train_batch_size_per_gpu for memory, and batch_size for a whole step over all GPUs",
        ),
        ("learning_rate optimizer_config.learning_rate", "optimizer_config.lr"),
        ("warmup_ratio warmup_steps", "optimizer_config.num_warmup_steps"),
        ("lr_scheduler_type", "optimizer_config.scheduler"),
        ("peft_config lora_r adapter", "model.lora.rank"),
        ("lora_alpha", "model.lora.alpha"),
        ("sample_packing packing", "use_sequence_packing"),
        ("dataset_num_proc", "num_workers"),
        ("dataset_name datasets", "train_datasets"),
        ("seq_len max_seq_length sequence_len cutoff_len", "max_length"),
        ("report_to", "logger"),
        ("resume_from_checkpoint", "resume_from"),
        ("train_on_inputs", "train_on_what"),
        ("assistant_only_loss", "write train_on_what=all_assistant_messages"),
        ("completion_only_loss", "leave it out: rows of prompt and completion train the completion alone"),
        ("wandb_entity", "leave it out: W&B reads WANDB_ENTITY from the environment"),
        ("output_dir", "write ckpt_path for checkpoints and log_dir for metrics"),
        ("logging_steps", "leave it out: every step is logged"),
        ("gradient_accumulation_steps", "leave it out: batch_size is that of a whole step, over all GPUs"),
        ("dataset_text_field", "leave it out: each dataset is told by its columns"),
        ("deepspeed fsdp", "leave it out: strategy=fsdp needs no file beside fsdp_config"),
    ],
)
def test_a_key_of_another_trainer_is_answered_by_ours(names, ours):
    assert {name: answer(name) for name in names.split()} == dict.fromkeys(names.split(), ours)


@pytest.mark.parametrize(
    ("name", "nearest"), [("ddp_timeout", "model.lora.dropout"), ("group_by_length", "max_length")]
)
def test_a_key_like_no_other_is_not_taken_for_its_nearest(name, nearest):
    assert answer(name) == f"leave it out; burnish train --help lists all keys, the nearest in name is {nearest}"


def test_what_the_table_names_is_there():
    assert {ours for ours in TABLE if " " not in ours} <= KNOWN
    assert {name for names in TABLE.values() for name in names.split()} & KNOWN == set()
    plain = PAGE.replace("`", "")
    assert [
        ours for ours in TABLE if ours.startswith("leave") and ours.removeprefix("leave it out: ") not in plain
    ] == []


def rows_of_the_page():
    """(names that no key of ours has, our keys, what differs) of each row."""
    for line in PAGE.splitlines():
        if not line.startswith("| ") or line.startswith("| claim"):
            continue
        theirs, ours, differs = (cell.strip() for cell in line.strip("|").split("|"))
        names = [
            found[1] for text in re.findall("`([^`]+)`", theirs) if (found := re.match(r"([a-z]\w*)(?=[=:]|$)", text))
        ]
        keys, section = set(), ""
        for key in re.findall(r"`([\w.]+)[^`]*`", ours):
            section = section if key.startswith(".") else key.rpartition(".")[0]
            keys.add(section + key if key.startswith(".") else key)
        yield [name for name in names if name not in KNOWN], keys, differs.replace("`", "")


def test_the_page_says_the_same():
    rows = list(rows_of_the_page())
    wrong = {}
    for name in {name for names, _, _ in rows for name in names}:
        said = answer(name)
        named = set(re.findall(r"[\w.]*\w", said)) & KNOWN
        agree = [
            said.removeprefix("leave it out: ") in differs if said.startswith("leave") else named <= keys and named
            for names, keys, differs in rows
            if name in names
        ]
        if not any(agree):
            wrong[name] = said
    assert wrong == {}, wrong
    assert len(rows) > 60
