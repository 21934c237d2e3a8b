"""What the variables of a launcher mean. That real processes find each other by them is tested in tests/system."""

import pytest

from vitlab.core.errors import UsageError
from vitlab.core.launch import Launch, first_host, may_restart, read_launch

SRUN = {"SLURM_JOB_ID": "70123", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}


def test_without_a_launcher_there_is_one_process() -> None:
    assert read_launch({}) == Launch(0, 1, 0, "")


def test_rank_world_size_and_local_rank_are_read_from_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_launch(env) == Launch(3, 8, 1, "env://")


def test_srun_gives_the_same_and_the_first_machine_is_the_rendezvous() -> None:
    env = {**SRUN, "SLURM_NODELIST": "gpu[07-10]"}
    assert read_launch(env) == Launch(5, 16, 1, "tcp://gpu07:20123")
    assert read_launch({**env, "MASTER_PORT": "4000"}).address == "tcp://gpu07:4000"
    assert read_launch({**env, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}).address == "tcp://10.0.0.1:4000"


def test_step_of_a_job_may_have_fewer_processes_than_the_job() -> None:
    env = {
        **SRUN,
        "SLURM_NODELIST": "a,b",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "b",
        "SLURM_PROCID": "1",
    }
    assert read_launch(env) == Launch(1, 2, 1, "tcp://b:20123")


def test_torchrun_under_slurm_is_torchrun() -> None:
    assert read_launch({**SRUN, "SLURM_NODELIST": "a", "RANK": "0", "WORLD_SIZE": "2"}) == Launch(0, 2, 0, "env://")


def test_batch_script_is_one_process_whatever_the_job_has() -> None:
    env = {**SRUN, "SLURM_NODELIST": "a", "SLURM_PROCID": "0"}
    del env["SLURM_STEP_ID"]
    assert read_launch(env).size == 1


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu5", "gpu5"),
        ("gpu5,gpu6", "gpu5"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[11-14],x", "rack1node11"),
        ("a-b[001-004]-ib.cluster", "a-b001-ib.cluster"),
    ],
)
def test_first_machine_of_a_compressed_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_variables_that_are_not_numbers_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"WORLD_SIZE.*'many'"):
        read_launch({"WORLD_SIZE": "many", "RANK": "0"})
    with pytest.raises(UsageError, match="no machine"):
        first_host("")


def test_restarts_are_those_of_torchrun_and_requeued_jobs() -> None:
    assert not may_restart({})
    assert not may_restart({"TORCHELASTIC_MAX_RESTARTS": "0"})
    assert may_restart({"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert may_restart({"SLURM_RESTART_COUNT": "1"})
