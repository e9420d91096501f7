"""The command ``deepinfer-sm80 make-checkpoint``."""

import pytest

from deepinfer_sm80.cli import main, make_checkpoint
from deepinfer_sm80.model.checkpoint import Reader


@pytest.fixture
def small(monkeypatch, micro):
    asked = []
    monkeypatch.setattr(make_checkpoint, "preset", lambda name: asked.append(name) or micro)
    return asked


def test_writes_and_says_what(small, tmp_path, capsys, micro_checkpoint):
    assert main(["make-checkpoint", str(tmp_path / "model"), "--seed", "3"]) == 0
    assert small == ["tiny"]
    *shards, last = capsys.readouterr().out.splitlines()
    assert len(shards) == 1
    assert shards[0].startswith("model-00001-of-00001.safetensors: ")
    assert last.startswith(f"{tmp_path / 'model'}: 6 files, 0.0")
    assert " GB, " in last
    name = "layers.0.attn.attn_sink"
    assert Reader(tmp_path / "model").load(name).equal(Reader(micro_checkpoint).load(name))


def test_refuses_a_directory_in_use(small, tmp_path, capsys):
    (tmp_path / "precious").write_text("kept")
    assert main(["make-checkpoint", str(tmp_path), "--preset", "layer"]) == 2
    assert small == ["layer"]
    assert "not empty" in capsys.readouterr().err


def test_the_released_model_is_not_on_offer(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["make-checkpoint", str(tmp_path / "model"), "--preset", "released"])
    assert "tiny" in capsys.readouterr().err
