"""The README's generated parts and the two transcripts say what the code and the results say."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from deepinfer_sm80 import cli
from deepinfer_sm80.cli import demo
from deepinfer_sm80.cli.demo_operators import DECODED
from deepinfer_sm80.cli.demo_serve import OPTIONS
from deepinfer_sm80.ops import OPS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO_LIMIT = 240  # seconds on two cores once installed


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def blocks():
    return load("readme_blocks")


def transcript(name):
    """(header, command, output lines, exit code)."""
    head, command, *said, tail = (ROOT / f"docs/transcripts/{name}.txt").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"# commit [0-9a-f]{7,}, \d{4}-\d\d-\d\d, \d+ cores, Linux, set-up included", head)
    return command, said, int(re.fullmatch(r"# exit code (\d+) after \d+ s", tail)[1])


def test_readme_is_in_step(blocks):
    assert blocks.rendered(README) == README, "run make docs"


def test_readme_has_its_order():
    titles = re.findall(r"^## (.*)", README, re.MULTILINE)
    assert titles == [
        "Who it is for",
        "What is supported, and what ran where",
        "Two commands",
        "Install beside vLLM",
        "Serve",
        "Verify on your own GPU",
        "Figures",
        "Where things are",
        "Limits",
    ]


@pytest.mark.parametrize("folder", ["src/deepinfer_sm80", "tests"])
def test_the_tree_names_every_folder(folder):
    tree = README.partition("## Where things are")[2].partition("```\n")[2].partition("```")[0]
    part = re.search(rf"^{folder}/.*\n(?:  .*\n)*", tree, re.MULTILINE)[0].removeprefix(folder)
    there = {path.name for path in (ROOT / folder).iterdir() if any(path.glob("**/*.py"))}
    assert there
    assert there <= set(re.findall(r"(?<![\w<])(\w+)/", part))


def test_every_result_of_a_stage_is_in_the_table(blocks):
    found = blocks.results()
    rows = blocks.runs(found)
    shown = [(row.folder, name) for row in rows for name in (*row.passed, *row.failed)]
    there = [(f.relative_to(ROOT).as_posix(), name) for f, stages in found.items() for name in stages]
    assert sorted(shown) == sorted(there)
    failed = {
        (f.relative_to(ROOT).as_posix(), n) for f, stages in found.items() for n, r in stages.items() if not r["ok"]
    }
    assert {(row.folder, name) for row in rows for name in row.failed} == failed


def result(**facts):
    return {"ok": True, "gpu": "NVIDIA H200", "lowering": "sm80", "torch": "2.11.0", "triton": "3.6.0", **facts}


def test_a_stage_that_died_before_it_knew_its_gpu_is_in_the_row_of_its_run(blocks):
    folder = ROOT / "benchmarks/results/x/prove_x"
    (row,) = blocks.runs({folder: {"tp1": result(), "pp2": {"ok": False}}})
    assert (row.passed, row.failed, row.code) == (("tp1",), ("pp2",), "sm80 in its place")


@pytest.mark.parametrize(
    ("facts", "gone"),
    [
        ({"gpu": "NVIDIA A100-SXM4-80GB", "lowering": "native"}, "on real Ampere hardware"),
        ({"gpu": "NVIDIA GeForce RTX 3090", "lowering": "native"}, "on real Ampere hardware"),
        ({"checkpoint": "released"}, "on the released weights"),
        ({"torch": "2.14.0+cu130", "triton": "3.8.0"}, "with torch 2.14 and Triton 3.8 on a GPU"),
        ({"flashinfer": "0.7.2"}, "with FlashInfer installed"),
        ({"executor": "ray"}, "under Ray"),
        ({"docker": True}, "under Docker"),
    ],
)
def test_a_limit_goes_when_a_run_passed_and_not_before(blocks, facts, gone):
    folder = ROOT / "benchmarks/results/x/prove_x"
    assert gone in blocks.limits({folder: {"serve": result()}})
    assert gone in blocks.limits({folder: {"serve": result(**facts) | {"ok": False}}})
    text = blocks.limits({folder: {"serve": result(**facts)}})
    assert gone not in text
    assert text.count("\n- ") == len(blocks.LIMITS) + len(blocks.KINDS) - 1


def test_what_the_planner_says_never_ran_is_a_limit(blocks, monkeypatch):
    before = blocks.limits({})
    monkeypatch.setattr(blocks.ran, "REPLICAS", True)
    after = blocks.limits({})
    assert "- with data parallel replicas;" in before
    assert "replicas" not in after
    assert "pipeline" not in before
    assert "- on more than 2 GPUs at once." in after
    assert all(len(line) <= 120 for line in README.partition("<!-- limits")[2].splitlines())


def test_the_serve_commands_are_those_that_plan_prints(blocks, capsys):
    commands = re.findall(
        r"```\n((?:\w+=\S+ )?vllm serve .*?)\n```", README.partition("<!-- serve")[2].partition("<!-- end")[0], re.S
    )
    assert len(commands) == len(blocks.MACHINES)
    for (_, gpus), command in zip(blocks.MACHINES, commands, strict=True):
        cli.main(["plan", "--gpus", gpus])
        assert "  " + command.replace(" \\\n    --", " --") + "\n" in capsys.readouterr().out


def test_a_serve_command_may_be_a_pipeline(blocks):
    said = blocks.serve()
    assert "(tensor parallel 8, 2 pipeline stages, whole experts on each GPU):" in said
    assert "speculation, which vLLM refuses over a pipeline" in " ".join(said.split())


def test_an_ampere_gpu_in_the_disguise_of_none_is_named_in_the_table(blocks):
    folder = ROOT / "benchmarks/results/x/prove_x"
    assert "none yet" in blocks.support({folder: {"serve": result()}})
    table = blocks.support({folder: {"serve": result(gpu="NVIDIA A40", lowering="native", vllm="0.33.0")}})
    assert "none yet" not in table
    assert "| NVIDIA A40 | its own | 0.33.0, 2.11.0, 3.6.0 | serve |" in table


def test_what_judges_a_run_stands_beside_its_gpus(blocks):
    """It uses none itself, and belongs to the run whose stages it compared."""
    folder = ROOT / "benchmarks/results/x/prove_x"
    stages = {
        "tp1": result(facts={"gpus": 1}),
        "tp2": result(facts={"gpus": 2}),
        "compare": {"ok": True, "facts": {"tp2": "mean 0.001"}},
    }
    assert {(row.gpu, row.passed) for row in blocks.runs({folder: stages})} == {
        ("2 x NVIDIA H200", ("tp1", "tp2")),
        ("2 x NVIDIA H200", ("compare",)),
    }


def test_the_tiny_checkpoint_is_served_as_the_demo_serves_it():
    flag = f"{OPTIONS[2]} '{OPTIONS[3]}'"
    assert flag == """--limit-mm-per-prompt '{"image": 0}'"""
    for text in (README, "\n".join(what for _, what in demo.NEXT)):
        assert re.findall("vllm serve tiny(.*)", text) == [f" {flag}"]


def test_transcript_of_the_demo():
    command, said, code = transcript("demo")
    text = "\n".join(said)
    assert (command, code) == ("$ make demo", 0)
    assert "cached = full, bit for bit" in text
    assert "DISAGREES" not in text
    assert f"decode: {DECODED} tokens, one at a time, through the paged caches {'.' * DECODED}" in text
    assert all(f"deepinfer-sm80 {words} " in text and what in text for words, what in demo.NEXT)
    (seconds,) = re.findall(r"^every operator agrees with its reference \((\d+) s\)$", text, re.MULTILINE)
    assert int(seconds) < DEMO_LIMIT
    table = text[text.index("6. Every operator") :]
    assert [line.split()[0] for line in table.splitlines() if line.split()[:1] and line.split()[0] in OPS] == list(OPS)


def test_transcript_of_the_tests():
    command, said, code = transcript("test")
    assert (command, code) == ("$ make test", 0)
    assert "All checks passed!" in said
    assert "skipped tests: 0" in said
    (passed,) = [line for line in said if re.match(r"\d+ passed", line)]
    assert int(passed.split()[0]) > 2000
    assert "failed" not in passed


def test_a_transcript_names_no_folder_of_the_machine(tmp_path):
    record = load("record_transcripts")
    clone, home = tmp_path / "clone", tmp_path / "home"
    text = record.scrubbed(f"{clone}/x {home}/.cache /tmp/q/deepinfer-demo-ab12/tiny", clone, home)
    assert text == "~/DeepInfer-SM80/x ~/.cache /tmp/deepinfer-demo/tiny"


def test_a_transcript_keeps_only_what_pip_needs_of_the_environment(tmp_path, monkeypatch):
    record = load("record_transcripts")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index")
    monkeypatch.setenv("SECRET", "x")
    text, code = record.recorded(("env",), tmp_path, tmp_path / "home", "abcdef0")
    assert code == 0
    lines = text.splitlines()
    assert {"PIP_INDEX_URL=https://index", "HOME=~/DeepInfer-SM80/home"} <= set(lines)
    assert "SECRET" not in text
    assert lines[0].startswith("# commit abcdef0, ")
    assert lines[-1].startswith("# exit code 0 after ")
