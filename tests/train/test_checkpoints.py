"""Checkpoints after the death of a writer, damaged checkpoints, and workers that load them."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.said import says

from elasticrs.train.checkpoint import (
    CheckpointError,
    CheckpointUtil,
    FileSystemCheckpointManager,
    get_checkpoint_manager,
    set_checkpoint_manager,
)
from elasticrs.train.state_machine import Vote, disagreement

from .threads import Job, Sum, add, train_sum, train_sums


def write(manager, data, key="default"):
    made = manager.create_checkpoint()
    with made.open_output_stream(key) as stream:
        stream.write(data)
    made.commit()
    return made


def read(made, key="default"):
    with made.open_input_stream(key) as stream:
        return stream.read()


@pytest.fixture
def manager(tmp_path):
    return FileSystemCheckpointManager(tmp_path / "checkpoints")


def folder(manager):
    return Path(manager.directory)


def test_the_newest_checkpoint_is_the_last_committed(manager):
    assert manager.get_latest_checkpoint() is None
    assert manager.list_checkpoints() == []
    for number in range(3):
        made = write(manager, b"%d" % number)
        made.commit()
        made.discard()
        assert read(made) == b"%d" % number
    assert [read(each) for each in manager.list_checkpoints()] == [b"2", b"1", b"0"]
    assert read(manager.get_latest_checkpoint()) == b"2"
    assert read(manager.get_checkpoint(1)) == b"1"
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/9"):
        manager.get_checkpoint(9)


def test_an_uncommitted_checkpoint_is_not_listed(manager):
    write(manager, b"old")
    made = manager.create_checkpoint()
    with made.open_output_stream("default") as stream:
        stream.write(b"new")
    assert read(manager.get_latest_checkpoint()) == b"old"
    with pytest.raises(CheckpointError, match="is not committed"):
        made.open_input_stream("default")
    made.discard()
    made.discard()
    assert os.listdir(manager.directory) == ["0"]


def test_stream_names_may_contain_any_characters(manager):
    for key in ("model/layer 1", "..", "ä"):
        assert read(write(manager, b"x", key), key) == b"x"
    assert sorted(os.listdir(manager.directory)) == ["0", "1", "2"]
    with pytest.raises(CheckpointError, match="has no stream 'other'"):
        manager.get_latest_checkpoint().open_input_stream("other")
    with pytest.raises(CheckpointError, match="is committed"):
        manager.get_latest_checkpoint().open_output_stream("other")


DIES = """
import os, signal, sys
from elasticrs.train.checkpoint import FileSystemCheckpointManager
made = FileSystemCheckpointManager(sys.argv[1]).create_checkpoint()
made.open_output_stream("default").write(b"x" * 100_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_removes_the_leftovers_of_a_dead_writer(manager):
    alive = manager.create_checkpoint()
    subprocess.run([sys.executable, "-c", DIES, manager.directory], check=False)
    assert len(os.listdir(manager.directory)) == 2
    write(manager, b"next")
    assert read(manager.get_latest_checkpoint()) == b"next"
    # The unfinished checkpoint of the live writer is kept.
    assert len(os.listdir(manager.directory)) == 2
    alive.discard()


def test_the_configured_number_of_checkpoints_is_kept(tmp_path):
    manager = FileSystemCheckpointManager(tmp_path, keep=2)
    for number in range(5):
        write(manager, b"%d" % number)
    assert sorted(os.listdir(tmp_path)) == ["3", "4"]
    with pytest.raises(ValueError, match="keep: got 0, expected at least 1"):
        FileSystemCheckpointManager(tmp_path, keep=0)


def cut(made):
    (made / "default.stream").write_bytes(b"ne")


def flip(made):
    (made / "default.stream").write_bytes(b"nfw")


def lose_stream(made):
    (made / "default.stream").unlink()


def lose_manifest(made):
    (made / "checkpoint.json").unlink()


def cut_manifest(made):
    (made / "checkpoint.json").write_bytes((made / "checkpoint.json").read_bytes()[:20])


def other_manifest(made):
    (made / "checkpoint.json").write_text("[]")


def old_manifest(made):
    (made / "checkpoint.json").write_text('{"format": 0}')


DAMAGES = (cut, flip, lose_stream, lose_manifest, cut_manifest, other_manifest, old_manifest)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(manager, caplog, damage):
    write(manager, b"old")
    write(manager, b"new")
    damage(folder(manager) / "1")
    assert read(manager.get_latest_checkpoint()) == b"old"
    (record,) = caplog.records
    assert "/1 is damaged" in record.getMessage()
    with pytest.raises(CheckpointError, match="is damaged"):
        read(manager.get_checkpoint(1))
    damage(folder(manager) / "0")
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints in .* are damaged"):
        manager.get_latest_checkpoint()


def test_a_checkpoint_of_another_job_is_refused(tmp_path):
    write(FileSystemCheckpointManager(tmp_path, job="cats"), b"x")
    with pytest.raises(CheckpointError, match="/0 is of job 'cats', this is 'dogs'"):
        FileSystemCheckpointManager(tmp_path, job="dogs").get_latest_checkpoint()
    # A manager without a job name accepts any name.
    assert read(FileSystemCheckpointManager(tmp_path).get_latest_checkpoint()) == b"x"


def test_a_checkpoint_of_a_newer_version_is_refused(manager):
    write(manager, b"x")
    path = folder(manager) / "0" / "checkpoint.json"
    path.write_text(json.dumps({"format": 2, "chunks": []}))
    with pytest.raises(CheckpointError, match=r"/0 .*format 2,.* 1"):
        manager.get_latest_checkpoint()


# --- in the loop ---


class Saved(Sum):
    """A state that wants a checkpoint at the steps in ``due``, and records each time it is asked."""

    due = frozenset({4, 8})
    asked = ()

    def save(self, stream):
        stream.write(json.dumps([self.steps, self.total]).encode())

    def load(self, stream):
        self.steps, self.total = json.load(stream)
        self.coordinator.calls.append(("load", self.steps))

    def should_save_checkpoint(self, rank):
        self.asked += ((rank, self.steps),)
        return self.steps in self.due


@pytest.fixture
def saving(manager):
    set_checkpoint_manager(manager)
    yield manager
    set_checkpoint_manager(None)


def test_a_state_is_not_asked_to_save_without_a_checkpoint_manager():
    assert get_checkpoint_manager() is None
    states = []

    def work(name, coordinator):
        states.append(Saved(coordinator, 10))
        return train_sum(coordinator, state=lambda *_: states[-1])

    Job(1).run(work)
    assert states[0].asked == ()


def test_rank_0_saves_due_checkpoints_and_the_final_state(saving):
    assert train_sums(3, state=Saved) == [(10, 550)] * 3
    # The newest checkpoint, of step 10, has the final state.
    assert [json.loads(read(each))[0] for each in saving.list_checkpoints()] == [10, 8, 4]


def test_checkpoint_util_works_in_a_loop_without_train(saving):
    write(saving, json.dumps([6, 210]).encode())

    def work(name, coordinator):
        util, state = CheckpointUtil(coordinator), Saved(coordinator, 10)
        _, rank, world_size = coordinator.rendezvous_barrier()
        for _ in range(2):
            assert util.load_checkpoint(state, rank) is state
            state.sync(world_size, rank)
            util.set_checkpoint_loaded()
        for state.steps in (7, 8):
            util.save_checkpoint(state, rank)
        return state.total, [call for call in coordinator.calls if call[0] == "load"]

    assert Job(2).run(work) == [(210, [("load", 6)]), (210, [])]
    assert [json.loads(read(each)) for each in saving.list_checkpoints()] == [[8, 210], [6, 210]]


def test_a_new_run_continues_from_the_newest_checkpoint_and_loads_it_once(saving):
    write(saving, json.dumps([6, 210]).encode())
    loads = []

    def work(name, coordinator):
        failed = []

        def step(state):
            if state.steps == 7 and name == 1 and not failed:
                failed.append(True)
                raise RuntimeError("once")
            return add(state)

        try:
            return train_sum(coordinator, step=step, state=Saved)
        finally:
            loads.extend((name, call) for call in coordinator.calls if call[0] == "load")

    assert Job(3).run(work) == [(10, 550)] * 3
    assert loads == [(0, ("load", 6))]


def test_the_coordinator_can_request_a_checkpoint(saving):
    class Quiet(Saved):
        due = frozenset()

    def work(name, coordinator):
        coordinator.should_save_checkpoint = lambda: True
        return train_sum(coordinator, length=2, state=Quiet)

    Job(2).run(work)
    assert len(saving.list_checkpoints()) == 2, "the last one is that of the final state"


def test_an_unreadable_checkpoint_ends_every_worker_with_one_error(saving, caplog):
    write(saving, b"")
    cut_manifest(folder(saving) / "0")
    first, second = train_sums(2, state=Saved)
    assert isinstance(first, CheckpointError)
    assert "are damaged" in str(first)
    assert isinstance(second, CheckpointError)
    assert str(second) == f"rank 0 cannot load the checkpoint: CheckpointError: {first}"


class FullDisk(FileSystemCheckpointManager):
    """A checkpoint manager whose disk is full. It writes to ``/dev/full``."""

    def create_checkpoint(self):
        made = super().create_checkpoint()
        os.symlink("/dev/full", os.path.join(made._path, "default.stream"))
        return made


def as_torch_save_does(_, stream):
    try:
        stream.write(bytes(100_000))
    finally:
        raise RuntimeError("unexpected pos 704 vs 598")


def with_a_cause(_, stream):
    try:
        stream.write(bytes(100_000))
    except OSError as error:
        raise ValueError("cannot save") from error


@pytest.mark.parametrize("save", [None, as_torch_save_does, with_a_cause])
def test_a_full_disk_fails_the_training_only_at_its_end(saving, monkeypatch, caplog, save):
    set_checkpoint_manager(FullDisk(saving.directory))
    if save is not None:
        monkeypatch.setattr(Saved, "save", save)
    with caplog.at_level(logging.WARNING):
        found = train_sums(2, state=Saved)
    # The training continues without the two periodic checkpoints, but it fails without the final checkpoint.
    assert [type(each) for each in found] == [CheckpointError] * 2
    assert len(caplog.records) == 3
    assert all(os.strerror(errno.ENOSPC) in record.getMessage() for record in caplog.records)
    assert os.listdir(saving.directory) == []


def test_a_disk_that_is_full_for_a_while_loses_only_checkpoints(saving, caplog):
    class FullAtFirst(FullDisk):
        made = 0

        def create_checkpoint(self):
            self.made += 1
            return super().create_checkpoint() if self.made < 3 else super(FullDisk, self).create_checkpoint()

    set_checkpoint_manager(FullAtFirst(saving.directory))
    with caplog.at_level(logging.WARNING):
        assert train_sums(2, state=Saved) == [(10, 550)] * 2
    assert len(caplog.records) == 2


def while_an_error_is_handled(*_):
    try:
        os.stat("/no/such/file")
    except OSError:
        raise ValueError("a mistake")  # noqa: B904 -- the case that is tested


def caused_by_itself(*_):
    error = ValueError("a mistake")
    raise error from error


@pytest.mark.parametrize("save", [while_an_error_is_handled, caused_by_itself])
def test_an_error_in_save_is_not_treated_as_a_disk_failure(saving, monkeypatch, save):
    monkeypatch.setattr(Saved, "save", save)
    (found,) = train_sums(state=Saved)
    assert isinstance(found, ValueError)


def test_a_failed_removal_of_an_old_checkpoint_keeps_the_new_one(tmp_path, caplog):
    manager = FileSystemCheckpointManager(tmp_path, keep=1)
    # Removing "0" fails because it is a file. The manager first renames it over an empty directory, which
    # works only for directories.
    (tmp_path / "0").write_bytes(b"")
    made = write(manager, b"new")
    assert read(made) == b"new"
    (record,) = caplog.records
    says(record.getMessage(), f"{tmp_path}/1", f"{tmp_path}/0")


def test_a_state_that_cannot_be_saved_is_refused_if_a_manager_is_set(saving):
    (found,) = train_sums(state=Sum)
    assert isinstance(found, TypeError)
    assert "Sum has neither state_dict nor save and neither load_state_dict nor load" in str(found)


def test_rerunning_a_finished_job_writes_no_further_checkpoint(saving):
    for _ in range(2):
        assert train_sums(2, state=Saved) == [(10, 550)] * 2
    assert len(saving.list_checkpoints()) == 3


def test_ranks_without_a_checkpoint_manager_are_named_in_the_error(manager, monkeypatch):
    votes = [Vote(True, False, False, 1), Vote(False, False, False, 2), Vote(False, False, False, 3)]
    says(disagreement(votes), "set_checkpoint_manager", "rank 0", "ranks 1, 2")
    assert disagreement(votes[:1]) is disagreement(votes[1:]) is None


def vote(**fields):
    return Vote(True, True, False, 5, **fields)


def test_votes_from_different_moments_of_one_save_are_no_disagreement():
    saving = vote(last_round=7, asked=4, said_yes=4, is_saving=True)
    for other in (
        # The other worker has already left the save and continued, possibly into the next save.
        vote(last_round=7, asked=4, said_yes=4),
        vote(last_round=7, asked=6, said_yes=4),
        vote(last_round=7, asked=6, said_yes=6, is_saving=True),
        # The other worker has not come that far, has just joined, or comes from an earlier round.
        vote(last_round=7, asked=3, said_yes=1),
        vote(last_round=0),
        vote(last_round=6, asked=9, said_yes=1),
    ):
        assert disagreement([saving, other]) is None
        assert disagreement([other, saving]) is None
    assert disagreement([vote(last_round=7, asked=4, said_yes=1), saving]) is not None
