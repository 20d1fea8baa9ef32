from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from forge_async.config import REDACTED, Config, SFTConfig, load_config, to_yaml
from forge_async.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: base\nsteps: 7\ntrainer: {optimizer: {lr: 1.0e-3}}\ndataset: {params: {min_terms: 2}}\n")
    return path


def test_the_file_is_read_and_overrides_win(config_file: Path) -> None:
    config = load_config(config_file, ["trainer.optimizer.lr=1e-4", "dataset.params.max_terms=3"])
    assert config.steps == 7
    assert config.trainer.optimizer.lr == 1e-4
    assert config.dataset.params == {"min_terms": 2, "max_terms": 3}


def test_base_files_are_read_first(config_file: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("base: run.yaml\nsteps: 9\n")
    config = load_config(overlay)
    assert (config.name, config.steps) == ("base", 9)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("dataset.prompt_template={a} = {b}", "{a} = {b}"),
        ("dataset.prompt_template=x=y=z", "x=y=z"),
        ("dataset.prompt_template='quoted: text'", "quoted: text"),
        ('dataset.prompt_template="a\\tb"', "a\tb"),
        ("dataset.prompt_template=ünï ☃", "ünï ☃"),
        ("dataset.prompt_template=${not.an.interpolation}", "${not.an.interpolation}"),
        ("dataset.prompt_template=12", "12"),
        ("dataset.prompt_template=", ""),
        ("dataset.system_prompt=", ""),
        ("dataset.system_prompt=null", None),
        ("reward.functions=[my_task:right_answer]", ["my_task:right_answer"]),
        ("reward.functions=['a:b', \"c.d:e\"]", ["a:b", "c.d:e"]),
        ("placement.trainer_cores=[1, 0]", [1, 0]),
        ("placement.trainer_cores=null", None),
        ("reward.weights=[1e-1]", [0.1]),
    ],
)
def test_override_values_arrive_as_written(override: str, value: object) -> None:
    config = load_config(None, [override])
    room, field = override.partition("=")[0].split(".")
    assert getattr(getattr(config, room), field) == value


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("trainer.optmizer.lr=3", "trainer.optmizer.lr", "Did you mean trainer.optimizer.lr?"),
        ("group_size=3", "group_size", "Did you mean rollout.group_size?"),
        ("trainer.lr=3", "trainer.lr", "Did you mean trainer.optimizer.lr?"),
        ("temprature=3", "temprature", "Did you mean policy.sampling.temperature?"),
        ("trainer.optimizer.learning_rate=3", "trainer.optimizer.learning_rate", "Did you mean trainer.optimizer.lr?"),
        ("banana=3", "banana", "must be a known setting. The top level has: buffer, "),
        ("trainer.batch=3", "trainer.batch", "must be a known setting. trainer has: trainer."),
        ("seed.x=3", "seed.x", "seed has none below it."),
        ("steps=many", "steps", "a whole number"),
        ("steps=1.5", "steps", "a whole number"),
        ("metrics.console=1", "metrics.console", "true or false"),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr", "a number"),
        ("trainer=3", "trainer", "optimizer"),
        ("reward.functions=a:b", "reward.functions", "a list"),
        ("buffer.max_staleness=-1", "buffer.max_staleness", "0 (synchronous) or more"),
        ("trainer.optimizer.betas=[0.9]", "trainer.optimizer.betas", "two numbers"),
        ("dataset.examples=[{prompt: hi}]", "dataset.examples[0].answer", "not empty"),
        ("dataset.examples=[{prompt: hi, answer: a, mood: b}]", "dataset.examples", "prompt, answer"),
        ("policy.sampling.max_tokens=5000", "policy.sampling.max_tokens", "less than max_model_len (1024)"),
        ("policy.max_model_len=9000", "trainer.max_sequence_tokens", "at least policy.max_model_len (9000)"),
        (
            "trainer.dtype=bfloat16 checks.ratio_tolerance=1e-4",
            "checks.ratio_tolerance",
            "0.01 when",
        ),
        ("checks.ratio_tolerance=0", "checks.ratio_tolerance", "greater than 0, or null"),
        ("policy.sampling.repetition_penalty=1.1", "policy.sampling.repetition_penalty", "a known setting"),
        ("policy.sampling.logit_bias={5: 1}", "policy.sampling.logit_bias", "a known setting"),
        ("policy.sampling.temperature=0", "policy.sampling.temperature", "above 0"),
        ("rollout.group_size=1", "buffer.min_group_size", "at most rollout.group_size (1)"),
        ("buffer.min_group_size=1 rollout.group_size=1", "rollout.group_size", "at least 2 with trainer.loss.baseline"),
        ("trainer.optimizer.eps=${x}", "trainer.optimizer.eps", "a number"),
        ("trainer.loss.clip_high=${x}", "trainer.loss.clip_high", "a number or null"),
        ("trainer.loss.clip_high=true", "trainer.loss.clip_high", "a number or null"),
        ("reward.weights=[[1]]", "reward.weights", "a list, each element a number"),
        ("policy.sampling.stop_token_ids=[{}]", "policy.sampling.stop_token_ids", "each element a whole number"),
        ("policy.sampling.stop_token_ids=&a [*a]", "policy.sampling.stop_token_ids", "each element a whole number"),
        ("dataset.params.x=&a [*a]", "dataset.params.x", "a mapping"),
        ("placement.trainer_cores=[[1]]", "placement.trainer_cores", "each element a whole number or null"),
        ("policy.sampling.temperature=.inf", "policy.sampling.temperature", "finite"),
        ("policy.kv_cache_gib=.inf", "policy.kv_cache_gib", "finite"),
        ("trainer.optimizer.weight_decay=.inf", "trainer.optimizer.weight_decay", "finite"),
        ("trainer.optimizer.eps=.inf", "trainer.optimizer.eps", "finite"),
        ("trainer.loss.overlong_penalty=.inf", "trainer.loss.overlong_penalty", "finite"),
        ("model.prepare=sft", "model.warmup_config", "a YAML file"),
        ("seed=-1", "seed", "from 0"),
        ("steps", "steps", "key=value"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(override: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, override.split() if " " in override and override.count("=") > 1 else [override])
    assert caught.value.key == key
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "precision", "tolerance"),
    [
        ([], "float32", 1e-4),
        (["policy.dtype=bfloat16"], "bfloat16", 0.3),
        (["policy.dtype=float16"], "float32", 0.3),
        (["trainer.dtype=bfloat16"], "bfloat16", 0.3),
        (["policy.dtype=bfloat16", "trainer.dtype=float32", "checks.ratio_tolerance=0.1"], "float32", 0.1),
    ],
)
def test_the_trainer_and_the_first_check_follow_the_policys_precision(
    overrides: list[str], precision: str, tolerance: float
) -> None:
    config = load_config(None, overrides)
    assert config.trainer.beside(config.policy.dtype).precision == precision
    assert config.ratio_tolerance == tolerance


