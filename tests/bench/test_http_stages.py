"""The HTTP stages: the official client against a server that answers as vLLM does, right and wrong, and the verdict."""

import ast
import functools
import importlib.util
import json
import re
import sys
import threading
import time
import types
from pathlib import Path

import openai
import pytest

from deepinfer_sm80.model.tokenizer_files import installed_tokenizer

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "benchmarks/serving"
FAKE = Path(__file__).with_name("fake_vllm.py")


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vllm_source = load("vllm_source", ROOT / "tests/vllm_plugin/vllm_source.py")
fake_vllm = load("fake_vllm", FAKE)
PROMPTS = [[7, number, 11] for number in range(8)]


@pytest.fixture
def stages(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    for known in ("http_stages", "http_requests"):
        monkeypatch.delitem(sys.modules, known, raising=False)
    import http_stages

    return http_stages


def serve(stages, tmp_path, *options):
    return stages.Server(Path("tiny"), tmp_path / "server.log", options, (sys.executable, str(FAKE)))


def test_everything_is_asked_and_the_server_is_gone_afterwards(stages, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy of the environment is not asked
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve(stages, tmp_path, *stages.ask.FLAGS) as server:
        values, facts = stages.everything(server.url, PROMPTS, {"5": -100.0})
    assert server.process.poll() is not None
    assert server.boot_seconds > 0
    assert "serving tiny" in server.log.read_text()
    assert {kind: len(values[kind]) for kind in stages.KINDS} == {
        "alone": 8,
        "together": 8,
        "arriving": 8,
        "chat": 8,
        "streamed": 1,
    }
    assert len({tuple(found["tokens"]) for found in values["together"]}) == 8
    assert [found["prompt"] for found in values["alone"]] == PROMPTS
    assert values["streamed"][0]["tokens"] == values["alone"][stages.STREAMED]["tokens"]
    assert facts["long_tokens"] == 8192
    assert facts["tool"] == '{"quay": "north", "boats": 2}'
    assert facts["structured"] == 'by json: {"quay": "north", "boats": 2}, by choice: ebb, by regex: quay-042'


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nan", "not finite"),
        ("minus-infinity", "not finite"),
        ("short", "63 tokens instead of 64"),
        ("no-stream", "nothing was streamed"),
        ("no-call", "0 tool calls"),
        ("bad-json", "not what the schema allows"),
        ("thought", "reasoning ''"),
        ("marker", "a marker was left in the text"),
        ("not-a-choice", "choice: 'slack'"),
        ("image", "an image was answered"),
        ("no-pause", "8 requests were answered while the server held them back"),
    ],
)
def test_a_wrong_answer_fails(stages, tmp_path, fault, said):
    with serve(stages, tmp_path, "--fault", fault) as server, pytest.raises(AssertionError, match=said):
        stages.everything(server.url, PROMPTS, {"5": -100.0})
    assert server.process.poll() is not None


def run_of(tokens, second_best=0.5, prompt=(1,)):
    top = [[(token, -1.0), (token + 1, -1.0 - second_best)] for token in tokens]
    return {"prompt": list(prompt), "tokens": tokens, "logprobs": [-1.0] * len(tokens), "top": top}


def test_the_same_tokens_are_the_same(stages):
    found = stages.judge([run_of([4, 5])], [run_of([4, 5])])
    assert (found["ok"], found["same"], found["widest_gap"]) == (True, 1, 0.0)


@pytest.mark.parametrize(("gap", "ok"), [(0.03, True), (0.04, False)])
def test_tokens_may_part_only_where_two_tie(stages, gap, ok):
    found = stages.judge([run_of([4, 6, 9])], [run_of([4, 5, 8], gap)])
    assert (found["ok"], found["same"]) == (ok, 0)
    assert found["widest_gap"] == pytest.approx(gap, abs=1e-4)


def test_where_both_schedule_the_same_steps_tokens_may_not_part(stages):
    found = stages.judge([run_of([4, 6])], [run_of([4, 5], 0.001)], exact=True)
    assert (found["ok"], found["widest_gap"]) == (False, pytest.approx(0.001))
    assert stages.judge([run_of([4, 5])], [run_of([4, 5], 0.001)], exact=True)["ok"]
    assert set(stages.KINDS) - set(stages.SAME_STEPS) == {"arriving"}


def test_requests_wait_in_their_order(stages, monkeypatch):
    said = []
    client = types.SimpleNamespace(base_url="http://here/v1/", post=lambda url, cast_to: said.append(url))
    monkeypatch.setattr(stages.ask, "APART_S", 0.02)
    monkeypatch.setattr(stages.ask, "ARRIVED_S", 0.0)

    def ask(item):
        said.append(item)
        while "http://here/resume" not in said:
            time.sleep(0.001)
        return item

    assert stages.ask.in_order(client, ask, [3, 1, 2]) == [3, 1, 2]
    assert said == ["http://here/pause?mode=keep", 3, 1, 2, "http://here/resume"]


