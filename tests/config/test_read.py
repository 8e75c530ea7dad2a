import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config import SFTConfig, load_config
from burnish.config.run import key_names
from burnish.config.section import sections_of
from burnish.errors import ConfigError
from tests.config.configs import WORDS, load, refused


def _load(tmp_path, text, *words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, [*WORDS, *words])


def _keys(tmp_path, text, *words):
    with pytest.raises(ConfigError) as error:
        _load(tmp_path, text, *words)
    return [problem.key for problem in error.value.problems]


def test_yaml_is_read_by_the_type_of_the_key(tmp_path):
    text = """
        run_name: 007
        project_name: yes
        tags: [1.0, on, null]
        optimizer_config: {lr: 1e-4, adam_betas: [.9, 0.99]}
        force_recache: yes
        max_length:
        cache_dir: ~
        chat_template: null
        train_dataset_splits: ["train[:100]"]
        sampler_kwargs: {number: 40, text: "40", flag: true, none: null, id: 007, list: [1, a]}
        callbacks:
          - my.First
          - my.Second: {every: 3}
    """
    config = _load(tmp_path, text)
    assert (config.run_name, config.project_name, config.tags) == ("007", "yes", ("1.0", "on", "null"))
    assert (config.optimizer_config.lr, config.optimizer_config.adam_betas) == (1e-4, (0.9, 0.99))
    assert (config.force_recache, config.max_length, config.cache_dir, config.chat_template) == (True, None, None, None)
    kwargs = {"number": 40, "text": "40", "flag": True, "none": None, "id": "007", "list": [1, "a"]}
    assert config.sampler_kwargs == kwargs
    assert config.callback_specs == (("my.First", {}), ("my.Second", {"every": 3}))


def test_dotted_and_nested_yaml_are_the_same(tmp_path):
    nested = _load(
        tmp_path, "optimizer_config:\n  lr: 1e-4\nfsdp_config:\n  mixed_precision: {reduce_dtype: float32}\n"
    )
    dotted = _load(tmp_path, "optimizer_config.lr: 1e-4\nfsdp_config.mixed_precision.reduce_dtype: float32\n")
    assert nested == dotted
    assert nested.explicit_keys == dotted.explicit_keys


def test_an_override_changes_one_value(tmp_path):
    text = "optimizer_config: {lr: 1e-4, eps: 1e-6}\nsampler_kwargs: {a: 1, b: 2}\n"
    config = _load(tmp_path, text, "optimizer_config.lr=3e-4", "sampler_kwargs.a=5")
    assert (config.optimizer_config.lr, config.optimizer_config.eps) == (3e-4, 1e-6)
    assert config.sampler_kwargs == {"a": 5, "b": 2}


def test_a_section_in_one_word_changes_what_it_names(tmp_path):
    config = _load(tmp_path, "optimizer_config: {lr: 1e-4, eps: 1e-6}", "optimizer_config={lr: 3e-4}")
    assert (config.optimizer_config.lr, config.optimizer_config.eps) == (3e-4, 1e-6)


def test_a_mapping_in_one_word_replaces_the_mapping(tmp_path):
    assert _load(tmp_path, "sampler_kwargs: {a: 1}", "sampler_kwargs={b: 2}").sampler_kwargs == {"b": 2}


@pytest.mark.parametrize(
    ("text", "word", "steps", "epochs"),
    [
        ("num_epochs: 2", "num_steps=5", 5, None),
        ("num_steps: 2", "num_epochs=5", None, 5),
        ("num_epochs: 2", "num_steps=None", None, 2),
        ("{num_epochs: 2, num_steps: null}", "num_steps=5", 5, None),
    ],
)
def test_steps_and_epochs_replace_each_other(tmp_path, text, word, steps, epochs):
    config = _load(tmp_path, text, word)
    assert (config.num_steps, config.num_epochs) == (steps, epochs)


