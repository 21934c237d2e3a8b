"""The same command under every launcher: torchrun on one machine and on two, Slurm's variables, and by hand. A process that is
killed ends all of them; torchrun names it, and can start them again, and they go on by themselves."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from forked_command import Command

SOAK = os.environ.get("VITLAB_SOAK") == "1"

PROGRAMS = Path(sys.executable).parent
PATIENCE_S = 300  # for what takes seconds, on a machine that does other things too
PROMISED_S = 60  # from a death to the end of all
# Small and quick, on real digits. Not Adam, whose first steps make whole steps of rounding noise.
SMALL = ("model.name=ViT-w16d2m32h2/4", "train.batch_size=16", "optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=0")


def train(out: Path, steps: int, *overrides: str) -> list[str]:
    options = [word for override in (*SMALL, f"train.steps={steps}", *overrides) for word in ("--set", override)]
    command = [str(PROGRAMS / "vitlab"), "train", "digits", "--recipe", "laptop-digits", "--out", str(out)]
    return [*command, "--threads", "1", "--device", "cpu", "--quiet", *options]


def torchrun(*options: str) -> list[str]:
    return [str(PROGRAMS / "torchrun"), *options, "--no-python"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command: Sequence[str], cwd: Path, **variables: str) -> Generator[subprocess.Popen[str]]:
    """A process with an output that is kept; it and what it started end with the test."""
    taken_away = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_JOB_ID")
    env = {name: value for name, value in os.environ.items() if name not in taken_away}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def printed(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=PATIENCE_S)[0]


def by_hand(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(run: Path, steps: int, *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(rows(run)) < steps or not list((run / "checkpoints").glob("step-*")):
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, printed(ended[0])
        assert time.monotonic() < until, f"{run} has done {len(rows(run))} steps only"
        time.sleep(0.05)


def child_of_rank(rank: int, *agents: subprocess.Popen[str]) -> int:
    """The process that a torchrun agent gave this rank, from what the system knows of them."""
    tables = [Path(f"/proc/{agent.pid}/task/{agent.pid}/children") for agent in agents]
    for child in " ".join(table.read_text() for table in tables).split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    place = tmp_path_factory.mktemp("alone")
    code, _, text = Command(train(place / "run", 12)[1:], place).end()
    assert code == 0, text
    return [row["loss"] for row in rows(place / "run")]


def assert_same_curve(run: Path, alone: list[float]) -> None:
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, len(alone) + 1))
    assert [row["loss"] for row in found] == pytest.approx(alone, rel=1e-5)
    assert json.loads((run / "env.json").read_text())["world"] == 2


# --- every launcher gives the same training ---------------------------------------------------------------------------


@pytest.mark.slow
def test_slurm_variables_make_two_processes_one_run(tmp_path: Path, alone: list[float]) -> None:
    environment = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    command = train(tmp_path / "run", 12)
    with (
        started(command, tmp_path, **environment, SLURM_PROCID="0", SLURM_LOCALID="0") as first,
        started(command, tmp_path, **environment, SLURM_PROCID="1", SLURM_LOCALID="1") as second,
    ):
        texts = [printed(first), printed(second)]
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert_same_curve(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_torchrun_agents_make_one_run(tmp_path: Path, alone: list[float]) -> None:
    command = [
        *torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"),
        *train(tmp_path / "run", 12, "train.sharded=true"),
    ]
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command[1:1] = meeting
    with started(command, tmp_path) as first, started(command, tmp_path) as second:
        texts = [printed(first), printed(second)]
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert_same_curve(tmp_path / "run", alone)


# Two networks of one machine each, joined by a cable, in a namespace where that needs no rights.
TWO_HOSTS = """
set -e
mount -t tmpfs none /run
ip netns add east; ip netns add west
ip link add wire netns east type veth peer name wire netns west
for host in east west; do ip -n $host link set lo up; ip -n $host link set wire up; done
ip -n east addr add 10.213.0.1/24 dev wire
ip -n west addr add 10.213.0.2/24 dev wire
ip netns exec east "$@" --local-addr 10.213.0.1 --rdzv-conf is_host=1 $AFTER & first=$!
ip netns exec west "$@" --local-addr 10.213.0.2 --rdzv-conf is_host=0 $AFTER & second=$!
wait $first; wait $second
"""


@pytest.mark.skipif(not SOAK, reason="like two agents, but for the network: `make soak`")
def test_two_hosts_with_networks_of_their_own_make_one_run(tmp_path: Path, alone: list[float]) -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs `unshare` and `ip` to make networks")
    tried = subprocess.run(
        ["unshare", "-rnm", "sh", "-c", "mount -t tmpfs none /run && ip netns add a && ip netns exec a true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"this system lets nobody make networks: {tried.stderr.strip()}")
    agent = [*torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "hosts")[:-1]]
    agent += ["--rdzv-endpoint", "10.213.0.1:29400"]
    after = " ".join(["--no-python", *train(tmp_path / "run", 12)])
    command = ["unshare", "-rnm", "sh", "-c", TWO_HOSTS, "sh", *agent]
    with started(command, tmp_path, AFTER=after, GLOO_SOCKET_IFNAME="wire") as both:
        text = printed(both)
    assert both.returncode == 0, text
    assert_same_curve(tmp_path / "run", alone)


# --- a process that dies ----------------------------------------------------------------------------------------------


# T06 kills each of two forked processes in every phase; here it is enough that one of two separate programs dies.
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "sharded"), [(1, "false"), (0, "true")] if SOAK else [(0, "true")])
def test_killed_process_ends_the_other_within_a_minute(tmp_path: Path, victim: int, sharded: str) -> None:
    port, command = free_port(), train(tmp_path / "run", 100_000, "train.save_every=0.02%", f"train.sharded={sharded}")
    with (
        started(command, tmp_path, **by_hand(0, port)) as first,
        started(command, tmp_path, **by_hand(1, port)) as second,
    ):
        wait_for(tmp_path / "run", 25, first, second)
        lost, left = (first, second) if victim == 0 else (second, first)
        lost.kill()
        died = time.monotonic()
        text = printed(left)
    assert time.monotonic() - died < PROMISED_S
    assert left.returncode == 1, text
    assert "vitlab: another process of the run is gone" in text
    assert "--resume" in text


@pytest.mark.slow
def test_torchrun_ends_all_within_a_minute_and_names_the_killed_one(tmp_path: Path) -> None:
    command = [
        *torchrun("--nproc-per-node", "2", "--master-port", str(free_port())),
        *train(tmp_path / "run", 100_000, "train.save_every=0.02%"),
    ]
    with started(command, tmp_path) as agent:
        wait_for(tmp_path / "run", 25, agent)
        left = child_of_rank(0, agent)
        os.kill(child_of_rank(1, agent), signal.SIGKILL)
        died = time.monotonic()
        text = printed(agent)
        assert not Path(f"/proc/{left}").exists(), "no orphan"
    assert time.monotonic() - died < PROMISED_S
    assert agent.returncode != 0
    assert "local_rank: 1" in text and "exitcode: -9" in text.replace("exitcode  :", "exitcode:"), text


@pytest.mark.slow
def test_torchrun_starts_all_again_and_they_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    steps = 400
    # Two agents, whose counts of restarts may differ: only the agent whose process failed counts.
    meeting = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--max-restarts", "1")
    command = [
        *torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "again", *meeting),
        *train(tmp_path / "run", steps, "train.save_every=5%"),
    ]
    with started(command, tmp_path) as first, started(command, tmp_path) as second:
        wait_for(tmp_path / "run", 25, first, second)
        os.kill(child_of_rank(1, first, second), signal.SIGKILL)
        texts = [printed(first), printed(second)]
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, steps + 1))
    assert "resuming at step" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "bundle" / "model.safetensors").exists()


def test_restarts_need_a_folder_that_can_be_found_again(tmp_path: Path) -> None:
    command = train(tmp_path / "run", 5)
    del command[command.index("--out") : command.index("--out") + 2]
    code, _, text = Command(command[1:], tmp_path, lambda: os.environ.update(TORCHELASTIC_MAX_RESTARTS="1")).end()
    assert code == 2
    assert "--out" in text
