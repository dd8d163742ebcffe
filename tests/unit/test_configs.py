from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemons.cli import run
from daemons.specs import write_component_configs
from prime_rl.configs.base import (
    MAX_PROBLEMS,
    MAX_TOML_BYTES,
    MAX_TOML_VALUES,
    ConfigError,
    ConfigParseError,
    build,
    load_config,
    load_toml,
    merge,
    parse_argv,
    parse_set,
    parse_toml,
)
from prime_rl.configs.envs import BUILT_IN_ENVS
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.losses import AipoLossConfig, TisLossConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, doubts, explain, load_run_config, resolve
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.types import MAX_BATCH_BYTES, full_batch_bytes, max_batch_bytes

MINIMAL = """\
batch_size = 8
rollouts_per_example = 4
[model]
name = "models/base"
[[env]]
id = "reverse-text"
"""
LIMITS = TrainerLimits(model="models/base", max_seq_len=128, max_rank=16, alpha=32.0)


def run_toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "orch.toml"
    path.write_text(text)
    return path


def test_the_four_required_keys_are_enough(tmp_path: Path) -> None:
    config = load_run_config(run_toml(tmp_path, MINIMAL))
    assert check_against_trainer(config, LIMITS) == []
    resolved = resolve(config, LIMITS)
    assert (resolved.seq_len, resolved.model.lora.rank, resolved.model.lora.alpha) == (128, 16, 32.0)


@pytest.mark.parametrize("key", ["batch_size", "rollouts_per_example", "model", "env"])
def test_each_of_them_is_missed_by_name(tmp_path: Path, key: str) -> None:
    lines = MINIMAL.splitlines(keepends=True)
    drop = {"model": lines[2:4], "env": lines[4:6]}.get(key) or [line for line in lines if line.startswith(key)]
    text = "".join(line for line in lines if line not in drop)
    with pytest.raises(ConfigError, match=f"{key}: required, but missing"):
        load_run_config(run_toml(tmp_path, text))


@pytest.mark.parametrize(
    ("extra", "key", "words"),
    [
        ("[model.lora]\nrnk = 3", "model.lora.rnk", "did you mean 'rank'"),
        ("[optim]\nlr = 'fast'", "optim.lr", "found 'fast'"),
        ("[optim]\nlr = -1", "optim.lr", "greater than 0"),
        ("[[env]]\nid = 'chess'", "env.1.id", "reverse-text"),
        ("[[env]]\nid = 'reasoning-gym:chain_sums'", "env.1.id", "no family 'chain_sums'; did you mean 'chain_sum'?"),
        ("[[env]]\nid = 'reasoning-gym:graph_color'", "env.1.id", "graph_color gives its own right answer no reward"),
        ("[[env]]\nid = 'reasoning-gym:gcd'\nargs = { size = 3 }", "env.1", "args: size: unknown key"),
        ("[sampling]\ntemperature = 0", "sampling.temperature", "greater than or equal to 0.01"),
        ("[sampling]\ntemperature = 1e-39", "sampling.temperature", "greater than or equal to 0.01"),
        ("[sampling]\nmin_p = 1e-320", "sampling.min_p", "found 1e-320: must be 0, or 1e-06 to 1"),
        ("[sampling]\ntop_p = nan", "sampling.top_p", "found nan: must be"),
        ("[sampling]\nmax_tokens = 2147483648", "sampling.max_tokens", "must be 1 to 2147483647"),
        ("[eval.sampling]\ntemperature = 1e-9", "eval.sampling.temperature", "must be 0, or 0.01 to 2"),
        ("[loss]\ntype = 'ppo'", "loss.type", "found 'ppo': expected one of 'aipo', 'tis'"),
        ("[loss]\ntype = 3", "loss.type", "found 3: expected one of 'aipo'"),
        ("[loss]\ndetla = 3", "loss.detla", "unknown key for type = 'aipo'; did you mean 'delta'?"),
        ("[loss]\ntype = 'gspo'\ndelta = 8", "loss.delta", "unknown key for type = 'gspo'; valid keys: clip_high"),
        ("[loss]\ntype = 'tis'\nlevel = 'word'", "loss.level", "'token' or 'sequence'"),
        ("[loss]\ntype = 'tis'\ncap = 0", "loss.cap", "greater than 0"),
        ("[loss]\ntype = 'icepop'\nalpha = 6", "loss", "alpha: found 6: must be at most beta = 5"),
        ("[loss]\ntype = 'mis'\nlow = 1.5", "loss", "low: found 1.5: must be at most high = 1.01"),
        ("[loss]\ntype = 'cispo'\nlower = 6", "loss", "lower: found 6: must be at most upper = 5"),
        ("[loss]\ntype = 'dppo'\nlow = 1.5", "loss.low", "less than or equal to 1"),
        ("[loss]\ntype = 'dapo'\nclip_low = -0.1", "loss.clip_low", "greater than or equal to 0"),
        ("[loss]\ntype = 'dr_grpo'\nlength = 0", "loss.length", "greater than or equal to 1"),
        ("[loss]\nkl_coef = inf", "loss.kl_coef", "finite"),
        ("[loss]\ndelta = nan", "loss.delta", "greater than 0"),
        ("loss = 3", "loss", "found 3"),
    ],
)
def test_each_error_says_key_found_and_allowed(tmp_path: Path, extra: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_toml(tmp_path, MINIMAL + extra if extra.startswith("[") else f"{extra}\n{MINIMAL}"))
    (problem,) = caught.value.problems
    assert problem.key == key and words in problem.message and "\n" not in problem.message
    assert explain(caught.value).startswith("Error parsing orchestrator config")
    assert str(tmp_path) in explain(caught.value)


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_toml(tmp_path, f"{MINIMAL}[optim]\nlr = 0\n[ckpt]\nkeep = 1\n"))
    assert [problem.key for problem in caught.value.problems] == ["optim.lr", "ckpt.keep"]


