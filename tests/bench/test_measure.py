"""One measurement on a fake device: order of the arms, arithmetic, and a gate that no wrong result passes."""

import importlib.util
import itertools
import weakref
from pathlib import Path

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import (
    adapters,
    cases,
    gate,
    measure,
    projected,
    providers,
    report,
    residual_streams,
    statistics,
)
from deepinfer_sm80.bench.ceilings import Ceilings
from deepinfer_sm80.bench.gpu import Timed
from deepinfer_sm80.bench.providers import Arm
from deepinfer_sm80.bench.rows import KEYS
from deepinfer_sm80.ops.contract import Cost

spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
fake_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_device)

FACTS = {"commit": "c", "torch": "t", "triton": "r", "driver": "d", "time": "now"}
SMALL = {
    "mhc_post": cases.mhc(3),
    "mhc_fused_post_pre_delayed": cases.mhc_fused(3),
    "combine_topk_swa_indices": cases.combine(5, 700),
    "global_topk_indices": cases.mapping(2),
    "indexer_topk": cases.select(2, 600),
    "indexer_q_rope_quant": cases.index_queries(3),
    "indexer_k_norm_rope_store": cases.index_keys(5, 2),
    "engram_lookup": cases.engram(2),
    "dequantize_and_gather_k_cache": cases.gather(2, 256),
    "sparse_mla_decode": cases.decode(2, 256),
    "sparse_mla_prefill": cases.prefill(3, 256),
    "rope_quant_insert": cases.insert(5),
    "indexer_logits_prefill": cases.prompt_logits(5, 300),
    "indexer_logits_paged": cases.paged_logits(2, 256),
    "inverse_rope_grouped": cases.inverse_rope(3),
    "grouped_output_projection": cases.projection(2),
    "stable_expert_order": cases.expert_order(40, 8),
}
with pytest.MonkeyPatch.context() as small:
    small.setattr(cases, "CANDIDATES", 16)
    SMALL["select_candidate_blocks"] = cases.candidates(3, 200)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    monkeypatch.setattr(cases, "ENGRAM_ROWS", 64)
    monkeypatch.setattr(cases, "CANDIDATES", 16)


def run_of(device, lowering="native", rounds=3):
    return measure.Run(device, lowering, Ceilings(copy=1e12, dot=1e14), FACTS, rounds)


def arm(op, provider="ours", spoil=None, **options):
    """Our PyTorch form under any name; ``spoil`` changes its result."""
    function = ops.pytorch(op)

    def call(kwargs):
        result = function(**kwargs)
        return spoil(result, kwargs) if spoil else result

    return Arm(provider, lambda kwargs: lambda: call(kwargs), **options)


def test_every_timed_operator_is_small_here_too():
    assert {case.op for case in cases.all_cases()} == set(SMALL)


@pytest.mark.parametrize("op", SMALL)
def test_right_results_get_rows_with_every_key(op):
    device = fake_device.FakeDevice([10.0, 25.0], l2_bytes=1)
    chains = providers.CHAINS
    arms = [arm(op), arm(op, "pytorch", graphed=False)]
    if op in chains:
        arms.append(Arm("unfused", lambda kwargs: lambda: chains[op](**kwargs)))
    outcome = measure.measure(SMALL[op], run_of(device), arms)
    assert not outcome.left_out
    assert [row["provider"] for row in outcome.rows] == [a.provider for a in arms]
    assert all(set(KEYS) <= set(row) and row["gate"] is True for row in outcome.rows)
    assert [row["p50_us"] for row in outcome.rows][:2] == [10.0, 25.0]


def first_element(result, kwargs):
    values = [t.clone() for t in (result if isinstance(result, tuple) else (result,))]
    flat = values[0].view(torch.uint8).view(-1)
    flat[-1] ^= 0x40
    return tuple(values) if isinstance(result, tuple) else values[0]


@pytest.mark.parametrize("op", [op for op in SMALL if not ops.spec(op).mutates])
def test_a_wrong_element_leaves_no_row(op):
    outcome = measure.measure(SMALL[op], run_of(fake_device.FakeDevice(l2_bytes=1)), [arm(op, spoil=first_element)])
    assert not outcome.rows
    assert outcome.left_out[0]["reason"].startswith("disagrees: copy 0: ")


