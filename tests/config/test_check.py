import pytest

from burnish.config import Purpose, SFTConfig, find_problems, load_config
from burnish.config.rules_devices import planned_world
from tests.config.configs import WORDS, broken, load, refused

_NONE_GIVEN = ("model.path=m",)
_CUSTOM = ("sampler=custom", "sampler_class_path=my.Sampler")
_MEGATRON = ("strategy=megatron", "placement.num_gpus_per_node=4")


def test_a_plain_config_breaks_no_rule():
    assert broken() == {}


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("num_steps=5", "num_epochs=2"), "num_steps", "num_epochs=2 is given too"),
        (("batch_size=4", "batch_tokens=100", "num_steps=5"), "batch_size", "batch_tokens takes its place"),
        (("batch_tokens=100",), "batch_tokens", "needs num_steps"),
        (("use_sequence_packing=true",), "use_sequence_packing", "needs max_length"),
        (
            ("use_sequence_packing=true", "max_length=8", "remove_microbatch_padding=false"),
            "use_sequence_packing",
            "needs remove_microbatch_padding=true",
        ),
        (("max_length=8", "max_tokens_per_microbatch=7"), "max_tokens_per_microbatch", "is less than max_length=8"),
        (("train_datasets=[a, b]", "train_dataset_splits=[t]"), "train_dataset_splits", "1 entries for 2"),
        (("train_datasets=[a, b]", "train_dataset_weights=[1]"), "train_dataset_weights", "1 entries for 2"),
        (("train_dataset_weights=[1]", "sampler=sequential"), "train_dataset_weights", "sampler=sequential"),
        (("eval_datasets=[a, b]", "eval_dataset_splits=[t]"), "eval_dataset_splits", "1 entries for 2"),
        (("eval_dataset_splits=[t]",), "eval_dataset_splits", "1 entries for 0"),
        (("eval_dataset_names=[t]",), "eval_dataset_names", "1 entries for 0"),
        (("sampler=custom",), "sampler_class_path", "is missing"),
        (("sampler=custom", "sampler_class_path=Sampler"), "sampler_class_path", "is not the dotted path"),
        (("sampler_class_path=my.Sampler",), "sampler_class_path", "no effect on sampler=random"),
        (("sampler_kwargs={a: 1}",), "sampler_kwargs", "no effect on sampler=random"),
        (("max_ckpts_to_keep=0",), "max_ckpts_to_keep", "would keep no checkpoint"),
        (("ckpt_interval=5",), "ckpt_interval", "there is no ckpt_path"),
        (("resume_from=latest",), "resume_from", "there is no ckpt_path"),
        (("resume_from=lastest", "ckpt_path=c"), "resume_from", "nor latest"),
        (("hf_save_interval=5",), "hf_save_interval", "neither export_path nor ckpt_path"),
        (("hf_save_interval=5", "ckpt_path=c/d", "export_path=./c/d/"), "export_path", "is ckpt_path too"),
        (("optimizer_config.adam_betas=[0.9]",), "optimizer_config.adam_betas", "1 entries, not 2"),
        (("optimizer_config.num_warmup_steps=1.5",), "optimizer_config.num_warmup_steps", "neither a number of steps"),
        (
            ("optimizer_config.num_warmup_steps=5", "optimizer_config.scheduler=constant"),
            "optimizer_config.num_warmup_steps",
            "no effect on scheduler=constant",
        ),
        (("train_datasets=['']",), "train_datasets", "an empty path"),
        (("model.path=",), "model.path", "an empty path"),
        (("train_datasets=https://x/y.jsonl",), "train_datasets", "https:// is no place that is read"),
        (("cache_dir=s3://b/c",), "cache_dir", "must be a local folder"),
        (("log_dir=s3://b/c",), "log_dir", "must be a local folder"),
        (("run_name=",), "run_name", "cannot name a folder"),
        (("run_name=../x",), "run_name", "cannot name a folder"),
        (
            ("sequence_parallel_size=3", "placement.num_gpus_per_node=4"),
            "sequence_parallel_size",
            "does not divide the 4 processes",
        ),
        (
            ("fsdp_config.fsdp_size=3", "placement.num_gpus_per_node=4"),
            "fsdp_config.fsdp_size",
            "does not divide the 4 processes",
        ),
        (("dummy_run_full_ctx=true",), "dummy_run_full_ctx", "needs max_length"),
    ],
)
def test_rules_between_keys(words, key, said):
    config = load(*words)
    assert any(said in p.message for p in find_problems(config, environment={}) if p.key == key)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("sequence_parallel_size=2",), "sequence_parallel_size", "is for FSDP only"),
        (
            ("megatron_config.tensor_model_parallel_size=3",),
            "megatron_config.tensor_model_parallel_size",
            "tensor 3 * pipeline 1 * context 1 does not divide 4 processes",
        ),
        (
            (
                "megatron_config.tensor_model_parallel_size=2",
                "megatron_config.pipeline_model_parallel_size=2",
                "megatron_config.context_parallel_size=2",
            ),
            "megatron_config.tensor_model_parallel_size",
            "tensor 2 * pipeline 2 * context 2 does not divide 4 processes",
        ),
        (
            ("megatron_config.pipeline_model_parallel_size=3",),
            "megatron_config.pipeline_model_parallel_size",
            "tensor 1 * pipeline 3 * context 1 does not divide 4 processes",
        ),
        (
            ("megatron_config.expert_model_parallel_size=3",),
            "megatron_config.expert_model_parallel_size",
            "times tensor 1 * pipeline 1 does not divide 4 processes",
        ),
        (
            ("megatron_config.expert_model_parallel_size=4", "megatron_config.tensor_model_parallel_size=2"),
            "megatron_config.expert_model_parallel_size",
            "times tensor 2 * pipeline 1 does not divide 4 processes",
        ),
        (
            ("megatron_config.tensor_model_parallel_size=4", "megatron_config.sequence_parallel_size=2"),
            "megatron_config.sequence_parallel_size",
            "is neither 1 nor tensor_model_parallel_size=4",
        ),
        (
            ("megatron_config.virtual_pipeline_model_parallel_size=2",),
            "megatron_config.virtual_pipeline_model_parallel_size",
            "needs pipeline_model_parallel_size above 1",
        ),
    ],
)
def test_megatron_sizes_have_to_fit(words, key, said):
    found = find_problems(load(*_MEGATRON, *words), environment={})
    assert any(problem.key == key and said in problem.message for problem in found)