def test_batch_size_must_be_whole_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found 10: must be a multiple of rollouts_per_example = 4"):
        load_run_config(run_toml(tmp_path, MINIMAL.replace("batch_size = 8", "batch_size = 10")))


def test_two_environments_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="duplicate names"):
        load_run_config(run_toml(tmp_path, MINIMAL + "[[env]]\nid = 'reverse-text'\n"))


@pytest.mark.parametrize(("text", "line"), [("batch_size = \n", 1), (MINIMAL + "[optim\n", 7), ("a = 1\na = 2\n", 2)])
def test_bad_toml_is_named_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigParseError, match=f"line {line}: not valid TOML"):
        load_run_config(run_toml(tmp_path, text))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{" + "a." * 300 + "a = 1}", "nested too deeply"),
        ("{a = " + "9" * 5_000 + "}", "over 64 bits"),
        ("{a = 0x" + "f" * 5_000 + "}", "over 64 bits"),
    ],
    ids=["nested", "digits", "hexadecimal digits"],
)
def test_what_cannot_be_passed_on_to_other_processes_is_not_valid(tmp_path: Path, value: str, words: str) -> None:
    with pytest.raises(ConfigParseError, match=words):
        load_run_config(run_toml(tmp_path, f"{MINIMAL}args = {value}\n"))


@pytest.mark.parametrize(
    "text",
    ["".join(f"key{number} = 1\n" for number in range(MAX_TOML_VALUES)), f"keys = [{'{},' * MAX_TOML_VALUES}]\n"],
    ids=["keys", "entries of a list"],
)
def test_a_config_of_very_many_values_is_refused_before_each_of_them_is_checked(tmp_path: Path, text: str) -> None:
    path = run_toml(tmp_path, text + MINIMAL)
    with pytest.raises(ConfigError, match=rf"has 100\d\d values, expected at most {MAX_TOML_VALUES}: keep data in"):
        load_run_config(path)
    path.write_text(text + MINIMAL + "#" * MAX_TOML_BYTES)
    with pytest.raises(ConfigError, match=rf"has \d+ bytes, expected at most {MAX_TOML_BYTES}"):
        load_run_config(path)
    with pytest.raises(ConfigError, match=rf"orch.toml: has \d+ bytes, expected at most {MAX_TOML_BYTES}"):
        parse_toml("#" * (MAX_TOML_BYTES + 1), "orch.toml")


