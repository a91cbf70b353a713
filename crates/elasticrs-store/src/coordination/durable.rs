//! The file in which a store keeps its state. A restarted store restores its state from this file.
//!
//! The file consists of a head and records. The first records contain a whole state, and each later record contains a
//! batch of changes. Each commit appends a record. At each start, and when the file has doubled in size, the store
//! replaces the file with a new one that contains only the current state. The store keeps its file locked, and it locks
//! a new file before moving it into place.
//!
//! - **DISK-1** once `StateFile::commit` has returned, the change survives any crash of the process or the machine. If
//!   the file is damaged later, the store refuses it or reports the loss;
//! - **DISK-2** a batch is read as a whole or not at all;
//! - **DISK-3** a file that is damaged, truncated, in use or not a state file is left unchanged;
//! - **DISK-4** the store does not read or write a file that another user owns, or that any user may replace.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, Permissions, canonicalize, metadata, remove_file, rename};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::geteuid;
use sha2::{Digest as _, Sha256};

use super::protocol::{Digest, Secret};
use super::state::{SessionId, Stored, cost_of_entries};
use super::wire::{Cursor, Field, MAX_IDS, Malformed, Writer, kinds, record};
use crate::types::StoreId;

const MAGIC: [u8; 8] = *b"\x93ERSTAT\n";
/// Format version that this code reads and writes. A file with any other version is refused.
const FORMAT: u32 = 1;
/// Length of the head: [`MAGIC`], [`FORMAT`], and the synced length, which is the number of bytes known to be on disk.
const HEAD_LENGTH: usize = 20;
const HEAD: u64 = HEAD_LENGTH as u64;
/// Offset of the synced length in the file header. The synced length is the number of bytes that are known to be on
/// disk.
const SYNCED_AT: u64 = 12;
/// Size of the length and the digest of a record, in bytes.
const AROUND: u64 = 4 + 32;

/// Maximum total size of the sessions in one record, in bytes.
const MAX_SESSIONS: u64 = 16 << 20;
/// Approximate size of one record in bytes when the whole state is written to a new file.
const CHUNK: usize = 1 << 20;
/// Minimum growth of a file in bytes before it is replaced. In addition, the file must have doubled in size.
const GROWTH: u64 = 4 << 20;

/// Error while opening, reading or writing the state file.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot {doing} the state {path}: {why}", path = path.display(), why = words(source))]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the state {path} belongs to user {owner}, who could change it, and this store runs as user {own}: start it as that user, or name another file", path = path.display())]
    Stranger { path: PathBuf, owner: u32, own: u32 },
    #[error("anybody may replace files in {folder}, where the state {path} is: take that right away (chmod o-w), or name another folder", folder = folder.display(), path = path.display())]
    Unprotected { path: PathBuf, folder: PathBuf },
    #[error("a running store uses the state {}", .0.display())]
    Locked(PathBuf),
    #[error("{} is not the state of a store", .0.display())]
    Foreign(PathBuf),
    #[error("a newer version of elasticrs has written the state {path}: in format {found}, this one knows {FORMAT}", path = path.display())]
    Newer { path: PathBuf, found: u32 },
    #[error("the state {path} is damaged or was cut off: byte {at} is the first of a part that is not as it was written", path = path.display())]
    Damaged { path: PathBuf, at: u64 },
    #[error("the state {path} is of {kept}, and the store is to serve {served}", path = path.display(), kept = run(kept.as_deref()), served = run(served.as_deref()))]
    Run { path: PathBuf, kept: Option<String>, served: Option<String> },
    #[error("the state {path} takes {taken} bytes, and the keys of a store with this limit at most {limit}", path = path.display())]
    Large { path: PathBuf, taken: usize, limit: usize },
}

fn words(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |errno| Errno::from_raw(errno).desc().to_owned())
}

fn run(run_id: Option<&str>) -> String {
    run_id.map_or_else(|| "any run".into(), |run_id| format!("run {run_id}"))
}

/// The secret of a session, and the keep-alive settings that the store granted to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) secret: Secret,
    pub(super) interval_ms: u32,
    pub(super) attempts: u16,
    /// Longest time to live that the store has granted to the session, in milliseconds.
    pub(super) ttl_ms: u32,
}

