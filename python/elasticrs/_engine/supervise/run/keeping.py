"""Agent's side of ``elasticrs.Keep``: keeps the training state of this node's workers from one attempt (a
start of all workers) to the next.

The agent owns the files in memory into which the workers copy their state. Before each attempt, it writes a
*plan* into each worker's file, which tells the worker which training step to restore, and from which copy.
"""

from __future__ import annotations

import os

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.job import config, phrases
from elasticrs._engine.job.config import keep_memory
from elasticrs._engine.job.restart_policy import DAMAGED
from elasticrs._engine.process.background_call import BackgroundCall, FileAccess
from elasticrs._engine.process.console import has_time
from elasticrs._engine.supervise.attempt import file_text, memory_counters
from elasticrs._engine.workers.keep_files import ALL_STEPS, KeepFiles
from elasticrs._engine.workers.plan import KEEP_OFF, KEPT, MemoryFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticrs._engine.inside.keep.choice import Choice, Holding, Loop
    from elasticrs._engine.inside.keep.saved import Saved
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.restart_policy import FailureHistory
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.workers.keep_files import PlanValue
    from elasticrs._engine.workers.plan import Plan


class Keeping:
    """Keeps the training states of one agent's workers. Its errors never fail the training: if it cannot
    work, no state is kept, and a line tells the user why.
    """

    def __init__(self, job: JobSpec, memory: MemoryFiles, say: Callable[[str], None]) -> None:
        self._job, self._memory_files, self._say = job, memory, say
        self._choice: Choice | None = None
        self._loop: Loop | None = None
        self._reached: tuple[int, int] | None = None
        """Last attempt in which a worker of this node got to a step, and the newest of its steps."""
        self._ranks: dict[int, int] = {}
        self._world = 0
        self._previous = self._ranks, self._world
        self._awaits_agreement = False
        is_one_node = job.is_multi_node and job.rendezvous.max_nodes == 1
        self._may_have_several_nodes = job.make_handler is not None or (job.is_multi_node and not is_one_node)
        self.files: KeepFiles | None = None
        self._off = _why_off(job)
        self._unusable = set[int]()
        """Numbers of charged restarts at the failures of ranks that could not use their files."""
        self._parent = os.path.abspath(job.keep_save) if job.keep_save else None
        self._access: FileAccess | None = None
        self._claim: tuple[str, str, int] | None = None
        """Folder of ``--keep-save``, name of this job, and descriptor of the file that marks the folder."""
        self._has_warned = self._has_told_success = False
        if self._parent and self._off:
            self._parent = None
            say(f"keep: nothing is saved, because {self._off}")
        self._partners: MemoryFiles | None = None
        if job.keep_peers and not self._off and not self._may_have_several_nodes:
            say("keep: --keep-peers has no effect in a job with one node")
        self._memory = 0 if self._off else memory_budget(job.keep_memory) // job.nproc
        try:
            if job.keep_peers and self._may_have_several_nodes and not self._off:
                self._partners = MemoryFiles(job.nproc)
            self.files = KeepFiles(memory, self._partners)
        except OSError as error:
            self._give_up(error)

    def begin(self, number: int, plan: Plan, history: FailureHistory) -> Choice | None:
        """Prepare the next attempt, after all workers of the last one have exited: choose the step that its
        workers restore, and write that into their files. Return the choice; ``None`` if no worker has used
        ``Keep``, or if the job may have several nodes, whose workers choose the step themselves.

        Args:
            number: number of the attempt; of the round (an attempt of all nodes) if there are several nodes.
            plan: ranks and addresses of the workers in the next attempt.
            history: the failures of the job.
        """
        if self.files is None:
            return None
        try:
            return self._begin(self.files, number, plan, history)
        except OSError as error:
            self._give_up(error)
            return None

    def _begin(self, files: KeepFiles, number: int, plan: Plan, history: FailureHistory) -> Choice | None:
        before, holdings = self._ranks, self._look(files, history)
        world_before = self._world
        self._previous = before, world_before
        self._ranks = {each.local_rank: each.global_rank for each in plan.ranks}
        self._world = plan.ranks[0].world_size
        if holdings and not self._may_have_several_nodes:
            self._choice = self._chosen(holdings, self._world)
        self._turn_off_if_unusable(history)
        # Both `holdings` and `files.places` are in the order of local ranks.
        choice, places = None if self._off else self._choice, dict(zip(holdings, files.places, strict=False))
        saved = self._saved() if not self._off and (choice is None or choice.step is None) else None
        if saved is not None and not self._may_have_several_nodes:
            choice = saved.choice(self._world, 0 if self._reached is None else self._reached[1])
        shared: dict[str, PlanValue] = {
            "attempt": number,
            "off": self._off,
            "step": None,
            "why": "",
            "frameworks": self._job.keep,
            "has_time": has_time(self._job.log_prefix, 2),
            "memory": self._memory,
            "grace": self._job.keep_grace,
            "files": [files.places[place] for place in self._ranks],
            "world": str(self._world),
            "local_world": str(plan.ranks[0].local_world_size),
            "run_id": self._job.run_id,
        }
        if choice is not None:
            shared |= choice.facts()
            shared["reader"] = _readable(choice, places, saved)
            shared["folder"] = choice.folder
        if choice is not None and choice.step is not None and saved is None and self._world == 1:
            # Choose an older step, too. If the copy of the chosen step is damaged, the only rank restores the
            # older one at once, because there is no other rank with which it must agree.
            older = self._chosen(holdings, 1, older_than=choice.step)
            older = older.replaced(why="the newer copy is damaged")
            if older.step is not None:
                large = _own(older, 0, holdings, places, None)
                shared["older"] = {**older.facts(), **large, "reader": _readable(older, places, None)}
        # If Keep is off, delete no copies, because the next job may restore them (--keep-save).
        newest = ALL_STEPS if self._off else None if choice is None else choice.step
        self._awaits_agreement = bool(holdings) and self._may_have_several_nodes and not self._off
        steps = [] if newest is None or self._off else [newest]
        if self._may_have_several_nodes:
            # The workers of all nodes choose the step together, when they restore their state. So delete no
            # copies, and tell the workers which steps the files of this node have.
            newest = ALL_STEPS
            steps = [slot.step for each in holdings.values() for slot in each.slots]
            rank_of = {place: rank for place, rank in before.items() if rank in holdings}
            shared["holdings"] = [
                {"rank": rank_of[place], "holding": holdings[rank_of[place]].to_json()}
                if place in rank_of
                else None
                for place in self._ranks
            ]
            shared["barred_from"] = None if self._loop is None else self._loop.barred_from
            shared["refused"] = None if self._loop is None else self._loop.refused
            shared["reached"] = self._reached
            # The rank that found a damaged copy has checked only those of its own node.
            shared["must_check"] = history.last is not None and history.last[0] == DAMAGED
            shared["ranks_before"] = world_before
            shared["has_peers"] = self._partners is not None
            shared["partner_files"] = (
                [] if self._partners is None else [self._partners.places[each] for each in self._ranks]
            )
            shared["partners"] = [
                [
                    {"rank": rank, "holding": held.to_json()}
                    for rank, held in files.partner_holdings(place, world_before).items()
                ]
                for place in self._ranks
            ]
            shared["bandwidth"] = config.keep_bandwidth(self._job.keep_bandwidth) / self._job.nproc
            shared["was_replicated"] = any(map(files.was_replicated, self._ranks))
            shared["saved"] = None if saved is None else self._shared_facts(saved)
        own: dict[int, dict[str, PlanValue]] = {
            place: {
                "rank": str(rank),
                **({} if choice is None else _own(choice, rank, holdings, places, saved)),
                **({"saved_own": saved.plan_of(rank)} if saved and self._may_have_several_nodes else {}),
            }
            for place, rank in self._ranks.items()
        }
        files.begin(shared, own, newest)
        steps += [] if saved is None else [saved.step]
        kept = {KEPT: str(max(steps))} if steps and not self._off else {}
        plan.variables = {**{name: each for name, each in plan.variables.items() if name != KEPT}, **kept}
        return choice

    def _turn_off_if_unusable(self, history: FailureHistory) -> None:
        """Keep no state any more if two attempts have failed because a rank could not use its file. Otherwise
        no attempt could succeed, because this rank may not begin without the state that others restore.
        """
        if not self._off and history.last is not None and history.last[0] == layout.UNUSABLE:
            self._unusable.add(history.charged)
            if len(self._unusable) > 1:
                self._off = f"rank {history.last[2]} could not use the agent's memory in two attempts"

    def _shared_facts(self, saved: Saved) -> PlanValue:
        """Return what the workers must know about a saved state before all nodes agree to restore it. Where
        the copies are that a worker restores is not included. The nodes restore the state only if the value
        of ``facts`` is equal on all of them. The value of ``name`` may be different.
        """
        choice = saved.choice(self._world)
        facts = {**choice.facts(), "replicated": choice.is_replicated, "number": os.path.basename(saved.name)}
        reader = {"step": saved.step, "folder": self._parent}
        return {"facts": facts, "name": saved.name, "reader": reader}

    def _look(self, files: KeepFiles, history: FailureHistory) -> Mapping[int, Holding]:
        """Return which steps the file of each rank has after the attempt that has ended, by global rank;
        nothing if no worker has used ``Keep``.
        """
        ranks = self._ranks
        if not ranks or not files.is_used():
            return {}
        # Import this module here, because few jobs need it, and only at a restart.
        from elasticrs._engine.inside.keep.choice import Loop, failed_soon, last_step, refused_of

        holdings = {rank: files.holding(place, rank, self._world) for place, rank in ranks.items()}
        restored = [each.restored for each in holdings.values() if each.restored is not None]
        began, last = failed_soon([*holdings.values()], max(restored, default=None))
        cause = None if history.last is None or history.last[0] == DAMAGED else history.last[:2]
        refused = refused_of([*holdings.values()])
        self._loop = (self._loop or Loop()).after(began, last, cause, refused)
        self._reached = last_step(holdings.values(), self._reached)
        return holdings

    def _chosen(
        self, holdings: Mapping[int, Holding], world: int, *, older_than: int | None = None
    ) -> Choice:
        """Choose the step that the next attempt restores. If ``older_than`` is given, choose only from the
        steps before it.
        """
        from elasticrs._engine.inside.keep.choice import choose

        bars = [older_than, None if self._loop is None else self._loop.barred_from]
        return choose(
            holdings,
            world,
            barred_from=min((each for each in bars if each is not None), default=None),
            refused=None if self._loop is None else self._loop.refused,
            was_replicated=self._choice is not None and self._choice.is_replicated,
            before=self._reached,
        )

    def take_agreed(self, attempt: Attempt) -> bool:
        """After a restart on several nodes, find out which training step the workers restore, and tell the
        user. The agent does not know it before, because the workers choose the step. Return true if the
        workers have not chosen yet, so that the agent must call this method again later.
        """
        if not self._awaits_agreement or self.files is None:
            return False
        found = self.files.agreed()
        if found is not None:
            self._awaits_agreement = False
            attempt.kept = found
            if not self._has_rank_0_begun(self.files):
                self._say(found.line())
        return found is None

    def _has_rank_0_begun(self, files: KeepFiles) -> bool:
        """Return true if rank 0 runs on this node, and has already said itself at which step it continues."""
        places = [place for place, rank in self._ranks.items() if rank == 0]
        begun = files.progress(places[0]) if places else None
        return begun is not None and begun.counts == "keep"

    def at_end(self, history: FailureHistory) -> Choice | None:
        """Choose the step that another attempt would restore, after the job's last attempt has ended. Return
        ``None`` if no worker has used ``Keep``, or if the job may have several nodes.
        """
        if self.files is None or self._may_have_several_nodes:
            return None
        try:
            holdings = self._look(self.files, history)
        except OSError:
            return None  # No file descriptor is free, so the job's report does not name the kept step.
        if holdings:
            self._choice = self._chosen(holdings, self._world)
        return self._choice

    def say_what_is_gone(self, *, leaves: bool) -> None:
        """When this agent ends, tell the user of which step it had copies in memory, which are now lost. Do
        nothing if there are none. ``leaves``: true if this node leaves a job that other nodes can continue.
        """
        kept = None if self.files is None else self.files.standing()
        if self.files is not None and kept is not None and (step := kept["step"]) is not None:
            gone = f"keep: the copy of step {step}"
            if leaves:
                others, secured = "the other nodes keep theirs", kept["secured_step"]
                if any(map(self.files.is_sharded, self._ranks)):
                    others = "no other node has its part of the state, because --keep-peers is 0"
                    if self._partners is not None:
                        limit = f"within --keep-grace ({self._job.keep_grace:g} s)"
                        others = f"no other node got a second one {limit}"
                        others += "" if secured is None else f", so the job goes on from step {secured}"
                    if secured == step:
                        others = "another node has a second one"
                self._say(f"{gone} here is deleted, because the node leaves the job")
                self._say(f"keep: {others}")
            else:
                self._say(f"{gone} {phrases.gone_with_the_job(has_folder=bool(self._job.keep_save))}")

    def _saved(self) -> Saved | None:
        """Return the newest state that an earlier job has saved in the folder of ``--keep-save``. Return
        ``None`` if there is none, if it cannot be read, or if two attempts have failed alike soon after
        restoring it.
        """
        folder = self._parent
        if folder is None:
            return None
        from elasticrs._engine.inside.keep.saved import claim, newest

        job = self._job.run_id
        if not self._may_have_several_nodes:
            job += f" (pid {os.getpid()} on {os.uname().nodename})"

        refused: list[OSError] = []

        def look() -> Saved | None:
            try:
                self._claim = self._claim or (folder, job, claim(folder, job))
            except BlockingIOError:
                raise
            except OSError as error:  # A folder that cannot be written is only read.
                refused.append(error)
            return newest(folder)

        self._access = self._access or FileAccess(
            lambda: self._say(f"keep: no saved state is used, because the folder does not answer: {folder}")
        )
        try:
            found = self._access.run(look, None)
        except BlockingIOError as error:
            self._parent = None
            self._say("keep: nothing is restored or saved; give each job a folder of its own for --keep-save")
            self._say(f"keep: the folder is in use ({error.strerror}): {folder}")
            return None
        except (OSError, ValueError) as error:
            if not refused:
                self._say(f"keep: the saved state is not used: {error}")
                return None
            found = None
        if refused and not self._has_warned:
            self._has_warned = True
            self._say(f"keep: --keep-save cannot save anything: {refused[0].strerror}: {folder}")
        bar = None if self._loop is None else self._loop.barred_from
        if found is not None and bar is not None and found.step >= bar:
            self._say(f"keep: saved step {found.step} is set aside: two attempts failed alike ({found.name})")
            return None
        if found is not None and found.has_succeeded and not self._has_told_success:
            self._has_told_success = True
            self._say(
                f"keep: a job has succeeded after step {found.step} was saved, so a restore repeats its end"
            )
            self._say(f"keep: to begin anew, use another folder than {os.path.dirname(found.name)}")
        return found

    def save(self, choice: Choice | None, limit: float, interrupts: Callable[[int, float], bool]) -> str:
        """Save the step that another attempt would restore on a disk (``--keep-save``), so that the next job
        can go on from it. Tell the user about it. Return the new folder; an empty text if nothing was saved.

        Args:
            choice: the result of :meth:`at_end`: the step, and which copy each rank would restore.
            limit: maximum seconds.
            interrupts: function that waits for a number of seconds until a file descriptor is readable. It
                returns true if the time has passed, or if the user has asked once more to stop the job.
        """
        parent = self._parent
        if parent is None or self.files is None:
            return ""
        files, ranks, world = self.files, self._ranks, self._world
        if self._may_have_several_nodes and not any(map(files.has_joined, ranks)):
            # The nodes stop one after the other. So this node may have begun one more attempt, although the
            # job is ending. Then save the copies of the attempt before, with its ranks.
            ranks, world = self._previous
        is_kept = files.is_used() if self._may_have_several_nodes else choice is not None and choice.step
        if not is_kept or not ranks:
            why = (choice and choice.why) or "no worker has kept its state with elasticrs.Keep"
            self._say(f"keep: nothing is saved ({why}): {parent}")
            return ""
        from elasticrs._engine.inside.keep.saved import save

        step, others, lost = None, dict[str, str](), ""
        if choice is not None and choice.step is not None:
            what, step, was_replicated = f"step {choice.step}", choice.step, choice.is_replicated
            lost = f", {phrases.counted(choice.lost, 'step')} lost" if choice.lost else ""
        else:
            what = f"the state of {phrases.ranks_text(sorted(ranks.values()), 8)}"
            was_replicated = any(map(files.was_replicated, ranks))
            node = f"{os.uname().nodename.replace('.', '-')}-rank{min(ranks.values())}"
            others = {"job": self._job.run_id, "node": node}
        try:
            holdings = {rank: files.holding(place, rank, world) for place, rank in ranks.items()}
            call = BackgroundCall(
                lambda: save(
                    files,
                    holdings,
                    ranks,
                    parent,
                    world=world,
                    was_replicated=was_replicated,
                    step=step,
                    **others,
                )
            )
            try:
                if interrupts(call.fd, limit):
                    # Leave the files open, because the thread that saves them still reads them. If they were
                    # closed, other files could get their descriptors, and the thread would read these.
                    self._memory_files.stay_open = True
                    raise TimeoutError("it took too long")
                folder: str = call.take()
            finally:
                call.close()
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"keep: {what} is not saved: {error}")
            return ""
        self._say(f"keep: {what} is saved for the next job with --keep-save{lost}: {folder}")
        return folder

    def release(self, *, has_succeeded: bool) -> None:
        """Let other jobs use the folder of ``--keep-save``, because this job ends."""
        if self._claim is not None and self._access is not None:
            from elasticrs._engine.inside.keep.saved import release

            claimed, self._claim = self._claim, None
            self._access.run(lambda: release(*claimed, has_succeeded=has_succeeded), None)

    def _give_up(self, error: OSError) -> None:
        self.files = None
        self._memory_files.close()
        if self._partners is not None:
            self._partners.close()
        self._say(KEEP_OFF.format(error.strerror or error))


