"""Checkpoints in parts, each with the rows of one process: any number of processes reads any number of parts.

Here one process writes all parts, one after the other. Real processes do it in tests/system.
"""

from pathlib import Path

import pytest
import torch

from vitlab.core import fsio
from vitlab.core.errors import FileProblem
from vitlab.training.checkpoint import ALL, Snapshot, newest_valid, restore, rows_of, write_part

STATE = {
    "matrix": torch.arange(35, dtype=torch.float32).view(7, 5),
    "one row": torch.arange(4, dtype=torch.bfloat16).view(1, 4),
    "vector": torch.arange(3, dtype=torch.float64),
    "number": torch.tensor(5.0),
}


def part_of(share: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {name: value[slice(*rows_of(len(value), share))] if value.ndim else value for name, value in STATE.items()}


def written(folder: Path, parts: int, step: int = 3) -> Path:
    path = folder / f"step-{step:09d}"
    token = fsio.NewFolder.new_token()
    members = [fsio.NewFolder(path, token) for _ in range(parts)]
    members[0].make()
    for rank, member in enumerate(members):
        own = part_of((rank, parts))
        write_part(member, Snapshot(step, own, own, own, {"best": None}), (rank, parts))
        assert not path.exists(), "nothing is to be seen before all have written"
    members[0].publish({name: digest for member in members for name, digest in member.hashes.items()})
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_rows_are_dealt_out_as_torch_does(count: int, size: int) -> None:
    rows = torch.arange(count)
    dealt = [rows[slice(*rows_of(count, (rank, size)))].tolist() for rank in range(size)]
    chunks = [chunk.tolist() for chunk in rows.chunk(size)]
    assert dealt == chunks + [[]] * (size - len(chunks))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_number_of_processes_reads_any_number_of_parts(tmp_path: Path, parts: int, size: int) -> None:
    path = written(tmp_path, parts)
    for rank in range(size):
        share = (rank, size) if size > 1 else ALL
        found = restore(path, share)
        assert (found.step, found.progress) == (3, {"best": None})
        for group in (found.model, found.optimizer, found.ema):
            assert group is not None
            assert group.keys() == STATE.keys()
            for name, value in part_of(share).items():
                assert group[name].dtype == value.dtype
                assert torch.equal(group[name], value), name


def test_damage_in_any_part_is_found_by_one_of_those_who_read(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    for name in fsio.verify_folder(path):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused = []
        for rank in range(3):
            try:
                restore(path, (rank, 3))
            except FileProblem as problem:
                refused.append(problem.what)
        assert any(name in what for what in refused), name
        (path / name).write_bytes(whole)
    assert restore(path).step == 3


def test_lost_part_falls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    written(tmp_path, 2, step=3)
    later = written(tmp_path, 2, step=6)
    (later / "optimizer-2-of-2.safetensors").unlink()
    found, printed = newest_valid(tmp_path)
    assert found is not None and found.step == 3
    assert "optimizer-2-of-2.safetensors is missing" in printed[0]


def test_place_that_is_taken_is_refused_before_anyone_writes(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    with pytest.raises(ValueError, match="exists"):
        fsio.NewFolder(path, fsio.NewFolder.new_token()).make()