def test_of_very_many_problems_the_first_are_told_and_none_takes_longer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_toml(tmp_path, "".join(f"key{number} = 1\n" for number in range(1_000)) + MINIMAL))
    assert len(caught.value.problems) == MAX_PROBLEMS


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found: "):
        load_run_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder: must be a regular file"):
        load_run_config(tmp_path)
    for data, words in (
        (b"a = '\xe9'", r"not UTF-8 text \(byte 5\): save it as UTF-8"),
        (b"\xff\xfe", "begins with a byte order mark of UTF-16: save it as UTF-8"),
        (MINIMAL.encode("utf-16"), "begins with a byte order mark of UTF-16: save it as UTF-8"),
    ):
        (tmp_path / "b.toml").write_bytes(data)
        with pytest.raises(ConfigParseError, match=words):
            load_run_config(tmp_path / "b.toml")


def test_a_byte_order_mark_of_utf8_changes_nothing(tmp_path: Path) -> None:
    path = run_toml(tmp_path, MINIMAL)
    plain = load_run_config(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_run_config(path) == plain


@pytest.mark.parametrize(
    ("extra", "key", "words"),
    [
        ("[model.lora]\nrank = 17", "model.lora.rank", "at most the trainer's 16"),
        ("[sampling]\nmax_tokens = 128", "sampling.max_tokens", "below seq_len = 128"),
    ],
)
def test_what_the_trainer_cannot_serve(tmp_path: Path, extra: str, key: str, words: str) -> None:
    config = load_run_config(run_toml(tmp_path, f"{MINIMAL}{extra}\n"))
    (problem,) = check_against_trainer(config, LIMITS)
    assert problem.key == key and words in problem.message


def test_a_batch_that_no_trainer_can_hold_is_refused(tmp_path: Path) -> None:
    config = load_run_config(run_toml(tmp_path, MINIMAL))
    seq_len = LIMITS.max_seq_len
    (problem,) = check_against_trainer(config.model_copy(update={"batch_size": 4_000_000}), LIMITS)
    assert str(problem) == (
        f"batch_size: found 4000000: with seq_len = {seq_len} a batch has up to 21972 MiB, must be at most 1024; "
        "make one of them smaller"
    )
    most = MAX_BATCH_BYTES // full_batch_bytes(1, seq_len)
    assert check_against_trainer(config.model_copy(update={"batch_size": most}), LIMITS) == []
    assert check_against_trainer(config.model_copy(update={"batch_size": most + 1}), LIMITS) != []
    # What a full batch takes is read.
    assert max_batch_bytes(most, seq_len) >= full_batch_bytes(most, seq_len)
    assert max_batch_bytes(4_000_000, seq_len) == MAX_BATCH_BYTES, "whatever a config asks for"


def test_a_workspace_refuses_a_run_for_whose_versions_it_has_no_room(tmp_path: Path) -> None:
    for said, allowed in (({}, 2), ({"max_async_level": 4}, 4), ({"trainer": {"max_async_level": 1}}, 1)):
        limits = TrainerLimits.of(
            build(SystemConfig, {"model": {"name": "models/base"}, **said}, "system.toml").trainer
        )
        fits = load_run_config(run_toml(tmp_path, MINIMAL), {"max_async_level": allowed})
        assert check_against_trainer(fits, limits) == []
        (problem,) = check_against_trainer(fits.model_copy(update={"max_async_level": allowed + 1}), limits)
        assert str(problem) == (
            f"max_async_level: found {allowed + 1}: must be at most {allowed}, "
            "this workspace's limit (max_async_level in its system file)"
        )
    without_a_workspace = load_run_config(run_toml(tmp_path, MINIMAL), {"max_async_level": 16})
    assert check_against_trainer(without_a_workspace, LIMITS) == []


def test_another_model_or_longer_samples_are_refused(tmp_path: Path) -> None:
    config = load_run_config(run_toml(tmp_path, MINIMAL), {"seq_len": 129, "model": {"name": "other"}})
    problems = check_against_trainer(config, LIMITS)
    assert [problem.key for problem in problems] == ["model.name", "seq_len"]
    assert problems[1].message.endswith("128; a longer one for all runs: prl down, then prl up --seq_len N")
    config = load_run_config(run_toml(tmp_path, MINIMAL), {"sampling": {"max_tokens": 128}})
    (problem,) = check_against_trainer(config, LIMITS)
    assert problem.key == "sampling.max_tokens" and problem.message.endswith("then prl up --seq_len N")


def test_one_model_under_two_paths_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    config = load_run_config(run_toml(tmp_path, MINIMAL), {"model": {"name": str(tmp_path / "link")}})
    limits = TrainerLimits(model=str(tmp_path / "base"), max_seq_len=128, max_rank=16)
    assert check_against_trainer(config, limits) == []


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text('seq_len = 64\n[model]\nname = "x"\n')
    config = parse_argv(
        TrainerConfig, ["@", str(path), "--seq-len", "32", "--model.lora.rank=4", "--log.level", "debug"]
    )
    assert (config.seq_len, config.model.name, config.model.lora and config.model.lora.rank) == (32, "x", 4)
    assert config.log.level == "debug"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["@"], "expected a TOML file after '@'"),
        (["--seq-len"], "missing value"),
        (["seq_len=3"], "unexpected argument"),
        (["--seq-lne", "3"], "did you mean 'seq_len'"),
        (["@", "/none.toml"], "not found: /none.toml"),
    ],
)
def test_wrong_command_lines(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_argv(TrainerConfig, argv)


def test_a_wrong_flag_is_not_blamed_on_the_file_alone(tmp_path: Path) -> None:
    path = run_toml(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=rf"^{path} and the command line: max_step: unknown key"):
        parse_argv(OrchestratorConfig, ["@", str(path), "--max-step", "3"])


@pytest.mark.parametrize("config", [TrainerConfig, InferenceConfig])
def test_weights_of_eight_bits_are_refused(config: type[TrainerConfig | InferenceConfig]) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: found 'fp8': must be .*'bfloat16'"):
        parse_argv(config, ["--model.dtype", "fp8"])


def test_set_items_become_one_table() -> None:
    assert parse_set(["a.b=1", "a.c=x y", 'd="1"', "e=[1, 2]"]) == {"a": {"b": 1, "c": "x y"}, "d": "1", "e": [1, 2]}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_set(["novalue"])


def test_merge_is_deep_and_changes_neither() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merge(base, {"a": {"b": 3}, "d": []}) == {"a": {"b": 3, "c": 2}, "d": []}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1]}