@pytest.mark.parametrize(("op", "name"), [(op, n) for op in SMALL for n in ops.spec(op).mutates])
def test_a_wrong_byte_in_place_leaves_no_row_although_another_arm_wrote_it_right(op, name):
    def nothing_written(kwargs):
        return lambda: None

    arms = [Arm("vllm", nothing_written), arm(op)]
    outcome = measure.measure(SMALL[op], run_of(fake_device.FakeDevice(l2_bytes=1)), arms)
    assert [row["provider"] for row in outcome.rows] == ["ours"]
    assert f"{op}.{name}" in outcome.left_out[0]["reason"]


def test_a_fault_outside_the_reference_rows_is_seen_beside_pytorch():
    case = cases.mhc(40)
    kwargs = case.arguments("cpu", 0)
    good = ops.pytorch("mhc_post")(**kwargs)
    chosen = next(iter(gate.parts("mhc_post", {**kwargs, "x": torch.arange(40.0)[:, None]}))).arguments["x"].view(-1)
    unchecked = next(t for t in range(40) if t not in chosen.tolist())
    bad = good.clone()
    bad[unchecked, 0, 0] += 1
    assert gate.disagreement("mhc_post", gate.expected("mhc_post", kwargs), kwargs, bad) == ""
    both = gate.expected("mhc_post", kwargs, {"out": good})
    assert gate.disagreement("mhc_post", both, kwargs, good) == ""
    assert "beside PyTorch" in gate.disagreement("mhc_post", both, kwargs, bad)


def test_an_arm_that_raises_is_left_out_with_its_sentence():
    def broken(kwargs):
        raise RuntimeError("no cubin for sm_80")

    outcome = measure.measure(
        cases.mhc(2), run_of(fake_device.FakeDevice(l2_bytes=1)), [arm("mhc_post"), Arm("vllm", broken)]
    )
    assert [row["provider"] for row in outcome.rows] == ["ours"]
    assert outcome.left_out == [
        {"op": "mhc_post", "case": "T2-H5120", "provider": "vllm", "reason": "RuntimeError: no cubin for sm_80"}
    ]


def test_what_an_arm_prepared_lives_as_long_as_its_graph():
    """A captured graph holds addresses, no tensors: it replays into memory that its arm must still own."""

    class Forgetful(fake_device.FakeDevice):
        def capture(self, calls):
            timed = super().capture(calls)
            result, made = timed.results, list(prepared)

            def elapsed_us():
                self.order.append(all(tensor() is not None for tensor in made))
                return 10.0

            return Timed(elapsed_us, result, 1.0)

    prepared, function = [], ops.pytorch("mhc_post")

    def prepare(kwargs):
        lists = torch.zeros(4)
        prepared.append(weakref.ref(lists))
        return lambda: (lists, function(**kwargs))[1]

    device = Forgetful(l2_bytes=1)
    measure.measure(cases.mhc(2), run_of(device), [Arm("vllm", prepare), arm("mhc_post")])
    assert device.order
    assert all(device.order)


def test_arms_take_turns():
    device = fake_device.FakeDevice(l2_bytes=1)
    measure.measure(cases.mhc(2), run_of(device, rounds=2), [arm("mhc_post", p) for p in ("a", "b", "c")])
    lanes = [lane for lane, _ in device.order]
    assert lanes[:3] == [0, 1, 2]  # to warm up
    assert lanes[3:9] == [0, 1, 2, 2, 1, 0]
    assert lanes[9:] == [0, 1, 2]  # the gate's own round


def test_a_slow_arm_sits_out_rounds_that_a_fast_one_has():
    device = fake_device.FakeDevice([10.0, 15_000.0], l2_bytes=1)
    run = run_of(device, rounds=12)
    found = measure.measure(cases.mhc(2), run, [arm("mhc_post"), arm("mhc_post", "pytorch")])
    assert [row["rounds"] for row in found.rows] == [12, measure.LEAST_ROUNDS]
    order = [lane for lane, _ in device.order][2:-2]
    slow = [order[: at + 1].count(0) for at, lane in enumerate(order) if lane == 1]
    assert max(later - sooner for sooner, later in itertools.pairwise(slow)) <= 4, "spread over the run"


@pytest.mark.parametrize(("cost", "rounds"), [(10.0, 40), (2_500.0, 6), (1e6, 5)])
def test_slow_arms_have_fewer_rounds(cost, rounds):
    device = fake_device.FakeDevice([cost], l2_bytes=1)
    outcome = measure.measure(cases.mhc(2), run_of(device, rounds=40), [arm("mhc_post")])
    assert outcome.rows[0]["rounds"] == rounds


