"""The longest context of a set of GPUs, and the smallest sets that hold one."""

import dataclasses

import pytest

from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology import explain, page, ran
from deepinfer_sm80.topology.cluster import cluster
from deepinfer_sm80.topology.footprint import weights
from deepinfer_sm80.topology.layout import Setting
from deepinfer_sm80.topology.offers import equal_hosts, longest, servable, smallest_sets, weights_gib
from deepinfer_sm80.topology.search import ANY, Only, judge, plan
from deepinfer_sm80.topology.serve import Standing

FOUND = weights(ModelConfig())
SETTING = Setting()


@pytest.mark.parametrize(("gpus", "hosts"), [("8xA6000-48GB", 1), ("16x24GB", 1), ("16x24GB", 2), ("6xA100-64GB", 1)])
def test_the_longest_context_fits_and_the_next_does_not(gpus, hosts):
    group = cluster(gpus, hosts)
    offer = longest(FOUND, group, SETTING)
    assert offer.context % 4096 == 0

    def holding(context):
        rows = plan(FOUND, group, dataclasses.replace(SETTING, context=context))
        return [row.layout for row in rows if row.servable]

    assert holding(offer.context)[0] == offer.row.layout, "the best at that context"
    assert offer.row.command
    assert f"--max-model-len {offer.context}" in offer.row.command
    assert offer.context == SETTING.context or not holding(offer.context + 4096)


def test_a_pipeline_is_offered_where_it_holds_what_nothing_else_does():
    group = cluster("8xA6000-48GB")
    offer = servable(FOUND, group, SETTING)
    assert (offer.context, offer.row.layout.name) == (SETTING.context, "TP4 x PP2 [20,20]")
    offer = servable(FOUND, group, SETTING, only=Only(pp=1))
    assert (offer.context, offer.row.layout.name) == (1_044_480, "TP8 + EP8")


def test_the_context_that_was_asked_for_is_offered_where_it_fits():
    short = dataclasses.replace(SETTING, context=100_001)
    rows = plan(FOUND, cluster("8xA6000-48GB"), short)
    offer = servable(FOUND, cluster("8xA6000-48GB"), short, rows=rows)
    assert (offer.context, offer.row) == (100_001, rows[0])


def test_offers_keep_to_the_sizes_that_were_asked_for():
    a6000 = cluster("8xA6000-48GB")
    assert longest(FOUND, a6000, SETTING).row.layout.tp == 4
    eight = longest(FOUND, a6000, SETTING, only=Only(tp=8))
    assert (eight.context, eight.row.layout.tp) == (1_044_480, 8)
    assert servable(FOUND, a6000, SETTING, only=Only(dp=2)).row.layout.dp == 2
    assert servable(FOUND, a6000, SETTING, only=Only(pp=2)).row.layout.pp == 2


def test_nothing_fits_and_nothing_is_offered():
    assert not any(row.fits for row in plan(FOUND, cluster("2xA100-40GB"), SETTING))
    assert servable(FOUND, cluster("2xA100-40GB"), SETTING) is None
    assert longest(FOUND, cluster("2xA100-40GB"), SETTING) is None


def test_tables_on_the_gpu_count_where_the_host_has_no_room():
    """As ``judge`` has it: a host that is too small for the tables does not rule a context out."""
    group = cluster("8xA100-64GB", ram="128GB")
    offer = longest(FOUND, group, SETTING, only=Only(tp=8))
    assert offer is None, "47 GiB of weights and 24 of tables are more than 60"
    group = cluster("8xA100-80GB", ram="128GB")
    offer = longest(FOUND, group, SETTING, only=Only(tp=8))
    assert (offer.context, offer.row.engram) == (SETTING.context, "gpu")