@pytest.mark.parametrize("word", ["model.lora.rank=8", "model.router_aux_loss_coef=0.01", "model.attention=sdpa"])
def test_what_megatron_has_not_is_refused_by_name(word):
    found = find_problems(load(*_MEGATRON, word), environment={})
    key = word.partition("=")[0]
    assert any(problem.key == key and "is not built for strategy=megatron" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        ("megatron", "fsdp_config.cpu_offload=true"),
        ("megatron", "fsdp_config.mixed_precision.reduce_dtype=bfloat16"),
        ("fsdp", "megatron_config.tensor_model_parallel_size=2"),
        ("fsdp", "megatron_config.cpu=true"),
        ("fsdp", "megatron_config.transformer_config_kwargs={fp8: hybrid}"),
    ],
)
def test_what_is_of_the_other_strategy_is_not_ignored(strategy, word):
    (problem,) = find_problems(load(f"strategy={strategy}", word), environment={})
    assert problem.key == word.partition("=")[0]
    assert problem.message == f"has no effect on strategy={strategy}"


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("tensor_model_parallel_size: 4", "is decided by megatron_config.tensor_model_parallel_size"),
        ("bf16: false", "is decided by model.dtype"),
        ("calculate_per_token_loss: false", "is always true"),
    ],
)
def test_a_field_that_another_key_decides_is_refused(field, said):
    (problem,) = find_problems(
        load(*_MEGATRON, f"megatron_config.transformer_config_kwargs={{{field}}}"), environment={}
    )
    assert problem.key == f"megatron_config.transformer_config_kwargs.{field.partition(':')[0]}"
    assert said in problem.message


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("megatron_config.virtual_pipeline_model_parallel_size=1", "fsdp_config.cpu_offload=false"),
        (
            "megatron_config.tensor_model_parallel_size=2",
            "megatron_config.sequence_parallel_size=2",
            "megatron_config.pipeline_model_parallel_size=2",
        ),
        ("megatron_config.pipeline_model_parallel_size=2", "megatron_config.expert_model_parallel_size=2"),
    ],
)
def test_megatron_sizes_that_fit_break_no_rule(words):
    assert broken(*_MEGATRON, *words) == {}


