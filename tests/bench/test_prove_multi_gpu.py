"""The several-GPU proof: its comparison, its cut and its page, on a CPU and without vLLM."""

import contextlib
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.model.config import preset
from deepinfer_sm80.topology import roofline
from deepinfer_sm80.topology.cluster import LINKS
from deepinfer_sm80.topology.roofline import hop_bytes

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
    top = [[[(5, -1.0), (8, -1.1)], [(6, -2.0), (9, -2.03)], [(7, -1.0), (9, -3.0)]]]
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
    [
        ([[-1.0, -2.1]], [[5, 6, 7]]),
        ([[-1.0, -2.0]], [[5, 6, 9]]),
        ([[-1.0, -2.0]], [[5, 9, 7]]),
        ([[-1.0, -2.0]], [[4, 6, 7]]),
    ],
    ids=["far", "no tie", "two steps", "a token of neither side of a tie"],
)
def test_a_layout_that_differs_fails(proof, tmp_path, logprobs, tokens):
    top = [[[(5, -1.0), (8, -1.001)], [(6, -2.0), (9, -2.05)], [(7, -1.0), (9, -3.0)]]]
    write(tmp_path, "tp1", run([[-1.0, -2.0]], [[5, 6, 7]], top))
    write(tmp_path, "pp2", run(logprobs, tokens, top))
    assert proof.compare(tmp_path)["ok"] is False


def test_the_pipeline_is_cut_where_stock_vllm_allows_it(proof, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(preset("tiny").to_config_json()))
    assert proof.split(tmp_path) == (4, 4)


@pytest.fixture
def ranks(proof):
    return importlib.import_module("ranks")


def test_rows_of_ranks_are_compared_layer_by_layer(ranks):
    one = {"rank": 0, "rows": {"2": "a", "10": "b"}, "sent": []}
    assert ranks.differing([one, {"rank": 1, "rows": {"2": "a", "10": "b"}, "sent": []}]) == []
    assert ranks.differing([one, {"rank": 1, "rows": {"2": "c", "10": "d", "4": "e"}, "sent": []}]) == ["2", "10"]


def test_bytes_of_a_hop_are_those_the_planner_states(ranks):
    """The streams in bfloat16 and their pre-mix in float32, as vLLM hands them over."""
    config = preset("layer")
    watched = ranks.Watched(recorder=None)
    for tokens in (1500, 1):
        streams = torch.zeros(tokens, config.hc_mult, config.hidden_size, dtype=torch.bfloat16)
        watched.note({"hidden_states": streams, "pre_mix": torch.zeros(tokens, config.hc_mult), "name": "x"})
    first = {"rank": 0, "rows": {}, "sent": watched.sent}
    assert ranks.per_token([first, {"rank": 1, "rows": {}, "sent": []}]) == [hop_bytes(config)] == [40_976]


def test_ranks_that_choose_otherwise_fail_the_layout(proof, ranks):
    answers = [{"rank": r, "rows": {"2": digest}, "sent": []} for r, digest in enumerate("ab")]

    class Engine:
        prompts = ([1], [2] * proof.RANKS_PROMPT)

        def __init__(self):
            self.llm, self.asked = self, []

        def collective_rpc(self, what):
            self.asked.append(what)
            return answers

        def generate(self, prompts, tokens):
            assert [len(p) for p in prompts] == [proof.RANKS_PROMPT]

    config = types.SimpleNamespace(index_source_layer_ids=(2,), hc_mult=4, hidden_size=5120)
    with pytest.raises(AssertionError, match="different rows in layers 2"):
        proof.asked_of_ranks(Engine(), config, 1)
    answers[1]["rows"] = {"2": "a"}
    engine = Engine()
    found = proof.asked_of_ranks(engine, config, 1)
    assert found == {"ranks": 2, "layers_with_equal_rows": 1, "hop_bytes": []}
    assert engine.asked == [ranks.watch, ranks.noted]


SENT = (10, 10 * 40_976)