def test_a_system_says_things_once(tmp_path: Path) -> None:
    data = {
        "output_dir": str(tmp_path),
        "model": {"name": "m"},
        "lora": {"rank": 4},
        "seq_len": 77,
        "max_concurrent_runs": 2,
        "inference": {"model": {"max_model_len": 99}},
    }
    system = build(SystemConfig, data, "system.toml")
    assert system.trainer.model.name == system.inference.model.name == "m"
    assert system.trainer.output_dir == system.inference.output_dir == tmp_path
    assert (system.trainer.seq_len, system.inference.model.max_model_len) == (77, 99)
    assert system.trainer.model.lora == system.inference.model.lora == system.lora
    assert system.trainer.max_concurrent_runs == system.inference.max_concurrent_runs == 2


def test_slots_that_are_left_to_the_memory_become_one_number_for_both() -> None:
    system = build(SystemConfig, {"max_concurrent_runs": "auto"}, "system.toml")
    assert system.max_concurrent_runs == system.trainer.max_concurrent_runs == "auto" and system.trainer.num_slots == 0
    settled = system.with_slots(9)
    found = settled.max_concurrent_runs, settled.trainer.max_concurrent_runs, settled.inference.max_concurrent_runs
    assert found == (9, 9, 9)
    assert build(SystemConfig, settled.model_dump(exclude_none=True), "again") == settled
    whole = build(SystemConfig, {"max_concurrent_runs": "auto", "full_finetune": True}, "system.toml")
    assert whole.max_concurrent_runs == whole.trainer.num_slots == whole.inference.max_concurrent_runs == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"max_concurrent_runs": 0}, "max_concurrent_runs: found 0: must be 1 to 1024, or 'auto'"),
        ({"max_concurrent_runs": "many"}, "max_concurrent_runs: found 'many': must be 1 to 1024, or 'auto'"),
        ({"trainer": {"max_tokens_per_micro_batch": 7}}, "found 7: must be 8 or more, or 'auto'"),
        ({"trainer": {"max_concurrent_runs": "auto"}}, "set it at the top level only"),
        ({"max_concurrent_runs": "auto", "inference": {"max_concurrent_runs": 4}}, "set it at the top level only"),
        ({"max_concurrent_runs": "auto", "trainer": {"max_concurrent_runs": 4}}, "set it at the top level only"),
    ],
)
def test_a_wrong_number_of_slots_is_one_problem(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(SystemConfig, data, "system.toml")
    (problem,) = caught.value.problems
    assert words in str(problem)


def test_a_mistake_in_what_is_set_once_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(SystemConfig, {"lora": {"rnk": 4, "rank": 0}, "max_async_level": 17}, "system.toml")
    assert sorted(problem.key for problem in caught.value.problems) == ["lora.rank", "lora.rnk", "max_async_level"]


def test_a_loss_is_chosen_by_its_type_with_its_own_constants(tmp_path: Path) -> None:
    path = run_toml(tmp_path, MINIMAL + "[loss]\ndelta = 3\n")
    config = load_run_config(path)
    assert config.loss == AipoLossConfig(delta=3)
    assert parse_argv(OrchestratorConfig, ["@", str(path), "--loss.delta", "2"]).loss == AipoLossConfig(delta=2)
    tis = load_run_config(run_toml(tmp_path, MINIMAL), {"loss": {"type": "tis", "level": "sequence"}})
    assert isinstance(tis.loss, TisLossConfig) and tis.loss.limit == 5
    assert tis.replace(max_steps=3).loss == tis.loss
    with pytest.raises(ConfigError, match="delta: unknown key for type = 'gspo'"):
        parse_argv(
            OrchestratorConfig,
            ["@", str(run_toml(tmp_path, path.read_text() + "[loss]\ndelta = 3\n")), "--loss.type", "gspo"],
        )


def test_what_stands_for_the_length_of_a_sample(tmp_path: Path) -> None:
    path = run_toml(tmp_path, MINIMAL)
    loss = {"type": "dr_grpo"}
    config = load_run_config(path, {"loss": loss, "sampling": {"max_tokens": 48}})
    assert config.loss_length == 48
    assert load_run_config(path, {"loss": {**loss, "length": 100}}).loss_length == 100


def test_a_whole_model_has_no_base_to_compare_with(tmp_path: Path) -> None:
    config = load_run_config(run_toml(tmp_path, MINIMAL), {"loss": {"kl_coef": 0.1}, "sampling": {"max_tokens": 8}})
    assert check_against_trainer(config, LIMITS) == []
    (problem,) = check_against_trainer(config, replace(LIMITS, max_rank=None))
    assert problem.key == "loss.kl_coef" and "no base" in problem.message


def test_a_workspace_of_the_whole_model_says_that_to_both_parts_and_reads_itself_again(tmp_path: Path) -> None:
    data = {"full_finetune": True, "broadcast": {"type": "nccl", "port": 5000}, "output_dir": str(tmp_path)}
    system = build(SystemConfig, data, "system.toml")
    assert system.max_concurrent_runs == system.trainer.max_concurrent_runs == 1
    assert system.lora is system.trainer.model.lora is system.inference.model.lora is None
    assert system.trainer.broadcast == system.inference.broadcast == system.broadcast and system.broadcast.port == 5000
    write_component_configs(system, OutputDir(tmp_path))  # TOML has no null
    for name, part in (("system", system), ("trainer", system.trainer), ("inference", system.inference)):
        written = load_toml(OutputDir(tmp_path).component_config(name)) | {"output_dir": str(tmp_path)}
        assert build(type(part), written, name) == part


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"full_finetune": True, "lora": {"rank": 4}}, "remove [lora]"),
        ({"full_finetune": True, "max_concurrent_runs": 2}, "must be 1 (or omitted)"),
        ({"broadcast": {"type": "nccl"}}, "requires full_finetune = true"),
        ({"full_finetune": True, "trainer": {"model": {"lora": {}}}}, "not in [trainer] or [inference]"),
        ({"inference": {"full_finetune": True, "model": {"lora": None}}}, "not in [trainer] or [inference]"),
        ({"full_finetune": True, "inference": {"broadcast": {"type": "nccl"}}}, "set it in [broadcast] only"),
        ({"full_finetune": "perhaps"}, "full_finetune"),
    ],
)
def test_what_does_not_go_with_the_whole_model_is_one_line(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(SystemConfig, data, "system.toml")
    (problem,) = caught.value.problems
    assert words in f"{problem.key}: {problem.message}" and "\n" not in problem.message


@pytest.mark.parametrize(
    ("model", "max_rank", "words"),
    [
        ({"lora": {}}, None, "model.lora: this workspace fine-tunes the whole model: remove it"),
        ({"lora": {"rank": 4}}, None, "model.lora.rank: this workspace fine-tunes"),
        ({"full_finetune": False}, None, "model.full_finetune: found false: this workspace fine-tunes"),
        ({"full_finetune": True}, 8, "a workspace with full_finetune = true in its system file"),
    ],
)
def test_a_run_that_is_in_the_wrong_workspace_hears_what_to_do(
    tmp_path: Path, model: dict[str, Any], max_rank: int | None, words: str
) -> None:
    config = load_run_config(run_toml(tmp_path, MINIMAL), {"model": model, "sampling": {"max_tokens": 8}})
    (problem,) = check_against_trainer(config, replace(LIMITS, max_rank=max_rank))
    assert words in str(problem)


def test_a_run_says_what_it_trains_or_leaves_that_to_the_trainer(tmp_path: Path) -> None:
    def says(model: dict[str, Any]) -> bool | None:
        return load_run_config(run_toml(tmp_path, MINIMAL), {"model": model}).model.trains_whole_model

    assert [says({}), says({"full_finetune": True}), says({"lora": {}})] == [None, True, False]
    with pytest.raises(ConfigError, match=r"remove \[model\.lora\]"):
        says({"full_finetune": True, "lora": {"rank": 4}})
    config = load_run_config(run_toml(tmp_path, MINIMAL))
    assert resolve(config, replace(LIMITS, max_rank=None)).model.trains_whole_model is True
    assert resolve(config, LIMITS).model.trains_whole_model is False


def test_runs_on_the_small_base_model_ask_in_the_words_that_it_was_taught() -> None:
    tables = [load_toml(path) for path in (Path(__file__).parents[2] / "configs").rglob("*.toml")]
    runs = [table.get("run", table) for table in tables if table.get("model", {}).get("name") == "models/base"]
    envs = [env for run in runs for env in run.get("env", []) if env["id"] in BUILT_IN_ENVS]
    assert len(envs) > 5 and [env for env in envs if env.get("args", {}).get("wording") != "short"] == []


DOUBTFUL = {"optim.lr": 0.02, "sampling.max_tokens": 120, "batch_size": 4}


@pytest.mark.parametrize("key", DOUBTFUL)
def test_what_is_valid_and_rarely_meant_is_a_doubt(tmp_path: Path, key: str) -> None:
    path = run_toml(tmp_path, MINIMAL)
    usual = {"sampling": {"max_tokens": 100}}
    assert doubts(load_run_config(path, usual), LIMITS) == []
    config = load_run_config(path, merge(usual, parse_set([f"{key}={DOUBTFUL[key]}"])))
    assert check_against_trainer(config, LIMITS) == []
    [found] = doubts(config, LIMITS)
    assert found.key == key and f"found {DOUBTFUL[key]}" in found.message


def test_a_large_lr_is_no_doubt_of_another_optimizer_or_of_whole_weights(tmp_path: Path) -> None:
    path = run_toml(tmp_path, MINIMAL)
    wild = {"optim": {"lr": 1e3}, "sampling": {"max_tokens": 100}}
    assert [each.key for each in doubts(load_run_config(path, wild), None)] == ["optim.lr"], "no trainer is known"
    assert doubts(load_run_config(path, wild), replace(LIMITS, max_rank=None)) == []
    assert doubts(load_run_config(path, merge(wild, {"optim": {"type": "muon"}})), LIMITS) == []


def test_no_example_has_a_doubt() -> None:
    seen = 0
    for folder in {path.parent for path in (Path(__file__).parents[2] / "configs").rglob("system.toml")}:
        limits = TrainerLimits.of(load_config(SystemConfig, folder / "system.toml").trainer)
        for path in sorted(folder.glob("*.toml")):
            if "rollouts_per_example" in load_toml(path):
                assert doubts(load_run_config(path), limits) == [], path
                seen += 1
    assert seen > 8


def test_validate_and_add_warn_and_do_not_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = run_toml(tmp_path, MINIMAL), ["--output-dir", str(tmp_path / "out"), "--set", "optim.lr=1e3"]
    assert run(["runs", "validate", str(path), *place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] and found["problems"] == []
    [warning] = found["warnings"]
    assert (warning["key"], warning["found"]) == ("optim.lr", 1e3)
    for words in (["validate", str(path)], ["add", str(path)]):
        assert run(["runs", *words, *place]) == 0
        assert f"prl: warning: {path}: optim.lr: found 1000: above 0.01" in capsys.readouterr().err
    assert (tmp_path / "out" / "run_orch").is_dir()
