"""Initialization of processes and its errors; `multiprocess` has the rest."""

import jax
import numpy as np
import pytest

from octavo.data import make_dataset
from octavo.train import distributed
from octavo.train.config import ConfigError
from octavo.train.mesh import make_mesh
from tests.train.common import small


def test_the_configuration_is_stronger_than_the_environment():
    config = small(coordinator_address="a:1", num_processes=4, process_id=0)
    environ = {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_NUM_PROCESSES": "9", "JAX_PROCESS_ID": "3"}
    assert distributed.distributed_settings(config, environ) == {
        "coordinator_address": "a:1",
        "num_processes": 4,
        "process_id": 0,
    }
    found = distributed.distributed_settings(small(), environ)
    assert found == {"coordinator_address": "b:2", "num_processes": 9, "process_id": 3}
    assert distributed.distributed_settings(small(), {}) == {}
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID=two: a whole number of at least 0"):
        distributed.distributed_settings(small(), {"JAX_PROCESS_ID": "two"})


def test_a_process_that_nobody_asked_to_join_is_alone():
    jax.devices()
    distributed.initialize(small(), {})
    assert not distributed.is_multiprocess()
    assert distributed.is_main_process()
    config = small()
    assert distributed.agree_on_config(config) is config


def test_processes_that_do_not_come_together():
    jax.devices()
    with pytest.raises(distributed.ConnectionLostError) as caught:
        distributed.initialize(small(coordinator_address="127.0.0.1:9", num_processes=2, process_id=1))
    text = str(caught.value)
    assert text.startswith(
        "the processes of this run could not connect (coordinator_address=127.0.0.1:9, num_processes=2, process_id=1): "
    )
    assert "Every process needs the same coordinator_address and num_processes and a process_id of its own" in text
    distributed.initialize(small(coordinator_address="127.0.0.1:9", skip_jax_distributed_system=True))


def test_a_lost_connection_names_the_checkpoint_to_resume_from():
    text = str(distributed.connection_lost(45, 40, RuntimeError("Gloo all-reduce failed\nand more")))
    assert text == (
        "process 0 of 1 lost the others at step 45: one of them ended or cannot be reached. Start all processes again "
        "with the same command: the run resumes from the checkpoint of step 40. (Gloo all-reduce failed)"
    )
    assert "resumes from the start" in str(distributed.connection_lost(3, None, RuntimeError()))


def test_a_batch_on_devices_is_the_batch():
    config = small(num_devices=0, ici_context_parallelism=2, per_device_batch_size=1)
    data = make_dataset(config, batch_size=8)
    sharding = jax.sharding.NamedSharding(make_mesh(config), jax.sharding.PartitionSpec("fsdp", "context"))
    found = distributed.shard_batch(data, 5, sharding)
    for name, rows in data.batch(5).items():
        np.testing.assert_array_equal(found[name], rows)
        assert found[name].sharding == sharding
