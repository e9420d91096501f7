"""Charts come from the summary alone, say which GPU they show, and the committed ones are what the rows give."""

import importlib.util
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from deepinfer_sm80.bench import cases, providers, rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
COMMITTED = sorted((RESULTS / "charts").iterdir())
RESOURCES = rows.read_resources(ROOT / "docs/resources.md")


@pytest.fixture(scope="module")
def charts():
    path = ROOT / "benchmarks/generate_charts.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(charts, tmp_path_factory):
    summary = json.loads((RESULTS / rows.SUMMARY).read_text(encoding="utf-8"))
    return {path.name: path for path in charts.draw(summary, tmp_path_factory.mktemp("charts"))}


def measured(gpu):
    rate = {"copy_bytes_per_s": 2e12, "dot_flops_per_s": 2e14, "bytes": 10**6, "flops": 10**8}
    return [
        {"op": case.op, "case": case.name, "provider": provider, "lowering": "sm80", "gpu": gpu, "p50_us": time} | rate
        for case in cases.all_cases()
        for provider, time in (("ours", 2.0), ("pytorch", 8.0), ("unfused", 4.0))
    ]


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_the_committed_summary_is_what_the_rows_and_the_resource_page_say():
    summary = json.loads((RESULTS / rows.SUMMARY).read_text(encoding="utf-8"))
    assert summary == rows.summarise(RESULTS, ROOT / "docs/resources.md"), "run make docs"
    assert len(summary["resources"]) > 100


def test_the_committed_charts_are_those_of_the_summary(drawn):
    assert sorted(drawn) == [path.name for path in COMMITTED], "run make docs"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_a_committed_chart_is_drawn_again(path, drawn):
    again = drawn[path.name]
    if path.suffix == ".svg":
        assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), "run make docs"
    else:
        assert np.array_equal(matplotlib.image.imread(again), matplotlib.image.imread(path)), "run make docs"


def test_no_measured_chart_without_rows(charts):
    summary = {"resources": rows.read_resources(ROOT / "docs/resources.md"), "rows": []}
    assert set(charts.charts(summary)) == {"resources-sm_80", "resources-sm_86"}


def test_one_gpu_a_chart_with_its_name(charts):
    resources = rows.read_resources(ROOT / "docs/resources.md")
    found = charts.charts({"resources": resources, "rows": measured("NVIDIA A100") + measured("NVIDIA Test 9000")})
    for folder, gpu, other in (
        ("a100", "NVIDIA A100", "NVIDIA Test"),
        ("test-9000", "NVIDIA Test 9000", "NVIDIA A100"),
    ):
        mine = {name: figure for name, figure in found.items() if name.endswith(f"nvidia-{folder}-sm80")}
        kinds = {name.partition("-nvidia")[0] for name in mine}
        assert kinds == {"speedup", "roofline", "latency-tokens", "latency-context"}
        for figure in mine.values():
            assert any(f"{gpu}, lowering sm80" in text for text in texts(figure))
            assert not any(other in text for text in texts(figure))


def step(name, arm, ms, **shares):
    groups = {group: {"share": share} for group, share in shares.items()}
    return {"gpu": "NVIDIA A100", "checkpoint": "toy", "step": name, "arm": arm, "ms": ms, "groups": groups}


def test_steps_show_both_arms_and_the_shares_of_ours(charts):
    made = [step("decode-8", "kernels", 3.0, attention=0.7, norms=0.28, tiny=0.02), step("decode-8", "stock", 4.0)]
    made += [
        step("decode-1", "kernels", 2.0, attention=0.4, norms=0.6),
        step("prefill-2048", "kernels", 9.0, norms=1.0),
    ]
    name, figure = next(
        (n, f) for n, f in charts.charts({"resources": RESOURCES, "rows": [], "steps": made}).items() if "steps" in n
    )
    assert name == "steps-nvidia-a100-toy"
    assert {"A whole step inside vLLM\nNVIDIA A100, checkpoint toy", "attention", "norms", "all others"} <= set(
        texts(figure)
    )
    assert "tiny" not in texts(figure)
    line = figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 8], [2.0, 3.0])
    assert [bar.get_width() for bar in figure.axes[1].containers[0]] == [0.4, 0.7, 0.0]


def test_figures_of_others_are_hollow_and_named(charts):
    common = {"op": "combine_topk_swa_indices", "case": "T1536-K512-W128", "lowering": "sm80", "gpu": "G"}
    made = [common | {"provider": provider, "p50_us": us} for provider, us in (("ours", 1.0), ("vllm", 3.0))]
    figure = charts.speedup(made, "G")
    points = figure.axes[0].collections[0]
    assert points.get_offsets().tolist() == [[22.17, 0.0]]
    assert len(points.get_facecolors()) == 0
    assert "published, not ours (GA100, against vLLM's kernel)" in texts(figure)


def test_speedup_is_the_geometric_mean_over_shared_cases(charts):
    made = []
    for case, ours, theirs in (("a", 1.0, 2.0), ("b", 1.0, 8.0)):
        common = {"op": "mhc_post", "case": case, "lowering": "sm80", "gpu": "G"}
        made += [common | {"provider": "ours", "p50_us": ours}, common | {"provider": "pytorch", "p50_us": theirs}]
    made.append({"op": "mhc_post", "case": "c", "lowering": "sm80", "gpu": "G", "provider": "pytorch", "p50_us": 99.0})
    assert "4.00" in texts(charts.speedup(made, "G"))


def test_roofline_points_are_flops_over_time(charts):
    figure = charts.roofline(measured("G"), "G")
    points = figure.axes[0].collections[0].get_offsets()
    assert list(points[0]) == pytest.approx([100.0, 10**8 / 2.0 / 1e6])


def test_resource_bars_show_the_most_demanding_kernel(charts):
    table = [
        {"op": "x", "arch": "sm_80", "triton": t, "shared": s, "registers": 1, "ctas_per_sm": c}
        for t, s, c in (("3.6.0", 99 * 1024, 1), ("3.10.0", 10 * 1024, 7), ("3.10.0", 20 * 1024, 5))
    ]
    figure = charts.resources(table, "sm_80")
    assert {"20", "5"} <= set(texts(figure))
    assert any("Triton 3.10.0, not timed" in text for text in texts(figure))
    assert "99" not in texts(figure)


def test_every_provider_has_its_colour(charts):
    assert list(charts.COLOURS) == list(providers.PROVIDERS)
    assert len(set(charts.COLOURS.values())) == len(providers.PROVIDERS)


@pytest.mark.parametrize(
    ("option", "name", "found"),
    [
        ("--summary", "absent", "no such file or directory ("),
        ("--summary", "text", "what is no JSON in line 1 ("),
        ("--out", "text", ""),
    ],
)
def test_a_path_that_cannot_be_used_is_a_sentence(charts, option, name, found, tmp_path, capsys):
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(SystemExit) as ended:
        charts.main([option, str(tmp_path / name)])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{option} must be a " in said
    assert f"found {found}{tmp_path / name}" in said
    assert ": name another" in said