def test_smallest_sets_are_the_smallest():
    found = {(s.cluster.label, s.standing): s for s in smallest_sets(FOUND, SETTING)}
    assert found["6xA100-64GB", Standing.REPLICAS].layout.tp_per_stage == (2, 2, 2)
    assert ("8xA100-80GB", Standing.SERVABLE) in found
    assert found["8xA6000-48GB", Standing.SERVABLE].layout.pp == 2
    for entry in found.values():
        row = judge(FOUND, entry.layout, entry.cluster, SETTING)
        assert (row.fits, row.standing) == (True, entry.standing)
        assert entry.cluster.per_host <= 8
        assert entry.cluster.per_host % entry.layout.tp == 0, "a group of TP lies in one host"
    assert not any(row.fits for row in plan(FOUND, cluster("5xA100-64GB"), SETTING))


def test_every_card_has_a_set_that_vllm_serves_or_that_there_is_none():
    for setting, only in ((SETTING, ANY), (SETTING, Only(dp=1)), (dataclasses.replace(SETTING, context=32768), ANY)):
        sets = smallest_sets(FOUND, setting, only)
        for gpu in {entry.cluster.gpu for entry in sets}:
            of_card = [entry for entry in sets if entry.cluster.gpu is gpu]
            assert of_card[0].standing == Standing.SERVABLE
            replicas = [e.layout.dp > 1 for e in of_card if e.layout and e.standing == Standing.SERVABLE]
            assert replicas == sorted(replicas), "what has run comes first"
            counts = [entry.cluster.count for entry in of_card if entry.layout]
            assert counts == sorted(set(counts), reverse=True), "what is further from running needs fewer GPUs"
    lines = explain.smallest(smallest_sets(FOUND, SETTING, Only(dp=1)), SETTING, Only(dp=1)).splitlines()
    assert "  RTX3090-24GB: no set of up to 32 GPUs that vLLM serves" in lines
    assert lines[0] == "Smallest sets that hold one context of 1,048,576 tokens with --dp 1:"


@pytest.mark.parametrize("only", [Only(tp=4), Only(pp=1), Only(dp=2), Only(tp=8, pp=2)], ids=str)
def test_smallest_sets_keep_to_the_sizes_that_were_asked_for(only):
    layouts = [entry.layout for entry in smallest_sets(FOUND, SETTING, only) if entry.layout]
    assert layouts
    assert all(only.admits(layout.tp_per_stage, layout.dp) for layout in layouts)


def test_smallest_sets_have_the_memory_of_their_hosts():
    rich, poor = (smallest_sets(FOUND, SETTING, Only(tp=8), ram) for ram in (None, 128 << 30))
    assert next(s.cluster.count for s in rich if s.cluster.label.endswith("A100-64GB")) == 8
    assert next(s.cluster.count for s in poor if s.cluster.label.endswith("A100-64GB")) == 16


def test_sets_are_listed_with_what_is_to_know_of_them():
    text = explain.smallest(smallest_sets(FOUND, SETTING), SETTING, ANY)
    for words in (
        "  8xA6000-48GB as TP4 x PP2 [20,20] (a pipeline)",
        "  6xA100-64GB as TP2 x PP3 [14,13,13] (a pipeline, source replicas)",
        "  16xA100-40GB as TP8 x PP2 [20,20] (2 hosts, a pipeline)",
        "  24xA30-24GB as TP8 x DP3 + EP24 (3 hosts)",
        ran.NO_REPLICAS,
        "Several hosts need Ray, which has never run with this plugin.",
    ):
        assert f"\n{words}" in text
    assert text in page.page()


def test_the_draft_is_no_weight_without_speculation():
    with_draft, without = (weights_gib(FOUND, dataclasses.replace(SETTING, speculation=k)) for k in (5, 0))
    assert with_draft - without == pytest.approx(7.39, abs=0.01)


def test_hosts_are_equal_and_of_up_to_eight():
    card = cluster("1xA6000").gpu
    found = {count: equal_hosts(card, count).hosts for count in (1, 8, 9, 10, 11, 16, 24)}
    assert found == {1: 1, 8: 1, 9: 3, 10: 2, 11: 11, 16: 2, 24: 3}
    assert [equal_hosts(card, count, tp=tp).hosts for count, tp in ((10, 2), (12, 4), (20, 4), (24, 8))] == [5, 3, 5, 3]