def test_a_missing_file_names_the_others(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(config_file.with_name("rnu.yaml"))


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "steps: 3\nunknown: {a: 1}\n", "base: 3", "base: bad.yaml", "name: \xff"]
)
def test_unusable_files_are_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError):
        load_config(path)


def test_the_printed_tree_loads_again(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["dataset.examples=[{prompt: '1+1=', answer: '2'}]", "dataset.system_prompt="])
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(config))
    assert load_config(printed) == config


def test_a_token_is_not_written_down_and_what_stands_for_it_is_none() -> None:
    token = "a-secret-of-enough-letters"
    config = load_config(None, [f"dashboard.token={token}", "dashboard.host=0.0.0.0"])
    assert config.dashboard.token == token
    printed = to_yaml(config)
    assert token not in printed and REDACTED in printed and REDACTED not in to_yaml(Config())
    assert to_yaml(load_config(None)).count("token: ''") == 1


def test_a_config_with_a_token_that_was_not_written_down_loads_with_a_new_one(tmp_path: Path) -> None:
    """As a resume or a second run from a run's own config.yaml does."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(None, ["dashboard.token=a-secret-of-enough-letters"])))
    tokens = {load_config(path).dashboard.token for _ in range(3)}
    assert len(tokens) == 3 and min(map(len, tokens)) >= 32 and REDACTED not in tokens
    assert load_config(path, ["dashboard.token=another-one-by-hand"]).dashboard.token == "another-one-by-hand"
    assert load_config(path, ["dashboard.token="]).dashboard.token == ""


def test_a_page_that_may_control_a_run_needs_one_that_reads_its_commands() -> None:
    words = r"metrics.status_every_s = 0(\.0)?: must be above 0 with dashboard.control. .*dashboard.control=false"
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["dashboard.control=true", "metrics.status_every_s=0"])
    load_config(None, ["dashboard.control=true", "metrics.status_every_s=0.5"])
    load_config(None, ["metrics.status_every_s=0"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    load_config(path, schema=SFTConfig if path.stem.startswith("sft") else Config)


def test_a_config_error_crosses_processes() -> None:
    error = ConfigError("a.b", 3, "above 3", "Raise it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.key, copy.value) == (str(error), "a.b", 3)