/// An item of a record: a part of the store's state, or a change to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    /// Accepted run ID (`None` for any), and the IDs of this store and of the stores that it replaced, newest first.
    Store {
        run_id: Option<String>,
        ids: Vec<StoreId>,
    },
    Counters {
        revision: u64,
        next_session: SessionId,
    },
    /// A session with this ID. `granted` contains its secret and its keep-alive settings, or is `None` if the session
    /// has ended.
    Session {
        id: SessionId,
        granted: Option<Granted>,
    },
    /// A key. `stored` is `None` if the key was deleted.
    Key {
        key: Arc<str>,
        stored: Option<Stored>,
    },
}

kinds! { Item, "an unknown kind of item";
    0 => Store { run_id, ids },
    1 => Counters { revision, next_session },
    2 => Session { id, granted },
    3 => Key { key, stored },
}

record!(Granted { secret, interval_ms, attempts, ttl_ms });
record!(Stored { value, create_revision, mod_revision, lease });

/// The whole state of a store, as read from its state file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) run_id: Option<String>,
    /// The IDs of the store and its predecessors, newest first.
    pub(super) ids: Vec<StoreId>,
    pub(super) revision: u64,
    pub(super) next_session: SessionId,
    pub(super) sessions: BTreeMap<SessionId, Granted>,
    pub(super) entries: BTreeMap<Arc<str>, Stored>,
}

impl Image {
    fn apply(&mut self, items: impl IntoIterator<Item = Item>) {
        for item in items {
            match item {
                Item::Store { run_id, ids } => (self.run_id, self.ids) = (run_id, ids),
                Item::Counters { revision, next_session } => {
                    (self.revision, self.next_session) = (revision, next_session);
                }
                Item::Session { id, granted } => set(&mut self.sessions, id, granted),
                Item::Key { key, stored } => set(&mut self.entries, key, stored),
            }
        }
    }

    /// Returns the items that represent the whole state in the state file. Takes the keys from `entries`, because the
    /// caller may store the keys outside of `self`.
    pub(super) fn items(&self, entries: &BTreeMap<Arc<str>, Stored>) -> impl Iterator<Item = Item> {
        let store = Item::Store { run_id: self.run_id.clone(), ids: self.ids.clone() };
        let session = |(id, granted): (&SessionId, &Granted)| Item::Session { id: *id, granted: Some(granted.clone()) };
        let key =
            |(key, stored): (&Arc<str>, &Stored)| Item::Key { key: Arc::clone(key), stored: Some(stored.clone()) };
        [store, self.counters()].into_iter().chain(self.sessions.iter().map(session)).chain(entries.iter().map(key))
    }

    pub(super) fn counters(&self) -> Item {
        Item::Counters { revision: self.revision, next_session: self.next_session }
    }
}

fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => drop(map.insert(key, value)),
        None => drop(map.remove(&key)),
    }
}

/// Sticky bit of a folder: users may remove or replace only their own files in it.
const STICKY: u32 = 0o1000;
const WRITABLE: u32 = 0o0002;
/// Permissions of the file. Only the owner may read it, because it contains the secrets with which sessions can be
/// resumed.
const MODE: u32 = 0o600;

/// Outcome of [`StateFile::replace`].
#[derive(Debug)]
pub(super) enum Replaced {
    Yes,
    /// The new file could not be written. The old file is unchanged and still in use.
    No(StateError),
}

/// The open and locked state file of a running store.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    file: Flock<File>,
    end: u64,
    /// Length of an incomplete record at the end of the previous file, in bytes. The record was not copied to this
    /// file.
    pub(super) dropped: u64,
    /// Chained digest of all records written so far.
    digest: Digest,
    /// Length of the file when it was created, or when the last attempt to replace it failed.
    begun: u64,
}