def test_requests_are_let_arrive_one_after_the_other(stages, monkeypatch):
    client = Paused()
    monkeypatch.setattr(stages.ask, "time", types.SimpleNamespace(sleep=client.said.append))
    stages.ask.in_order(client, lambda item: client.open.wait(10), [1, 2, 3])
    apart, arrived = stages.ask.APART_S, stages.ask.ARRIVED_S
    assert client.said == ["pause?mode=keep", apart, apart, apart, arrived, "resume"]
    assert min(apart, arrived) > 0


class Paused:
    """A client of a server that is paused and resumed; ``open`` tells whether requests pass."""

    base_url = "http://here/v1/"

    def __init__(self):
        self.open, self.said = threading.Event(), []

    def post(self, url, cast_to):
        self.said.append(url.removeprefix("http://here/"))
        (self.open.set if url.endswith("/resume") else self.open.clear)()


@pytest.mark.parametrize("fails", ["at once", "afterwards"])
def test_a_request_that_fails_says_why_and_the_server_is_resumed(stages, monkeypatch, fails):
    monkeypatch.setattr(stages.ask, "APART_S", 0.02)
    monkeypatch.setattr(stages.ask, "ARRIVED_S", 0.02)
    client = Paused()

    def ask(item):
        assert fails == "at once" or client.open.wait(10)
        if item == 2:
            raise ValueError("no such prompt")
        assert client.open.wait(10)
        return item

    with pytest.raises(ValueError, match="no such prompt"):
        stages.ask.in_order(client, ask, [1, 2, 3])
    assert client.said == ["pause?mode=keep", "resume"]


@pytest.mark.parametrize("passing", [[2], [1, 2, 3]])
def test_a_server_that_answers_while_it_is_paused_is_told_and_resumed(stages, monkeypatch, passing):
    monkeypatch.setattr(stages.ask, "APART_S", 0.02)
    monkeypatch.setattr(stages.ask, "ARRIVED_S", 0.02)
    client = Paused()
    with pytest.raises(AssertionError, match=f"^{len(passing)} requests were answered while"):
        stages.ask.in_order(client, lambda item: item in passing or client.open.wait(10), [1, 2, 3])
    assert client.said == ["pause?mode=keep", "resume"]


def test_without_a_request_no_server_is_paused(stages):
    client = Paused()
    with pytest.raises(ValueError, match="max_workers"):
        stages.ask.in_order(client, len, [])
    assert client.said == []


def test_the_server_that_holds_requests_is_vllms(stages):
    source = vllm_source.wheel().read("vllm/entrypoints/rl/online/api_router.py").decode()
    assert all(f'@router.post("/{path}")' in source for path in ("pause", "resume"))
    assert (
        "VLLM_SERVER_DEV_MODE" in vllm_source.wheel().read("vllm/entrypoints/launchers/api_server/routers.py").decode()
    )


def test_a_token_that_was_not_near_the_best_fails(stages):
    found = stages.judge([run_of([4, 77])], [run_of([4, 5], 0.001)])
    assert (found["ok"], found["widest_gap"]) == (False, 99.0)


def test_another_prompt_fails(stages):
    assert not stages.judge([run_of([4], prompt=(2,))], [run_of([4], prompt=(1,))])["ok"]


def results(out, http=True):
    """As running.py leaves them."""
    for name, ok in (("http", http), ("in-process", True)):
        (out / f"{name}.json").write_text(json.dumps({"ok": ok}))


def test_values_of_a_stage_that_failed_are_not_compared(stages, tmp_path):
    """They are of the run before."""
    for name in ("http", "in-process"):
        (tmp_path / f"{name}.values").write_text(json.dumps({kind: [run_of([4, 5])] for kind in stages.KINDS}))
    results(tmp_path, http=False)
    with pytest.raises(AssertionError, match="http failed"):
        stages.http_compare(Path("tiny"), tmp_path)


def test_the_same_tokens_with_other_log_probabilities_fail(stages):
    moved = run_of([4, 5])
    moved["logprobs"] = [-1.0, -1.06]
    found = stages.judge([moved], [run_of([4, 5])])
    assert (found["ok"], found["same"], found["mean_logprob_difference"]) == (False, 1, 0.03)
    assert not stages.judge([], [])["ok"]


def test_the_comparison_reads_what_the_stages_saved(stages, tmp_path):
    values = {kind: [run_of([4, 5])] for kind in stages.KINDS}
    (tmp_path / "in-process.values").write_text(json.dumps(values))
    (tmp_path / "http.values").write_text(json.dumps({**values, "chat": [run_of([4, 9])]}))
    results(tmp_path)
    found = stages.http_compare(Path("tiny"), tmp_path)
    assert found["ok"] is False
    assert found["facts"] == {
        "alone": "1 of 1 the same",
        "together": "1 of 1 the same",
        "arriving": "1 of 1 the same",
        "chat": "0 of 1 the same",
        "streamed": "1 of 1 the same",
        "widest_gap_where_they_part": 99.0,
    }


