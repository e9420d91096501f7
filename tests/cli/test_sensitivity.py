"""sensitivity: the exit code tells whether every component is noticed, and the page shows what was measured."""

import json

import pytest

from deepinfer_sm80.cli import main, sensitivity
from deepinfer_sm80.model.sensitivity import ROUNDING_NOISE, Change, Table


def table(rounding=0.005, clamp=-0.2):
    changes = (Change(ROUNDING_NOISE, 0.0001, rounding, 0.03), Change("clamp", clamp, 0.25, 1.5))
    return Table(1499, -8.7, changes)


@pytest.mark.parametrize(
    ("measured", "code"), [(table(), 0), (table(clamp=-0.09), 1), (table(clamp=0.2), 1), (table(rounding=0.02), 1)]
)
def test_exit_code(monkeypatch, tmp_path, capsys, measured, code):
    monkeypatch.setattr(sensitivity, "measure", lambda directory, lengths, device: measured)
    assert main(["sensitivity", str(tmp_path)]) == code
    assert "| clamp: gate and up values" in capsys.readouterr().out


def test_a_no_is_explained(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sensitivity, "measure", lambda directory, lengths, device: table(clamp=-0.09))
    assert main(["sensitivity", str(tmp_path), "--lengths", "64"]) == 1
    out = capsys.readouterr().out
    assert "NOT NOTICED: 1 of 1 components (leaving a component out must lower the mean by 0.1 or more): clamp" in out
    assert "Prompts of 64 tokens are too short to notice every component: take --lengths 1500, the default." in out
    assert main(["sensitivity", str(tmp_path)]) == 1
    assert "too short" not in capsys.readouterr().out
    monkeypatch.setattr(sensitivity, "measure", lambda directory, lengths, device: table(rounding=0.02))
    assert main(["sensitivity", str(tmp_path)]) == 1
    assert (
        "TOO MUCH: Rounding moves a log-probability by 0.0200 on average; 0.01 is allowed." in capsys.readouterr().out
    )
    monkeypatch.setattr(sensitivity, "measure", lambda directory, lengths, device: table())
    assert main(["sensitivity", str(tmp_path)]) == 0
    assert "Noticed: all 1 components" in capsys.readouterr().out


def test_what_was_measured_becomes_the_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sensitivity, "measure", lambda directory, lengths, device: table())
    monkeypatch.setattr(sensitivity, "preset_of", lambda directory: "tiny")
    file = tmp_path / "measured.json"
    assert main(["sensitivity", str(tmp_path), "--lengths", "700", "1500", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["lengths"] == [700, 1500]
    capsys.readouterr()
    assert main(["sensitivity", "--page", str(file), str(file)]) == 0
    page = capsys.readouterr().out
    assert page.count("## Preset `tiny`") == 2
    assert "prompts of 700 and 1,500 tokens" in page
    assert "| nothing; rounding only | +0.0001 | 0.0050 | 0.030 |" in page


def test_without_a_checkpoint_one_sentence(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["sensitivity", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_folder_for_the_measurement_is_missing_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sensitivity, "measure", lambda *given: pytest.fail("it was measured"))
    assert main(["sensitivity", str(tmp_path), "--json", str(tmp_path / "absent" / "x.json")]) == 2
    assert "existing folder" in capsys.readouterr().err