def test_both_in_one_place_stay_for_the_rules(tmp_path):
    in_file = _load(tmp_path, "{num_epochs: 2, num_steps: 3}", "num_steps=5")
    on_line = load("num_epochs=2", "num_steps=5")
    assert [(c.num_steps, c.num_epochs) for c in (in_file, on_line)] == [(5, 2), (5, 2)]


def test_all_problems_at_once():
    found = refused(
        "num_step=5",
        "batch_size=x",
        "optimizer_config.lr=fast",
        "train_on_what=last",
        "max_length=8",
        "max_tokens_per_microbatch=4",
        "eval_interval=5",
        "torch_profiler_config.wait=2",
    )
    assert set(found) == {
        "num_step",
        "batch_size",
        "optimizer_config.lr",
        "train_on_what",
        "max_tokens_per_microbatch",
        "eval_interval",
        "torch_profiler_config.wait",
    }
    assert found["train_on_what"].fix == "write train_on_what=last_assistant_message"


def test_no_rule_is_blamed_on_a_key_that_could_not_be_read():
    assert set(refused("train_datasets=", "pretokenized_dataset_path=/a")) == {"pretokenized_dataset_path"}
    assert set(refused("use_sequence_packing=true", "max_length=x")) == {"max_length"}


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["num_step=3"])
    assert [problem.key for problem in error.value.problems] == ["model.path", "num_step", "train_datasets"]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("num_steps", "num_steps"),
        ("optimizer_config=fast", "optimizer_config"),
        ("optimizer_config={lr: 1", "optimizer_config"),
        ("seed.x=1", "seed"),
        ("seed=010", "seed"),
        ("seed=1.5", "seed"),
        ("seed=99999999999999999999", "seed"),
        ("optimizer_config.lr=nan", "optimizer_config.lr"),
        ("train_dataset_weights=[1, NaN]", "train_dataset_weights"),
        ("train_dataset_weights=[0, 1]", "train_dataset_weights"),
        ("train_dataset_weights=[-1, 2]", "train_dataset_weights"),
        ("batch_size=0", "batch_size"),
        ("micro_train_batch_size_per_gpu=0", "micro_train_batch_size_per_gpu"),
        ("num_steps=0", "num_steps"),
        ("num_epochs=-1", "num_epochs"),
        ("max_length=1", "max_length"),
        ("max_ckpts_to_keep=-2", "max_ckpts_to_keep"),
        ("num_steps=true", "num_steps"),
        ("callbacks={a.B: 1}", "callbacks"),
        ("sampler_kwargs=40", "sampler_kwargs"),
        ("=5", "=5"),
    ],
)
def test_what_cannot_be_read(word, key):
    assert set(refused(word)) == {key}


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("train_on_what=last", "train_on_what=last_assistant_message"),
        ("train_on_what=true", "one of these"),
        ("train_on_what=assistant", "one of these"),
        ("optimizer_config.scheduler=cosine_with_restarts", "optimizer_config.scheduler=cosine"),
        ("optimizer_config.scheduler=liner", "optimizer_config.scheduler=linear"),
    ],
)
def test_a_word_is_named_where_one_alone_is_near(word, fix):
    assert refused(word)[word.partition("=")[0]].fix == f"write {fix}"


@pytest.mark.parametrize(("word", "first"), [("model=org/name", "model.path"), ("model.lora=8", "model.lora.rank")])
def test_a_value_in_the_place_of_a_section_is_answered_with_its_first_key(word, first):
    key, _, value = word.partition("=")
    fix = f"write {first}=... or another of its keys"
    assert (refused(word)[key].message, refused(word)[key].fix) == (f"'{value}' where a mapping belongs", fix)
    *outer, name = key.split(".")
    with pytest.raises(ConfigError) as error:
        SFTConfig(**({outer[0]: {name: value}} if outer else {name: value}))
    assert [(p.message, p.fix) for p in error.value.problems if p.key == key] == [("is a section, not a value", fix)]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("- a\n- b\n", "{file}"),
        ("num_steps: [\n", "{file}"),
        ("a: 1\n---\nb: 2\n", "{file}"),
        ("? [a, b]\n: c\n", "{file}"),
        ("optimizer_config: 3\n", "optimizer_config"),
        ("tags: &x [*x]\n", "{file}"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, key):
    assert key.format(file=tmp_path / "run.yaml") in _keys(tmp_path, text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "fsdp_config:\n"])
