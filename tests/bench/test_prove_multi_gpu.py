"""The several-GPU proof: its comparison, its cut and its page, on a CPU and without vLLM."""

import importlib.util
import json
from pathlib import Path

import pytest

from deepinfer_sm80.model.config import preset

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/serving/prove_multi_gpu.py"


@pytest.fixture
def proof(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("prove_multi_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(logprobs, tokens, top):
    facts = {"boot_s": 1.0}
    return {"ok": True, "prompt_logprobs": logprobs, "tokens": tokens, "top": top, "facts": facts, "gpu": "a GPU"}


def write(folder, name, result):
    values = {key: result.pop(key) for key in ("prompt_logprobs", "top") if key in result}
    (folder / f"{name}.values").write_text(json.dumps(values))
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_layouts_are_judged_against_one_gpu(proof, tmp_path):
    top = [[[-1.0, -1.1], [-2.0, -2.03], [-1.0, -3.0]]]
    write(tmp_path, "tp1", run([[-1.0, -2.0]], [[5, 6, 7]], top))
    write(tmp_path, "tp2", run([[-1.004, -2.008]], [[5, 9, 9]], top))
    found = proof.compare(tmp_path)
    assert found["ok"] is True
    assert found["rows"]["tp2"]["mean"] == pytest.approx(0.006)
    assert found["rows"]["tp2"]["same_tokens"] == "0 of 1 prompts"
    assert found["rows"]["tp2"]["widest_gap_where_they_part"] == pytest.approx(0.03)
    write(tmp_path, "compare", found)
    page = proof.report(tmp_path)
    assert "| tp2 | ok | 1.0 | 0.006 | 0.008 | 0 of 1 prompts | 0.03 |" in page
    assert "| pp2 | not run |" in page


@pytest.mark.parametrize(
    ("logprobs", "tokens"),
    [([[-1.0, -2.1]], [[5, 6, 7]]), ([[-1.0, -2.0]], [[5, 6, 8]]), ([[-1.0, -2.0]], [[5, 9, 7]])],
    ids=["far", "no tie", "two steps"],
)
def test_a_layout_that_differs_fails(proof, tmp_path, logprobs, tokens):
    top = [[[-1.0, -1.1], [-2.0, -2.05], [-1.0, -3.0]]]
    write(tmp_path, "tp1", run([[-1.0, -2.0]], [[5, 6, 7]], top))
    write(tmp_path, "pp2", run(logprobs, tokens, top))
    assert proof.compare(tmp_path)["ok"] is False


def test_the_pipeline_is_cut_where_stock_vllm_allows_it(proof, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(preset("tiny").to_config_json()))
    assert proof.split(tmp_path) == (4, 4)