def _readable(choice: Choice, places: Mapping[int, str], saved: Saved | None) -> PlanValue:
    """Return the data for ``Keep.reader``: the chosen step, and the locations of the copies that together
    contain the whole state. Return ``None`` if no step can be restored. ``places`` maps ranks to files.
    """
    if saved is not None:
        choice, places = saved.saved, saved.places
    return None if choice.step is None else {"step": choice.step, "copies": choice.copies(places)}


def _own(
    choice: Choice, rank: int, holdings: Mapping[int, Holding], places: Mapping[int, str], saved: Saved | None
) -> dict[str, PlanValue]:
    """Return the part of the plan (in which the agent tells a worker what to restore) that differs between
    ranks. ``large`` tells the file and slot (region) with the parameters and optimizer state that the rank
    restores. ``own`` tells the slot with the rank's own copy of the step, if it has one.
    """
    if choice.step is None:
        return {"large": None, "own": None}
    if saved is not None:
        return saved.plan_of(rank)
    own = holdings[rank].slot_of(choice.step) if rank in holdings else None
    return {"large": choice.plan_of(rank, places), "own": None if own is None else own.index}


def _why_off(job: JobSpec) -> str | None:
    if job.on_failure == "replace":
        return "--on-failure replace leaves the other workers running"
    if keep_memory(job.keep_memory) == (0.0, 0):
        return "--keep-memory is 0"
    return None


