"""Loading: precedence, presets, sections that are null, interpolation, and errors that name the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pekoe.pipeline.config.actor import NormConfig, RejectionConfig
from pekoe.pipeline.config.load import from_yaml_text, load, preset_names, to_yaml
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError, all_keys, nearest_key
from pekoe.pipeline.config.show import show
from pekoe.pipeline.config.snapshot import read_run_config, write_run_config
from pekoe.pipeline.run_directory import RunDirectory


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_yaml_text(text, overrides)
    return list(caught.value.problems)


def test_nothing_written_gives_the_defaults() -> None:
    assert from_yaml_text("") == RunConfig()
    assert from_yaml_text("# only a comment\n") == RunConfig()


def test_overrides_win_over_yaml_and_later_ones_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("seed: 3\nactor: {optimizer: {lr: 1e-5}, path: a}\n")
    config = load(file, ["actor.optimizer.lr=2e-5", "seed=4", "seed=5", "gconfig.stop_token_ids=[1,2]"])
    assert config.actor.optimizer.lr == 2e-5
    assert config.actor.path == "a"
    assert config.seed == 5
    assert config.gconfig.stop_token_ids == [1, 2]


def test_interpolation_names_any_key_also_unwritten_ones_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEKOE_TEST_SEED", "17")
    config = from_yaml_text(
        "tokenizer_path: ${actor.path}\n"
        "seed: ${oc.env:PEKOE_TEST_SEED}\n"
        "gconfig:\n  max_tokens: ${actor.mb_spec.max_tokens_per_mb}\n",
        ["actor.path=models/x", "trial_name=s${seed}"],
    )
    assert config.tokenizer_path == "models/x"
    assert config.seed == 17
    assert config.gconfig.max_tokens == 8192
    assert config.trial_name == "s17"
    assert from_yaml_text("valid_dataset: ${train_dataset}\ntrain_dataset: {path: p}").valid_dataset.path == "p"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: ${nope}", "seed: cannot be interpolated: Interpolation key 'nope' not found"),
        ("actor: {path: '${oc.env:PEKOE_NOT_SET}'}", "actor.path: cannot be interpolated: KeyError"),
        ("tokenizer_path: ${trial_name}\ntrial_name: ${tokenizer_path}", "Recursive interpolation"),
    ],
)
def test_failed_interpolation_names_the_key(text: str, words: str) -> None:
    assert words in problems(text)[0]


def test_null_sections_are_made_and_nulled_by_overrides() -> None:
    made = from_yaml_text(
        "actor: {adv_norm: null}", ["actor.adv_norm.mean_level=batch", "actor.adv_norm.std_level=batch"]
    )
    assert made.actor.adv_norm == NormConfig(mean_level="batch", std_level="batch")
    assert from_yaml_text("", ["actor.adv_norm.mean_leave1out=true"]).actor.adv_norm == NormConfig(mean_leave1out=True)
    assert from_yaml_text("actor: {reward_norm: {eps: 1}}", ["actor.reward_norm=null"]).actor.reward_norm is None
    assert from_yaml_text("actor: {rejection_sampling: null}").actor.rejection_sampling is None
    again = from_yaml_text("", ["actor.rejection_sampling=null", "actor.rejection_sampling.upper=2"])
    assert again.actor.rejection_sampling == RejectionConfig(upper=2.0)
    assert from_yaml_text("", ["valid_dataset.path=p"]).valid_dataset.path == "p"
    assert from_yaml_text("", ["actor.reward_norm.std_level=null"]).actor.reward_norm == NormConfig(std_level=None)


def test_eval_gconfig_inherits_what_it_leaves_out() -> None:
    text = "gconfig: {max_new_tokens: 77, temperature: 0.9, stop: [x]}\n"
    assert from_yaml_text(text).eval_gconfig is None
    partly = from_yaml_text(text, ["eval_gconfig.temperature=0.5"]).eval_gconfig
    assert (partly.temperature, partly.max_new_tokens, partly.stop) == (0.5, 77, ["x"])
    late = from_yaml_text(text + "eval_gconfig: {greedy: true}", ["gconfig.max_new_tokens=9"]).eval_gconfig
    assert (late.greedy, late.max_new_tokens, late.temperature) == (True, 9, 0.9)


def test_a_preset_in_the_yaml_is_its_base_and_on_the_command_line_lies_over_it() -> None:
    recipe = "algorithm: gspo\nactor: {eps_clip: 0.1}\n"
    own = from_yaml_text(recipe)
    assert (own.actor.eps_clip, own.actor.eps_clip_higher) == (0.1, 4e-4)
    assert own.algorithm == "gspo"
    asked = from_yaml_text(recipe, ["algorithm=icepop"])
    assert (asked.actor.eps_clip, asked.actor.importance_sampling_level) == (0.2, "token")
    assert asked.algorithm == "icepop"
    explicit = from_yaml_text(recipe, ["actor.eps_clip=0.3", "algorithm=icepop"])
    assert explicit.actor.eps_clip == 0.3
    dropped = from_yaml_text(recipe, ["algorithm=null"])
    assert dropped.actor.eps_clip_higher is None
    assert dropped.algorithm is None


def test_an_unknown_preset_names_the_nearest() -> None:
    (line,) = problems("algorithm: gpso")
    assert "'gpso' is no preset (did you mean gspo?)" in line
    assert f"allowed: {', '.join(preset_names())}, or null" in line
    assert "7 is no preset" in problems("", "algorithm=7")[0]


@pytest.mark.parametrize(
    ("text", "override", "name", "nearest"),
    [
        ("actr: {path: x}", None, "actr", "actor"),
        ("actor: {lr: 1}", None, "actor.lr", "actor.optimizer.lr"),
        ("actor: {optimiser: {lr: 1}}", None, "actor.optimiser", "actor.optimizer"),
        ("", "gconfig.n_sample=3", "gconfig.n_sample", "gconfig.n_samples"),
        ("", "max_new_tokens=3", "max_new_tokens", "gconfig.max_new_tokens"),
        ("", "actor.reward_norm.mean_levels=group", "actor.reward_norm.mean_levels", "actor.reward_norm.mean_level"),
        ("valid_dataset: {pth: x}", None, "valid_dataset.pth", "valid_dataset.path"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest(text: str, override: str, name: str, nearest: str) -> None:
    (line,) = problems(text, *([override] if override else []))
    assert line.startswith(f"{name}: unknown key in ")
    assert line.endswith(f"did you mean {nearest}?")
    assert ("the command line" in line) == bool(override)


def test_all_unknown_keys_are_listed_at_once() -> None:
    lines = problems("actr: 1\ngconfig: {n_sample: 2}", "sed=3")
    assert [line.partition(":")[0] for line in lines] == ["actr", "gconfig.n_sample", "sed"]


def test_a_dotted_key_in_yaml_is_told_to_be_nested() -> None:
    assert problems("actor.path: x") == ["actor.path: unknown key in configuration; write it nested, one level per dot"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=1.5", "seed: 1.5 is not a whole number; allowed: a whole number >= 0"),
        ("seed=true", "seed: true is not a whole number; allowed: a whole number >= 0"),
        ("seed=null", "seed: null is not a value; allowed: a whole number >= 0"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr: 'fast' is not a number; allowed: a number >= 0"),
        ("gconfig.greedy=3", "gconfig.greedy: 3 is not true or false; allowed: true or false"),
        ("gconfig.stop=x", "gconfig.stop: 'x' is not a list; allowed: a list of texts"),
        (
            "gconfig.stop_token_ids=[a]",
            "gconfig.stop_token_ids: ['a'] is not a whole number; allowed: a list of whole numbers",
        ),
        ("workflow.args=3", "workflow.args: 3 is not a mapping; allowed: a mapping"),
        ("rollout=null", "rollout: null is not a value; allowed: a section"),
        ("rollout=3", "rollout: 3 is not a section; allowed: a section"),
        ("valid_dataset=x", "valid_dataset: 'x' is not a section; allowed: a section, or null"),
        ("actor.path=[1]", "actor.path: [1] is not text; allowed: text"),
        ("trial_name=on", "trial_name: true is not text (put quotes around it); allowed: text"),
        ("actor.c_clip=", "actor.c_clip: '' is not a number; allowed: a number > 1, or null"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_is_allowed(override: str, line: str) -> None:
    assert problems("", override) == [line]


def test_texts_that_are_numbers_and_yaml_words_that_are_choices_are_accepted() -> None:
    config = from_yaml_text(
        "seed: '12'\ntrial_name: 2024\nactor: {optimizer: {lr: '1e-6'}, mb_spec: {max_tokens_per_mb: 1e4}}",
        ["stats_logger.progress=off", "gconfig.temperature=1", "tokenizer_path=", "saver.at_end='false'"],
    )
    assert config.seed == 12
    assert config.trial_name == "2024"
    assert config.actor.optimizer.lr == 1e-6
    assert config.actor.mb_spec.max_tokens_per_mb == 10000
    assert config.stats_logger.progress == "off"
    assert isinstance(config.gconfig.temperature, float)
    assert config.tokenizer_path == ""
    assert config.saver.at_end is False


@pytest.mark.parametrize("override", ["seed", "=3", "--seed=3", "a..b=1", ".seed=1", "seed =3"])
def test_what_is_no_override_is_refused(override: str) -> None:
    assert "is no override; allowed: key=value" in problems("", override)[0]


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml:\n  cannot read the file: No such file"):
        load(tmp_path / "absent.yaml")
    for text, words in (
        ("a: [1", "is not YAML: while parsing"),
        ("seed: 1\nseed: 2", "found duplicate key seed"),
        ("- 1", "is not a mapping"),
    ):
        assert words in problems(text)[0]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text file"):
        load(binary)


def test_free_arguments_keep_any_key() -> None:
    config = from_yaml_text("workflow: {args: {turns: 2, nested: {a: [1, x]}}}", ["reward.args.strict=true"])
    assert config.workflow.args == {"turns": 2, "nested": {"a": [1, "x"]}}
    assert config.reward.args == {"strict": True}


PIECES = ("${", "${a}", "\\", "}", " ", ":", " #", "'", '"', "\n", "- ", "?", "%", "null", "1e3", "\t", "\x7f")
PIECES += ("é", "\u2028", "😀")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(TEXTS, TEXTS, st.lists(TEXTS, max_size=3), st.floats(1e-12, 1e6), st.booleans())
def test_an_effective_configuration_loads_again_to_itself(
    template: str, system: str, stop: list[str], lr: float, partly: bool
) -> None:
    config = from_yaml_text(
        "", ["algorithm=gspo", "actor.eps_clip=0.01", *(["eval_gconfig.top_k=3"] if partly else [])]
    )
    config.train_dataset.prompt_template = template
    config.train_dataset.system_prompt = system
    config.gconfig.stop = stop
    config.actor.optimizer.lr = lr
    config.workflow.args = {"text": template, system: [system, 1, 0.5, None, True], "of": {3: lr}}
    assert from_yaml_text(to_yaml(config)) == config
    assert from_yaml_text(show(config)) == config


def test_the_nearest_key_always_exists() -> None:
    names = {key.name for key in all_keys()}
    for wrong in ("", "x", "actor", "actor.optimizer.learning_rate", "ppo.critic.lr", "§"):
        assert nearest_key(wrong) in names


def test_every_key_has_a_meaning_and_a_legal_type() -> None:
    for key in all_keys():
        assert key.meaning, key.name
        assert "\n" not in key.meaning
        assert key.allowed


def test_loading_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("algorithm: grpo\nactor: {path: x}\n")
    script = (
        "import sys, time\n"
        "from pekoe.pipeline.config import check, load, show, snapshot\n"
        f"show.show(load.load({str(file)!r}, ['seed=2']))\n"
        "heavy = {'torch', 'transformers', 'mpi4py', 'datasets', 'huggingface_hub', 'h5py'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.process_time())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert float(run.stdout) < 1.5


def test_models_beside_the_policy_have_its_dtype_unless_they_name_one() -> None:
    beside = "ref: {}\ncritic: {path: c}\nteacher: {dtype: bfloat16}\nreward_model: {path: r}\n"
    config = from_yaml_text(beside + "actor: {dtype: float32}")
    assert (config.ref.dtype, config.critic.dtype, config.reward_model.dtype) == ("float32",) * 3
    assert config.teacher.dtype == "bfloat16"
    assert from_yaml_text(to_yaml(config), ["actor.dtype=bfloat16"]).ref.dtype == "float32"
    assert from_yaml_text(beside).ref.dtype == "bfloat16"


def test_dpo_has_a_reference_also_when_none_is_named() -> None:
    assert from_yaml_text("task: dpo").ref is not None
    assert from_yaml_text("algorithm: grpo", ["task=dpo"]).ref is not None
    assert from_yaml_text("task: dpo\nref: {path: r}").ref.path == "r"
    assert from_yaml_text("task: sft").ref is None


def test_the_overlong_window_is_a_fifth_unless_it_is_named() -> None:
    on = "actor: {overlong_reward_penalty: true}\ngconfig: {max_new_tokens: 20480}"
    assert from_yaml_text(on).actor.overlong_tokens == 4096
    assert from_yaml_text(on, ["actor.overlong_tokens=7"]).actor.overlong_tokens == 7
    assert from_yaml_text(on, ["gconfig.max_new_tokens=3"]).actor.overlong_tokens == 1
    assert from_yaml_text("gconfig: {max_new_tokens: 20480}").actor.overlong_tokens == 0


@pytest.mark.parametrize("text", ["1:30:00", "30:00", "1:30", "01:02:03", "1-12:30:15", "90", "1:99"])
def test_durations_are_not_read_as_numbers_to_the_base_of_60(text: str) -> None:
    for written in (f"cluster:\n  time_limit: {text}  # of the job\n", f"cluster: {{time_limit: {text}}}"):
        assert from_yaml_text(written).cluster.time_limit == text
    assert from_yaml_text("{}", [f"cluster.time_limit={text}"]).cluster.time_limit == text
    assert from_yaml_text(to_yaml(from_yaml_text(written))).cluster.time_limit == text


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_runs_configuration_that_is_cut_off_is_not_filled_with_defaults(tmp_path: Path, share: float) -> None:
    run = RunDirectory(tmp_path)
    write_run_config(run, RunConfig(seed=7))
    assert read_run_config(run) == RunConfig(seed=7)
    text = run.config.read_text()
    end = text.rindex("\n", 0, int(share * len(text))) + 1
    run.config.write_text(text[:end])
    with pytest.raises(ValueError, match="cut off"):
        read_run_config(run)