def test_eager_is_recorded_beside_the_graph():
    device = fake_device.FakeDevice([10.0, 70.0], l2_bytes=1)
    outcome = measure.measure(cases.mhc(2), run_of(device), [arm("mhc_post", "unfused", eager_too=True)])
    assert (outcome.rows[0]["p50_us"], outcome.rows[0]["eager_p50_us"]) == (10.0, 70.0)


def test_a_slow_eager_run_is_not_repeated_as_often():
    device = fake_device.FakeDevice([10.0, 15_000.0], l2_bytes=1)
    row = measure.measure(cases.mhc(2), run_of(device, rounds=9), [arm("mhc_post", "unfused", eager_too=True)]).rows[0]
    assert row["rounds"] == measure.LEAST_ROUNDS
    assert [lane for lane, how in device.order].count(1) == 1 + 2, "a warm-up, and 0.3 s twice"
    assert row["eager_p50_us"] == 15_000.0


def test_an_eager_round_is_short_and_reaches_the_copies_that_are_compared():
    device = fake_device.FakeDevice([10.0, 30.0], l2_bytes=1 << 30, memory=1 << 40)
    found = measure.measure(cases.mhc(1), run_of(device), [arm("mhc_post"), arm("mhc_post", "pytorch", graphed=False)])
    assert not found.left_out, "the last of 40 copies was computed"
    assert [(row["calls"], row["p50_us"]) for row in found.rows] == [(40, 10.0), (20, 30.0)]


def test_copies_pass_three_times_the_cache_and_do_not_read_the_same_rows():
    case, device = cases.decode(2, 256), fake_device.FakeDevice(l2_bytes=1 << 20)
    copies = measure._copies(case, device)
    assert len(copies.arguments) * copies.cost.bytes >= 3 << 20
    assert copies.cold
    assert copies.calls >= 20
    assert copies.calls % len(copies.arguments) == 0
    one, two = copies.arguments[:2]
    assert not torch.equal(one["extra_indices"], two["extra_indices"])
    assert one["extra_k_cache"].data_ptr() != two["extra_k_cache"].data_ptr(), "too small to be shared"
    large = measure._copies(case, fake_device.FakeDevice(l2_bytes=1 << 10))
    assert set(large.shared) == {"swa_k_cache", "extra_k_cache"}


@pytest.mark.parametrize(("memory", "copies", "cold"), [(1 << 20, 7, False), (1 << 40, 40, True)])
def test_a_row_says_that_it_is_warm(memory, copies, cold):
    """Cold, where every copy is used once in a graph: the device sweeps the cache before each."""
    device = fake_device.FakeDevice(l2_bytes=1 << 30, memory=memory)
    row = measure.measure(cases.mhc(1), run_of(device), [arm("mhc_post")]).rows[0]
    assert (row["copies"], row["cold"]) == (copies, cold)


class Noted:
    def __init__(self):
        self.told = []

    def begin(self, case):
        self.told.append(("begin", case.name))

    def end(self, case, outcome):
        self.told.append(("end", case.name, len(outcome.rows), [item["reason"] for item in outcome.left_out]))


def test_one_case_that_fails_does_not_end_the_others(monkeypatch):
    def broken(builder):
        raise RuntimeError("CUDA out of memory.\nSome advice")

    monkeypatch.setattr(providers, "arms", lambda op, lowering, native: ([arm(op)], []))
    listed = [cases.BenchCase("mhc_post", "broken", broken), cases.mhc(2)]
    watch = Noted()
    outcome = measure.measure_all(listed, run_of(fake_device.FakeDevice(l2_bytes=1)), watch)
    assert watch.told == [
        ("begin", "broken"),
        ("end", "broken", 0, ["RuntimeError: CUDA out of memory. Some advice"]),
        ("begin", "T2-H5120"),
        ("end", "T2-H5120", 1, []),
    ]
    assert (len(outcome.rows), len(outcome.left_out)) == (1, 1)


def test_no_case_begins_after_the_deadline(monkeypatch):
    run = measure.Run(fake_device.FakeDevice(l2_bytes=1), "native", Ceilings(1e12, 1e14), FACTS, 3, deadline=0.0)
    watch = Noted()
    assert measure.measure_all([cases.mhc(2)], run, watch).rows == []
    assert watch.told[1] == ("end", "T2-H5120", 0, ["no time was left"])