@pytest.mark.parametrize(
    ("rows", "sent", "stages", "problem"),
    [
        (({}, {}), ([], []), 1, "layer 2 by 0 instead of 2"),
        (({"2": "a"}, {}), ([], []), 1, "layer 2 by 1 instead of 2"),
        (({"2": "a"}, {}), ([], []), 2, "a hand-over by 0 ranks instead of 1"),
        (({"2": "a"}, {}), ([(10, 10 * 41_000)], []), 2, "the planner says 40976"),
        (({}, {}, {"2": "a"}, {}), ([SENT], [SENT], [], []), 2, "layer 2 by 1 instead of 2"),
        (({}, {}, {"2": "a"}, {"2": "a"}), ([SENT], [], [], []), 2, "a hand-over by 1 ranks instead of 2"),
        (({}, {}, {"2": "a"}, {"2": "b"}), ([SENT], [SENT], [], []), 2, "different rows in layers 2"),
    ],
)
def test_ranks_that_noted_too_little_fail_the_layout(proof, rows, sent, stages, problem):
    answers = [{"rank": r, "rows": rows[r], "sent": sent[r]} for r in range(len(rows))]
    engine = types.SimpleNamespace(prompts=([2] * proof.RANKS_PROMPT,), generate=lambda prompts, tokens: None)
    engine.llm = types.SimpleNamespace(collective_rpc=lambda what: answers)
    config = types.SimpleNamespace(index_source_layer_ids=(2,), hc_mult=4, hidden_size=5120)
    with pytest.raises(AssertionError, match=problem):
        proof.asked_of_ranks(engine, config, stages)


def test_the_page_names_commit_and_checkpoint(proof, tmp_path):
    """``tiny`` has had several contents; what a run was of is in its results, or is said not to be."""
    write(tmp_path, "tp1", run([[-1.0]], [[5]], [[[-1.0, -2.0]]]) | {"commit": "abc1234"})
    page = proof.report(tmp_path)
    assert "Commit abc1234." in page
    assert "Checkpoint `tiny`; no digest of it was recorded" in page
    known = {"commit": "def5678", "checkpoint": "layer", "checkpoint_sha256": "0f" * 32}
    write(tmp_path, "tp1", run([[-1.0]], [[5]], [[[-1.0, -2.0]]]) | known)
    assert f"Checkpoint `layer`, SHA-256 of its files {'0f' * 32}." in proof.report(tmp_path)
    for name in ("tp2", "pp2"):
        write(tmp_path, name, run([[-1.0]], [[5]], [[[-1.0, -2.0]]]))
    assert f"files {'0f' * 32}; not recorded of `tp2`, `pp2`." in proof.report(tmp_path)


def test_the_committed_page_shows_the_committed_results(proof):
    results = ROOT / "benchmarks/results/nvidia-h200-x2/prove_multi_gpu"
    assert (ROOT / "docs/multi-gpu.md").read_text(encoding="utf-8") == proof.report(results), "run make docs"