impl StateFile {
    /// Opens the state file at `path`, or creates one if there is none. `id` is the ID of the new store, `run_id` is
    /// the run that it serves, and `limit` is the maximum number of bytes for its keys.
    pub(super) fn open(
        path: &Path,
        run_id: Option<&str>,
        id: StoreId,
        limit: usize,
    ) -> Result<(Self, Image), StateError> {
        // Resolve symbolic links, because the rename would otherwise replace the link itself.
        let path = match canonicalize(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            real => real.map_err(|source| failed("open", path, source))?,
        };
        check_folder(&path)?;
        let held = lock(&path, &path, &mut OpenOptions::new())?;
        let there = held.as_ref().map_or(Ok(None), |file| load(&path, file, limit))?;
        let served = || run_id.map(str::to_owned);
        let new = || (Image { run_id: served(), next_session: 1, ..Image::default() }, 0);
        let (mut image, dropped) = there.unwrap_or_else(new);
        if image.run_id.as_deref() != run_id {
            return Err(StateError::Run { path, kept: image.run_id, served: served() });
        }
        let taken = cost_of_entries(&image.entries);
        if taken > limit {
            return Err(StateError::Large { path, taken, limit });
        }
        image.ids.insert(0, id);
        image.ids.truncate(MAX_IDS);
        let begun = Self::begin(path, held.as_deref(), image.items(&image.entries));
        Ok((Self { dropped, ..begun.map_err(|(error, _)| error)? }, image))
    }

    /// Appends these items as one batch, and returns when they are on disk. If this fails, the store has to stop,
    /// because the contents of the file are then unknown.
    pub(super) fn commit(&mut self, items: &[Item]) -> Result<(), StateError> {
        // Update the synced length in the file header last, so that a crash during the commit does not look like
        // damage. `load` ignores an incomplete record beyond the synced length, but reports damage within it.
        let written = self.append(items).and_then(|()| self.file.sync_data()).and_then(|()| self.note_synced());
        written.map_err(|source| self.failed(source))
    }

    /// Returns true if the file has grown so much that it should be replaced by a shorter one.
    pub(super) fn has_grown(&self) -> bool {
        self.end - self.begun > self.begun.max(GROWTH)
    }

    /// Replaces the file with a new one that contains this whole state, and returns when the new file is on disk. If
    /// the new file cannot be written, keeps using the old file and tries again when that file has doubled in size.
    ///
    /// # Errors
    ///
    /// Fails if the old file is no longer at its path, or if it is unknown whether it still is.
    pub(super) fn replace(&mut self, whole: impl Iterator<Item = Item>) -> Result<Replaced, StateError> {
        match Self::begin(self.path.clone(), Some(&self.file), whole) {
            Ok(new) => {
                *self = new;
                Ok(Replaced::Yes)
            }
            Err((error, Harm::None)) => {
                self.begun = self.end;
                Ok(Replaced::No(error))
            }
            Err((error, Harm::Unknown)) => Err(error),
        }
    }

    /// Writes the final synced length to disk, so that a copy of the file without the last record is recognised as
    /// truncated.
    pub(super) fn finish(&mut self) -> Result<(), StateError> {
        self.note_synced().and_then(|()| self.file.sync_data()).map_err(|source| self.failed(source))
    }