def test_a_device_that_takes_no_more_work_ends_the_process(monkeypatch):
    monkeypatch.setattr(providers, "arms", lambda op, lowering, native: ([arm(op)], []))
    device, watch = fake_device.FakeDevice(l2_bytes=1), Noted()
    device.alive = lambda: False
    with pytest.raises(measure.DeviceLostError) as caught:
        measure.measure_all([cases.mhc(2), cases.mhc(3)], run_of(device), watch)
    assert len(caught.value.outcome.rows) == 1
    assert [told[:2] for told in watch.told] == [("begin", "T2-H5120"), ("end", "T2-H5120")]


def test_padding_that_fails_costs_no_row(monkeypatch):
    monkeypatch.setattr(residual_streams, "HIDDEN", 128)
    kernel = ops.kernel("mhc_post")
    device = fake_device.FakeDevice(l2_bytes=1)

    def refuse(keys, capability):
        raise AttributeError("no packed_metadata")

    device.limit_occupancy = refuse
    ours = Arm("ours", lambda kwargs: lambda: kernel(**kwargs))
    rows = measure.measure(cases.mhc(1), run_of(device, "sm80"), [ours]).rows
    assert [row["occupancy"] for row in rows] == ["native, AttributeError: no packed_metadata"]


def test_launches_of_ours_are_held_to_ampere_and_only_under_its_lowering(monkeypatch):
    monkeypatch.setattr(residual_streams, "HIDDEN", 128)  # the kernel runs in the interpreter
    kernel = ops.kernel("mhc_post")
    ours = Arm("ours", lambda kwargs: lambda: kernel(**kwargs))
    device = fake_device.FakeDevice(l2_bytes=1)
    sm80 = measure.measure(cases.mhc(1), run_of(device, "sm80"), [ours, arm("mhc_post", "pytorch")])
    assert [row["occupancy"] for row in sm80.rows] == ["sm_80", "native"]
    assert len(device.limited) == 1
    assert device.limited[0][1] == (8, 0)
    assert device.limited[0][0][0].startswith("mhc_post/")
    native = measure.measure(cases.mhc(1), run_of(device), [ours])
    assert native.rows[0]["occupancy"] == "native"
    device.capability = (8, 0)
    assert measure.measure(cases.mhc(1), run_of(device, "sm80"), [ours]).rows[0]["occupancy"] == "native"


def test_share_of_the_roofline_takes_the_larger_bound():
    assert statistics.least_us(Cost(bytes=2_000_000, flops=10), 1e12, 1e14) == pytest.approx(2.0)
    assert statistics.least_us(Cost(bytes=10, flops=10**9), 1e12, 1e14) == pytest.approx(10.0)
    outcome = measure.measure(cases.mhc(3), run_of(fake_device.FakeDevice([4.0], l2_bytes=1)), [arm("mhc_post")])
    row = outcome.rows[0]
    assert row["roofline_share"] == pytest.approx(row["bytes"] / 1e12 * 1e6 / 4.0, abs=1e-4)


def test_projections_keep_the_share_of_the_roofline():
    cost = Cost(bytes=1_835_100, flops=0)  # 1 us of an A100's copy rate
    found = projected.projected_us(cost, 8.0, 1_835_100 / 2e-6, 1e14)  # 2 us here: a quarter of the roofline
    assert found["A100 80GB"] == pytest.approx(4.0)
    assert found["RTX 3090"] == pytest.approx(4.0 * 2.039e12 / 936e9, abs=0.01)
    assert projected.projected_us(Cost(0, 0), 8.0, 1e12, 1e14) == {}


def test_only_code_for_ampere_is_projected():
    arms = [arm("mhc_post", provider) for provider in ("ours", "vllm", "pytorch")]
    device = fake_device.FakeDevice(l2_bytes=1)
    rows = measure.measure(cases.mhc(2), run_of(device, "sm80"), arms).rows
    assert [set(row.get("projected_us", {})) for row in rows] == [set(projected.GPUS)] * 2 + [set()]
    head, first, _, last = report.table(rows).splitlines()[1:]
    assert head.split()[-4:] == ["~A100", "80GB", "~RTX", "3090"]
    assert first.split()[-2:] == [str(t) for t in rows[0]["projected_us"].values()]
    assert last.split()[-2:] == ["-", "-"]
    assert "projected_us" not in measure.measure(cases.mhc(2), run_of(device), arms).rows[0]
    device.capability = (8, 0)
    assert "projected_us" not in measure.measure(cases.mhc(2), run_of(device, "sm80"), arms).rows[0]