def test_a_digest_is_of_names_and_bytes(proof, tmp_path):
    seen = set()
    for number, (name, text) in enumerate((("a", "x"), ("a", "y"), ("b", "x"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
        seen.add(proof.digest(folder))
    assert len(seen) == 3


def test_nothing_compared_is_no_success(proof, tmp_path):
    (tmp_path / "tp1.json").write_text(json.dumps({"ok": False}))
    assert proof.compare(tmp_path)["ok"] is False


def test_times_stand_beside_the_planner(proof, tmp_path):
    config = preset("layer")
    plan = proof.planned("pp2-times", config, proof.CARDS["NVIDIA H200"])
    alone = proof.planned("tp1-times", config, proof.CARDS["NVIDIA H200"])
    hop = roofline.HAND_OVER + hop_bytes(config) / (LINKS["nvlink"].rate * 1e9)
    assert alone["decode_ms_batch_1"] > 0
    assert plan["decode_ms_batch_1"] - alone["decode_ms_batch_1"] == pytest.approx(1e3 * hop), "a hop costs"
    assert proof.planned("tp2-times", config, proof.CARDS["NVIDIA H200"])["prefill_ms_2048"] < alone["prefill_ms_2048"]
    facts = {"decode_ms_batch_1": 4.1, "decode_ms_batch_8": 5.2, "decode_ms_batch_64": 9.9, "prefill_ms_2048": 50.5}
    write(tmp_path, "tp2-times", {"ok": True, "facts": facts, "planned": {"decode_ms_batch_1": 1.234}})
    write(tmp_path, "pp2-eager", {"ok": True, "facts": {}, "ranks": 2, "hop_bytes": [40976.0]})
    watched = {"ranks": 2, "layers_with_equal_rows": 4, "hop_bytes": []}
    write(tmp_path, "tp2-eager", {"ok": True, "facts": {}} | watched)
    page = proof.report(tmp_path)
    assert "| tp2 | 4.1 | 1.23 | 5.2 | 9.9 | 50.5 |  |" in page
    assert "`tp2-eager`: 2 ranks chose the same rows in 4 index source layers." in page
    assert "`pp2-eager`: a hop carries 40,976 bytes a token, as the planner says." in page


def test_times_are_taken_alone_after_the_layouts(proof, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(proof, "run_stage", lambda name, args: ran.append(name) or 0)
    monkeypatch.setattr(proof.os, "environ", dict(proof.os.environ))
    monkeypatch.setattr(proof, "require_engine", lambda parser: None)
    (tmp_path / "config.json").touch()
    command = ["prove_multi_gpu.py", "--out", str(tmp_path), "--model", str(tmp_path), "--together"]
    monkeypatch.setattr(sys, "argv", command)
    assert proof.main() == 0
    layouts = len(proof.LAYOUTS)
    assert set(ran[:layouts]) == set(proof.LAYOUTS)
    assert ran[layouts:] == [*proof.TIMED, "links", "compare"]


@pytest.mark.parametrize("name", ["tp2", "tp2-times", "links"])
def test_what_is_timed_has_its_gpus_alone(proof, monkeypatch, tmp_path, name):
    ran = []
    monkeypatch.setattr(proof, "run_process", lambda script, stage, args, environment, **_: ran.append(environment))
    monkeypatch.setenv("PROVE_SHARED_GPU", "1")
    proof.run_stage(name, types.SimpleNamespace(model=None, capability="8.0"))
    assert ("PROVE_SHARED_GPU" in ran[0]) == (name == "tp2")
    assert ran[0]["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert ran[0]["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("name", "function"), [("links", "joined"), ("pp2-times", "timed"), ("pp2", "layout"), ("compare", "compare")]
)
def test_each_stage_is_its_function_and_what_fails_is_stored(proof, monkeypatch, tmp_path, name, function):
    def fails(*_):
        raise ValueError("no link")

    args = types.SimpleNamespace(model=tmp_path, out=tmp_path)
    for other in ("joined", "timed", "layout", "compare"):
        monkeypatch.setattr(proof, other, lambda *_, other=other: {"function": other})
    proof.inside(name, args)
    assert json.loads((tmp_path / f".{name}.json").read_text()) == {"function": function, "ok": True}
    monkeypatch.setattr(proof, function, fails)
    proof.inside(name, args)
    stored = json.loads((tmp_path / f".{name}.json").read_text())
    assert (stored["ok"], proof.named(stored["error"])) == (False, "ValueError: no link")


def test_a_layout_keeps_the_best_five_of_each_greedy_step(proof, monkeypatch, tmp_path):
    """With two, the token of a layout that parts where three tie would count as far off."""
    asked = []

    def output(ids, best):
        entries = {token: types.SimpleNamespace(logprob=-1.0 - token) for token in range(best)}
        completion = types.SimpleNamespace(token_ids=[0], logprobs=[entries])
        prompt = [None, *({token: types.SimpleNamespace(logprob=-float(token))} for token in ids[1:])]
        return types.SimpleNamespace(outputs=[completion], prompt_logprobs=prompt)

    class Engine:
        prompts = ([7], [7, 8, 9])

        def __init__(self, model, **options):
            assert options == {"swa_bounded_replay": False, "enable_prefix_caching": False}

        def generate(self, prompts, *tokens, **options):
            asked.append(options)
            return [output(ids, options.get("logprobs", 0)) for ids in prompts]

        def result(self, **facts):
            return {"facts": facts}

    stand_in = types.SimpleNamespace(
        Engine=Engine,
        require_finite=lambda outputs: None,
        tokens_of=lambda outputs: [list(found.outputs[0].token_ids) for found in outputs],
    )
    monkeypatch.setitem(sys.modules, "stages", stand_in)
    found = proof.layout("tp1", tmp_path, tmp_path)
    assert asked == [{"prompt_logprobs": 0}, {"logprobs": 5}]
    assert found["prompt_logprobs"] == [[-8.0, -9.0]]
    assert [len(step) for step in found["top"][0]] == [5]
    assert (found["tokens"], found["facts"]) == ([[0], [0]], {"gpus": 1})


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            "Traceback\n  File x\nRuntimeError: Worker failed 'CUDA error\nmore\n', see above\n",
            "RuntimeError: Worker failed 'CUDA error",
        ),
        ("Traceback\ntorch.OutOfMemoryError: 2 GiB", "torch.OutOfMemoryError: 2 GiB"),
        ("stopped after 540 s, no result", "stopped after 540 s, no result"),
    ],
)
def test_the_page_shows_the_line_that_names_the_exception(proof, error, line):
    assert proof.named(error) == line


def test_two_stages_of_two_ranks(proof):
    answers = [
        {"rank": r, "rows": {"2": "a"} if r > 1 else {"0": "c"}, "sent": [SENT] if r < 2 else []} for r in range(4)
    ]
    engine = types.SimpleNamespace(prompts=([2] * proof.RANKS_PROMPT,), generate=lambda prompts, tokens: None)
    engine.llm = types.SimpleNamespace(collective_rpc=lambda what: answers)
    config = types.SimpleNamespace(index_source_layer_ids=(0, 2), hc_mult=4, hidden_size=5120)
    found = proof.asked_of_ranks(engine, config, 2)
    assert found == {"ranks": 4, "layers_with_equal_rows": 2, "hop_bytes": [40_976.0, 40_976.0]}
    assert proof.ways("tp2-pp2-times") == proof.ways("tp2-pp2-eager") == (2, 2)
    sizes = {name: proof.gpus_of(name) for name in ("tp1", "tp2-ring", "pp2-times", "tp2-pp2", "links", "compare")}
    assert sizes == {"tp1": 1, "tp2-ring": 2, "pp2-times": 2, "tp2-pp2": 4, "links": 2, "compare": 0}
    hop = proof.planned("tp2-pp2-times", preset("layer"), proof.CARDS["NVIDIA H200"])
    assert (
        hop["decode_ms_batch_1"]
        < proof.planned("pp2-times", preset("layer"), proof.CARDS["NVIDIA H200"])["decode_ms_batch_1"]
    )


def test_stages_for_more_gpus_than_there_are(proof, monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(proof, "run_stage", lambda name, args: ran.append(name) or 0)
    monkeypatch.setattr(proof, "require_engine", lambda parser: None)
    monkeypatch.setattr(proof, "gpus_here", lambda: 2)
    (tmp_path / "config.json").touch()
    command = ["prove_multi_gpu.py", "--out", str(tmp_path), "--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert proof.main() == 0
    assert "links" in ran
    assert not any(proof.gpus_of(name) > 2 for name in ran)
    monkeypatch.setattr(sys, "argv", [*command, "--stage", "tp1", "--stage", "tp2-pp2"])
    with pytest.raises(SystemExit):
        proof.main()
    assert "--stage tp2-pp2 takes 4 GPUs, found 2: leave it out" in capsys.readouterr().err


@pytest.fixture
def links(proof):
    import links

    return links


def test_constants_follow_from_the_times_of_few_and_many_rows(links):
    ranks = [{"1": 11.0, "2048": 111.0}, {"1": 12.0, "2048": 110.0}]
    slow = links.slowest(ranks)
    assert slow == {"1": 12.0, "2048": 111.0}
    found = links.fitted(slow, 10_240)
    assert found == {"latency_us": 12.0, "gb_s": round(2047 * 10_240 / 99.0e-6 / 1e9, 1)}
    between = {"1": 12.0, "64": 1.0, "512": 2.0, "2048": 111.0, "8": 3.0}
    assert links.fitted(between, 10_240) == found, "by number, not by digits"
    with pytest.raises(AssertionError, match="2048 rows took no longer than 1"):
        links.fitted({"1": 12.0, "2048": 12.0}, 10_240)


@pytest.mark.parametrize("ranks", [[{"1": 1.0}], [], [{"1": 1.0}, {}], [{}, {"1": 1.0}], [{"1": 1.0}] * 3])
def test_constants_are_of_both_ranks(links, ranks):
    with pytest.raises(AssertionError, match="not the answers of 2 ranks about the same rows"):
        links.slowest(ranks)


def test_the_links_are_asked_of_both_ranks_and_stand_on_the_page(proof, links, monkeypatch, tmp_path):
    asked = []

    class Engine:
        def __init__(self, model, **options):
            assert options == {"tensor_parallel_size": 2, "enforce_eager": True}
            self.llm = self

        def collective_rpc(self, function, args):
            asked.append((function, args))
            more = 0.0 if function is links.all_reduces else 1.0
            return [{"1": 10.0, "2048": 110.0}, {"1": 20.0 + more, "2048": 220.0 + more}]

        def result(self, **facts):
            return {"ok": True, "facts": facts}

    config = preset("layer")
    monkeypatch.setattr(proof, "config_of", lambda model: config)
    monkeypatch.setitem(sys.modules, "stages", types.SimpleNamespace(Engine=Engine))
    found = proof.joined(tmp_path)
    assert asked == [(links.all_reduces, (config.hidden_size,)), (links.hops, (hop_bytes(config),))]
    assert found["constants"]["all_reduce"] == {"latency_us": 20.0, "gb_s": round(2047 * 10_240 / 200e-6 / 1e9, 1)}
    assert found["constants"]["hop"] == {"latency_us": 21.0}
    write(tmp_path, "links", found)
    page = proof.report(tmp_path)
    assert "| 2,048 | 220.0 | 221.0 |" in page
    assert "an all-reduce 20.0 us and 104.8 GB/s, the hosts of\na hop 21.0 us." in page
    write(tmp_path, "links", {"ok": False})
    assert "Between two ranks" not in proof.report(tmp_path)


class Group:
    """Two ranks' group, seen by one: what is sent comes back, and ``order`` tells what was called."""

    def __init__(self):
        self.value, self.order = {"hidden_states": torch.ones(1, 4)}, []

    def send_tensor_dict(self, value):
        self.value = value
        self.order.append("send")

    def recv_tensor_dict(self):
        self.order.append("receive")
        return self.value


def in_place_of_vllm(monkeypatch, **functions):
    state = types.SimpleNamespace(**functions)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, state)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(("rank", "order"), [(0, ["send", "receive"]), (1, ["receive", "send"])])
def test_a_hop_is_half_of_the_median_round_trip(links, monkeypatch, rank, order):
    """Round trips take 0 us twice before those that count: 1, 2, ... 20 us, which come mixed."""
    group, counted = Group(), [(7 * number) % links.ROUNDS + 1 for number in range(links.ROUNDS)]
    clock = iter([at for took in 2 * [0, 0, *counted] for at in (0.0, 1e-6 * took)])
    in_place_of_vllm(monkeypatch, get_tp_group=lambda: group)
    monkeypatch.setattr(links.time, "perf_counter", lambda: next(clock))
    found = links.hops(types.SimpleNamespace(rank=rank, device="cpu"), 8, (1, 3))
    assert found == {"1": 5.5, "3": 5.5}
    assert group.value["hidden_states"].shape == ((3, 4) if rank == 0 else (1, 4))
    assert group.order == order * 2 * (links.ROUNDS + 2)


@pytest.mark.parametrize("wrong", [None, 1, "one element"])
def test_an_all_reduce_is_its_share_of_the_fastest_replay(links, monkeypatch, wrong):
    calls, took = [], iter([9.0, 4.0, *[5.0] * (links.REPLAYS - 2)] * 2)

    def reduce(value):
        calls.append(tuple(value.shape))
        summed = value * 2
        if wrong and len(calls) == 5:  # the second in the graph, after three outside
            summed.view(-1)[: 1 if wrong == "one element" else None] = 1
        return summed

    @contextlib.contextmanager
    def nothing(*_, **__):
        yield types.SimpleNamespace(stream=None)

    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: next(took))
    in_place_of_vllm(monkeypatch, tensor_model_parallel_all_reduce=reduce, graph_capture=nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    worker = types.SimpleNamespace(device="cpu")
    if wrong:
        with pytest.raises(AssertionError, match="not 2 everywhere, at 2 rows"):
            links.all_reduces(worker, 8, (2, 3))
        return
    assert links.all_reduces(worker, 8, (2, 3)) == {"2": 200.0, "3": 200.0}
    assert calls == [(rows, 8) for rows in (2, 3) for _ in range(3 + links.CALLS)]