@pytest.mark.parametrize("kind", ["alone", "together", "arriving", "chat", "streamed"])
def test_only_those_that_arrive_meanwhile_may_part_at_a_tie(stages, tmp_path, kind):
    values = {kind: [run_of([4, 5], 0.001)] for kind in stages.KINDS}
    (tmp_path / "in-process.values").write_text(json.dumps(values))
    (tmp_path / "http.values").write_text(json.dumps({**values, kind: [run_of([4, 6], 0.001)]}))
    results(tmp_path)
    assert stages.http_compare(Path("tiny"), tmp_path)["ok"] == (kind == "arriving")


def test_white_space_is_biased_against_and_nothing_else(stages):
    texts = {0: "", 1: " ", 2: "\n\t", 3: " a"}
    assert stages.ask.whitespace_bias(lambda ids: texts[ids[0]], 4) == {"1": -100.0, "2": -100.0}


def test_the_packages_for_grammars_are_vllms_own_requirements(stages):
    metadata = vllm_source.wheel().read("vllm-0.33.0.dist-info/METADATA").decode()
    for name in stages.GRAMMARS:
        assert re.search(rf"^Requires-Dist: {name}[\[=<>]", metadata, re.MULTILINE), name


def test_the_parsers_are_registered_in_vllm_and_documented(stages):
    flags = dict(flag.removeprefix("--").split("=") for flag in stages.ask.FLAGS if "=" in flag)
    for place, flag in (("tool_parsers", "tool-call-parser"), ("reasoning", "reasoning-parser")):
        registered = ast.dump(vllm_source.module(f"vllm.{place}"))
        assert f"Constant(value={flags[flag]!r})" in registered
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(flag.replace("=", " ") in readme for flag in stages.ask.FLAGS)


class Engine:
    """In place of a vLLM engine: the tokens that the fake server gives."""

    def __init__(self, model, max_num_batched_tokens, max_num_seqs):
        assert (max_num_batched_tokens, max_num_seqs) == (2048, 256)
        self.prompts = PROMPTS
        self.llm = types.SimpleNamespace(reset_prefix_cache=lambda: None, chat=self.chat)

    def generate(self, prompts, tokens, logprobs):
        return [self.output(prompt, tokens, second=-2.0 - len(prompts)) for prompt in prompts]

    def chat(self, conversations, params, *, chat_template_kwargs, use_tqdm):
        assert chat_template_kwargs == {"thinking": False}
        return [self.output([len(str(messages))], params["max_tokens"]) for messages in conversations]

    def output(self, prompt, count, second=-2.0):
        tokens = fake_vllm.tokens_of(prompt, count)
        steps = [{t: types.SimpleNamespace(logprob=-1.0), t + 1: types.SimpleNamespace(logprob=second)} for t in tokens]
        completion = types.SimpleNamespace(token_ids=tokens, logprobs=steps)
        return types.SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])

    def result(self, **facts):
        return {"facts": facts}


def test_the_three_stages_one_after_the_other(stages, tmp_path, monkeypatch):
    lacking = ["outlines_core"]
    stand_ins = {
        "stages": {
            "Engine": Engine,
            "apply_disguise": lambda: None,
            "facts_of_machine": lambda: {"gpu": "a GPU"},
            "require_finite": lambda outputs, tokens: None,
            "SHARED_GPU": {"kv_cache_memory_bytes": 2},
            "installed": lambda name: "" if name in lacking else "1",
        },
        "vllm": {"SamplingParams": dict},
    }
    for name, contents in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(contents)
    monkeypatch.setenv("PROVE_SHARED_GPU", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "")  # the stage sets it: gone with the test
    command = (sys.executable, str(FAKE))
    monkeypatch.setattr(stages, "Server", functools.partial(stages.Server, command=command))
    monkeypatch.setattr("deepinfer_sm80.model.prose.prompts", lambda encode: PROMPTS)
    (tmp_path / "tokenizer.json").write_text(json.dumps(installed_tokenizer()))
    assert stages.in_process(tmp_path, tmp_path)["facts"] == {"requests": 24}
    saved = json.loads((tmp_path / "in-process.values").read_text())
    assert {kind: saved[kind][0]["top"][0][1][1] for kind in stages.KINDS} == {
        "alone": -3.0,
        "together": -10.0,
        "arriving": -10.0,
        "chat": -2.0,
        "streamed": -3.0,
    }, "eight at once are compared with eight at once"
    with pytest.raises(AssertionError, match=r"not installed: outlines_core\. Install them"):
        stages.http(tmp_path, tmp_path)
    lacking.clear()
    found = stages.http(tmp_path, tmp_path)
    assert (found["gpu"], found["flags"], found["facts"]["openai"]) == (
        "a GPU",
        list(stages.ask.FLAGS),
        openai.__version__,
    )
    log = (tmp_path / "http-server.log").read_text()
    assert "--max-num-batched-tokens=2048 --max-num-seqs=256 --kv-cache-memory-bytes=2" in log
    assert "VLLM_SERVER_DEV_MODE=1\n" in log
    results(tmp_path)
    compared = stages.http_compare(tmp_path, tmp_path)
    assert compared["ok"], compared
    assert compared["facts"]["together"] == "8 of 8 the same"
    assert compared["facts"]["widest_gap_where_they_part"] == 0.0
