"""Document streams, and the loaders of other libraries, replaced by fakes with their documented calls."""

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from octavo.data import KEYS, BatchConfig, make_dataset
from octavo.data.corpus import Corpus
from octavo.data.loaders import parse_text
from octavo.data.streaming import DocumentStream
from octavo.data.tokenizer import ByteTokenizer

TEXTS = [f"document {i}: " + "x" * (7 * i % 23) for i in range(12)]


def stream(opened=lambda epoch: TEXTS, **changes):
    return DocumentStream(opened, ByteTokenizer(), BatchConfig(batch_size=3, length=10, **changes), {"name": "test"})


def equal(one, other):
    return all(np.array_equal(one[key], other[key]) for key in KEYS)


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_packs_like_a_corpus(packing):
    ids = np.concatenate([[255], *([*ByteTokenizer().tokenize(text), 255] for text in TEXTS)]).astype(np.uint8)
    layout = BatchConfig(batch_size=3, length=10, packing=packing, shuffle=False)
    corpus = Corpus(ids, layout, eos=255, bos=255, vocab_size=256, details={})
    flow = stream(packing=packing)
    whole = corpus.num_batches - 1  # the last one continues with the next epoch
    assert whole > 2
    for index in range(whole):
        assert equal(flow.batch(index), corpus.batch(index))


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_of_a_stream_depends_on_its_index_alone(packing):
    flow = stream(packing=packing)
    ahead = [flow.batch(i) for i in range(40)]
    for index in (39, 5, 0, 17, 18, 18):
        assert equal(flow.batch(index), ahead[index])
    assert equal(stream(packing=packing).batch(33), ahead[33])


def test_the_next_batch_does_not_restart_the_stream():
    opened = []
    flow = stream(lambda epoch: opened.append(epoch) or TEXTS)
    for index in range(3):
        flow.batch(index)
    assert opened == [0]
    flow.batch(200)
    assert opened == list(range(len(opened)))
    count = len(opened)
    flow.batch(0)
    assert opened[count:] == [0]


def test_reuse_of_a_stream():
    flow = stream(reuse=2)
    assert equal(flow.batch(0), flow.batch(4))
    assert not equal(flow.batch(0), flow.batch(1))


def test_a_stream_without_text_raises():
    with pytest.raises(ValueError, match=r"there is no text in {'name': 'test'}"):
        stream(lambda epoch: ["", ""]).batch(0)


# -- records


def field(number, content):
    size, head = len(content), bytes([number << 3 | 2])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + content


def example(**columns):
    """A serialized tf.train.Example of texts and, for numbers, int64 lists."""
    entries = b""
    for name, value in columns.items():
        feature = field(1, field(1, value.encode())) if isinstance(value, str) else field(3, field(1, bytes([value])))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def test_the_text_of_an_example():
    assert parse_text(example(id=7, text="é" * 300, title="no")) == "é" * 300
    with pytest.raises(ValueError, match="no text in 'text'; its columns are id, title"):
        parse_text(example(id=7, title="no"))
    for broken in (b"\xff\xff", b"plain text", example(text="cut short")[:-3]):
        with pytest.raises(ValueError, match=r"is no tf.train.Example|no text in"):
            parse_text(broken)


# -- loaders


@pytest.fixture
def module(monkeypatch):
    def make(name, **contents):
        made = ModuleType(name)
        for key, value in contents.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


class Rows:
    """What datasets.load_dataset(streaming=True) returns, as far as it is used."""

    def __init__(self, rows):
        self.rows, self.epoch, self.seed = rows, 0, None

    def shuffle(self, *, seed, buffer_size):
        shuffled = Rows(self.rows)
        shuffled.seed = seed
        assert buffer_size > 1
        return shuffled

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.rows)))
        if self.seed is not None:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        return (self.rows[i] for i in order)


@pytest.fixture
def hub(module):
    calls = []

    def load_dataset(path, *, data_dir, data_files, split, streaming):
        calls.append(SimpleNamespace(path=path, data_dir=data_dir, data_files=data_files, split=split))
        assert streaming
        return Rows([{"text": f"{split} {text}", "url": ""} for text in TEXTS])

    module("datasets", load_dataset=load_dataset)
    return calls


def test_hf_streams_and_shuffles_by_seed(config, hub):
    wanted = config(dataset_type="hf", hf_path="some/set", hf_data_dir="en", train_split="train", eval_split="test")
    train, rest = make_dataset(wanted), make_dataset(wanted, "eval")
    assert "train document" in train.decode(train.batch(0)["inputs"])
    assert rest.decode(rest.batch(0)["inputs"]).startswith("test document 0")
    assert (hub[0].path, hub[0].data_dir, hub[0].data_files, hub[0].split) == ("some/set", "en", None, "train")
    assert equal(train.batch(9), make_dataset(wanted).batch(9))
    other = config(**{**vars(wanted), "data_shuffle_seed": 1})
    assert not equal(train.batch(0), make_dataset(other).batch(0))
    assert rest.describe()["name"] == "hf"
    assert rest.num_batches is None


def test_hf_reads_local_files(config, hub):
    wanted = config(dataset_type="hf", hf_path="json", hf_train_files="a.json; b.json", hf_eval_files="c.json")
    make_dataset(wanted).batch(0)
    make_dataset(wanted, "eval").batch(0)
    assert [(call.data_files, call.split) for call in hub] == [(["a.json", "b.json"], "train"), (["c.json"], "train")]