    /// Writes this whole state to a new file and moves it to `path`, where it replaces the open file `held`. If `held`
    /// is `None`, `path` must not exist yet. After an error, [`Harm`] says whether the old file may be gone.
    fn begin(
        path: PathBuf,
        held: Option<&File>,
        whole: impl Iterator<Item = Item>,
    ) -> Result<Self, (StateError, Harm)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let next = path.with_file_name(format!(".{name}.elasticrs-new"));
        // Another user may have created a file at this path. `O_NOFOLLOW` rejects a symbolic link, and `fill` resets
        // the permissions.
        let mut options = OpenOptions::new();
        options.create(true).mode(MODE).custom_flags(OFlag::O_NOFOLLOW.bits());
        let Some(file) = lock(&next, &path, &mut options).map_err(|error| (error, Harm::None))? else {
            // `lock` creates the file if it is missing, so `None` means that the folder is missing.
            return Err((failed("write", &path, Errno::ENOENT.into()), Harm::Unknown));
        };
        let mut begun = Self { path, file, dropped: 0, end: HEAD, digest: Digest::default(), begun: HEAD };
        // The new file is now locked. No other store can replace the file at `path`, because it would need this lock.
        let is_there = match held {
            Some(held) => stands_at(&begun.path, held),
            None => begun.path.try_exists().map(|is_there| !is_there),
        };
        let harm = |harm| move |error| (error, harm);
        let written = match is_there {
            Ok(true) => begun
                .fill(whole)
                .map_err(harm(Harm::None))
                .and_then(|()| put_in_place(&next, &begun.path).map_err(harm(Harm::Unknown))),
            // Another process has created the file at `path`, or has replaced the file `held` with it.
            Ok(false) if begun.path.exists() => Err((Errno::EWOULDBLOCK.into(), Harm::Unknown)),
            // `path` no longer exists: the file that `held` refers to was removed.
            Ok(false) => Err((Errno::ENOENT.into(), Harm::Unknown)),
            Err(error) => Err((error, Harm::Unknown)),
        };
        let Err((source, harm)) = written else { return Ok(begun) };
        // Remove the unusable new file. Ignore a failure to remove it, because the first error is the one to report.
        let _ = remove_file(&next);
        Err((begun.failed(source), harm))
    }

    fn fill(&mut self, whole: impl Iterator<Item = Item>) -> io::Result<()> {
        self.file.set_permissions(Permissions::from_mode(MODE))?;
        self.file.set_len(0)?;
        self.file.write_all_at(&MAGIC, 0)?;
        self.file.write_all_at(&FORMAT.to_le_bytes(), MAGIC.len() as u64)?;
        let mut chunk = Vec::new();
        let mut bytes = 0;
        for item in whole {
            bytes += size_of::<Item>();
            if let Item::Key { stored: Some(stored), .. } = &item {
                bytes += stored.value.len();
            }
            chunk.push(item);
            if bytes > CHUNK {
                self.append(&std::mem::take(&mut chunk))?;
                bytes = 0;
            }
        }
        self.append(&chunk)?;
        self.begun = self.end;
        self.note_synced()?;
        self.file.sync_data()
    }

    fn append(&mut self, items: &[Item]) -> io::Result<()> {
        let mut record = Writer::frame(|w| w.list(items.iter()));
        let digest = chained(&self.digest, &record);
        record.extend(digest);
        self.file.write_all_at(&record, self.end)?;
        (self.digest, self.end) = (digest, self.end + record.len() as u64);
        Ok(())
    }

    /// Records in the file header that the whole file is on disk.
    ///
    /// Does not sync the header, because the next sync does so. A crash of this process in the meantime does not lose
    /// the header, because the kernel already has it.
    fn note_synced(&self) -> io::Result<()> {
        self.file.write_all_at(&self.end.to_le_bytes(), SYNCED_AT)
    }

    fn failed(&self, source: io::Error) -> StateError {
        failed("write", &self.path, source)
    }
}

/// State of the old file after a failed replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    None,
    /// The old file may no longer be at its path.
    Unknown,
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> StateError {
    if source.raw_os_error() == Some(Errno::EWOULDBLOCK as i32) {
        return StateError::Locked(path.to_owned());
    }
    StateError::Io { doing, path: path.to_owned(), source }
}

fn chained(before: &Digest, record: &[u8]) -> Digest {
    Sha256::new().chain_update(before).chain_update(record).finalize().into()
}

/// Opens and locks the file at `at`. Retries if another process replaces the file before it is locked. Returns
/// `None` if there is no file. Error messages contain the path `state` instead of `at`.
fn lock(at: &Path, state: &Path, options: &mut OpenOptions) -> Result<Option<Flock<File>>, StateError> {
    loop {
        let file = match options.read(true).write(true).open(at) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|source| failed("open", state, source))?,
        };
        let locked = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let file = locked.map_err(|(_, errno)| failed("lock", state, errno.into()))?;
        check_owner(at, &file).map_err(|source| failed("open", state, source))??;
        if stands_at(at, &file).map_err(|source| failed("open", state, source))? {
            return Ok(Some(file));
        }
    }
}

