"""Saving on some ranks and loading on others: same rows, same next steps; damage is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.config import Optimizer
from headrace.embeddings.checkpoint import shards
from headrace.embeddings.checkpoint.files import read_index, shared_directory, verify_shards, write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, row_wise
from headrace.errors import UserError
from headrace.storage import local

DIM = 4
TABLES = (Table("users", 2_300, DIM), Table("tiny", 2, DIM), Table("items", 50, DIM))
LOOKUPS = (Lookup("user", "users"), Lookup("flag", "tiny"), Lookup("items", "items", 3, True))
KINDS = ["sgd", "adagrad", "adam"]


def plan_of(world: int, tables: tuple[Table, ...] = TABLES) -> Plan:
    return row_wise(tables, LOOKUPS, world)


def codes_of(step: int) -> Tensor:
    """Return the global batch of a step: 24 rows."""
    generator = torch.Generator().manual_seed(step)
    columns = [
        torch.randint(0, n, (24, 1), generator=generator)
        for n in (TABLES[0].rows, TABLES[1].rows, *[TABLES[2].rows] * 3)
    ]
    return torch.cat(columns, dim=1)


def steps(embeddings: ShardedEmbeddings, numbers: range) -> None:
    """Train on the rank's slice of each step's global batch (24 rows: every world up to 4 divides it)."""
    world = embeddings.collective.world
    for step in numbers:
        local_codes = codes_of(step).chunk(world.size)[world.rank]
        ((embeddings(local_codes) - 0.3).square().sum() / 24).backward()
        embeddings.step()


def trained(c: Collective, kind: str, numbers: range) -> ShardedEmbeddings:
    embeddings = ShardedEmbeddings(plan_of(c.world.size), c, seed=1)
    embeddings.configure_optimizer(Optimizer(kind=kind, learning_rate=0.1))
    steps(embeddings, numbers)
    return embeddings


def save(embeddings: ShardedEmbeddings, final: Path, with_optimizer: bool = True) -> None:
    c = embeddings.collective
    with shared_directory(local(final), c) as folder:
        save_shards(embeddings, local(folder), with_optimizer)
        c.barrier()
        if c.world.is_chief:
            write_index(local(folder))


def predictions(embeddings: ShardedEmbeddings) -> Tensor:
    """Look up the same rows on every rank."""
    with torch.no_grad():
        return torch.cat([embeddings(codes_of(s)) for s in range(90, 94)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save with states on two ranks, after three steps of Adagrad."""
    run_ranks(2, lambda c: save(trained(c, "adagrad", range(3)), tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_on_two_loaded_on_three_and_on_one(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of 100 rows: each rank's tables are cut in many.
    monkeypatch.setattr(shards, "FILE_BYTES", 100 * DIM * 4)

    def first(c: ThreadCollective) -> Tensor:
        embeddings = trained(c, kind, range(3))
        save(embeddings, tmp_path / "two")
        return predictions(embeddings)

    def loaded(c: Collective, source: Path) -> ShardedEmbeddings:
        embeddings = ShardedEmbeddings(plan_of(c.world.size), c, seed=99)
        embeddings.configure_optimizer(Optimizer(kind=kind, learning_rate=0.1))
        load_shards(embeddings, local(source), with_optimizer=True)
        return embeddings

    def second(c: ThreadCollective) -> Tensor:
        embeddings = loaded(c, tmp_path / "two")
        save(embeddings, tmp_path / "three")
        return predictions(embeddings)

    expected = run_ranks(2, first)[0]
    assert len(list((tmp_path / "two").glob("weight-00000-*.safetensors"))) == 12
    for got in run_ranks(3, second):
        assert torch.equal(got, expected)
    alone = loaded(LocalCollective(), tmp_path / "three")
    assert torch.equal(predictions(alone), expected)
    # The states came along: going on equals never having stopped.
    steps(alone, range(3, 6))
    undisturbed = trained(LocalCollective(), kind, range(6))
    torch.testing.assert_close(alone.weight, undisturbed.weight, rtol=1e-5, atol=1e-6)
    assert alone.steps == undisturbed.steps == 6


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_after_a_load_gives_the_same_bits(tmp_path: Path, kind: str) -> None:
    def resumed(c: ThreadCollective) -> Tensor:
        save(trained(c, kind, range(3)), tmp_path / "saved")
        embeddings = ShardedEmbeddings(plan_of(2), c, seed=1)
        embeddings.configure_optimizer(Optimizer(kind=kind, learning_rate=0.1))
        load_shards(embeddings, local(tmp_path / "saved"), with_optimizer=True)
        steps(embeddings, range(3, 6))
        return embeddings.weight

    uninterrupted = run_ranks(2, lambda c: trained(c, kind, range(6)).weight)
    for a, b in zip(run_ranks(2, resumed), uninterrupted, strict=True):
        assert torch.equal(a, b)


def test_a_table_that_has_grown_keeps_the_start_of_its_new_rows(saved: Path) -> None:
    grown = (Table("users", 2_310, DIM), TABLES[1], TABLES[2], Table("new", 7, DIM))
    old = ShardedEmbeddings(plan_of(1), LocalCollective(), seed=1)
    old.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
    load_shards(old, local(saved), with_optimizer=True)
    new = ShardedEmbeddings(plan_of(1, grown), LocalCollective(), seed=1)
    new.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
    start = new.weight.clone()
    # What was in the states before does not stay.
    new.state["sum"].fill_(5.0)
    loaded = load_shards(new, local(saved), with_optimizer=True)
    assert loaded.tables == {"users": 2_300, "tiny": 2, "items": 50}
    assert loaded.new_rows == {"users": 10, "new": 7}
    for loaded_rows, saved_rows in ((new.weight, old.weight), (new.state["sum"], old.state["sum"])):
        assert torch.equal(loaded_rows[:2_300], saved_rows[:2_300])
        assert torch.equal(loaded_rows[2_310:2_362], saved_rows[2_300:])
    assert float(old.state["sum"].max()) > 0
    fresh = torch.cat([torch.arange(2_300, 2_310), torch.arange(2_362, 2_369)])
    assert torch.equal(new.weight[fresh], start[fresh])
    assert torch.equal(new.state["sum"][fresh], torch.zeros(17, DIM))


def load(folder: Path, tables: tuple[Table, ...] = TABLES, kind: str = "adagrad", with_optimizer: bool = True) -> None:
    lookups = tuple(x for x in LOOKUPS if x.table in {t.name for t in tables})
    embeddings = ShardedEmbeddings(row_wise(tables, lookups, 1), LocalCollective(), seed=1)
    embeddings.configure_optimizer(Optimizer(kind=kind, learning_rate=0.1))
    load_shards(embeddings, local(folder), with_optimizer)


@pytest.mark.parametrize("name", ["weight-00001-00000.safetensors", "sum-00000-00000.safetensors", "index.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_refused_by_file(saved: Path, name: str, damage: str) -> None:
    load(saved)
    verify_shards(local(saved))
    path = saved / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-100])
    else:
        # In the index: the digit of a row count, so that it stays readable JSON.
        offset = content.index(b'"rows": 2300') + 8 if name == "index.json" else len(content) - 50
        content[offset] ^= 1
        path.write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        load(saved)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        verify_shards(local(saved))


def test_scoring_does_not_read_optimizer_states(saved: Path) -> None:
    (saved / "sum-00000-00000.safetensors").unlink()
    load(saved, with_optimizer=False)


def test_a_rank_reads_only_files_that_may_hold_its_rows(saved: Path) -> None:
    # Two ranks saved; of two that load, each needs its own file alone.
    (saved / "weight-00000-00000.safetensors").unlink()

    def rank_main(c: ThreadCollective) -> str:
        try:
            load_shards(ShardedEmbeddings(plan_of(2), c, seed=1), local(saved), with_optimizer=False)
        except UserError as e:
            return str(e)
        return "loaded"

    missing, loaded = run_ranks(2, rank_main)
    assert "weight-00000-00000.safetensors is missing" in missing
    assert loaded == "loaded"


def test_what_does_not_fit_is_explained(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"saved with 2300 rows, the model has 2200: .* older vocabulary"):
        load(saved, (Table("users", 2_200, DIM), *TABLES[1:]))
    with pytest.raises(UserError, match="embedding_dim 4, the model has 8"):
        load(saved, tuple(Table(t.name, t.rows, 8) for t in TABLES))
    with pytest.raises(UserError, match=r"optimizer 'adagrad', train\.embeddings\.kind is 'adam'"):
        load(saved, kind="adam")
    save(ShardedEmbeddings(plan_of(1), LocalCollective(), seed=1), tmp_path / "plain", with_optimizer=False)
    with pytest.raises(UserError, match="saved without optimizer states"):
        load(tmp_path / "plain")
    load(saved, TABLES[:2])


def test_a_save_that_did_not_finish_cannot_be_read(tmp_path: Path) -> None:
    run_ranks(2, lambda c: save_shards(trained(c, "sgd", range(1)), local(tmp_path), with_optimizer=False))
    with pytest.raises(UserError, match=r"index\.json is missing: the save .* did not finish"):
        load(tmp_path, with_optimizer=False)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(UserError, match=r"rank-00001\.json is missing"):
        write_index(local(tmp_path))


def test_ranks_that_saved_different_steps_are_found(tmp_path: Path) -> None:
    def rank_main(c: ThreadCollective) -> None:
        embeddings = trained(c, "adagrad", range(2))
        embeddings.steps += c.world.rank
        save_shards(embeddings, local(tmp_path), with_optimizer=True)

    run_ranks(2, rank_main)
    with pytest.raises(UserError, match="did not save the same tables or step"):
        write_index(local(tmp_path))


def test_a_save_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    embeddings = trained(LocalCollective(), "sgd", range(0))
    embeddings(codes_of(0)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients wait"):
        save_shards(embeddings, local(tmp_path), with_optimizer=False)


def test_a_shared_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "out"
    leftover = tmp_path / ".out.shared.partial"
    leftover.mkdir()
    (leftover / "stale").touch()

    def fill(c: ThreadCollective, text: str, fails: bool) -> None:
        with shared_directory(local(final), c) as folder:
            (folder / f"rank{c.world.rank}").put_text(text)
            assert not (folder / "stale").exists()
            if fails and c.world.rank == 1:
                raise KeyError("killed")

    run_ranks(2, lambda c: fill(c, "old", fails=False))
    with pytest.raises(KeyError):
        run_ranks(2, lambda c: fill(c, "new", fails=True))
    assert {p.name: p.read_text() for p in final.iterdir()} == {"rank0": "old", "rank1": "old"}
    run_ranks(2, lambda c: fill(c, "new", fails=False))
    assert {p.name: p.read_text() for p in final.iterdir()} == {"rank0": "new", "rank1": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_index_names_what_was_saved(saved: Path) -> None:
    index = read_index(local(saved))
    assert [(t.name, t.rows) for t in index.tables] == [("users", 2_300), ("tiny", 2), ("items", 50)]
    assert index.optimizer is not None
    assert (index.optimizer.kind, index.optimizer.steps) == ("adagrad", 3)
    assert sorted(p.name for p in saved.iterdir()) == sorted([*(f.name for f in index.files), "index.json"])