@pytest.mark.parametrize(
    "word",
    [
        "strategy=fsdp",
        "launcher=local",
        "launcher=ray",
        "placement.num_nodes=1",
        "placement.num_gpus_per_node=1",
        "placement.num_gpus_per_node=4",
        "sequence_parallel_size=1",
        "model.lora.rank=0",
        "model.lora.rank=8",
        "model.router_aux_loss_coef=0.01",
        "model.lora.alpha=32",
        "fsdp_config.cpu_offload=true",
        "fsdp_config.fsdp_size=None",
        "fsdp_config.fsdp_size=1",
        "fsdp_config.mixed_precision.param_dtype=bfloat16",
        "fsdp_config.activation_checkpointing=true",
        "fsdp_config.reshard_after_forward=false",
        "fsdp_config.mixed_precision.reduce_dtype=float32",
        "model.attention=sdpa",
        "model.attention=flash",
        "model.attention=flex",
        "fsdp_config.compile=true",
        "label_smoothing=0.1",
        "z_loss=1e-4",
        "model.freeze=[]",
        "optimizer_config.lr_by_part={}",
        "images=pixels",
        "eval_generate.prompts=None",
        "eval_generate.every=2",
        "eval_generate.prompts=[hello]",
        "torch_profiler_config={enable: true, ranks: 0, activities: cpu}",
        "torch_profiler_config={enable: true, with_stack: true, export_type: stacks}",
        "record_memory=true",
        "torch_profiler_config=None",
        "record_memory=false",
        "megatron_config.tensor_model_parallel_size=1",
        "megatron_config.cpu=false",
        "logger=console",
        "logger=[]",
        "logger=wandb",
        "logger=[console, tensorboard, mlflow, trackio]",
        "project_name=mine",
        "tags=[a, b]",
        "dummy_run_full_ctx=false",
        "max_ckpts_to_keep=1",
        "ckpt_path=/c",
        "resume_from=/c/global_step_12/",
        "ckpt_path=s3://b/c",
        "export_path=gs://b/c",
        "resume_from=s3://b/c/global_step_5",
        "callbacks=my.Callback",
        "train_dataset_weights=[2]",
        "run_name=a/b",
    ],
)
def test_neutral_and_built_values_pass(word):
    assert broken(word) == {}


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("wait=2",), "wait", "has no effect without torch_profiler_config.enable"),
        (("enable=true", "ranks=[]"), "ranks", "nothing would be recorded"),
        (("enable=true", "activities=[]"), "activities", "nothing would be recorded"),
        (("enable=true", "ranks=[0, 4]"), "ranks", "there is no rank 4: 4 processes"),
        (("enable=true", "save_path=s3://b/p"), "save_path", "is no local path"),
        (("enable=true", "export_type=stacks"), "export_type", "needs with_stack"),
    ],
    ids=str,
)
def test_what_the_profiler_cannot_do(words, key, said):
    found = broken(*(f"torch_profiler_config.{word}" for word in words), "placement.num_gpus_per_node=4")
    assert said in found.pop(f"torch_profiler_config.{key}")
    assert found == {}


def test_an_unknown_key_of_the_profiler_is_refused():
    (key, problem), *_ = refused("torch_profiler_config.warm_up=1").items()
    assert (key, problem.fix.split()[1]) == ("torch_profiler_config.warm_up", "torch_profiler_config.warmup,")


def test_a_section_that_a_saved_config_holds_as_none_is_its_defaults():
    assert SFTConfig(model={"path": "m"}, torch_profiler_config=None) == SFTConfig(model={"path": "m"})


@pytest.mark.parametrize("key", ["eval_interval=2", "eval_before_train=true"])
def test_prompts_are_an_evaluation_too(key):
    assert "there is no eval set" in str(broken(key))
    assert broken(key, "eval_generate.prompts=[hello]") == {}


def test_a_dummy_run_needs_no_data():
    assert broken("dummy_run_full_ctx=true", "max_length=8", base=_NONE_GIVEN) == {}