def test_an_empty_file_changes_nothing(tmp_path, text):
    assert _load(tmp_path, text) == load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_steps: [\n", "{file}: line 2 is not YAML: while parsing a flow node (line 2): expected the node content"),
        (
            "tags: {a: b\nx: y\n",
            "{file}: line 2 is not YAML: while parsing a flow mapping (line 1): expected ',' or '}'",
        ),
        ("a: b: c\n", "{file}: line 1 is not YAML: mapping values are not allowed here"),
        ("num_steps: 5\nseed: 1\nnum_steps: 6\n", "num_steps: is given twice, again in {file}, line 3"),
        ("- a\n", "{file}: holds a list or a text, not keys"),
    ],
)
def test_of_a_file_that_cannot_be_read_nothing_else_is_said(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    for words in ([], ["num_step=3"]):
        with pytest.raises(ConfigError) as error:
            load_config(file, words)
        assert str(error.value).startswith("config: 1 problem\n  " + said.replace("{file}", str(file)))


def test_of_a_file_that_is_not_there_nothing_else_is_said(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "none.yaml")
    said = f"{tmp_path}/none.yaml: cannot be read: No such file or directory\n    fix: give the path of a file"
    assert str(error.value) == f"config: 1 problem\n  {said}"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", WORDS)


def test_yaml_that_is_not_text(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"run_name: \xff\xfe")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(file, WORDS)


def test_plain_form_reads_back():
    config = load(
        "sampler_kwargs={a: 1, b: 'x'}", "callbacks=[a.B, {c.D: {every: 3}}]", "tags=[a, b]", "logger=console"
    )
    plain = json.loads(json.dumps(config.to_plain()))
    assert SFTConfig(**plain) == config


def test_yaml_form_reads_back(tmp_path):
    config = load("run_name=007 é \U0001f600", "sampler_kwargs={a: '1', b: 2}", "max_length=None", "tags=['null', '#']")
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(file)
    assert again == config
    assert again.explicit_keys == config.explicit_keys


_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(_ANY_TEXT, st.lists(_ANY_TEXT, max_size=3), st.dictionaries(_ANY_TEXT, _ANY_TEXT | st.integers() | st.none()))
def test_any_value_reads_back_from_yaml(text, texts, kwargs):
    config = SFTConfig(model={"path": "m"}, run_name=text, tags=texts, sampler_kwargs=kwargs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_bytes(config.to_yaml().encode())
        assert load_config(file) == config


@given(st.lists(st.tuples(st.sampled_from([*key_names(), *sections_of(SFTConfig)]), _ANY_TEXT), max_size=4))
def test_whatever_is_written_is_read_or_explained(pairs):
    with contextlib.suppress(ConfigError):
        config = load(*(f"{name}={text}" for name, text in pairs))
        assert SFTConfig(**config.to_plain()) == config


@given(st.binary(max_size=40))
def test_whatever_a_file_holds_is_read_or_explained(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_bytes(content)
        with contextlib.suppress(ConfigError):
            load_config(file, WORDS)


def test_a_config_is_frozen():
    config = load()
    with pytest.raises(ValueError, match="frozen"):
        config.batch_size = 8


def test_python_values_are_checked_by_type():
    with pytest.raises(ConfigError) as error:
        SFTConfig(model={"path": "m"}, run_name=7, batch_size=True, tags={"a": 1}, sampler_kwargs={"f": object()})
    found = {problem.key: problem.fix for problem in error.value.problems}
    assert set(found) == {"run_name", "batch_size", "tags", "sampler_kwargs"}
    assert found["tags"] == "write one text in its place, such as a path or name"
    assert found["run_name"] == "quote it: run_name='7'"
