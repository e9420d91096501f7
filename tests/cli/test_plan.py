"""``deepinfer-sm80 plan`` as a user meets it."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from deepinfer_sm80 import cli
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology.footprint import weights

KEYS = {
    "tp": int,
    "pp": int,
    "dp": int,
    "ep": int,
    "split": list,
    "tp_per_stage": list,
    "legal_stock": bool,
    "fits": bool,
    "servable": bool,
    "cautions": list,
    "why": str,
    "kv_tokens": int,
    "contexts": float,
    "gib_per_rank": list,
    "host_gib": dict,
    "prefill_tok_s": float,
    "decode_ms": float,
}


def run(capsys, *args):
    code = cli.main(["plan", *args])
    return code, capsys.readouterr()


def test_json_has_the_contract_and_is_deterministic(capsys):
    code, first = run(capsys, "--gpus", "6xA100-64GB", "--json")
    assert code == 1, "it takes source replicas"
    layouts = json.loads(first.out)["layouts"]
    for layout in layouts:
        for key, kind in KEYS.items():
            assert type(layout[key]) is kind, key
        assert layout["command"] is None or layout["command"].split("vllm serve")[1]
        assert len(layout["gib_per_rank"]) == sum(layout["tp_per_stage"])
        assert {"experts", "attention", "wo_a", "activations", "graphs", "workspace"} <= set(layout["gib_per_rank"][0])
    assert layouts[0]["fits"]
    assert list(json.loads(first.out)).index("best_servable") < list(json.loads(first.out)).index("layouts")
    assert any("engram_host" in rank for rank in layouts[0]["gib_per_rank"])
    assert run(capsys, "--gpus", "6xA100-64GB", "--json")[1].out == first.out


def test_json_says_how_its_speeds_were_estimated(capsys):
    found = json.loads(run(capsys, "--gpus", "16xA100-40GB", "--hosts", "2", "--context", "32K", "--json")[1].out)
    told = found["estimates"]
    assert told["formulas"][0].startswith("decode step = ")
    assert [line.split(":")[0] for line in told["inputs"]] == [
        "card (data sheet)",
        "nvlink (measured between two NVIDIA H200, docs/multi-gpu.md)",
        "100 Gb/s network (assumed)",
        "hand-over of a hop (measured between two NVIDIA H200)",
        "overhead of a layer's small kernels (assumed)",
    ]
    assert told["prompt"] == 32_768
    assert found["layouts"][0]["read_gib"] > 1
    out = run(capsys, "--gpus", "16xA100-40GB", "--hosts", "2", "--context", "32K")[1].out
    assert " (estimated, prompt of 32,768 tokens)" in out


def test_text_shows_the_answer_its_reckoning_and_the_losers(capsys):
    code, caught = run(capsys, "--gpus", "8xA100-80GB")
    assert code == 0
    for words in ("Best of", "full contexts", "Command:\n  vllm serve", "TFLOP/s x", "estimate", "next ones that fit"):
        assert words in caught.out
    assert "x the best's time" in caught.out


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("8xA100", "A100 was taken as A100-80GB; for another say 8xA100-40GB or 8xA100-64GB."),
        ("8xa800", "a800 was taken as A800-80GB; for another say 8xA800-40GB."),
        ("8x48GB", "48GB was taken as A40-48GB; for another say 8xA6000-48GB."),
        ("16x24GB", "24GB was taken as RTX3090-24GB; for another say 16xA30-24GB or 16xA10-24GB or 16xRTX3090Ti-24GB."),
        ("8xA100-80GB", ""),
        ("8xA6000", ""),
        ("8xMyCard:80GB:900GB/s:150TFLOPS", ""),
    ],
)
def test_a_name_of_several_cards_is_told_which_was_taken(capsys, gpus, said):
    out = run(capsys, "--gpus", gpus)[1].out
    heading = out.split("\n\n")[0].splitlines()
    assert heading[2:] == ([said] if said else [])
    assert json.loads(run(capsys, "--gpus", gpus, "--json")[1].out)["cluster"]["taken"] == said


def test_too_little_memory_says_what_is_possible(capsys):
    code, caught = run(capsys, "--gpus", "16x24GB", "--hosts", "2")
    assert code == 1
    assert "does not hold a context of 1,048,576 tokens" in caught.out
    assert "What fits is a context of" in caught.out
    assert "6xA100-64GB as TP2 x PP3" in caught.out
    assert run(capsys, "--gpus", "2xA100-40GB")[0] == 1


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "--gpus must be"),
        (("--gpus", "6xTPU"), "--gpus must be a number and a known card, got '6xTPU'. Known cards"),
        (("--gpus", "6xA100-64GB", "--tp", "3"), "--tp must be one of 1, 2 with 6 GPUs, got 3"),
        (("--gpus", "16xA100-64GB", "--tp", "16"), "--tp must be one of 1, 2, 4, 8 with 16 GPUs, got 16"),
        (("--gpus", "1xA100-80GB", "--tp", "2"), "--tp must be 1 with 1 GPU, got 2"),
        (("--gpus", "8xA100-80GB", "--tp", "0"), "--tp must be one of 1, 2, 4, 8 with 8 GPUs, got 0"),
        (("--gpus", "8xA100-80GB", "--pp", "3"), "--pp must be one of 1, 2, 4, 8 with 8 GPUs, got 3. Stages share"),
        (("--gpus", "8xA100-80GB", "--dp", "0"), "--dp must be one of 1, 2, 4, 8 with 8 GPUs, got 0. Replicas"),
        (
            ("--gpus", "8xA100-80GB", "--tp", "8", "--pp", "2"),
            "--tp 8 --pp 2 must be sizes of a layout with 8 GPUs: TP x PP x DP = 8, at most 40 stages, got 8 x 2 = 16",
        ),
        (("--smallest", "--tp", "3"), "--tp must be one of 1, 2, 4, 8 in sets of up to 32 GPUs, got 3"),
        (("--smallest", "--tp", "8", "--dp", "8"), "TP x PP x DP = 32 or less, at most 40 stages, got 8 x 8 = 64"),
        (("--smallest", "--hosts", "2"), "--hosts must be left out where --gpus is, got 2"),
        (("--smallest", "--link", "pcie3"), "--link must be left out where --gpus is, got pcie3"),
        (("--smallest", "--all"), "--all must be left out where --gpus is, got --all. The smallest"),
        (("--gpus", "8xA100-80GB", "--context", "2M"), "--context must be 1 to 1,048,576 tokens"),
        (("--gpus", "8xA100-80GB", "--context", "0"), "longest, got 0. Ask for"),
        (("--gpus", "8xA100-80GB", "--context", "0K"), "longest, got 0K. Ask for"),
        (("--gpus", "8xA100-80GB", "--context", "2000000"), "longest, got 2000000. Ask for"),
        (("--gpus", "1xA100-80GB", "--hosts", "2"), "--hosts must be 1 with 1 GPU, got 2"),
        (("--gpus", "8xA100-80GB", "--context", "much"), "--context must be tokens"),
        (("--gpus", "8xA100-80GB", "--streams", "0"), "--streams must be 1 to 1024, got 0. Requests"),
        (("--gpus", "8xA100-80GB", "--speculation", "-1"), "--speculation must be 0 to"),
        (
            ("--gpus", "8xA100-80GB", "--context", "1.5M"),
            "1 to 1,048,576 tokens, the model's longest, got 1.5M (1,572,864",
        ),
        (
            ("--gpus", "8xA100-80GB", "--context", "1e6"),
            "--context must be tokens, such as 1M, 128K or 100000, got '1e6'",
        ),
        (("--gpus", "8xA100-80GB", "--context", "0.5"), "--context must be tokens"),
        (("--gpus", "8xA100-80GB", "--context", "9" * 5000), "--context must be tokens"),
        (("--gpus", "8xA100-80GB", "--context", "\u0661K"), "--context must be tokens"),
        (
            ("--gpus", "8xA100-80GB", "--streams", "1e3"),
            "--streams must be a whole number, got '1e3'. Write it in digits.",
        ),
        (("--gpus", "8xA100-80GB", "--hosts", "two"), "--hosts must be a whole number"),
        (("--gpus", "8xA100-80GB", "--tp", "1.5"), "--tp must be a whole number"),
        (("--gpus", "8xA100-80GB", "--speculation", "99"), "--speculation must be 0 to 16, got 99"),
        (("--smallest", "--hosts", "0"), "--hosts must be left out where --gpus is, got 0"),
        (("--smallest", "--gpus", ""), "--gpus must be a number and a card, such as 8xA100-80GB, got ''"),
        (("--smallest", "--ram", "17GB"), "--ram must be 18GB or more"),
        (("--gpus", "8xA100-80GB", "--checkpoint", "nowhere"), "--checkpoint must be a directory"),
        (("--gpus", "8xA100-80GB", "--checkpoint", "nowhere"), "nowhere/config.json (no such file or directory)"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(capsys, args, sentence):
    code, caught = run(capsys, *args)
    assert (code, caught.out) == (2, "")
    assert sentence in caught.err
    assert caught.err.count("\n") == 1
    assert caught.err.startswith("deepinfer-sm80 plan: --"), "the command is named once"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("[]", "what describes no model"),
        ("null", "what describes no model"),
        ('{"model_type": "deepseek_v41", "text_config": 3}', "found 'deepseek_v41' without a text_config"),
        ("{", "what is no JSON in line 1"),
        ("[" * 100_000, "what is no JSON"),
        ('{"model_type": "llama"}', "found 'llama' without a text_config"),
    ],
)
def test_a_foreign_checkpoint_is_one_sentence(capsys, tmp_path, content, found):
    (tmp_path / "config.json").write_text(content)
    code, caught = run(capsys, "--gpus", "8xA100-80GB", "--checkpoint", str(tmp_path))
    assert (code, caught.out, caught.err.count("\n")) == (2, "", 1)
    assert found in caught.err


def test_a_part_of_a_million_tokens_is_a_context(capsys):
    assert json.loads(run(capsys, "--gpus", "8xA100-80GB", "--context", "0.5M", "--json")[1].out)["context"] == 524_288


@pytest.mark.parametrize(
    ("args", "held"),
    [
        (("--gpus", "8xA100-80GB"), True),
        (("--gpus", "8xA100-80GB", "--all"), True),
        (("--gpus", "8xA100-80GB", "--smallest"), True),
        (("--gpus", "6xA100-64GB"), False),  # with source replicas
        (("--gpus", "6xA100-64GB", "--all"), False),
        (("--gpus", "6xA100-64GB", "--dp", "3", "--context", "1007616"), True),
        (("--gpus", "16xRTX3090"), False),  # a shorter context is offered
        (("--gpus", "16xRTX3090", "--context", "176128"), True),
        (("--gpus", "16xRTX3090", "--context", "180224", "--streams", "1"), False),
        (("--smallest", "--tp", "8"), True),
        (("--smallest", "--tp", "2", "--pp", "5"), False),  # with source replicas
    ],
)
def test_the_exit_code_the_last_line_and_the_json_say_whether_vllm_serves_what_was_asked(capsys, args, held):
    code, caught = run(capsys, *args)
    assert code == (0 if held else 1)
    start = f"Exit code {code}: held by {'a' if held else 'no'} layout that vLLM serves: "
    *_, blank, last = caught.out.splitlines()
    assert (blank, last.startswith(start)) == ("", True)
    named = dict(itertools.pairwise(args))
    assert f": one context of {int(named.get('--context', 1 << 20)):,} tokens, in a cache that" in last
    assert f" {named.get('--streams', 4)} stream(s) share" in last
    assert all(f"--{size} {named[f'--{size}']}" in last for size in ("tp", "pp", "dp") if f"--{size}" in named)
    code, caught = run(capsys, *args, "--json")
    assert (code, json.loads(caught.out)["held"]) == (0 if held else 1, held)


def test_a_shorter_context_is_offered_with_the_host_memory_it_takes(capsys):
    out = run(capsys, "--gpus", "16xRTX3090")[1].out
    host = json.loads(run(capsys, "--gpus", "16xRTX3090", "--json")[1].out)["best_servable"]["layout"]["host_gib"]
    assert sum(host.values()) == pytest.approx(236.8, abs=0.1)
    assert "\nHost memory: 237 GiB per host: Engram tables 189, processes and system 48 (assumed).\nCommand:\n" in out


def test_the_weights_that_are_named_are_the_checkpoints_without_the_tables(capsys):
    out = run(capsys, "--gpus", "2xA100-40GB")[1].out
    found = weights(ModelConfig())
    gib = (found.stored() - found.stored("engram_tables")) / 2**30
    assert f"that go to the GPUs, all but Engram's tables, are {gib:.0f} GiB in the checkpoint, vLLM may use" in out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_smallest_set_is_code_1(capsys, form):
    code, caught = run(capsys, "--smallest", "--tp", "1", "--pp", "1", "--dp", "1", *form)
    assert code == 1
    assert json.loads(caught.out)["smallest"] == [] if form else "A100-80GB: no set of up to 32 GPUs\n" in caught.out


def test_json_says_what_is_possible_where_nothing_fits(capsys):
    code, caught = run(capsys, "--gpus", "2xA100-40GB", "--json")
    assert code == 1
    assert "Smallest sets that hold one context" in json.loads(caught.out)["instead"]
    assert json.loads(run(capsys, "--gpus", "8xA100-80GB", "--json")[1].out)["instead"] == ""


def test_json_has_columns_and_tile_efficiency_per_stage(capsys):
    layouts = json.loads(run(capsys, "--gpus", "8xA100-80GB", "--json")[1].out)["layouts"]
    found = {(tuple(x["tp_per_stage"]), x["dp"], x["ep"]): (x["expert_columns"], x["tile_efficiency"]) for x in layouts}
    assert found[(8,), 1, 1] == ([320], [0.9])
    assert found[(8,), 1, 8] == ([2304], [1.0])
    assert found[(4,), 2, 1] == ([320], [0.9])
    assert found[(4, 4), 1, 1] == ([576, 576], [1.0, 1.0])
    assert found[(2, 2, 4), 1, 1] == ([1152, 1152, 576], [1.0] * 3)


def test_tables_on_the_gpu_are_no_host_memory(capsys):
    args = ("--gpus", "8xA100-80GB", "--tp", "8")
    for ram, held in (("256GB", {"engram_host"}), ("128GB", {"engram_tables"}), ("31GB", {"engram_disk"})):
        layout = json.loads(run(capsys, *args, "--ram", ram, "--json")[1].out)["layouts"][0]
        rank = layout["gib_per_rank"][0]
        assert {name for name in rank if name.startswith("engram_")} == held
        assert rank[held.pop()] == pytest.approx(23.6, abs=0.1)


def test_what_replay_gives_and_takes_is_said(capsys):
    layouts = json.loads(run(capsys, "--gpus", "8xA100-80GB", "--json")[1].out)["layouts"]
    out = run(capsys, "--gpus", "8xA100-80GB", "--all")[1].out
    lines = [line for line in out.splitlines() if line.startswith("  decoder replay ")]
    other = [float(line.split(" would be ")[1].split()[0].replace(",", "")) for line in lines]
    assert len({layout["decoder_replay"] for layout in layouts}) == 2
    for layout, line, speed in zip(layouts, lines, other, strict=True):
        if layout["decoder_replay"]:
            assert "  available; without it prefill would be" in line
            assert speed == pytest.approx(layout["prefill_replay_off_tok_s"], abs=0.6)
            assert speed <= layout["prefill_tok_s"] + 0.6, "no gain where an earlier stage is the slowest"
        else:
            assert "  not available; with it prefill would be" in line
            assert speed + 0.6 >= layout["prefill_tok_s"] == layout["prefill_replay_off_tok_s"]
    gains = [abs(speed / layout["prefill_tok_s"] - 1) for layout, speed in zip(layouts, other, strict=True)]
    assert {layout["decoder_replay"] for layout, gain in zip(layouts, gains, strict=True) if gain > 0.4} == {
        True,
        False,
    }


def test_a_prefill_speed_of_replicas_is_called_their_sum(capsys):
    args = ("--gpus", "8xA100-80GB", "--tp", "2", "--pp", "1")
    row = json.loads(run(capsys, *args, "--json")[1].out)["layouts"][0]
    assert row["dp"] == 4
    assert row["prefill_one_prompt_tok_s"] == pytest.approx(row["prefill_tok_s"] / 4, abs=0.1)
    out = run(capsys, *args)[1].out
    said = f"{row['prefill_tok_s']:,.0f} tok/s over 4 replicas, one prompt {row['prefill_one_prompt_tok_s']:,.0f} ("
    assert f"  prefill         {said}" in out
    others = [line for line in out.splitlines() if "x the best's time" in line]
    assert others
    assert all(" tok/s over 4 replicas against " in line and " over 4 replicas, step" in line for line in others)
    assert "replicas, one prompt" not in run(capsys, "--gpus", "8xA100-80GB", "--dp", "1", "--all")[1].out


def test_all_shows_every_layout_in_full(capsys):
    code, caught = run(capsys, "--gpus", "8xA100-80GB", "--all")
    assert code == 0
    count = len(json.loads(run(capsys, "--gpus", "8xA100-80GB", "--json")[1].out)["layouts"])
    for words in ("routed experts, FP4", "decoder replay ", "expert columns ", "prefill  ", "  KV cache ", "  cuts "):
        assert caught.out.count(words) == count, words
    assert caught.out.count("Command:\n") + caught.out.count("No command: ") == count
    assert caught.out.startswith("8xA100-80GB, 1 host(s)")
    assert f"\n{count}. " in caught.out
    assert "does not fit; " in caught.out


def test_smallest_sets_need_no_gpus(capsys):
    code, caught = run(capsys, "--smallest", "--context", "128K")
    assert code == 0
    assert caught.out.startswith("Smallest sets that hold one context of 131,072 tokens:\n")
    assert "xA100-80GB as " in caught.out


@pytest.mark.parametrize("gpus", [(), ("--gpus", "8xA100-80GB")])
def test_smallest_sets_as_json(capsys, gpus):
    code, caught = run(capsys, *gpus, "--smallest", "--context", "128K", "--json")
    found = json.loads(caught.out)
    assert code == 0
    assert ("layouts" in found) == bool(gpus)
    assert found["context"] == 131072
    assert found["smallest"]
    for entry in found["smallest"]:
        assert sum(entry["tp_per_stage"]) * entry["dp"] == int(entry["gpus"].split("x")[0])
        assert sum(entry["split"]) == 40
        assert entry["servable"] is not entry["source_replicas"]
    assert any(entry["gpus"].endswith("xA100-80GB") and entry["servable"] for entry in found["smallest"])


@pytest.mark.parametrize("gpus", [(), ("--gpus", "8xA6000"), ("--gpus", "8xA100-80GB")])
def test_smallest_sets_keep_to_the_sizes_and_the_hosts_that_were_asked_for(capsys, gpus):
    args = (*gpus, "--smallest", "--tp", "8", "--pp", "1")
    entries = json.loads(run(capsys, *args, "--json")[1].out)["smallest"]
    assert {(entry["tp"], entry["pp"]) for entry in entries} == {(8, 1)}
    assert any(entry["gpus"] == "8xA100-64GB" for entry in entries)
    poor = json.loads(run(capsys, *args, "--ram", "128GB", "--json")[1].out)["smallest"]
    assert not any(entry["gpus"] == "8xA100-64GB" for entry in poor), "its host has no room for the tables"
    out = run(capsys, *args)[1].out
    sets = out[out.index("Smallest sets that hold one context of 1,048,576 tokens with --tp 8 --pp 1:\n") :]
    assert "8xA100-64GB as TP8\n" in sets
    assert all(" as TP8" in line for line in sets.splitlines() if " as " in line)
    assert "8xA100-64GB as" not in run(capsys, *args, "--ram", "128GB")[1].out


def test_sizes_and_context_narrow_the_plan(capsys):
    for option, size in (("tp", 4), ("pp", 2), ("dp", 4)):
        _, caught = run(capsys, "--gpus", "8xA100-80GB", f"--{option}", str(size), "--context", "128K", "--json")
        found = json.loads(caught.out)
        assert found["context"] == 131072
        assert {layout[option] for layout in found["layouts"]} == {size}


def offered(out):
    """Contexts that are named after --context, and sizes in the names beside them, outside of "Without"."""
    lines = [line for line in out.splitlines() if "--context " in line]
    return {int(line.rsplit("--context ", 1)[1].rstrip(".")): line for line in lines}


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("8xA6000", "--tp", "8"), "TP8"),
        (("8xA6000", "--dp", "2"), "DP2"),
        (("8xA6000", "--pp", "1"), "TP8 + EP8"),
        (("16xRTX3090", "--pp", "2"), "PP2"),
        (("16xRTX3090", "--hosts", "2", "--speculation", "0"), ""),
        (("16xRTX3090", "--streams", "16"), ""),
        (("6xA100-64GB", "--tp", "2", "--pp", "1"), "TP2 x DP3"),
    ],
)
def test_what_is_offered_instead_keeps_to_what_was_asked(capsys, args, names):
    code, caught = run(capsys, "--gpus", *args)
    assert code == 1
    offers = offered(caught.out)
    assert offers
    for context, line in offers.items():
        assert context < 1048576, "what does not fit is not offered"
        assert names in line
        _, again = run(capsys, "--gpus", *args, "--context", str(context))
        assert "does not hold" not in again.out, f"--context {context} as offered"
        assert "Best of" in again.out


def test_without_the_sizes_that_were_asked_for_more_is_possible_and_said(capsys):
    out = run(capsys, "--gpus", "8xA6000", "--tp", "8")[1].out
    assert "does not hold a context of 1,048,576 tokens with --tp 8:" in out
    assert "\nWithout --tp 8: TP4 x PP2 [20,20]: up to 1,048,576 tokens of context.\n" in out
    assert "1,048,576 tokens with --tp 8:\n" in out, "the sets are of that size too"
    assert "Without --" not in run(capsys, "--gpus", "16xRTX3090")[1].out


@pytest.mark.parametrize(
    ("args", "best", "context"),
    [
        (("8xA6000",), "TP4 x PP2 [20,20]", 1_048_576),
        (("8xA6000", "--pp", "1"), "TP8 + EP8", 1_044_480),
        (("16xRTX3090",), "TP8 x PP2 + EP8 [20,20]", 176_128),
        (("6xA100-64GB",), "TP2 x DP3", 1_007_616),
        (("8xA100-80GB",), "TP8", 1_048_576),
    ],
)
def test_the_best_that_vllm_serves_is_named_with_its_command(capsys, args, best, context):
    out = run(capsys, "--gpus", *args)[1].out
    found = json.loads(run(capsys, "--gpus", *args, "--json")[1].out)["best_servable"]
    command = found["layout"]["command"]
    assert found["context"] == context
    assert found["layout"]["servable"] is True
    assert f"--max-model-len {context} " in command
    assert f"\nCommand:\n  {command}\n" in out
    assert all(f"\n{caution}\n" in out for caution in found["layout"]["cautions"])
    assert best in out.split("GiB on a rank")[0] or f"{context:,} tokens, as {best}: --context {context}" in out
    assert f"  {command}\n" in run(capsys, "--gpus", *args, "--all")[1].out


def test_what_needs_source_replicas_alone_fits_and_nothing_else_is_made_up(capsys):
    out = run(capsys, "--gpus", "6xA100-64GB", "--pp", "3")[1].out
    assert "Best that vLLM serves: none with --pp 3, whatever the context" in out
    assert json.loads(run(capsys, "--gpus", "6xA100-64GB", "--pp", "3", "--json")[1].out)["best_servable"] is None


def test_too_little_host_memory_is_the_reason_that_is_given(capsys):
    out = run(capsys, "--gpus", "8xA100-64GB", "--ram", "128GB", "--tp", "8")[1].out
    assert "with --tp 8: Engram's tables and the processes need 221 GiB of RAM on a host that has 128" in out
    assert "every rank needs a workspace" not in out
    assert "No context fits with --tp 8." in out
    assert "\nNo context fits.\n" in run(capsys, "--gpus", "2xA100-80GB")[1].out


def test_a_checkpoints_own_configuration(capsys, tmp_path):
    from deepinfer_sm80.model.config import preset

    (tmp_path / "config.json").write_text(json.dumps(preset("tiny").to_config_json()))
    code, caught = run(capsys, "--gpus", "1xRTX3090-24GB", "--checkpoint", str(tmp_path))
    assert code == 0
    assert f"vllm serve {tmp_path}" in caught.out
    assert "16,384 tokens of context" in caught.out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--gpus", "6xA100-64GB", "--json"), 1),
        (("--gpus", "16xRTX3090", "--hosts", "2", "--tp", "8"), 1),
        (("--smallest", "--ram", "64GB"), 0),
    ],
)
def test_under_two_seconds_without_torch_or_numpy(args, code):
    script = (
        "import sys\nfor name in ('torch', 'numpy', 'triton', 'vllm'): sys.modules[name] = None\n"
        f"from deepinfer_sm80.cli import main\nsys.exit(main(['plan', *{args!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    before = os.times()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    after = os.times()
    assert done.returncode == code, done.stderr
    # the processor's time: a shared machine may take longer by the clock
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 2


@pytest.mark.parametrize(
    ("args", "pipeline"),
    [
        (("8xA6000",), True),
        (("16xRTX3090", "--pp", "2", "--context", "163840"), True),
        (("8xA100-80GB", "--context", "1M"), False),
    ],
)
def test_a_pipelines_command_is_without_speculation_and_says_so(capsys, args, pipeline):
    out = run(capsys, "--gpus", *args)[1].out
    command = out[out.index("\nCommand:\n") :].split("\n\n")[0]
    assert ("--pipeline-parallel-size 2 " in command) is pipeline
    assert ("--speculative-config" in command) is not pipeline
    assert ("The command is without speculation, which vLLM refuses over a pipeline" in command) is pipeline
    best = next(line for line in out.splitlines() if line.startswith("Best of "))
    assert best.endswith("TP8" if not pipeline else " [20,20]")


@pytest.mark.parametrize("form", [(), ("--all",)])
def test_what_can_be_served_comes_before_what_would_hold_more(capsys, form):
    out = run(capsys, "--gpus", "6xA100-64GB", *form)[1].out
    first, _, rest = out.partition("\nWhat would hold 1,048,576 tokens cannot be served yet.\n")
    assert first.split("\n\n")[1] == "Best that vLLM serves: TP2 x DP3: up to 1,007,616 tokens of context"
    assert "4 streams of 503,808 tokens" in first
    for words in ("  KV cache  ", "  prefill  ", "  host memory  ", "routed experts, FP4", "\nCommand:\n  vllm serve "):
        assert words in first, words
    assert "--max-model-len 1007616 " in first
    assert "TP2 x PP3" not in first
    assert "TP2 x PP3" in rest
    assert "\nCommand:\n" not in rest
