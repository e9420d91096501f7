"""Headers, indexes and pairs of shards that say what is not so: each is refused with a sentence."""

import json

import pytest
import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model import checkpoint


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