def test_hf_trains_one_bpe_for_both_splits(config, hub):
    pytest.importorskip("tokenizers")
    wanted = config(dataset_type="hf", hf_path="some/set", tokenizer_type="bpe", vocab_size=280)
    train, rest = make_dataset(wanted), make_dataset(wanted, "eval")
    assert train._tokenizer.digest == rest._tokenizer.digest
    assert hub[0].split == hub[1].split == "train"


def test_a_row_without_text_names_its_columns(config, module):
    module("datasets", load_dataset=lambda *_, **__: Rows([{"content": "no", "id": 1}]))
    with pytest.raises(ValueError, match="a row has no column 'text'; its columns are content, id"):
        make_dataset(config(dataset_type="hf", hf_path="some/set")).batch(0)


def test_tfds_reads_in_order(config, module):
    calls = []

    def load(name, *, split, data_dir, shuffle_files):
        calls.append((name, split, data_dir, shuffle_files))
        return [{"text": text.encode()} for text in TEXTS]

    module("tensorflow_datasets", load=load, as_numpy=iter)
    data = make_dataset(config(dataset_type="tfds", dataset_name="c4/en:3.0.1", dataset_path="data"))
    assert data.decode(data.batch(0)["inputs"]).startswith(TEXTS[0])
    assert calls == [("c4/en:3.0.1", "train", "data", False)]
    make_dataset(config(dataset_type="tfds", dataset_name="c4/en:3.0.1"), "eval").batch(0)
    assert calls[1] == ("c4/en:3.0.1", "validation", None, False)


@pytest.fixture
def grain(module, tmp_path):
    """Grain's three readers over files that the test writes: records of four bytes of length, then content."""

    def records(path):
        data, found = Path(path).read_bytes(), []
        while data:
            (size,) = struct.unpack("<I", data[:4])
            found.append(data[4 : 4 + size])
            data = data[4 + size :]
        return found

    class ArrayRecordDataSource:
        def __init__(self, paths):
            self._records = [record for path in paths for record in records(path)]

        def __len__(self):
            return len(self._records)

        def __getitem__(self, key):
            return self._records[key]

    for number in range(3):
        for kind in ("train", "eval"):
            contents = [example(text=f"{kind} {text}") for text in TEXTS[number::3]]
            packed = b"".join(struct.pack("<I", len(content)) + content for content in contents)
            (tmp_path / f"{kind}-{number}.record").write_bytes(packed)
    return module(
        "grain",
        sources=SimpleNamespace(ArrayRecordDataSource=ArrayRecordDataSource),
        experimental=SimpleNamespace(
            ParquetIterDataset=lambda path: ({"text": parse_text(record)} for record in records(path)),
            TFRecordIterDataset=records,
        ),
    )


def document(data, index):
    batch = data.batch(index)
    return data.decode(batch["inputs"][batch["inputs_segmentation"] > 0])


@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "tfrecord"])
def test_grain_shuffles_anew_in_every_epoch(config, grain, tmp_path, kind):
    files = {
        "grain_train_files": f"{tmp_path}/train-[01].record;{tmp_path}/train-2.record",
        "grain_eval_files": f"{tmp_path}/eval-*.record",
    }
    shape = {"packing": False, "per_device_batch_size": 1, "max_target_length": 60}
    wanted = config(dataset_type="grain", grain_file_type=kind, **files, **shape)
    train, rest = make_dataset(wanted), make_dataset(wanted, "eval")
    epochs = [[document(train, e * 12 + i) for i in range(12)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"train {text}" for text in TEXTS)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    in_order = [f"eval {text}" for number in range(3) for text in TEXTS[number::3]]
    assert [document(rest, i) for i in range(12)] == in_order
    assert rest.describe()["file_type"] == kind


def test_grain_errors(config, grain, tmp_path):
    with pytest.raises(ValueError, match=r"unknown grain_file_type 'parket': did you mean 'parquet'"):
        make_dataset(config(dataset_type="grain", grain_file_type="parket"))
    with pytest.raises(FileNotFoundError, match=r"grain_train_files='.*none' matches no file; it is a pattern"):
        make_dataset(config(dataset_type="grain", grain_train_files=f"{tmp_path}/none"))


@pytest.mark.parametrize(
    ("kind", "package", "command"),
    [
        ("hf", "datasets", "pip install datasets"),
        ("tfds", "tensorflow_datasets", "pip install tensorflow-datasets tensorflow"),
        ("grain", "grain", "pip install grain"),
    ],
)
def test_a_missing_package_is_named(config, monkeypatch, kind, package, command):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"dataset_type={kind} needs the package '{package}'.*{command}$"):
        make_dataset(config(dataset_type=kind))


@pytest.mark.parametrize(
    ("kind", "package", "option"), [("hf", "datasets", "hf_path"), ("tfds", "tensorflow_datasets", "dataset_name")]
)
def test_a_missing_option_is_named(config, module, kind, package, option):
    module(package)
    with pytest.raises(ValueError, match=f"dataset_type={kind} needs {option}"):
        make_dataset(config(dataset_type=kind))