def test_a_result_is_finished_before_it_is_judged():
    """A set in another order, as vLLM returns it, is the same set; a wrong one stays wrong."""

    def backwards(result, kwargs):
        return result.flip(-1)

    def spoilt(result, kwargs):
        return torch.where(result == result.amax(), result.amin(), result).flip(-1)

    finish = adapters.FINISH["indexer_topk"]
    arms = [arm("indexer_topk", name, spoil=spoil, finish=finish) for name, spoil in (("a", backwards), ("b", spoilt))]
    outcome = measure.measure(SMALL["indexer_topk"], run_of(fake_device.FakeDevice(l2_bytes=1)), arms)
    assert [row["provider"] for row in outcome.rows] == ["a"]
    assert [item["provider"] for item in outcome.left_out] == ["b"]


def test_quantiles():
    assert statistics.quantile([3.0], 0.2) == 3.0
    assert statistics.quantile([4.0, 1.0, 2.0, 3.0, 5.0], 0.5) == 3.0
    assert statistics.quantile([0.0, 10.0], 0.2) == pytest.approx(2.0)


def test_clones_and_calls():
    assert statistics.clones_needed(100, 1000, 10**6) == 30
    assert statistics.clones_needed(100, 1000, 7) == 7
    assert statistics.clones_needed(100, 1000, 0) == 1
    assert statistics.clones_needed(1, 10**9, 10**6) == 40
    assert [statistics.calls_in_graph(n) for n in (1, 7, 20, 30)] == [20, 21, 20, 30]


def test_absent_providers_give_a_reason():
    found, left = providers.arms("sparse_mla_decode", "sm80", native_is_ampere=False)
    assert [a.provider for a in found] == ["ours", "pytorch", "pytorch-graph", "unfused"]
    assert {item.provider for item in left} == {"vllm", "flashmla"}
    assert "ModuleNotFoundError: No module named 'vllm'" in {item.reason for item in left}
    assert "vllm-native" in {item.provider for item in providers.arms("mhc_post", "native", False)[1]}


@pytest.mark.parametrize("op", SMALL)
def test_the_reference_overrules_pytorch_where_both_forms_are_wrong_alike(op):
    case = SMALL[op]
    used = case.arguments("cpu", 0)
    result = ops.pytorch(op)(**used)
    results = {name: t.clone() for name, t in gate.named_results(op, used, result).items()}
    want = gate.expected(op, case.arguments("cpu", 0), results)
    assert gate.disagreement(op, want, used, result) == ""
    spoilt = gate.named_results(op, used, result)
    for name, tensor in spoilt.items():
        row = tensor[-1:] if op != gate.GATHER else tensor[-1, tensor.shape[1] // 2]
        row.view(torch.uint8).view(-1)[-1] ^= 0x40
        want.whole[name].copy_(tensor)
    assert gate.disagreement(op, want, used, result).startswith(f"{op}.")
    assert "beside PyTorch" not in gate.disagreement(op, want, used, result)


def test_a_gather_is_checked_at_both_ends_and_in_the_middle_of_every_request():
    kwargs = cases.gather(2, 512).arguments("cpu", 0)
    marked = torch.arange(2 * 512).view(2, 512)
    seen = torch.cat([part.select(marked).flatten() for part in gate.parts(gate.GATHER, kwargs)])
    assert {0, 63, 224, 287, 448, 511, 512, 1023} <= set(seen.tolist())
    assert len(seen) == 2 * 3 * 64


INTERPRETED = [
    cases.insert(2),
    cases.prompt_logits(2, 40),
    cases.paged_logits(1, 64),
    SMALL["select_candidate_blocks"],
    cases.inverse_rope(1),
    pytest.param(cases.expert_order(3, 8), marks=pytest.mark.slow),  # 16 s
    cases.combine(2, 300),
    cases.mapping(2),
    cases.select(1, 600),
    cases.index_queries(1),
    cases.index_keys(3, 1),
    cases.engram(1),
    cases.gather(1, 128),
    cases.prefill(1, 128),
    cases.decode(1, 0),
    pytest.param(cases.decode(1, 128), marks=pytest.mark.slow),  # 4 s
]


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_the_kernels_take_the_arguments_that_are_timed(case):
    kwargs = case.arguments("cpu", 0)
    want = gate.expected(case.op, case.arguments("cpu", 0))
    assert gate.disagreement(case.op, want, kwargs, ops.kernel(case.op)(**kwargs)) == ""
