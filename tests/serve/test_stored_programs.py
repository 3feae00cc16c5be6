"""Compiled programs on disk: a second engine computes the same without tracing, and a bad file is compiled again."""

import os

import jax
import pytest

from octavo.serve import Engine, KVConfig, SamplingParams
from octavo.serve.stored_programs import program_path
from tests.serve.common import DENSE, quantized_params

ONE = DENSE.replace(num_layers=1)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def answer(engine):
    return [(e.token, e.logprob) for e in engine.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], GREEDY)]


def engine_of(directory, **options):
    copy = jax.tree.map(lambda x: x + 0, quantized_params(ONE))
    return Engine(ONE, copy, max_length=16, chunk=8, cache_dir=directory, **options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs")
    engine = engine_of(directory)
    assert not engine.programs.is_stored
    expected = answer(engine)
    assert engine.programs.traces == {"prefill": 1, "decode": 1}
    assert engine.programs.is_stored
    return directory, expected


def test_a_second_engine_traces_nothing_and_computes_the_same(stored):
    directory, expected = stored
    engine = engine_of(directory)
    engine.warm_up()
    assert answer(engine) == expected
    assert not engine.programs.traces
    plain = engine_of(None)
    assert answer(plain) == expected, "as programs that are not stored"


def test_other_sizes_are_other_programs(stored):
    directory, _ = stored
    assert not engine_of(directory, kv=KVConfig.of("int8")).programs.is_stored
    assert not engine_of(directory, slots=2).programs.is_stored


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:1] + data[3:], lambda data: b""])
def test_a_damaged_file_is_written_again(stored, damage):
    directory, expected = stored
    path = next(directory.glob("decode-*"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    engine = engine_of(directory)
    assert answer(engine) == expected
    assert engine.programs.traces == {"decode": 1}
    assert abs(path.stat().st_size - len(whole)) < 4096
    assert answer(engine_of(directory)) == expected


def test_without_a_directory_that_can_be_written_programs_are_compiled(stored, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    engine = engine_of(tmp_path / "file")
    assert answer(engine) == stored[1]
    assert not engine.programs.is_stored


def test_the_file_depends_on_settings_of_jax(tmp_path):
    path = program_path(tmp_path, "decode", 1)
    assert path == program_path(tmp_path, "decode", 1) != program_path(tmp_path, "decode", 2)
    with jax.default_matmul_precision("float32"):
        assert program_path(tmp_path, "decode", 1) != path
    assert program_path(None, "decode", 1) is None


def test_the_oldest_files_are_deleted(stored, monkeypatch):
    directory, _ = stored
    old, (path,) = directory / "old.program", directory.glob("prefill-*")
    old.write_bytes(bytes(1000))
    os.utime(old, (1, 1))
    size = sum(file.stat().st_size for file in directory.glob("*.program"))
    monkeypatch.setattr("octavo.serve.stored_programs.MOST_BYTES", size - 500)
    path.unlink()
    answer(engine_of(directory))
    assert path.exists()
    assert not old.exists()