_FILES = {
    "memory.events": ("memory.max", "memory.current", "inactive_file"),
    "memory.oom_control": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Names for a memory cgroup: its file with the limit, its file with the usage, and the line of its file
``memory.stat`` with the part of the usage that can be freed. The keys are the names of the file that counts
out-of-memory kills, which tell cgroups of version 2 (first entry) from those of version 1.
"""
_NO_LIMIT = 1 << 60
"""A memory cgroup of version 1 whose limit is this number of bytes or more has no limit."""


def memory_budget(setting: str) -> int:
    """Return how many bytes of memory all workers of this node together may use for copies of their training
    state. ``setting`` is the value of ``--keep-memory``.
    """
    share, number = keep_memory(setting)
    return number if not share else int(share * available_memory())


def available_memory(read: Callable[[str], str] = file_text) -> int:
    """Return how many bytes of memory new processes can use: what is available on the machine, but no more
    than the limits of this process's cgroups allow. ``read`` returns the text of a file; an empty text if the
    file cannot be read.
    """
    found = [1024 * _number(read("/proc/meminfo"), "MemAvailable:")]
    for path in memory_counters(read("/proc/self/cgroup"), read("/proc/self/mountinfo")):
        folder, name = os.path.split(path)
        limit, usage, freeable = _FILES[name]
        # The limits of all cgroups above this one apply, too. The loop ends at a folder that has no file with
        # a limit.
        while most := read(f"{folder}/{limit}").strip():
            used = read(f"{folder}/{usage}").strip()
            if most.isdecimal() and int(most) < _NO_LIMIT and used.isdecimal():
                free = _number(read(f"{folder}/memory.stat"), freeable)
                found.append(int(most) - int(used) + free)
            folder = os.path.dirname(folder)
    return max(0, min(found))


def _number(text: str, name: str) -> int:
    """Return the number after ``name`` in a text with a name and a number in each line; 0 if no line has this
    name.
    """
    words = (line.split() for line in text.splitlines())
    return next((int(word[1]) for word in words if len(word) > 1 and word[0] == name), 0)