/// Refuses a file of another user, because that user could still change it through an open descriptor.
fn check_owner(path: &Path, file: &File) -> io::Result<Result<(), StateError>> {
    let (about, own) = (file.metadata()?, geteuid().as_raw());
    let owner = about.uid();
    let is_ours = owner == own || !about.is_file();
    Ok(if is_ours { Ok(()) } else { Err(StateError::Stranger { path: path.to_owned(), owner, own }) })
}

/// Rejects a folder to which all users may write, because any user could replace the file. Accepts a folder with
/// the sticky bit, in which users may replace only their own files.
fn check_folder(path: &Path) -> Result<(), StateError> {
    let folder = folder_of(path);
    let Ok(about) = metadata(folder) else {
        // Ignore the error, because opening the file will report it.
        return Ok(());
    };
    if about.mode() & (STICKY | WRITABLE) == WRITABLE {
        return Err(StateError::Unprotected { path: path.to_owned(), folder: folder.to_owned() });
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn stands_at(path: &Path, file: &File) -> io::Result<bool> {
    let (there, ours) = match metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        there => (there?, file.metadata()?),
    };
    Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino()))
}

fn put_in_place(next: &Path, path: &Path) -> io::Result<()> {
    rename(next, path)?;
    File::open(folder_of(path))?.sync_all()
}

/// Reads the state from a file. Returns the state and the number of bytes after the last complete record, or `None` if
/// the file is empty. `limit` is the approximate maximum number of bytes that the keys take.
fn load(path: &Path, file: &File, limit: usize) -> Result<Option<(Image, u64)>, StateError> {
    let cannot_read = |source| failed("read", path, source);
    let foreign = || StateError::Foreign(path.to_owned());
    let about = file.metadata().map_err(cannot_read)?;
    if !about.is_file() {
        return Err(foreign());
    }
    if about.len() == 0 {
        return Ok(None);
    }
    let mut reader = BufReader::with_capacity(CHUNK, file);
    let mut head = [0; HEAD_LENGTH];
    let has_head = about.len() >= HEAD;
    if has_head {
        reader.read_exact(&mut head).map_err(cannot_read)?;
    }
    if !has_head || head[..8] != MAGIC {
        return Err(foreign());
    }
    let (found, synced) = Cursor::whole(&head[8..]).map_err(|Malformed(_)| foreign())?;
    if found != FORMAT {
        return Err(StateError::Newer { path: path.to_owned(), found });
    }
    let mut image = Image::default();
    let mut digest = Digest::default();
    // Maximum length of a record: twice the size limit for all keys, plus the maximum size of the sessions.
    //
    // The limit is doubled, because a record can contain the names of deleted keys in addition to all current keys.
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(MAX_SESSIONS);
    let mut at = HEAD;
    loop {
        let damaged = || StateError::Damaged { path: path.to_owned(), at };
        let left = about.len() - at;
        let Some(record) = next_record(&mut reader, left, most, &mut digest).map_err(cannot_read)? else {
            // Ignore an incomplete record at the end of the file. The store crashed while it wrote the record, so no
            // client was told that the record was saved.
            return if at < synced { Err(damaged()) } else { Ok(Some((image, left))) };
        };
        image.apply(Cursor::whole::<Vec<Item>>(&record).map_err(|Malformed(_)| damaged())?);
        at += AROUND + record.len() as u64;
    }
}

/// Reads the next record. `left` is the number of bytes that remain in the file. Returns `None` if the next record is
/// damaged, incomplete, or longer than `most` bytes.
fn next_record(reader: &mut impl Read, left: u64, most: u64, digest: &mut Digest) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    if left < AROUND {
        return Ok(None);
    }
    reader.read_exact(&mut length)?;
    let bytes = u64::from(u32::from_le_bytes(length));
    if left < AROUND + bytes || bytes > most {
        return Ok(None);
    }
    let mut record = length.to_vec();
    reader.take(bytes).read_to_end(&mut record)?;
    let mut stated = Digest::default();
    reader.read_exact(&mut stated)?;
    *digest = chained(digest, &record);
    Ok((*digest == stated).then(|| record.split_off(length.len())))
}

#[cfg(test)]
mod tests;