def test_what_is_built_passes_together():
    words = (
        "use_sequence_packing=true",
        "max_length=8",
        "max_tokens_per_microbatch=8",
        "ckpt_path=c",
        "ckpt_interval=2",
    )
    more = ("hf_save_interval=2", "resume_from=latest", "eval_datasets=e.jsonl", "eval_interval=3", *_CUSTOM)
    assert broken(*words, *more, "sampler_kwargs={seed: 3}", "optimizer_config.num_warmup_steps=0.1") == {}


def test_an_unknown_part_is_named():
    found = refused("optimizer_config.lr_by_part={eyes: 1e-6}")["optimizer_config.lr_by_part"]
    assert found.message == "'eyes' is none of vision, projector, language"


def test_training_needs_data():
    assert broken(base=_NONE_GIVEN) == {"train_datasets": "no training data is named"}
    assert broken("train_datasets=[]", base=_NONE_GIVEN) == {"train_datasets": "no training data is named"}


@pytest.mark.parametrize(
    ("purpose", "words", "keys"),
    [
        (Purpose.EVALUATE, ("eval_datasets=e",), []),
        (Purpose.EVALUATE, ("train_datasets=d",), ["eval_datasets"]),
        (Purpose.EVALUATE, ("eval_datasets=e", "eval_interval=5"), []),
        (Purpose.TOKENIZE, ("train_datasets=d",), []),
        (Purpose.TOKENIZE, ("eval_datasets=d",), []),
        (Purpose.TOKENIZE, ("pretokenized_dataset_paths=d",), ["train_datasets"]),
        (Purpose.TRAIN, ("pretokenized_dataset_paths=d",), []),
    ],
)
def test_each_purpose_needs_its_data(purpose, words, keys):
    config = load_config(None, ["model.path=m", *words])
    assert [problem.key for problem in find_problems(config, purpose=purpose, environment={})] == keys


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}],
)
def test_a_rank_already_needs_no_placement(environment):
    assert broken(**environment) == {}
    assert broken("placement.num_gpus_per_node=2", **environment) == {}


def test_one_process_under_torchrun_passes():
    assert broken("placement.num_gpus_per_node=1", RANK="0", WORLD_SIZE="1") == {}


def test_an_explicit_placement_must_be_the_environments_world():
    found = broken("placement.num_gpus_per_node=1", RANK="0", WORLD_SIZE="2")
    said = "1 nodes of 1 GPUs are not the 2 processes that the environment has started"
    assert found["placement.num_gpus_per_node"] == said


def test_several_nodes_need_a_launcher_that_reaches_them():
    found = find_problems(load("placement.num_nodes=2"), environment={})
    fixes = [problem.fix for problem in found if problem.key == "placement.num_nodes"]
    assert any("torchrun" in fix and "launcher=ray" in fix for fix in fixes)


def test_the_environments_world_decides_what_divides():
    config = load("strategy=megatron", "megatron_config.tensor_model_parallel_size=8")
    environment = {"RANK": "0", "WORLD_SIZE": "16"}
    assert find_problems(config, environment=environment) == []


def test_rules_are_found_from_this_process_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = find_problems(load(*WORDS, "placement.num_gpus_per_node=3"))
    assert [problem.key for problem in found] == ["placement.num_gpus_per_node"]


@pytest.mark.parametrize(("num_devices", "processes"), [(0, 1), (1, 1), (2, 2), (8, 4)])
def test_an_unset_placement_is_at_most_the_gpus_there_are(num_devices, processes):
    config = load(*WORDS)
    assert planned_world(config, {}, num_devices=num_devices) == processes
    shared = load(*WORDS, "sequence_parallel_size=4")
    found = find_problems(shared, environment={}, num_devices=num_devices)
    assert [problem.message for problem in found] == [f"does not divide the {processes} processes of the run"] * (
        processes < 4
    )


def test_more_processes_than_gpus_are_refused_but_not_where_there_are_none():
    config = load(*WORDS, "placement.num_gpus_per_node=3")
    assert find_problems(config, environment={}, num_devices=0) == []
    (problem,) = find_problems(config, environment={}, num_devices=2)
    assert (problem.key, problem.message) == ("placement.num_gpus_per_node", "this machine has 2")
